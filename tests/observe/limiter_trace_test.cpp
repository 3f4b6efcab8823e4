// SPDX-License-Identifier: Apache-2.0
// A small run whose trace is known: two tenants of a simulated device, one below the other.
#include <chrono>
#include <cstddef>
#include <fstream>
#include <string>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/observe/timeline_trace.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/json.hpp"

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;
using support::json_value;

namespace {

using limiter = compute_limiter<sim::stream, sim::clock_of>;

std::vector<json_value> of(const json_value& whole, const std::string& phase, const std::string& name) {
    std::vector<json_value> found;
    for (const auto& e : whole["traceEvents"].items)
        if (e["ph"].text == phase && e["name"].text == name) found.push_back(e);
    return found;
}

struct setup {
    sim::world world{{.devices = 4}};
    limiter compute{{.depth = 1, .horizon = 0ms}, sim::clock_of{world}};
    sim::stream below{world, {3}, {}, 1}, above{world, {3}, {1}, 2};
    timeline_trace trace;
};

}  // namespace

TEST_CASE("waits, permits, kernels and bounds of a limiter are in the trace", "[observe]") {
    setup t;
    const auto low = t.compute.add({.weight = 50_pct, .longest = 1ms, .tag = 1});
    const auto high = t.compute.add({.weight = 50_pct, .level = {1}, .longest = 100us, .tag = 2});
    t.trace.start();
    t.trace.name_tenant(1, "batch");
    t.trace.name_tenant(2, "chat");
    limiter_trace drawn(t.trace, t.compute, {3});
    std::vector<limiter::ticket> tickets;
    for (int i = 0; i < 2; ++i)
        tickets.push_back(t.compute.submit(low, t.below, [](auto& s) { s.enqueue(1ms); }).value());
    tickets.push_back(t.compute.submit(high, t.above, [](auto& s) { s.enqueue(100us); }).value());
    for (const auto& ticket : tickets) CHECK(ticket.wait());
    drawn.collect();
    CHECK(drawn.lost() == 0);

    const auto whole = support::parse_json(t.trace.json());
    // batch: 0 to 1 ms, and after chat, which came first on the device, 1.1 to 2.1 ms.
    const auto kernels = of(whole, "X", "kernel");
    REQUIRE(kernels.size() == 3);
    CHECK(kernels[0]["tid"].text == "1");
    CHECK(kernels[0]["ts"].text == "0.000");
    CHECK(kernels[0]["dur"].text == "1000.000");
    CHECK(kernels[1]["tid"].text == "2");
    CHECK(kernels[1]["pid"].text == "3");
    CHECK(kernels[1]["ts"].text == "1000.000");
    CHECK(kernels[1]["dur"].text == "100.000");
    CHECK(kernels[2]["tid"].text == "1");
    CHECK(kernels[2]["ts"].text == "1100.000");
    CHECK(kernels[2]["dur"].text == "1000.000");

    const auto waits = of(whole, "b", "wait"), ends = of(whole, "e", "wait");
    REQUIRE(waits.size() == 1);  // the others were let in at once
    CHECK(waits[0]["tid"].text == "1");
    CHECK(waits[0]["ts"].text == "0.000");
    CHECK(ends[0]["ts"].text == "1100.000");
    CHECK(of(whole, "b", "permit").size() == 3);

    const auto bounds = of(whole, "C", "bound of chat");
    REQUIRE(bounds.size() == 1);
    CHECK(bounds[0]["args"]["us"].text == "1000.000");
    CHECK(of(whole, "C", "bound of batch").size() == 1);  // twice the same is told once
    CHECK(of(whole, "i", "bound violated").empty());
}

TEST_CASE("a bound that is broken or changes is in the trace", "[observe]") {
    setup t;
    const auto low = t.compute.add({.weight = 50_pct, .longest = 1ms, .tag = 1});
    const auto high = t.compute.add({.weight = 50_pct, .level = {1}, .longest = 100us, .tag = 2});
    t.trace.start();
    limiter_trace drawn(t.trace, t.compute, {3});
    for (int i = 0; i < 2; ++i) {
        const auto a = t.compute.submit(low, t.below, [](auto& s) { s.enqueue(4ms); }).value();
        const auto b = t.compute.submit(high, t.above, [](auto& s) { s.enqueue(100us); }).value();
        CHECK(a.wait());
        CHECK(b.wait());
    }
    drawn.collect();
    const auto whole = support::parse_json(t.trace.json());
    const auto violations = of(whole, "i", "bound violated");
    REQUIRE(violations.size() == 1);  // after the first, 4 ms are what is promised
    CHECK(violations[0]["tid"].text == "2");
    CHECK(violations[0]["ts"].text == "4000.000");
    CHECK(violations[0]["args"]["us beyond"].text == "3000.000");
    const auto bounds = of(whole, "C", "bound of tenant 2");
    REQUIRE(bounds.size() == 2);
    CHECK(bounds[0]["args"]["us"].text == "1000.000");
    CHECK(bounds[1]["args"]["us"].text == "4000.000");
}

TEST_CASE("a bound that stays the same is in the trace, however long ago it was drawn first", "[observe]") {
    setup t;
    const auto c = t.compute.add({.longest = 1ms, .tag = 1});
    t.trace.start(16);
    limiter_trace drawn(t.trace, t.compute, {3});
    const auto bounds = [&] {
        CHECK(t.compute.submit(c, t.below, [](auto& s) { s.enqueue(1ms); })->wait());
        drawn.collect();
        return of(support::parse_json(t.trace.json()), "C", "bound of tenant 1").size();
    };
    CHECK(bounds() == 1);
    for (int i = 0; i < 20; ++i) CHECK(bounds() >= 1);  // the first one is overwritten
    t.trace.start(16);
    CHECK(bounds() == 1);
}

TEST_CASE("a limiter records only while it is drawn", "[observe]") {
    setup t;
    const auto c = t.compute.add({.tag = 1});
    const auto run = [&] { CHECK(t.compute.submit(c, t.below, [](auto& s) { s.enqueue(1ms); })->wait()); };
    t.trace.start();
    {
        limiter_trace drawn(t.trace, t.compute, {3}, 2);
        for (int i = 0; i < 5; ++i) run();
        CHECK(drawn.lost() == 3);
        drawn.collect();
        run();
        drawn.collect();
    }
    run();
    limiter_trace again(t.trace, t.compute, {3});
    again.collect();
    CHECK(of(support::parse_json(t.trace.json()), "X", "kernel").size() == 3);
}

TEST_CASE("tenants of a tenancy go by their tags and names", "[observe]") {
    host::node node{{.devices = 1, .memory = 1_MiB}};
    tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 1_KiB, .compute = 50_pct});
    auto batch = shared.admit({.name = "batch", .memory = 1_KiB, .compute = 50_pct});
    timeline_trace trace;
    trace.start();
    limiter_trace drawn(trace, shared.limiter_of({0}), {0});
    batch.resize({.compute = 25_pct});  // a change doesn't lose the tag
    const auto run = [](auto& tenant) { CHECK(tenant.submit([](auto& s) { s.launch({}, [](auto&) {}); }).wait()); };
    for (int i = 0; i < 3; ++i) run(chat);
    run(batch);
    drawn.collect();
    const auto whole = support::parse_json(trace.json());
    std::size_t of_chat = 0, of_batch = 0;
    for (const auto& k : of(whole, "X", "kernel")) {
        of_chat += k["tid"].text == std::to_string(chat.tag());
        of_batch += k["tid"].text == std::to_string(batch.tag());
    }
    CHECK(of_chat == 3);
    CHECK(of_batch == 1);
    std::vector<std::string> rows;
    for (const auto& row : of(whole, "M", "thread_name")) rows.push_back(row["args"]["name"].text);
    CHECK(rows == std::vector<std::string>{"chat", "batch"});
}
