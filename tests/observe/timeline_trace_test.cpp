// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/observe/timeline_trace.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/json.hpp"
#include "support/simulated_limiter.hpp"

using namespace gpushare;
using namespace std::chrono_literals;
using support::json_value;

namespace {

constexpr instant start{};

std::vector<json_value> events(timeline_trace& t, const std::string& phase) {
    std::vector<json_value> found;
    const auto whole = support::parse_json(t.json());
    for (const auto& e : whole["traceEvents"].items)
        if (e["ph"].text == phase) found.push_back(e);
    return found;
}

}  // namespace

TEST_CASE("a trace is off until it is started", "[observe]") {
    timeline_trace t;
    t.kernel({0}, 1, start, start + 1ms);
    CHECK(support::parse_json(t.json())["traceEvents"].items.empty());
    t.start(10);
    t.kernel({0}, 1, start, start + 1ms);
    t.stop();
    t.kernel({0}, 1, start, start + 1ms);
    CHECK(events(t, "X").size() == 1);
}

TEST_CASE("every kind of record is in the file, in microseconds", "[observe]") {
    timeline_trace t;
    t.start(100);
    t.name_device({2}, "left");
    t.name_tenant(7, "chat");
    t.wait({2}, 7, start + 1ns, start + 1500ns);
    t.permit({2}, 7, start + 1500ns, start + 5us);
    t.kernel({2}, 7, start + 2us, start + 4us + 50ns);
    t.bound({2}, 7, start, 3ms);
    t.violation({2}, 7, start + 9us, 1us);
    const auto kernels = events(t, "X");
    REQUIRE(kernels.size() == 1);
    CHECK(kernels[0]["pid"].text == "2");
    CHECK(kernels[0]["tid"].text == "7");
    CHECK(kernels[0]["ts"].text == "2.000");
    CHECK(kernels[0]["dur"].text == "2.050");
    const auto begins = events(t, "b"), ends = events(t, "e");
    REQUIRE(begins.size() == 2);
    REQUIRE(ends.size() == 2);
    CHECK(begins[0]["name"].text == "wait");
    CHECK(begins[0]["ts"].text == "0.001");
    CHECK(ends[0]["ts"].text == "1.500");
    CHECK(begins[0]["id"].text == ends[0]["id"].text);
    CHECK(begins[0]["id"].text != begins[1]["id"].text);
    REQUIRE(events(t, "C").size() == 1);
    CHECK(events(t, "C")[0]["name"].text == "bound of chat");
    CHECK(events(t, "C")[0]["args"]["us"].text == "3000.000");
    CHECK(events(t, "i").size() == 1);
    const auto names = events(t, "M");
    REQUIRE(names.size() == 2);
    CHECK(names[0]["args"]["name"].text == "left");
    CHECK(names[1]["args"]["name"].text == "chat");
}

TEST_CASE("a name may be any bytes", "[observe]") {
    timeline_trace t;
    t.start(10);
    t.name_tenant(1, std::string_view("a\"b\\c\n\0\xff\x7f}", 10));
    t.bound({0}, 1, start, 1us);
    t.kernel({0}, 2, start - 1ns, start);
    CHECK(events(t, "M")[1]["args"]["name"].text == "a\"b\\c????}");
    CHECK(events(t, "M")[2]["args"]["name"].text == "tenant 2");
    CHECK(events(t, "X")[0]["ts"].text == "-0.001");
}

TEST_CASE("the latest records are kept, and the others counted", "[observe]") {
    timeline_trace t;
    t.start(16);
    for (int i = 0; i < 100; ++i) t.kernel({0}, 1, start + i * 1us, start + i * 1us);
    const auto kept = events(t, "X");
    REQUIRE(kept.size() == 16);
    CHECK(kept.front()["ts"].text == "84.000");
    CHECK(kept.back()["ts"].text == "99.000");
    CHECK(t.lost() == 84);
    t.start(0);
    t.kernel({0}, 1, start, start);
    CHECK(events(t, "X").empty());
}

TEST_CASE("threads record beside each other and beside a reader; each record is whole", "[observe]") {
    timeline_trace t;
    t.start(64);
    std::atomic<bool> end{false};
    std::vector<std::jthread> threads;
    for (std::uint32_t who = 1; who <= 3; ++who)
        threads.emplace_back([&, who] {
            for (int i = 0; i < 20'000 && !end; ++i) t.kernel({who}, who, start + ns{who}, start + ns{2 * who});
        });
    bool whole = true;
    for (int i = 0; i < 20; ++i)
        for (const auto& k : events(t, "X")) {
            const auto micros = "0.00" + k["tid"].text;
            whole &= k["pid"].text == k["tid"].text && k["ts"].text == micros && k["dur"].text == micros;
        }
    end = true;
    CHECK(whole);
}

TEST_CASE("a simulated second is a trace", "[observe]") {
    sim::world world;
    timeline_trace t;
    t.start();
    world.on_kernel([&](const sim::kernel_span& k) { t.kernel(k.device, k.tag, k.begin, k.end); });
    support::simulated_limiter<weighted_fair> limiter(world, {0}, {.depth = 2});
    for (std::uint32_t tenant = 1; tenant <= 2; ++tenant) {
        const auto c = limiter.add({}, tenant);
        limiter.client(c).on_end = [&t, tenant](const support::simulated_end& e) {
            t.wait({0}, tenant, e.arrival, e.let_in);
            t.permit({0}, tenant, e.let_in, e.end);
        };
        for (int i = 0; i < 500; ++i) limiter.submit(c, {.length = 1ms});
    }
    world.run();
    CHECK(events(t, "X").size() == 1000);
    CHECK(events(t, "b").size() == 2000);
    CHECK(t.lost() == 0);
}
