// SPDX-License-Identifier: Apache-2.0
// A planner on a host that runs out of memory: each call is made as often as it allocates, and
// another allocation fails each time. A call that throws leaves nothing in the plan.
#include <chrono>
#include <cstddef>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/tenant_planner.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/host_tenants.hpp"
#include "support/sanitizers.hpp"
#include "support/this_heap.hpp"  // no_host_memory_test.cpp replaces operator new

#ifndef SUPPORT_THREAD_SANITIZED

namespace planner_memory_test {

using namespace support::host_tenants;
using gpushare::admission_result;

namespace {

/// Returns the result of `call`, of which allocation number `good` fails, from 0; none if `call`
/// threw std::bad_alloc. `failed`: whether there was such an allocation.
template <class F>
auto with_failure(std::size_t good, bool& failed, F call) {
    std::optional<decltype(call())> result;
    support::this_heap = {.good = good, .recovers = true};
    try {
        result.emplace(call());
    } catch (const std::bad_alloc&) {
    }
    failed = std::exchange(support::this_heap, {}).failed;
    return result;
}

/// One device, on which a tenant waits.
struct crowded {
    node n{modelled(1)};
    tenancy shared{n};
    gpushare::tenant_planner<tenancy, gpushare::best_fit> plan{shared, gpushare::best_fit{}, {.most_overtakes = 1000}};
    tenancy::tenant present = *plan.arrive(of("present", 32_MiB, 50_pct)).who;
    std::size_t thrown = 0;

    crowded() { REQUIRE(plan.arrive(of("waits", 48_MiB, 20_pct)).outcome == admission_result::queued); }
    static tenant_spec of(std::string name, bytes memory, gpushare::share compute, int level = 0) {
        return {.name = std::move(name), .memory = memory, .compute = compute, .level = {level}};
    }
};

}  // namespace

TEST_CASE_METHOD(crowded, "a tenant whose arrival throws has no place in the plan", "[tenant][planner]") {
    const auto spec = of("a name that is longer than a string without memory", 8_MiB, 10_pct);
    const auto before = plan.free();
    {  // lists grow here, so that each arrival below makes the same allocations
        auto first = plan.arrive(spec);
        REQUIRE((first.who && first.who->close(soon()).complete));
        plan.left(spec.name);
    }
    bool failed = true;
    for (std::size_t good = 0; failed; ++good) {
        CAPTURE(good);
        auto copy = spec;
        auto a = with_failure(good, failed, [&] { return plan.arrive(std::move(copy)); });
        if (a) {
            REQUIRE(a->who);
            CHECK(a->name == spec.name);
            CHECK(plan.free() != before);
            CHECK(a->who->close(soon()).complete);
            plan.left(spec.name);
        } else {
            ++thrown;
        }
        REQUIRE(plan.free() == before);
    }
    CHECK(thrown > 1);
}

TEST_CASE_METHOD(crowded, "a reservation that throws reserves nothing", "[tenant][planner]") {
    const auto spec = of("later", 20_MiB, 10_pct);
    const auto begin = shared.now() + 1h, end = begin + 1h;
    bool failed = true;
    for (std::size_t good = 0; failed; ++good) {
        CAPTURE(good);
        const auto r = with_failure(good, failed, [&] { return plan.reserve(spec, begin, end); });
        thrown += r ? 0 : 1;
        if (r) {
            REQUIRE(*r);
            CHECK(plan.cancel((*r)->id));
        }
        const auto again = plan.reserve(spec, begin, end);  // there is room for one
        REQUIRE(again);
        CHECK(plan.cancel(again->id));
    }
    CHECK(thrown > 1);
}

TEST_CASE_METHOD(crowded, "a notice that throws clears no device", "[tenant][planner]") {
    const auto spec = of("urgent", 48_MiB, 10_pct, 1);
    const auto before = plan.free();
    bool failed = true;
    for (std::size_t good = 0; failed; ++good) {
        CAPTURE(good);
        const auto notice = with_failure(good, failed, [&] { return plan.preempt(spec, 1ms); });
        thrown += notice ? 0 : 1;
        if (notice) {
            REQUIRE(*notice);
            CHECK(plan.free() != before);
            plan.call_off(**notice);
        }
        REQUIRE(plan.free() == before);
    }
    CHECK(thrown > 1);
}

TEST_CASE_METHOD(crowded, "a tenant that waits is lost by no advance that throws", "[tenant][planner]") {
    (void)present.close(soon());
    plan.left("present");
    const auto before = plan.free();
    bool failed = true;
    for (std::size_t good = 0; failed; ++good) {
        CAPTURE(good);
        auto all = with_failure(good, failed, [&] { return plan.advance(); });
        if (!all || all->empty()) {
            ++thrown;
            continue;
        }
        REQUIRE(all->size() == 1);
        CHECK(all->front().name == "waits");
        CHECK((all->front().who || all->front().code == errc::out_of_memory));
        if (all->front().who) CHECK(all->front().who->close(soon()).complete);
        plan.left("waits");
        REQUIRE(plan.free() == before);
        {
            auto fills = plan.arrive(of("fills", 64_MiB, 10_pct));
            REQUIRE(fills.who);
            REQUIRE(plan.arrive(of("waits", 48_MiB, 20_pct)).outcome == admission_result::queued);
            (void)fills.who->close(soon());
            plan.left("fills");
        }
    }
    CHECK(thrown > 1);
}

}  // namespace planner_memory_test

#endif
