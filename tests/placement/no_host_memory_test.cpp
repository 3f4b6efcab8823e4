// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Plans that are carried out while the host has no memory: whole or not at all.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/placement/admission_queue.hpp>
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

TEST_CASE("a cluster takes memory for nodes and devices as a vector does", "[placement]") {
    cluster nodes;
    const auto before = support::this_heap.allocations;
    for (int i = 0; i < 1000; ++i) nodes.add({.devices = 8});
    const auto nodes_added = support::this_heap.allocations;
    for (int i = 0; i < 56; ++i) nodes.add({999}, 1_GiB);
    const auto devices_added = support::this_heap.allocations;
    CHECK(nodes.devices() == 8056);
    CHECK(nodes_added - before < 64);
    CHECK(devices_added - nodes_added < 8);
}

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

namespace {

/// A queue for a cluster, in which a function carries the placements of one request out.
struct carried_queue {
    static constexpr gpushare::instant now{std::chrono::seconds(1)};

    cluster c;
    gpushare::admission_queue queue{};
    bool carried = false;
    std::vector<placement> placed{};

    /// Has the request placed while only `good` allocations succeed. Returns whether an allocation
    /// failed. `waits`: the request waits before. `change` changes the cluster meanwhile.
    template <class Change>
    bool place(const gpushare::admission_request& r, bool waits, Change change, support::heap memory) {
        const auto carry = [&](std::span<const placement>, cluster& view) {
            change(view);
            carried = true;
            return gpushare::carried::out;
        };
        if (waits) {
            for (std::uint32_t i = 0; i < c.size(); ++i) c.drain({i});
            REQUIRE(queue.submit(now, gpushare::first_fit{}, c, r).outcome == gpushare::admission_result::queued);
            for (std::uint32_t i = 0; i < c.size(); ++i) c.resume({i});
        }
        auto copy = r;
        support::this_heap = memory;
        try {
            if (waits) {
                auto done = queue.advance(now, gpushare::first_fit{}, c, [&](const auto&) { return carry; });
                if (!done.empty()) placed = std::move(done.front().placements);
            } else {
                placed = queue.submit(now, gpushare::first_fit{}, c, std::move(copy), carry).placements;
            }
        } catch (const std::bad_alloc&) {
        }
        return std::exchange(support::this_heap, {}).failed;
    }
};

}  // namespace

TEST_CASE("a request that was carried out is placed, whatever memory the host lacks then", "[placement][queue]") {
    const bool waits = GENERATE(false, true), recovers = GENERATE(false, true), labelled = GENERATE(false, true);
    cluster nodes;
    for (int i = 0; i < 2; ++i) nodes.add({.devices = 3});
    const placement_request one{.devices = 1, .each = 100_pct};
    const placement running{one, {0}, {{0}}};
    nodes.apply(running);
    gpushare::admission_request both{.members = {one, one}};
    if (labelled) both.members[0].group = {7}, both.members[1].group = {8}, both.members[1].apart = {9};
    const auto change = [&](cluster& view) {
        view.release(running);
        view.drain({1}, {2});
    };
    bool failed = true;
    std::size_t unplaced = 0, good = 0;
    for (; failed; ++good) {
        CAPTURE(good);
        carried_queue q{nodes};
        failed = q.place(both, waits, change, {.good = good, .recovers = recovers});
        CHECK(q.placed.size() == (q.carried ? 2 : 0));
        cluster expected = nodes;
        if (q.carried) change(expected);
        for (const auto& p : q.placed) expected.apply(p);
        CHECK(q.c == expected);
        CHECK(q.queue.waiting() == (waits && !q.carried ? 1 : 0));
        unplaced += q.carried ? 0 : 1;
    }
    CHECK(unplaced > 1);
}

TEST_CASE("a request is placed although its carrier took the memory for its labels", "[placement][queue]") {
    const bool waits = GENERATE(false, true);
    cluster nodes;
    nodes.add({.devices = 64});
    gpushare::admission_request one{.members = {{.devices = 1, .each = 100_pct, .group = {7}, .apart = {8}}}};
    const auto change = [](cluster& view) {
        const auto memory = std::exchange(support::this_heap, {});
        for (std::uint32_t i = 0; i < 40; ++i)
            view.apply({{.devices = 1, .each = 100_pct, .group = {100 + i}}, {0}, {{20 + i}}});
        support::this_heap = memory;
    };
    bool failed = true;
    for (std::size_t good = 0; failed; ++good) {
        CAPTURE(good);
        carried_queue q{nodes};
        failed = q.place(one, waits, change, {.good = good});
        REQUIRE(q.placed.size() == (q.carried ? 1 : 0));
        if (q.carried) CHECK(q.c.try_release(q.placed.front()));
        CHECK(q.queue.waiting() == (waits && !q.carried ? 1 : 0));
    }
}

}  // namespace no_host_memory_test

#endif
