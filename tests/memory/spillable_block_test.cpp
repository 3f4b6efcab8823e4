// SPDX-License-Identifier: Apache-2.0
// A block that moves to the host and back: its contents move along, and whatever goes wrong, the
// block is in one place or the other.
#include <chrono>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/spillable_block.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/refusing_memory.hpp"

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using gpushare::quota;
using gpushare::quota_resource;
using gpushare::spillable_block;
using support::fault_resource;

namespace host = gpushare::host;

namespace {

struct rig {
    host::node node{{.devices = 1, .memory = 1_MiB, .sms = 1}};
    host::stream stream = node.make_stream({0}, {}, 1);
    fault_resource aside;
    quota tenant{64_KiB};
    quota_resource<host::device_memory> mine{tenant, node.memory({0}), "chat"};
};

/// A stream whose next copy fails on the device, where it is told to.
struct failing_copies : host::stream {
    explicit failing_copies(host::stream of) : host::stream(std::move(of)) {}
    void copy(void* to, const void* from, std::size_t n) {
        if (std::exchange(fails, false))
            launch({}, [](auto&) { throw 1; });
        else
            host::stream::copy(to, from, n);
    }
    bool fails = false;
};

}  // namespace

TEST_CASE("a block spills to the host and comes back as it was", "[memory][spill]") {
    rig r;
    {
        spillable_block b{r.stream, r.mine, r.aside, 48_KiB};
        r.stream.fill(b.data(), std::byte{42}, 48 << 10);
        CHECK(b.spill(never) == errc::none);
        CHECK(b.spill(never) == errc::none);
        CHECK(b.data() == nullptr);
        CHECK(r.tenant.usage().current == 0_B);
        void* other = r.mine.allocate(64 << 10, 256);  // the room is anybody's
        CHECK(b.restore() == errc::out_of_memory);
        r.mine.deallocate(other, 64 << 10, 256);
        CHECK(b.restore() == errc::none);
        REQUIRE(b.data() != nullptr);
        std::vector<std::byte> seen(48 << 10);
        r.stream.copy(seen.data(), b.data(), seen.size());
        CHECK(r.stream.record().wait(never));
        CHECK(seen == std::vector<std::byte>(48 << 10, std::byte{42}));
    }
    CHECK(r.tenant.usage().current == 0_B);
    CHECK(r.aside.blocks() == 0);
}

TEST_CASE("a spill that takes too long goes on, or is called off", "[memory][spill]") {
    rig r;
    spillable_block b{r.stream, r.mine, r.aside, 4_KiB};
    void* const at = b.data();
    r.stream.enqueue(20ms);
    CHECK(b.spill(instant::min()) == errc::deadline_exceeded);
    CHECK(b.data() == nullptr);
    CHECK(r.tenant.usage().current == 4_KiB);
    CHECK(b.restore() == errc::none);
    CHECK(b.data() == at);
    CHECK(b.spill(instant::min()) == errc::deadline_exceeded);
    CHECK(b.spill(never) == errc::none);
    CHECK(r.tenant.usage().current == 0_B);
}

TEST_CASE("a block whose copy back fails is on the host still", "[memory][spill]") {
    rig r;
    failing_copies stream(r.node.make_stream({0}, {}, 1));
    spillable_block b{stream, r.mine, r.aside, 4_KiB};
    stream.fill(b.data(), std::byte{42}, 4 << 10);
    REQUIRE(b.spill(never) == errc::none);
    const auto fail_back = [&] {
        stream.fails = true;
        CHECK(b.restore() == errc::none);
        CHECK(stream.record().wait(never));
        std::memset(b.data(), 0, 4 << 10);
    };
    fail_back();
    CHECK_FALSE(b.settled());
    CHECK(b.wait(never) == errc::kernel_failed);
    CHECK(b.data() == nullptr);
    CHECK(r.tenant.usage().current == 0_B);
    fail_back();
    CHECK(b.spill(never) == errc::none);  // over nothing that is good
    CHECK(r.tenant.usage().current == 0_B);
    CHECK(b.wait(never) == errc::none);
    CHECK(b.restore() == errc::none);
    CHECK(b.wait(never) == errc::none);
    CHECK(b.settled());
    CHECK(static_cast<std::byte*>(b.data())[4095] == std::byte{42});
}

TEST_CASE("a kernel that fails in front of a copy spoils no copy", "[memory][spill]") {
    rig r;
    spillable_block b{r.stream, r.mine, r.aside, 4_KiB};
    r.stream.fill(b.data(), std::byte{42}, 4 << 10);
    r.stream.launch({}, [](auto&) { throw 1; });
    REQUIRE(b.spill(never) == errc::none);
    r.stream.launch({}, [](auto&) { throw 1; });
    CHECK(b.restore() == errc::none);
    CHECK(b.wait(never) == errc::none);
    CHECK(static_cast<std::byte*>(b.data())[4095] == std::byte{42});
}

TEST_CASE("a block that the device's memory doesn't take back now is freed later", "[memory][spill]") {
    rig r;
    failing_copies stream(r.node.make_stream({0}, {}, 1));
    support::refusing_memory device;
    {
        spillable_block b{stream, device, r.aside, 4_KiB};
        void* const at = b.data();
        stream.fill(at, std::byte{42}, 4 << 10);
        SECTION("after a spill it is on the device still") {
            device.refuse(errc::capturing);
            CHECK(b.spill(never) == errc::capturing);
            CHECK(b.on_device());
            CHECK(b.data() == at);
            CHECK(static_cast<std::byte*>(at)[4095] == std::byte{42});
            device.refuse(errc::none);
            CHECK(b.spill(never) == errc::none);
            CHECK_FALSE(b.on_device());
            CHECK(device.blocks() == 0);
        }
        SECTION("after a copy back that failed, it serves the next one, or goes with a spill") {
            REQUIRE(b.spill(never) == errc::none);
            const bool again = GENERATE(true, false);
            device.refuse(errc::capturing);
            stream.fails = true;
            CHECK(b.restore() == errc::none);
            CHECK(b.wait(never) == errc::kernel_failed);
            CHECK(b.data() == nullptr);
            CHECK(b.on_device());
            CHECK(b.spill(never) == errc::capturing);
            CHECK(device.blocks() == 1);
            if (!again) device.refuse(errc::none);
            CHECK((again ? b.restore() : b.spill(never)) == errc::none);
            CHECK(b.wait(never) == errc::none);
            CHECK(device.blocks() == (again ? 1 : 0));
            CHECK((b.data() != nullptr) == again);
            device.refuse(errc::none);
        }
    }
    CHECK(device.blocks() == 0);
    CHECK(device.wrong_frees() == 0);
    CHECK(r.aside.blocks() == 0);
}

TEST_CASE("a host without memory spills nothing", "[memory][spill]") {
    rig r;
    spillable_block b{r.stream, r.mine, r.aside, 4_KiB};
    void* const at = b.data();
    r.aside.fail_next();
    CHECK(b.spill(never) == errc::out_of_memory);
    CHECK(b.data() == at);
}

TEST_CASE("a hook that spills makes room for what was refused", "[memory][spill]") {
    rig r;
    spillable_block b{r.stream, r.mine, r.aside, 48_KiB};
    const gpushare::quota_hook spill{
        r.tenant, 0, [&](const gpushare::reclaim_request&) { return b.spill(never) == errc::none ? b.size() : 0_B; }};
    void* p = r.mine.allocate(32 << 10, 256);
    CHECK(b.data() == nullptr);
    CHECK(b.restore() == errc::out_of_memory);
    r.mine.deallocate(p, 32 << 10, 256);
    CHECK(b.restore() == errc::none);
}

TEST_CASE("a block that a close takes back before it is registered is never touched", "[memory][spill][closing]") {
    rig r;
    {
        // What another thread's close of a tenant does between the allocation and the constructor's
        // end.
        void* const p = r.mine.allocate(48 << 10, 256);
        CHECK(r.tenant.close(instant::min()));
        r.mine.deallocate(p, 48 << 10, 256);
        spillable_block b{r.stream, r.mine, r.aside, 48_KiB, 256, p, nullptr};
        CHECK(b.data() == nullptr);
        CHECK_FALSE(b.on_device());
        CHECK(b.spill(never) == errc::closed);
        CHECK(b.restore() == errc::closed);
        CHECK(b.wait(never) == errc::closed);
        CHECK(r.aside.blocks() == 0);  // nothing was copied
    }
    CHECK(r.tenant.usage().current == 0_B);  // nor freed once more
}
