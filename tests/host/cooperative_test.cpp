// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/host/host.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "host/gate.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace std::chrono_literals;
using host::timing;

TEST_CASE("a cooperative launch that can't be resident is refused and leaves nothing behind", "[host]") {
    host::node node{{.sms = 3}};
    auto s = node.make_stream(device_id{0});
    CHECK(s.max_cooperative_blocks() == 3);
    CHECK(s.launch_cooperative({.blocks = 4}, [](auto&) { throw std::runtime_error{"ran"}; }) == errc::too_many_blocks);
    const auto p = s.record();
    CHECK(p.wait(never));
    CHECK(p.status() == errc::none);
    CHECK(node.ledger(device_id{0}).take().blocks.empty());
}

TEST_CASE("blocks of a cooperative launch meet", "[host]") {
    for (const auto t : {timing::real, timing::modelled}) {
        constexpr int rounds = 50;
        host::node node{{.sms = 4, .timing = t}};
        auto s = node.make_stream(device_id{0});
        std::array<int, 4> step{};
        std::atomic<int> wrong{0};
        CHECK(s.launch_cooperative({.blocks = 4, .hold = 10us}, [&](auto& ctx) {
            for (int i = 1; i <= rounds; ++i) {
                step[ctx.block_rank()] = i;
                if (!ctx.grid_sync()) ++wrong;
                for (const int other : step) wrong += other != i;
                if (!ctx.grid_sync()) ++wrong;
            }
        }) == errc::none);
        CHECK(s.record().wait(never));
        CHECK(wrong == 0);
    }
}

TEST_CASE("a cooperative launch waits for its SMs, and keeps others from them", "[host]") {
    gate first, last;
    host::node node{{.sms = 2}};
    auto a = node.make_stream(device_id{0}), b = node.make_stream(device_id{0}),
         c = node.make_stream(device_id{0}, priority{1}), d = node.make_stream(device_id{0});
    a.launch({}, first.kernel());
    b.launch({}, last.kernel());
    first.wait_inside(1);
    last.wait_inside(1);
    std::vector<int> order;
    CHECK(c.launch_cooperative({.blocks = 2}, [&](auto& ctx) {
        if (ctx.block_rank() == 0) order.push_back(1);
        (void)ctx.grid_sync();
    }) == errc::none);
    d.launch({}, [&](auto&) { order.push_back(2); });
    const auto c_done = c.record(), d_done = d.record();
    first.open();
    CHECK(a.record().wait(never));
    CHECK_FALSE(d_done.reached());  // an SM is free, and kept
    last.open();
    CHECK(c_done.wait(never));
    CHECK(d_done.wait(never));
    CHECK(order == std::vector{1, 2});
}

TEST_CASE("cooperative launches of many streams don't deadlock", "[host]") {
    for (const auto t : {timing::real, timing::modelled}) {
        host::node node{{.devices = 2, .sms = 3, .timing = t}};
        std::vector<host::stream> streams;
        for (std::uint32_t i = 0; i < 6; ++i)
            streams.push_back(node.make_stream(device_id{i % 2}, priority{static_cast<int>(i % 3)}));
        std::atomic<int> met{0};
        for (int round = 0; round < 60; ++round)
            for (auto& s : streams)
                CHECK(s.launch_cooperative({.blocks = 2, .hold = 1us}, [&](auto& ctx) { met += ctx.grid_sync(); }) ==
                      errc::none);
        for (auto& s : streams) CHECK(s.record().wait(never));
        CHECK(met == 2 * 60 * 6);
    }
}

TEST_CASE("kernels of several devices that wait for each other all get a worker", "[host]") {
    // Every SM of the node spins at once: there must be as many threads.
    for (const auto t : {timing::real, timing::modelled}) {
        constexpr std::uint32_t devices = 4, sms = 2;
        std::atomic<std::uint32_t> arrived{0};
        host::node node{{.devices = devices, .sms = sms, .timing = t}};
        std::vector<host::stream> streams;
        for (std::uint32_t d = 0; d < devices; ++d) streams.push_back(node.make_stream(device_id{d}));
        for (auto& s : streams)
            CHECK(s.launch_cooperative({.blocks = sms, .hold = 1ms}, [&](auto& ctx) {
                ++arrived;
                for (std::uint32_t turn = 0; arrived < devices * sms; ++turn) ctx.backoff(turn);
            }) == errc::none);
        for (auto& s : streams) CHECK(s.record().wait(never));
        CHECK(arrived == devices * sms);
    }
}

TEST_CASE("a barrier gives up when a block can't come any more", "[host]") {
    host::node node{{.sms = 3}};
    auto s = node.make_stream(device_id{0});
    std::atomic<int> gave_up{0};
    CHECK(s.launch_cooperative({.blocks = 3}, [&](auto& ctx) {
        if (ctx.block_rank() == 1) throw std::runtime_error{"one block fails"};
        gave_up += !ctx.grid_sync();
    }) == errc::none);
    const auto p = s.record();
    CHECK(p.wait(never));
    CHECK(p.status() == errc::kernel_failed);
    CHECK(gave_up == 2);

    s.launch({.blocks = 2}, [&](auto& ctx) { gave_up += !ctx.grid_sync(); });  // not cooperative
    CHECK(s.launch_cooperative({.blocks = 2}, [&](auto& ctx) { gave_up += !ctx.grid_sync(); }) == errc::none);
    CHECK(s.record().wait(never));
    CHECK(gave_up == 4);
}

TEST_CASE("a barrier gives up when the device is lost", "[host]") {
    std::atomic<int> gave_up{0};
    gate g;
    host::node node{{.sms = 2}};
    auto s = node.make_stream(device_id{0});
    CHECK(s.launch_cooperative({.blocks = 2}, [&, hold = g.kernel()](auto& ctx) {
        hold(ctx);  // until the device is lost
        // The other block only comes when this one has stopped waiting for it.
        for (std::uint32_t turn = 0; ctx.block_rank() == 1 && gave_up == 0; ++turn) ctx.backoff(turn);
        gave_up += !ctx.grid_sync();
    }) == errc::none);
    g.wait_inside(2);
    node.faults(device_id{0}).lose_device();
    CHECK(s.record().wait(never));
    CHECK(gave_up >= 1);
}

TEST_CASE("a context can be had without a device", "[host]") {
    host::kernel_context ctx;
    CHECK(ctx.num_blocks() == 1);
    CHECK(ctx.grid_sync());
    CHECK(ctx.reduce_add(4) == 4);
    CHECK_FALSE(ctx.device_lost());
    for (const std::uint32_t turn : {0U, 100U, 1000U}) ctx.backoff(turn);
    STATIC_REQUIRE(host::kernel_context{}.block_rank() == 0);
}
