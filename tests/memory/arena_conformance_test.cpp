// SPDX-License-Identifier: Apache-2.0
// The host's virtual memory keeps the contract of every virtual memory, and arenas work on the
// host's own streams.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/units.hpp>

#include "conformance/virtual_memory_suite.hpp"
#include "support/arena_rig.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace std::chrono_literals;

namespace {

template <std::size_t Granularity>
class host_backend {
public:
    host::virtual_memory& virtual_memory() { return memory_; }
    static void write(void* at, const void* from, std::size_t size) { std::memcpy(at, from, size); }
    static void read(const void* at, void* to, std::size_t size) { std::memcpy(to, at, size); }

private:
    host::device_memory device_{{.capacity = bytes{Granularity} * 9, .taken = bytes{Granularity} / 2}};
    host::virtual_memory memory_{device_, bytes{Granularity}};
};

}  // namespace

TEMPLATE_TEST_CASE("virtual memory", "[memory][arena][conformance]", host_backend<4096>, host_backend<65536>,
                   host_backend<(2 << 20)>) {
    conformance::check_virtual_memory<TestType>();
}

TEST_CASE("virtual memory of the host is charged to its device", "[memory][arena][host]") {
    host::device_memory device{{.capacity = 1_MiB}};
    host::virtual_memory memory{device, 64_KiB};
    {
        auto first = memory.create(), second = memory.create();
        REQUIRE((first && second));
        CHECK(device.used() == 128_KiB);
        device.fail_allocations(0, 1);
        CHECK(memory.create().code() == errc::out_of_memory);
        device.take_for_others(1_MiB);
        CHECK(memory.create().code() == errc::out_of_memory);
        device.take_for_others(0_B);
        device.lose();
        CHECK(memory.create().code() == errc::device_lost);
        CHECK(device.used() == 128_KiB);
    }
    CHECK(device.used() == 0_B);
    CHECK_THROWS_AS(host::virtual_memory(device, 3000_B), operation_error);
    CHECK_THROWS_AS(host::virtual_memory(device, 512_B), operation_error);
    CHECK_THROWS_AS(host::virtual_memory(device, 0_B), operation_error);
}

TEST_CASE("kernels use an arena until they end, and the next tenant finds zeros", "[memory][arena][host]") {
    host::node node{{.memory = 16_MiB, .sms = 2}};
    host::virtual_memory memory{node.memory(device_id{0}), 64_KiB};
    host::stream scrubs = node.make_stream(device_id{0}, {}), kernels = node.make_stream(device_id{0}, {});
    chunk_pool pool{memory, scrubs, {.capacity = 64}};
    quota whole{4_MiB};
    virtual_arena chat{pool, whole, tenant_tag{1}, 8_MiB, "chat"}, code{pool, whole, tenant_tag{2}, 8_MiB, "code"};

    for (int round = 0; round < 3; ++round) {
        chat.commit(0_B, 4_MiB, never);
        node.faults(device_id{0}).stall(kernels);
        kernels.fill(chat.data(), std::byte{0x5e}, 4 << 20);
        const std::array used{kernels.record()};
        CHECK(chat.try_decommit(0_B, 4_MiB, used, node.get_clock().now() + 1ms).code == errc::deadline_exceeded);
        chat.decommit_after(0_B, 4_MiB, used);
        CHECK(code.try_commit(0_B, 4_MiB).code == errc::over_quota);  // the one quota that both have
        node.faults(device_id{0}).resume(kernels);
        code.commit(0_B, 4_MiB, never);
        CHECK(support::painted(code.data(), 4_MiB, 0));
        CHECK(whole.usage().current == 4_MiB);
        kernels.fill(code.data(), std::byte{0x11}, 4 << 20);
        code.decommit(0_B, 4_MiB, std::array{kernels.record()});
    }
}

TEST_CASE("losing the device under an arena hangs nobody", "[memory][arena][host]") {
    host::node node{{.memory = 16_MiB, .sms = 2}};
    host::virtual_memory memory{node.memory(device_id{0}), 64_KiB};
    host::stream scrubs = node.make_stream(device_id{0}, {}), kernels = node.make_stream(device_id{0}, {});
    chunk_pool pool{memory, scrubs, {.capacity = 8}};
    quota whole{4_MiB};
    virtual_arena chat{pool, whole, tenant_tag{1}, 1_MiB}, code{pool, whole, tenant_tag{2}, 1_MiB};
    chat.commit(0_B, 512_KiB);
    node.faults(device_id{0}).stall(kernels);
    kernels.fill(chat.data(), std::byte{1}, 1 << 19);
    chat.decommit_after(0_B, 512_KiB, std::array{kernels.record()});
    node.faults(device_id{0}).lose_device();
    CHECK(code.try_commit(0_B, 512_KiB, never).code == errc::device_lost);  // nothing can be scrubbed any more
    CHECK(whole.usage().current == 0_B);
}
