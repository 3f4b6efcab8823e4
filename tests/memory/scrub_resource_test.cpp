// SPDX-License-Identifier: Apache-2.0
// Blocks that are scrubbed before they go back to their upstream: in stream order, and without any
// thread waiting.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/memory/block_handle.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/scrubbing_resource.hpp>
#include <gpushare/units.hpp>

#include "conformance/memory_resource_suite.hpp"
#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_scrubber.hpp"
#include "support/manual_timeline.hpp"
#include "support/one_block.hpp"
#include "support/waiting.hpp"

using namespace gpushare::literals;
using gpushare::errc;
using gpushare::never;
using gpushare::scrub_policy;
using gpushare::scrubbing_resource;
using support::one_block;
using support::painted;

TEST_CASE("scrubbing_resource is a memory_resource", "[memory][scrub][conformance]") {
    support::fault_resource upstream;
    gpushare::host_scrubber<gpushare::immediate_point> scrubber;
    scrubbing_resource mine{upstream, scrubber};
    conformance::check_memory_resource(mine);
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
}

TEST_CASE("a block is back in its upstream only when it holds zeros", "[memory][scrub]") {
    one_block upstream;
    support::manual_scrubber scrubber;
    scrubbing_resource mine{upstream, scrubber, scrub_policy::on_hand_over};
    void* const p = mine.allocate(64, 64);
    std::memset(p, 0x5e, 64);
    CHECK(mine.deallocate(p, 64, 64) == errc::none);
    CHECK(upstream.out);
    CHECK(mine.pending() == 64_B);
    CHECK(mine.try_allocate(64, 64) == nullptr);
    CHECK_THROWS_AS((void)mine.allocate(64, 64), std::bad_alloc);
    scrubber.reach_next();
    CHECK(painted(upstream.place, 64_B, 0));
    CHECK(mine.try_allocate(64, 64) == p);  // collects before it refuses
    CHECK(mine.deallocate(nullptr, 64, 64) == errc::none);
    CHECK(mine.deallocate(p, 64, 64) == errc::none);
    scrubber.by_itself();
    CHECK(mine.drain(never));
}

TEST_CASE("a waiting thread gets a block once it is scrubbed, or is told why not", "[memory][scrub][waiting]") {
    gpushare::host::device_memory device{{.capacity = 1_MiB}};
    gpushare::quota limit{64_KiB};
    gpushare::quota_resource below{limit, device};
    support::manual_scrubber scrubber;
    scrubbing_resource mine{below, scrubber};
    gpushare::handle_table table;
    gpushare::handle_resource handles{table, {1}, mine};
    void* p = mine.allocate(64 << 10, 256);
    gpushare::failure why;
    CHECK(mine.try_allocate(64 << 10, 256, support::within(std::chrono::milliseconds(3)), &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    CHECK(mine.try_allocate(65 << 10, 256, support::forever(), &why) == nullptr);  // never
    CHECK(why.code == errc::over_quota);
    std::stop_source stop;
    stop.request_stop();
    CHECK(handles.try_allocate(8, 8, gpushare::patience{support::real_clock{}, never, stop.get_token()}).code() ==
          errc::stopped);
    CHECK_THROWS_AS((void)handles.allocate(8, 8, support::within(std::chrono::milliseconds(1))),
                    gpushare::memory_error);
    CHECK(table.size() == 0);
    scrubber.by_itself();
    CHECK(mine.deallocate(p, 64 << 10, 256) == errc::none);
    p = mine.allocate(64 << 10, 256, support::forever());
    CHECK(mine.deallocate(p, 64 << 10, 256) == errc::none);
    const auto h = handles.allocate(64 << 10, 256, support::forever(), "waited");
    CHECK(handles.deallocate(h) == errc::none);
    CHECK(mine.drain(never));
    CHECK(device.used() == 0_B);
}

TEST_CASE("a block in use is scrubbed behind the work that uses it", "[memory][scrub]") {
    one_block upstream;
    support::manual_scrubber scrubber;
    auto kernels = scrubber.neighbour();
    scrubbing_resource mine{upstream, scrubber};
    void* const p = mine.allocate(64, 64);
    const auto used = kernels.record();
    CHECK(mine.deallocate_after(used, p, 64, 64) == errc::none);
    REQUIRE(scrubber.awaited().size() == 1);
    CHECK(scrubber.awaited().front() == used);
    scrubber.reach_next();
    mine.collect();
    CHECK_FALSE(upstream.out);
}

TEST_CASE("a wait for any free ends with the first that is reached", "[memory][scrub][waiting]") {
    using point = gpushare::detail::scrubbed_point<gpushare::host::point>;
    gpushare::host::node node{{.devices = 1, .memory = 1_MiB, .sms = 2}};
    auto slow = node.make_stream({0}), quick = node.make_stream({0});
    node.faults({0}).stall(slow);
    slow.enqueue({});
    quick.enqueue(std::chrono::milliseconds(20));
    std::array points{point{.end = slow.record()}, point{.end = quick.record()}};
    // only for a wait that waits for the wrong point
    std::jthread rescue([&](const std::stop_token& over) {
        for (int i = 0; i < 500 && !over.stop_requested(); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        node.faults({0}).resume(slow);
    });
    CHECK(point::wait_any(points, never));
    CHECK(points[1].reached());
    CHECK_FALSE(points[0].reached());
}

TEST_CASE("a wait for any free passes over a scrubbing that failed", "[memory][scrub][waiting]") {
    support::manual_stream stream;
    using point = gpushare::detail::scrubbed_point<support::manual_point>;
    std::array points{point{.end = stream.record(), .scrubs = true}, point{.end = stream.record(), .scrubs = true}};
    stream.reach_next(errc::kernel_failed);
    CHECK_FALSE(point::wait_any(std::span(points).first(1), never));
    stream.on_wait([&] { stream.reach_all(); });
    CHECK(point::wait_any(points, never));
    CHECK(points[1].reached());
}

TEST_CASE("a block whose scrubbing failed is given to nobody again", "[memory][scrub]") {
    one_block upstream;
    support::manual_scrubber scrubber;
    scrubbing_resource mine{upstream, scrubber};
    void* const p = mine.allocate(64, 64);
    SECTION("later") {
        CHECK(mine.deallocate(p, 64, 64) == errc::none);
        scrubber.reach_next(errc::kernel_failed);
        CHECK_FALSE(mine.drain(never));
    }
    SECTION("at once") {
        scrubber.fail_next_fill();
        CHECK(mine.deallocate(p, 64, 64) == errc::submission_failed);
    }
    SECTION("for want of a point") {
        scrubber.fail_next_record();
        CHECK(mine.deallocate(p, 64, 64) == errc::submission_failed);
    }
    CHECK(mine.try_allocate(64, 64) == nullptr);
    CHECK(upstream.out);
}

TEST_CASE("nobody waits for a block whose scrubbing failed, but for others", "[memory][scrub][waiting]") {
    support::fault_resource upstream;
    support::manual_scrubber scrubber;
    scrubbing_resource mine{upstream, scrubber};
    void *const lost = mine.allocate(64, 64), *const p = mine.allocate(64, 64);
    CHECK(mine.deallocate(lost, 64, 64) == errc::none);
    scrubber.reach_next(errc::kernel_failed);
    CHECK_FALSE(mine.wait_any(never));  // it would return at once, for ever
    CHECK(mine.deallocate(p, 64, 64) == errc::none);
    scrubber.by_itself();
    CHECK(mine.wait_any(never));
    CHECK_FALSE(mine.drain(never));
    CHECK(upstream.blocks() == 1);
    CHECK(mine.pending() == 64_B);
}

TEST_CASE("a drain waits for blocks behind one whose scrubbing failed", "[memory][scrub]") {
    support::fault_resource upstream;
    support::manual_scrubber scrubber;
    scrubbing_resource mine{upstream, scrubber};
    void *const lost = mine.allocate(64, 64), *const p = mine.allocate(64, 64);
    CHECK(mine.deallocate(lost, 64, 64) == errc::none);
    CHECK(mine.deallocate(p, 64, 64) == errc::none);
    bool first = true;
    SECTION("before") {
        scrubber.reach_next(errc::kernel_failed);
        scrubber.by_itself();
    }
    SECTION("meanwhile") {
        scrubber.neighbour().on_wait(
            [&] { scrubber.reach_next(std::exchange(first, false) ? errc::kernel_failed : errc::none); });
    }
    CHECK_FALSE(mine.drain(never));
    CHECK(upstream.blocks() == 1);
}

TEST_CASE("with scrubbing off, frees are in stream order all the same", "[memory][scrub]") {
    one_block upstream;
    support::manual_scrubber scrubber;
    auto kernels = scrubber.neighbour();
    scrubbing_resource mine{upstream, scrubber, scrub_policy::off};
    void* const p = mine.allocate(64, 64);
    CHECK(mine.deallocate_after(kernels.record(), p, 64, 64) == errc::none);
    CHECK(mine.try_allocate(64, 64) == nullptr);
    kernels.reach_next(errc::kernel_failed);  // the tenant's own failure
    CHECK(mine.try_allocate(64, 64) == p);
    CHECK(mine.deallocate(p, 64, 64) == errc::none);
    CHECK_FALSE(upstream.out);
    CHECK(scrubber.filled() == 0);
}

TEST_CASE("above a quota, bytes are credited when they are scrubbed", "[memory][scrub][host]") {
    gpushare::host::node node{{.memory = 4_MiB, .sms = 2}};
    auto scrubs = node.make_stream(gpushare::device_id{0}, {}), kernels = node.make_stream(gpushare::device_id{0}, {});
    gpushare::quota limit{2_MiB};
    gpushare::quota_resource charged{limit, node.memory(gpushare::device_id{0}), "chat"};
    scrubbing_resource mine{charged, scrubs};
    for (int i = 0; i < 10; ++i) {
        void* const p = mine.allocate(2 << 20, 256);
        kernels.fill(p, std::byte{0x5e}, 2 << 20);
        CHECK(mine.deallocate_after(kernels.record(), p, 2 << 20, 256) == errc::none);
        CHECK(mine.drain(never));
        CHECK(limit.usage().current == 0_B);
    }
    CHECK_THROWS_AS((void)mine.allocate((2 << 20) + 1, 256), gpushare::memory_error);
}
