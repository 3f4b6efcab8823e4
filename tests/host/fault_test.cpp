// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/host/host.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "host/gate.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace std::chrono_literals;
using host::timing;

TEST_CASE("a stalled stream stops before its next operation, others go on", "[host]") {
    const auto t = GENERATE(timing::real, timing::modelled);
    gate g;
    host::node node{{.sms = 2, .timing = t}};
    auto faults = node.faults(device_id{0});
    auto s = node.make_stream(device_id{0}, priority{5}), other = node.make_stream(device_id{0});
    std::atomic<int> ran{0};
    s.launch({}, g.kernel());
    const auto started = s.record();
    g.wait_inside(1);
    s.launch({}, [&](auto&) { ++ran; });
    const auto behind = s.record();
    faults.stall(s);
    g.open();
    CHECK(started.wait(never));
    other.launch({.blocks = 5}, [](auto&) {});
    CHECK(other.record().wait(never));
    CHECK_FALSE(behind.reached());
    CHECK(ran == 0);
    faults.resume(s);
    CHECK(behind.wait(never));
    CHECK(ran == 1);

    // Stalled while it waits for another stream.
    gate h;
    other.launch({}, h.kernel());
    s.wait(other.record());
    const auto waited = s.record();
    faults.stall(s);
    h.open();
    CHECK(other.record().wait(never));
    CHECK_FALSE(waited.reached());
    faults.resume(s);
    CHECK(waited.wait(never));
}

TEST_CASE("a lost device fails everything it has and wakes who waits", "[host]") {
    const auto t = GENERATE(timing::real, timing::modelled);
    gate g;
    host::node node{{.devices = 2, .memory = 1_MiB, .sms = 2, .timing = t}};
    auto running = node.make_stream(device_id{0}), queued = node.make_stream(device_id{0}),
         stalled = node.make_stream(device_id{0}), held = node.make_stream(device_id{0}, priority{9}),
         healthy = node.make_stream(device_id{1});
    std::atomic<int> ran{0};
    running.launch({.blocks = 10}, g.kernel());  // two run, eight never will
    const auto p_running = running.record();
    g.wait_inside(2);
    running.launch({}, [&](auto&) { ++ran; });
    queued.launch({}, [&](auto&) { ++ran; });
    queued.wait(p_running);
    queued.enqueue(1h);
    node.faults(device_id{0}).stall(stalled);
    stalled.launch({}, [&](auto&) { ++ran; });
    CHECK(held.launch_cooperative({.blocks = 2}, [&](auto&) { ++ran; }) == errc::none);
    healthy.wait(p_running);
    healthy.launch({}, [&](auto&) { ran += 100; });
    std::vector points{running.record(), queued.record(), stalled.record(), held.record()};
    const auto p_healthy = healthy.record();
    void* const block = node.memory(device_id{0}).allocate(1000, 256);

    std::atomic<int> woken{0};
    std::vector<std::jthread> waiting;
    for (const auto& p : points) waiting.emplace_back([&woken, p] { woken += p.wait(never); });
    CHECK_FALSE(node.lost(device_id{0}));
    node.faults(device_id{0}).lose_device();
    node.faults(device_id{0}).lose_device();
    CHECK(node.lost(device_id{0}));
    CHECK_FALSE(node.lost(device_id{1}));
    waiting.clear();
    CHECK(woken == 4);
    for (const auto& p : points) CHECK(p.status() == errc::device_lost);
    CHECK(p_running.status() == errc::device_lost);
    CHECK(p_healthy.wait(never));
    CHECK(p_healthy.status() == errc::none);
    CHECK(ran == 100);
    CHECK(g.inside() == 2);

    running.launch({}, [&](auto&) { ++ran; });
    const auto later = running.record();
    CHECK(later.reached());
    CHECK(later.status() == errc::device_lost);
    CHECK(node.memory(device_id{0}).try_allocate(1, 1) == nullptr);
    try {
        (void)node.memory(device_id{0}).allocate(1, 1);
        FAIL("allocated on a lost device");
    } catch (const memory_error& e) {
        CHECK(e.code() == errc::device_lost);
    }
    CHECK(node.memory(device_id{0}).deallocate(block, 1000, 256) == errc::none);
    CHECK(node.memory(device_id{1}).try_allocate(1, 1) != nullptr);
}

TEST_CASE("a node goes down with work queued, running and held", "[host]") {
    const auto t = GENERATE(timing::real, timing::modelled);
    for (int round = 0; round < 20; ++round) {
        std::vector<host::stream> streams;
        std::vector<host::point> points;
        std::atomic<int> started{0};
        {
            host::node node{{.devices = 2, .sms = 2, .timing = t}};
            for (std::uint32_t i = 0; i < 6; ++i) {
                streams.push_back(node.make_stream(device_id{i % 2}));
                auto& s = streams.back();
                if (!points.empty()) s.wait(points.back());
                for (int n = 0; n < round; ++n) s.launch({.blocks = 3, .hold = 20us}, [&](auto&) { ++started; });
                s.enqueue(1h);
                (void)s.launch_cooperative({.blocks = 2}, [](auto& ctx) { (void)ctx.grid_sync(); });
                points.push_back(s.record());
            }
        }
        for (const auto& p : points) {
            CHECK(p.reached());
            CHECK(p.status() == errc::device_lost);
        }
    }
}

TEST_CASE("a node refuses what it can't be and devices it doesn't have", "[host]") {
    CHECK_THROWS_AS((host::node{{.devices = 0}}), operation_error);
    CHECK_THROWS_AS((host::node{{.devices = 5000}}), operation_error);
    CHECK_THROWS_AS((host::node{{.sms = 0}}), operation_error);
    CHECK_THROWS_AS((host::node{{.memory = 1_KiB, .taken = 2_KiB}}), operation_error);
    host::node node{{.devices = 2}};
    CHECK_THROWS_AS(node.memory(device_id{2}), operation_error);
    CHECK_THROWS_AS(node.make_stream(device_id{2}), operation_error);
    CHECK_THROWS_AS(node.faults(device_id{7}), operation_error);
    CHECK_THROWS_AS(node.ledger(device_id{7}), operation_error);
}

TEST_CASE("a full ledger says what it missed", "[host]") {
    host::node n{{.sms = 1, .timing = timing::modelled, .ledger_capacity = 3}};
    auto s = n.make_stream({0});
    s.launch({.blocks = 5}, [](auto&) {});
    REQUIRE(s.record().wait(std::chrono::steady_clock::now() + 5min));
    auto page = n.ledger({0}).take();
    CHECK(page.blocks.size() == 3);
    CHECK(page.dropped == 2);
    s.launch({.blocks = 2}, [](auto&) {});
    REQUIRE(s.record().wait(std::chrono::steady_clock::now() + 5min));
    page = n.ledger({0}).take();
    CHECK(page.blocks.size() == 2);
    CHECK(page.dropped == 0);
}
