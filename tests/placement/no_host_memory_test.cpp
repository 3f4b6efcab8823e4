// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Plans that are carried out while the host has no memory: whole or not at all.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <cstddef>
#include <new>

#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/defragment.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/failing_new.hpp"

namespace no_host_memory_test {

using namespace gpushare::literals;
using gpushare::cluster;
using gpushare::placement;
using gpushare::placement_request;

TEST_CASE("a rearrangement for which the host lacks memory changes nothing", "[placement]") {
    cluster nodes;
    for (int i = 0; i < 3; ++i) nodes.add({.devices = 1});
    const placement_request half{.devices = 1, .each = 50_pct}, whole{.devices = 1, .each = 100_pct, .group = {7}};
    const placement before{half, {0}, {{0}}}, there{half, {1}, {{0}}};
    nodes.apply(before);
    gpushare::rearrangement plan;
    plan.moves.push_back({0, before, there});
    plan.added = placement{whole, {0}, {{0}}};
    std::size_t failed = 0;
    for (std::size_t good = 0;; ++good) {
        CAPTURE(good);
        gpushare::indexed_cluster indexed(nodes, gpushare::best_fit{});
        REQUIRE(indexed.choose(half));
        bool done = false;
        support::this_heap = {.good = good};
        try {
            done = !try_apply(indexed, plan);
        } catch (const std::bad_alloc&) {
        }
        support::this_heap = {};
        cluster expected = nodes;
        if (done) {
            expected.release(before);
            expected.apply(there);
            expected.apply(*plan.added);
        }
        CHECK(indexed.nodes() == expected);
        for (const auto& r : {half, placement_request{.devices = 1, .each = 100_pct}})
            CHECK(indexed.choose(r) == choose(gpushare::best_fit{}, expected, r));
        if (done) break;
        ++failed;
    }
    CHECK(failed > 1);
}

}  // namespace no_host_memory_test

#endif
