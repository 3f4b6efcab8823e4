// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// The device in virtual time that replays recorded launches.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engines/colocation.hpp"
#include "engines/device.hpp"
#include "engines/recording.hpp"
#include "support/catch.hpp"

namespace {

using engines::device;
using engines::h100;
using engines::iteration;
using engines::kernel;
using engines::strategy;
using gpushare::instant;
using gpushare::ns;
using namespace std::chrono_literals;

constexpr engines::device_constants exact{.beside_memory = 0, .jitter = 0, .tail = 0};

kernel filling(std::uint32_t blocks, ns alone) {  // two blocks to an SM
    return {.blocks = blocks, .block = engines::block_of(1024, 32, 0, h100), .alone = alone};
}

instant end_of(device& gpu, std::uint32_t stream, const kernel& k) {
    instant end{};
    gpu.launch(stream, k, gpu.now(), [&] { end = gpu.now(); });
    gpu.run_until(gpu.now() + 1s);
    return end;
}

}  // namespace

TEST_CASE("a block takes whole warps and registers in units", "[engines]") {
    CHECK(h100.sm.fits(engines::block_of(1024, 32, 0, h100)) == 2);
    CHECK(h100.sm.fits(engines::block_of(384, 168, 213'188, h100)) == 1);  // shared memory and registers
    CHECK(h100.sm.fits(engines::block_of(1, 16, 0, h100)) == 32);          // slots
    CHECK(h100.sm.fits(engines::block_of(128, 255, 0, h100)) == 2);        // 256 registers a thread
}

TEST_CASE("alone, a kernel takes as long as it was recorded, however many waves it has", "[engines]") {
    for (const std::uint32_t blocks : {1U, 131U, 264U, 265U, 264U * 7}) {
        device gpu{h100, exact, 1};
        const auto s = gpu.make_stream({});
        const kernel k = filling(blocks, 840us);
        CAPTURE(blocks);
        CHECK(end_of(gpu, s, k) - instant{} == 1us + 840us);
    }
}

TEST_CASE("kernels of a stream follow each other, those of two streams run side by side where they fit", "[engines]") {
    device gpu{h100, exact, 1};
    const auto a = gpu.make_stream({.client = 0}), b = gpu.make_stream({.client = 1});
    const kernel half = filling(132, 100us);
    std::vector<instant> ends;
    for (const auto s : {a, a, b}) gpu.launch(s, half, gpu.now(), [&] { ends.push_back(gpu.now()); });
    gpu.run_until(instant{} + 1ms);
    REQUIRE(ends.size() == 3);
    CHECK(ends[0] - instant{} == 101us);
    CHECK(ends[1] - instant{} == 101us);  // of b: the other half of each SM
    CHECK(ends[2] - instant{} == 202us);
    CHECK(gpu.sm_time(0) == 2 * 66.0 * 100'000);
}

TEST_CASE("a native priority passes blocks that haven't started, and none that have", "[engines]") {
    for (const int priority : {0, 5}) {
        device gpu{h100, exact, 1};
        const auto low = gpu.make_stream({.client = 0}), high = gpu.make_stream({.client = 1, .priority = priority});
        const kernel four_waves = filling(4 * 264, 400us), small = filling(8, 10us);
        instant end{};
        gpu.launch(low, four_waves, gpu.now());
        gpu.launch(high, small, gpu.now() + 50us, [&] { end = gpu.now(); });
        gpu.run_until(instant{} + 1ms);
        // The high one waits for the wave that runs; without a priority for all waves but those
        // that leave it room.
        CHECK(end - instant{} == (priority == 0 ? 411us : 111us));
    }
}

TEST_CASE("work behind a closed wait stays there until the wait is opened", "[engines]") {
    device gpu{h100, exact, 1};
    const auto s = gpu.make_stream({});
    const kernel k = filling(1, 10us);
    bool closed = true;
    int over = 0;
    gpu.launch(s, k, gpu.now(), [&] { ++over; });
    gpu.wait_in_stream(s, closed, gpu.now());
    gpu.launch(s, k, gpu.now(), [&] { ++over; });
    gpu.run_until(instant{} + 1ms);
    CHECK(over == 1);
    closed = false;
    gpu.opened(s);
    gpu.run_until(instant{} + 2ms);
    CHECK(over == 2);
}

TEST_CASE("blocks of a cluster start together, in one GPC", "[engines]") {
    for (const std::uint32_t cluster : {1U, 8U}) {
        device gpu{h100, exact, 1};
        const auto low = gpu.make_stream({.client = 0}), high = gpu.make_stream({.client = 1, .priority = 5});
        // Leaves 12 SMs, one or three of each GPC.
        const kernel most{.blocks = 120, .block = engines::block_of(384, 168, 200'000, h100), .alone = 100us};
        kernel eight{.blocks = 8, .block = most.block, .alone = 5us};
        eight.cluster = cluster;
        instant end{};
        gpu.launch(low, most, gpu.now());
        gpu.launch(high, eight, gpu.now() + 50us, [&] { end = gpu.now(); });
        gpu.run_until(instant{} + 1ms);
        CHECK(end - instant{} == (cluster == 1 ? 55us : 106us));
    }
}

TEST_CASE("a fill takes time in its stream, and nothing of an SM", "[engines]") {
    device gpu{h100, exact, 1};
    const auto a = gpu.make_stream({.client = 0}), b = gpu.make_stream({.client = 1});
    const kernel all = filling(264, 100us);  // nothing else fits beside
    gpu.launch(a, all, gpu.now());
    const kernel fill{.blocks = 0, .alone = 2us};
    instant end{};
    gpu.launch(b, fill, gpu.now(), [&] { end = gpu.now(); });
    gpu.run_until(instant{} + 1ms);
    CHECK(end - instant{} == 3us);
    CHECK(gpu.sm_time(1) == 0);
}

TEST_CASE("memory-bound neighbours slow a small kernel down", "[engines]") {
    device gpu{h100, {.beside_memory = 2, .jitter = 0, .tail = 0}, 1};
    const auto a = gpu.make_stream({.client = 0}), b = gpu.make_stream({.client = 1});
    kernel neighbour = filling(132, 1ms);
    neighbour.uses_memory = true;
    gpu.launch(a, neighbour, gpu.now());
    gpu.run_until(instant{} + 10us);
    CHECK(end_of(gpu, b, filling(8, 100us)) - instant{} == 10us + 200us);  // half of the slots: 1 + 2 x 0.5
}

TEST_CASE("a launch alone is timed only if its end was marked right behind it", "[engines]") {
    for (const bool prompt : {true, false}) {
        engines::batch_times batches;
        batches.add(0, {10us, 10us}, instant{}, false, 0);
        batches.end(instant{} + 50us, prompt);
        CHECK(batches.reached(instant{} + 50us, 0).exact == prompt);
    }
}

namespace {

// 60 small kernels beside iterations of 40 kernels that each fill the device three times, and are
// bound by its memory.
struct made_up {
    std::vector<iteration> urgent{iteration(60, filling(64, 8us))}, background{iteration(40, filling(3 * 264, 150us))};
    engines::setting set{
        .served = {{.model = &urgent, .per_s = 400}}, .busy = {{.model = &background}}, .length = 500ms};

    made_up() {
        for (kernel& k : background[0]) {
            k.host = 15us;
            k.uses_memory = true;
        }
    }
    engines::outcome run(strategy how) {
        set.how = how;
        return engines::colocate(set, 1);
    }
};

}  // namespace

TEST_CASE("a gate keeps an urgent model's answers near those alone, which native priority doesn't", "[engines]") {
    made_up m;
    auto alone = m.set;
    alone.busy.clear();
    const double p99 = engines::percentile(engines::colocate(alone, 1).served[0].call_us, 0.99);
    const auto native = m.run(strategy::native), held = m.run(strategy::held), gated = m.run(strategy::gated);
    CHECK(engines::percentile(native.served[0].call_us, 0.99) > 3 * p99);
    CHECK(engines::percentile(held.served[0].call_us, 0.99) < 2 * p99);
    CHECK(engines::percentile(gated.served[0].call_us, 0.99) < 2 * p99);
    // A held host falls behind; a gate in the stream leaves its queue full.
    CHECK(gated.busy[0].iterations_per_s > 1.02 * held.busy[0].iterations_per_s);
    CHECK(held.busy[0].longest_hold_us > 500);
}

TEST_CASE("requests with a seed of their own are the same beside others and alone, and wait for a launch at most",
          "[engines]") {
    made_up m;
    m.set.device = exact;  // what is left is the wait for the launch in flight, which takes 150 us
    m.set.served[0].arrivals = 7;
    const auto beside = m.run(strategy::gated).served[0].in_order;
    m.set.busy.clear();
    const auto alone = m.run(strategy::gated).served[0].in_order;
    const std::size_t both = std::min(beside.size(), alone.size());
    REQUIRE(both > 100);
    bool any = false;
    for (std::size_t i = 0; i < both; ++i) {
        CAPTURE(i);
        CHECK(beside[i].from_arrival >= alone[i].from_arrival);
        CHECK(beside[i].from_arrival <= alone[i].from_arrival + 155us);
        any = any || beside[i].from_arrival > alone[i].from_arrival + 50us;
    }
    CHECK(any);
}

TEST_CASE("requests that are known in advance find nothing in flight", "[engines]") {
    made_up m;
    m.set.device = exact;
    m.set.served[0].arrivals = 7;
    m.set.served[0].ahead = 500us;
    const auto beside = m.run(strategy::gated).served[0].in_order;
    m.set.busy.clear();
    const auto alone = m.run(strategy::gated).served[0].in_order;
    const std::size_t both = std::min(beside.size(), alone.size());
    REQUIRE(both > 100);
    for (std::size_t i = 20; i < both; ++i) {  // nobody knows of the first one, which others may wait for
        CAPTURE(i);
        CHECK(beside[i].from_arrival <= alone[i].from_arrival + 5us);
    }
}

TEST_CASE("requests at an even pace come at that pace", "[engines]") {
    made_up m;
    m.set.served[0].even = true;
    CHECK(m.run(strategy::gated).served[0].in_order.size() == 200);  // one each 2.5 ms, the first after 1 ms
}

TEST_CASE("a model with shorter launches takes as long as before", "[engines]") {
    iteration one{filling(264, 250us), filling(264, 100us)};
    one[0].host = 30us;
    const auto shorter = engines::cut({one}, 100us).front();
    REQUIRE(shorter.size() == 4);
    ns all{0}, host{0};
    for (const kernel& k : shorter) {
        CHECK(k.alone <= 100us);
        all += k.alone;
        host += k.host;
    }
    CHECK(all > 350us - 3ns);  // whole nanoseconds
    CHECK(all <= 350us);
    CHECK(host == 30us);
}

TEST_CASE("a gate divides a device among engines by weight, and charges what they take alone", "[engines]") {
    std::vector<iteration> one(1), other(1);
    for (int i = 0; i < 40; ++i) one[0].push_back(filling(3 * 264, i % 2 == 0 ? 60us : 140us));
    for (int i = 0; i < 60; ++i) other[0].push_back(filling(264, 30us));
    for (auto* const engine : {&one, &other})
        for (kernel& k : (*engine)[0]) {
            k.host = 5us;
            k.kind = engine == &one ? 1 : 2;  // the first one's kernels take more or less with their data
        }
    engines::setting s{.busy = {{.model = &one, .weight = 30}, {.model = &other, .weight = 70}},
                       .how = strategy::held,
                       .length = 500ms,
                       .device = exact};
    const auto r = engines::colocate(s, 1);
    const double all = r.busy[0].device_s + r.busy[1].device_s;
    CHECK(r.busy[0].device_s / all == Approx(0.3).margin(0.01));
    for (const auto& engine : r.busy) CHECK(engine.charged_s == Approx(engine.device_s).epsilon(0.01));
}

TEST_CASE("a gate takes time of the launching host, for launches, events and waits", "[engines]") {
    std::vector<iteration> bound_by_host(1, iteration(40, filling(264, 10us)));
    for (kernel& k : bound_by_host[0]) k.host = 20us;
    engines::setting s{.busy = {{.model = &bound_by_host}}, .length = 500ms, .device = exact};
    const auto rate = [&](strategy how, const engines::gate_costs& costs) {
        s.how = how;
        s.host.gate = costs;
        return engines::colocate(s, 1).busy[0].iterations_per_s;
    };
    constexpr ns none{0};
    const engines::gate_costs nothing{none, none, none, none, none}, calls{2us, none, none, none, none},
        events{none, 28us, none, none, none}, waits{none, none, none, 50us, none};
    const double plain = rate(strategy::plain, {});
    for (const strategy how : {strategy::held, strategy::gated}) {
        CAPTURE(to_string(how));
        CHECK(rate(how, nothing) == Approx(plain).epsilon(0.005));
        CHECK(rate(how, calls) == Approx(plain * 20 / 22).epsilon(0.005));
    }
    CHECK(rate(strategy::held, events) == Approx(plain * 20 / 22).epsilon(0.005));  // one for 14 launches, in 300 us
    CHECK(rate(strategy::held, waits) == Approx(plain).epsilon(0.005));
    CHECK(rate(strategy::gated, waits) == Approx(plain * 20 / 22).epsilon(0.02));  // one for some 25 launches
    CHECK(rate(strategy::gated, events) < 0.98 * plain * 20 / 22);                 // and two events
    CHECK(rate(strategy::native, {1s, 1s, 1s, 1s, 1s}) == Approx(plain).epsilon(0.005));
}

namespace {

// An engine whose device waits for its host most of the time.
std::vector<iteration> slow_host(ns between) {
    std::vector<iteration> model(1, iteration(40, filling(264, 10us)));
    for (kernel& k : model[0]) k.host = between;
    return model;
}

}  // namespace

TEST_CASE("launches of a slow host behind a request's arrival don't delay the request", "[engines]") {
    const auto slow = slow_host(40us);
    made_up m;
    m.set.device = exact;
    m.set.served[0].arrivals = 7;
    m.set.busy = {{.model = &slow}};
    const auto beside = m.run(strategy::gated).served[0];
    m.set.busy.clear();
    const double alone = m.run(strategy::gated).served[0].call_us.back();
    REQUIRE(beside.in_order.size() > 100);
    CHECK(beside.beyond_us.back() <= alone + 0.1);
    CHECK(engines::percentile(beside.told_us, 0.25) < 60);  // so a piece that goes on would be too much
}

TEST_CASE("a slow host's piece is open for twice the time of its work", "[engines]") {
    const auto slow = slow_host(50us);
    engines::setting s{.busy = {{.model = &slow}}, .length = 500ms, .device = exact};
    const double plain = engines::colocate(s, 1).busy[0].iterations_per_s;
    constexpr ns none{0};
    s.how = strategy::gated;
    s.host.gate = {none, none, none, 50us, none};  // a wait and nine launches: 500 us
    CHECK(engines::colocate(s, 1).busy[0].iterations_per_s == Approx(plain * 0.9).epsilon(0.01));
}

TEST_CASE("the same seed gives the same run", "[engines]") {
    made_up m;
    const auto one = m.run(strategy::gated), other = m.run(strategy::gated);
    CHECK(one.served[0].call_us == other.served[0].call_us);
    CHECK(one.busy[0].iterations_per_s == other.busy[0].iterations_per_s);
}

TEST_CASE("a recording that isn't there is an error", "[engines]") {
    CHECK_THROWS_AS(engines::read_recording("/nowhere/kernels.csv.gz"), std::runtime_error);
}
