// SPDX-License-Identifier: Apache-2.0
// Shares as SMs on CUDA, over the stand-in: green contexts if the driver has them, and otherwise
// shares of time.
#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/pool.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <thread>
#include <type_traits>
#include <vector>

#include <gpushare/compute/partitioned_limiter.hpp>
#include <gpushare/interop/pytorch.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/units.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace partition_test {

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using support::code_of;

namespace {

constexpr device_id d{0};
constexpr std::array<client_settings, 3> clients{
    {{.weight = 70_pct, .tag = 1}, {.weight = 25_pct, .tag = 2}, {.weight = 5_pct, .tag = 3}}};
using limiter_type = partitioned_limiter<cuda::device_sms, host::steady_clock>;

}  // namespace

TEST_CASE("clients' streams are in the partitions of the plan", "[cuda][partitioned]") {
    const standin::session gpu{{.sms = 132, .sm_step = 8}};
    cuda::node node;
    limiter_type shared{{node, d}, clients, {}};
    CHECK(shared.plan().sms == std::vector<std::uint32_t>{88, 40});  // the third is due less than a unit
    CHECK_FALSE(shared.plan().clients[2].alone);
    std::set<std::uint32_t> seen;
    for (std::size_t i = 0; i < shared.size(); ++i) {
        auto own = standin::sms_of(shared.stream_of(i).native_handle());
        CHECK(own.size() == shared.plan().sms[shared.plan().clients[i].partition]);
        seen.merge(own);
        CHECK(own.empty() == (i < 2));
    }
    CHECK(seen.size() == 128);
    for (std::size_t i = 0; i < shared.size(); ++i) CHECK(shared.submit(i, [](auto& s) { s.enqueue(1us); })->wait());
    CHECK_NOTHROW(shared.verify());
}

TEST_CASE("streams past the partitions are named, whoever made them", "[cuda][partitioned]") {
    const standin::session gpu{{.sms = 132, .sm_step = 8}};
    cuda::node node;
    limiter_type shared{{node, d}, clients, {}, {}, sm_sharing::equal};
    CHECK(shared.plan().sms == std::vector<std::uint32_t>(3, 40));
    const auto elsewhere = node.make_stream(device_id{1}, {}, 9);
    CHECK_NOTHROW(shared.verify());
    const auto mine = raw::make_stream(0);
    {
        const auto made = node.make_stream(d, {}, 42), borrowed = node.borrow(mine, 77);
        CHECK_THROWS_WITH(shared.verify(), Contains("tags 42, 77"));
    }
    CHECK_NOTHROW(shared.verify());
    (void)node.point_after(d, mine).wait(never);  // leaves nothing
    CHECK_NOTHROW(shared.verify());
    const auto inside = node.borrow(shared.stream_of(0).native_handle(), 5);
    CHECK_NOTHROW(shared.verify());
    raw::destroy(mine);
}

TEST_CASE("a driver without green contexts: the same program shares time", "[cuda][partitioned]") {
    const standin::session gpu{{.driver_version = 12030}};
    cuda::node node;
    limiter_type shared{{node, d}, clients, {}};
    CHECK(shared.why_gated() == errc::not_supported);
    CHECK(shared.plan().clients[1].weight == 25_pct);
    for (std::size_t i = 0; i < shared.size(); ++i) CHECK(shared.submit(i, [](auto& s) { s.enqueue(1us); })->wait());
    CHECK_NOTHROW(shared.verify());
}

TEST_CASE("a tenant's streams are in its slice, wherever its memory is", "[cuda][partitioned]") {
    const standin::session gpu{{.devices = 1, .memory = 64_MiB, .sms = 132, .sm_step = 8}};
    {
        cuda::node node;
        tenancy shared{node};
        REQUIRE(shared.slice<cuda::device_sms>(d, std::array{3U, 1U}) == errc::none);
        CHECK(shared.slices(d) == std::vector{75_pct, 25_pct});
        auto large = shared.admit({.name = "large", .memory = 16_MiB, .compute = 60_pct}),
             small = shared.admit({.name = "small", .memory = 32_MiB, .compute = 20_pct});
        const auto ours = standin::sms_of(large.work_stream().native_handle()),
                   theirs = standin::sms_of(small.work_stream().native_handle());
        CHECK(ours.size() == 96);
        CHECK(theirs.size() == 32);
        for (const auto sm : theirs) CHECK(ours.count(sm) == 0);
        void* const p = small.memory().allocate(1 << 20, 256);
        CHECK(small.submit([](auto& s) { s.enqueue(1us); }).wait());
        small.memory().deallocate(p, 1 << 20, 256);
        CHECK_NOTHROW(shared.verify(d));
        const auto stray = node.make_stream(d, {}, 42);
        CHECK_THROWS_WITH(shared.verify(d), Contains("tags 42"));
    }
    CHECK(standin::existing().green_contexts == 0);
}

TEST_CASE("the library's own streams without kernels are nobody's strays", "[cuda][partitioned]") {
    const standin::session gpu{{.devices = 1, .memory = 64_MiB, .sms = 132, .sm_step = 8}};
    cuda::node node;
    cuda::memory_pool pool{node, d};
    tenancy shared{node};
    shared.offer(d, pool);
    REQUIRE(shared.slice<cuda::device_sms>(d, std::array{1U, 1U}) == errc::none);
    CHECK_NOTHROW(shared.verify(d));
    auto chat =
        shared.admit({.name = "chat", .memory = 16_MiB, .compute = 30_pct, .stack = memory_stack::stream_ordered});
    pytorch_allocator<std::remove_reference_t<decltype(chat.memory())>, cuda::node> torch{node};
    torch.add(0, d, chat.memory());
    CHECK_NOTHROW(shared.verify(d));
}

TEST_CASE("streams that are asked about stay as wide as they are", "[cuda][partitioned]") {
    const standin::session gpu;
    cuda::node node;
    auto parts = cuda::make_green_contexts(node, d, equal_sms(cuda::query_sm_split(node, d), 2));
    std::vector<cuda::stream> streams;
    streams.push_back(parts[0].make_stream());
    cuda::require_partitioned(node, streams);
    cuda::stream::launch_notes notes(streams[0]);
    streams[0].launch({}, gpushare::detail::empty_kernel{});
    CHECK_FALSE(notes.found().opaque);
}

TEST_CASE("SMs whose work is done are free for whoever looks, though another thread gives some back",
          "[cuda][partitioned]") {
    const char* const looks_during = GENERATE("cuGreenCtxDestroy", "cuEventQuery");
    CAPTURE(looks_during);
    const standin::session gpu;  // 2 units of 8 SMs
    cuda::node node;
    const std::vector<std::uint32_t> unit{cuda::query_sm_split(node, d).unit};
    auto first = std::make_unique<std::vector<cuda::green_context>>(cuda::make_green_contexts(node, d, unit));
    auto second = std::make_unique<std::vector<cuda::green_context>>(cuda::make_green_contexts(node, d, unit));
    auto gate = node.make_stream(d);
    standin::hold(gate.native_handle());
    gate.launch({}, gpushare::detail::empty_kernel{});
    {
        auto s = first->front().make_stream();
        s.wait(gate.record());
        s.launch({}, gpushare::detail::empty_kernel{});
    }
    first.reset();  // with work left
    standin::let_go(gate.native_handle());
    CHECK(gate.record().wait(never));
    bool had = false;
    std::thread looks;
    standin::before_next(looks_during, [&] {
        looks = std::thread([&] {
            try {
                had = cuda::make_green_contexts(node, d, std::vector{unit[0], unit[0]}).size() == 2;
            } catch (const error&) {  // refused
            }
        });
        std::this_thread::sleep_for(20ms);  // it has them by then, or waits until this thread knows
    });
    second.reset();
    REQUIRE(looks.joinable());
    looks.join();
    CHECK(had);
}

TEST_CASE("a stream that was released keeps its partition", "[cuda][partitioned]") {
    const standin::session gpu;
    cuda::node node;
    const std::vector<std::uint32_t> unit{cuda::query_sm_split(node, d).unit};
    auto parts = cuda::make_green_contexts(node, d, unit);
    const auto context = parts[0].native_handle();
    const cudaStream_t mine = parts[0].make_stream().release();
    parts.clear();
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    CHECK(standin::detail::launch(mine, 1us, [] {}) == cudaSuccess);
    CHECK(cudaStreamSynchronize(mine) == cudaSuccess);
    CHECK_THROWS_AS(cuda::make_green_contexts(node, d, std::vector{unit[0], unit[0]}), error);  // its SMs are its own
    raw::destroy(mine);
    CHECK(node.api().green_destroy(context) == CUDA_SUCCESS);
}

TEST_CASE("a partition and a stream of it are released by two threads at once", "[cuda][partitioned]") {
    const standin::session gpu;  // ThreadSanitizer looks on
    cuda::node node;
    const std::vector<std::uint32_t> unit{cuda::query_sm_split(node, d).unit};
    auto parts = cuda::make_green_contexts(node, d, unit);
    auto s = parts[0].make_stream();
    cudaStream_t mine = nullptr;
    std::thread other([&] { mine = s.release(); });
    const CUgreenCtx context = parts[0].release();
    other.join();
    parts.clear();
    CHECK(standin::existing().green_contexts == 1);  // the caller's
    raw::destroy(mine);
    CHECK(node.api().green_destroy(context) == CUDA_SUCCESS);
}

TEST_CASE("a failure while partitions are made gives the SMs back", "[cuda][partitioned][fault]") {
    const standin::session gpu;  // 2 units
    cuda::node node;
    const cuda::device_sms sms{node, d};
    const std::array<client_settings, 2> two{{{.weight = 50_pct}, {.weight = 50_pct}}};
    for (const char* const call : {"cuGreenCtxCreate", "cuDevResourceGenerateDesc", "cuGreenCtxStreamCreate"}) {
        CAPTURE(call);
        standin::inject({.call = call, .code = cudaErrorMemoryAllocation, .skip = 1});
        CHECK_THROWS_AS((limiter_type{sms, two, {}}), error);
        CHECK(standin::existing().green_contexts == 0);
    }
    CHECK(limiter_type{sms, two, {}}.plan().partitioned());
}

}  // namespace partition_test
