// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// A limiter's trace that lacks memory for a tenant's name, at each of its allocations in turn: a
// later call draws what the first one didn't.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <chrono>
#include <cstddef>
#include <new>
#include <string>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/observe/timeline_trace.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/json.hpp"

namespace limiter_trace_memory_test {

namespace gs = gpushare;
using namespace std::chrono_literals;

using limiter = gs::compute_limiter<gs::sim::stream, gs::sim::clock_of>;

/// The number of events with this phase and name.
std::size_t count(gs::timeline_trace& trace, const std::string& phase, const std::string& name) {
    std::size_t n = 0;
    const auto whole = support::parse_json(trace.json());
    for (const auto& e : whole["traceEvents"].items) n += e["ph"].text == phase && e["name"].text == name ? 1 : 0;
    return n;
}

TEST_CASE("submissions that a trace couldn't draw for lack of memory are drawn later, once", "[observe]") {
    std::size_t failed = 0;
    for (bool threw = true; threw; failed += threw ? 1 : 0) {
        gs::sim::world world{{.devices = 1}};
        limiter compute{{.depth = 1, .horizon = 0ms}, gs::sim::clock_of{world}};
        gs::sim::stream stream(world, {0});
        gs::timeline_trace trace;
        trace.start();
        gs::limiter_trace drawn(trace, compute, {0});
        const std::string name = "a tenant with a name that doesn't fit";
        for (std::uint32_t tag = 1; tag <= 2; ++tag) {
            const auto c = compute.add({.longest = 1ms, .tag = tag, .name = gs::tenant_name(name)});
            for (int i = 0; i < 3; ++i) CHECK(compute.submit(c, stream, [](auto& s) { s.enqueue(1ms); })->wait());
        }
        threw = false;
        support::this_heap = {.good = failed, .recovers = true};
        try {
            drawn.collect();
        } catch (const std::bad_alloc&) {
            threw = true;
        }
        support::this_heap = {};
        CAPTURE(failed);
        drawn.collect();
        CHECK(count(trace, "X", "kernel") == 6);
        CHECK(count(trace, "b", "permit") == 6);
        CHECK(count(trace, "M", "thread_name") == 2);
        CHECK(drawn.lost() == 0);
    }
    CHECK(failed >= 4);
}

}  // namespace limiter_trace_memory_test

#endif
