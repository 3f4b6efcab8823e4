// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Every policy places each request that fits somewhere, in a place where it fits, and the same way
// every time. The index gives the same answers as asking about every node.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/defragment.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/value_descent.hpp>
#include <gpushare/units.hpp>

#include "placement/random_cluster.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

using namespace gpushare::literals;
using gpushare::choose;
using gpushare::cluster;
using gpushare::indexed_cluster;
using gpushare::placement;
using gpushare::placement_request;
using gpushare::workload;

namespace {

template <class Policy>
Policy make(const cluster& c, const workload& w) {
    if constexpr (std::is_constructible_v<Policy, const cluster&, const workload&>)
        return Policy(c, w);
    else if constexpr (std::is_constructible_v<Policy, const workload&>)
        return Policy(w);
    else if constexpr (std::is_constructible_v<Policy, std::uint64_t>)
        return Policy(std::uint64_t{7});
    else
        return Policy{};
}

/// Likes all nodes the same.
struct indifferent {
    [[nodiscard]] gpushare::rating rate(const gpushare::node_view& n, const placement_request& r) const {
        return {0, tightest_devices(n, r)};
    }
};

}  // namespace

TEMPLATE_TEST_CASE("a policy places what fits somewhere and nothing else", "[placement]", gpushare::first_fit,
                   gpushare::best_fit, gpushare::bin_packing, gpushare::spreading, gpushare::dot_product,
                   gpushare::random_fit, gpushare::fragmentation_descent, gpushare::value_descent) {
    for (std::uint64_t run = 0; run < 15; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        cluster c = random_cluster(any, 5);
        const auto requests = random_requests(any, 12, 150);
        auto policy = make<TestType>(c, workload(requests));
        auto again = policy;
        for (const auto& r : requests) {
            bool fits = false;
            for (std::uint32_t n = 0; n < c.size(); ++n) fits = fits || c.fits(r, {n});
            const auto p = choose(policy, c, r);
            REQUIRE(p.has_value() == fits);
            REQUIRE(choose(again, c, r) == p);
            if (p) REQUIRE_FALSE(c.try_apply(*p));
        }
    }
}

TEMPLATE_TEST_CASE("the index chooses what a look at every node chooses", "[placement]", gpushare::first_fit,
                   gpushare::best_fit, gpushare::bin_packing, gpushare::spreading, gpushare::dot_product,
                   gpushare::fragmentation_descent, gpushare::value_descent, indifferent) {
    for (std::uint64_t run = 0; run < support::few(6U); ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        // Enough nodes for several blocks, and sometimes too few entries for all requests.
        const std::size_t nodes = any.one_in(2) ? 150 : 10;
        const std::size_t entries = any.one_in(2) ? 1024 : 3;
        cluster c = random_cluster(any, nodes);
        auto requests = random_requests(any, 10, 800);
        const auto policy = make<TestType>(c, workload(requests));
        indexed_cluster<TestType> index(c, policy, entries);
        std::vector<placement> placed;
        for (auto r : requests) {
            if (any.one_in(8)) r = with_labels(r, any);
            const auto p = choose(policy, c, r);
            REQUIRE(index.choose(r) == p);
            if (p && !any.one_in(5)) {
                c.apply(*p);
                if (any.one_in(2))
                    index.apply(*p);
                else
                    REQUIRE_FALSE(index.try_apply(*p));
                placed.push_back(*p);
            }
            if (!placed.empty() && any.one_in(4)) {
                auto& gone = any.of(placed);
                c.release(gone);
                if (any.one_in(2))
                    index.release(gone);
                else
                    REQUIRE(index.try_release(gone));
                gone = placed.back();
                placed.pop_back();
            }
            REQUIRE(index.nodes() == c);
        }
    }
}

TEST_CASE("an index sees what was changed longer ago than it keeps note of, and no change in what was refused",
          "[placement]") {
    cluster c;
    for (int i = 0; i < 3; ++i) c.add({.cpu_milli = 4'000, .devices = 1});
    indexed_cluster<gpushare::first_fit> index(c, {});
    const placement_request whole{.devices = 1, .each = 100_pct}, part{.devices = 1, .each = 30_pct};
    const auto p = index.choose(whole);
    REQUIRE(p);
    CHECK(p->node == gpushare::node_id{0});
    for (int i = 0; i < 9; ++i) {  // more changes than the log keeps, which are three
        index.apply(*index.choose(part));
    }
    CHECK(index.try_apply(*p).missing == gpushare::shortage::whole_devices);
    CHECK_FALSE(index.choose(whole));
    CHECK(index.choose({}));  // needs nothing
    CHECK_FALSE(index.try_release(*p));
    CHECK_THROWS(index.apply(*p));
    CHECK_THROWS(index.release(*p));
}

namespace {

/// Counts what it is asked, and prefers the last node unless it says that it doesn't look which one
/// it is.
template <bool ByState>
struct counting {
    static constexpr bool by_state = ByState;
    std::size_t* asked;

    [[nodiscard]] gpushare::rating rate(const gpushare::node_view& n, const placement_request&) const {
        ++*asked;
        const double cost = static_cast<double>(n.cpu_milli);
        return {ByState ? cost : -static_cast<double>(n.id.index), gpushare::device_set{{0}}};
    }
};

}  // namespace

TEST_CASE("of nodes that are alike one is rated, unless the policy looks which one it is", "[placement]") {
    cluster c;
    for (int i = 0; i < 300; ++i) c.add({.cpu_milli = 8'000, .devices = 2});
    for (int i = 0; i < 300; ++i) c.add({.cpu_milli = 9'000, .devices = 2});
    const placement_request part{.cpu_milli = 1'000, .devices = 1, .each = 30_pct};
    std::size_t asked = 0;
    indexed_cluster<counting<true>> index(c, {&asked});
    index.apply(placement{part, gpushare::node_id{7}, gpushare::device_set{{1}}});
    index.apply(placement{{.cpu_milli = 1'000}, gpushare::node_id{310}, {}});  // free is what is free on a smaller node
    const auto p = index.choose(part);
    REQUIRE(p);
    CHECK(p->node == gpushare::node_id{7});
    CHECK(asked == 4 + 1);  // four states, and the devices of the chosen one
    indexed_cluster<counting<false>> by_id(c, {&asked});
    CHECK(by_id.choose(part)->node == gpushare::node_id{599});
}

TEST_CASE("an index over no nodes has no place", "[placement]") {
    indexed_cluster<gpushare::first_fit> index(cluster{}, {}, 0);
    CHECK_FALSE(index.choose({}));
}

TEST_CASE("of nodes that cost the same, the one with the lowest id is taken", "[placement]") {
    cluster c;
    for (int i = 0; i < 200; ++i) c.add({.devices = 2});
    const placement_request r{.devices = 1, .each = 50_pct};
    const auto p = choose(indifferent{}, c, r);
    REQUIRE(p);
    CHECK(p->node == gpushare::node_id{0});
    CHECK(p->devices == gpushare::device_set{{0}});
    CHECK(indexed_cluster<indifferent>(c, {}).choose(r) == p);
}

TEST_CASE("the tightest devices are taken, ties by memory and then by lowest id", "[placement]") {
    cluster c;
    c.add({.devices = 4, .device_memory = 8_GiB});
    c.apply({{.devices = 1, .each = 40_pct}, {0}, {{2}}});
    c.apply({{.devices = 1, .device_memory = 4_GiB}, {0}, {{3}}});
    using set = gpushare::device_set;
    CHECK(tightest_devices(c[{0}], {.devices = 1, .each = 60_pct}) == set{{2}});
    CHECK(tightest_devices(c[{0}], {.devices = 1, .each = 61_pct}) == set{{3}});
    CHECK(tightest_devices(c[{0}], {.devices = 2, .each = 61_pct}) == set{{0}, {3}});
    CHECK(tightest_devices(c[{0}], {.devices = 1, .each = 61_pct, .device_memory = 5_GiB}) == set{{0}});
}

TEST_CASE("policies tell nodes apart as they say", "[placement]") {
    cluster c;
    c.add({.cpu_milli = 64'000, .devices = 8});  // untouched
    c.add({.cpu_milli = 64'000, .devices = 8});  // one device half used
    c.add({.cpu_milli = 64'000, .devices = 8});  // nearly full
    c.apply({{.devices = 1, .each = 50_pct}, {1}, {{0}}});
    c.apply({{.devices = 7, .each = 100_pct}, {2}, {{0}, {1}, {2}, {3}, {4}, {5}, {6}}});
    const placement_request small{.cpu_milli = 1'000, .devices = 1, .each = 30_pct};
    const auto node = [&](const auto& policy) { return choose(policy, c, small)->node.index; };
    CHECK(node(gpushare::first_fit{}) == 0);
    CHECK(node(gpushare::best_fit{}) == 2);
    CHECK(node(gpushare::bin_packing{}) == 1);
    CHECK(node(gpushare::spreading{}) == 0);
    CHECK(node(gpushare::dot_product{}) == 2);
}

TEST_CASE("spreading takes the emptiest devices", "[placement]") {
    cluster c;
    c.add({.devices = 4});
    c.apply({{.devices = 2, .each = 10_pct}, {0}, {{0}, {1}}});
    CHECK(choose(gpushare::spreading{}, c, {.devices = 2, .each = 50_pct})->devices == gpushare::device_set{{2}, {3}});
    CHECK(choose(gpushare::spreading{}, c, {.devices = 3, .each = 50_pct})->devices ==
          gpushare::device_set{{0}, {2}, {3}});
}

TEST_CASE("random fit depends on its seed and on nothing else", "[placement]") {
    cluster c;
    for (int i = 0; i < 50; ++i) c.add({.devices = 1});
    const placement_request r{.devices = 1, .each = 10_pct};
    const auto nodes = [&](std::uint64_t seed) {
        gpushare::random_fit policy(seed);
        std::vector<std::uint32_t> all;
        for (int i = 0; i < 20; ++i) all.push_back(choose(policy, c, r)->node.index);
        return all;
    };
    CHECK(nodes(1) == nodes(1));
    CHECK(nodes(1) != nodes(2));
    auto some = nodes(3);
    std::ranges::sort(some);
    CHECK(std::unique(some.begin(), some.end()) - some.begin() > 10);
}

namespace {

/// A cost of its own for node 0, and devices that are none.
struct odd {
    double cost = 0;
    [[nodiscard]] gpushare::rating rate(const gpushare::node_view& n, const placement_request& r) const {
        if (n.id.index == 0) return {cost, {}};
        return {5, tightest_devices(n, r)};
    }
};

}  // namespace

TEST_CASE("a request that fits is placed on devices, whatever a policy says of its cost", "[placement]") {
    constexpr double infinite = std::numeric_limits<double>::infinity(),
                     none = std::numeric_limits<double>::quiet_NaN();
    cluster all, alone;
    for (int i = 0; i < 3; ++i) all.add({.cpu_milli = 1'000, .devices = 2});
    alone.add({.cpu_milli = 1'000, .devices = 2});
    const placement_request half{.devices = 1, .each = 50_pct}, two{.devices = 2, .each = 100_pct};
    for (const double cost : {0.0, 9.0, infinite, -infinite, none, std::numeric_limits<double>::max()}) {
        CAPTURE(cost);
        const std::uint32_t best = cost < 5 ? 0 : 1;
        for (const auto& r : {half, two}) {
            const auto p = choose(odd{cost}, all, r);
            REQUIRE(p);
            CHECK(p->node.index == best);
            CHECK(indexed_cluster(all, odd{cost}).choose(r) == p);
            const auto only = choose(odd{cost}, alone, r);
            REQUIRE(only);
            CHECK(indexed_cluster(alone, odd{cost}).choose(r) == only);
            CHECK_FALSE(cluster(alone).try_apply(*only));
        }
    }
    for (const double odd_size : {0.0, none, infinite, -1.0}) {
        CAPTURE(odd_size);
        CHECK(choose(gpushare::best_fit{odd_size, odd_size}, all, half));
        CHECK(choose(gpushare::dot_product{odd_size, odd_size}, all, half));
    }
}

TEST_CASE("numbers that are no use are refused by name", "[placement]") {
    constexpr double infinite = std::numeric_limits<double>::infinity(),
                     none = std::numeric_limits<double>::quiet_NaN();
    cluster c;
    c.add({.cpu_milli = 1'000, .devices = 2});
    const placement_request half{.devices = 1, .each = 50_pct};
    const workload usual(std::vector<placement_request>{half});
    using support::code_of;
    for (const double bad : {infinite, -infinite, none, -1.0, 1e308}) {
        CAPTURE(bad);
        CHECK(code_of([&] { gpushare::value_descent(c, usual, {.fragmentation_weight = bad}); }) ==
              gpushare::errc::invalid_specification);
        CHECK(code_of([&] { gpushare::value_descent(c, usual, {.first_step = bad}); }) ==
              gpushare::errc::invalid_specification);
        const gpushare::request_kind kind{half, bad};
        CHECK(code_of([&] { gpushare::fragmentation f(std::span(&kind, 1)); }) ==
              gpushare::errc::invalid_specification);
    }
    for (const double bad : {infinite, -infinite, none})
        CHECK(code_of([&] { (void)gpushare::consolidate(indexed_cluster(c, gpushare::first_fit{}), {}, 1, bad); }) ==
              gpushare::errc::invalid_specification);
    CHECK_THROWS_WITH(gpushare::value_descent(c, usual, {.first_step = none}),
                      Catch::Contains("value_descent_options::first_step is nan"));
    CHECK(
        choose(gpushare::value_descent(c, usual, {.fragmentation_weight = 0, .rounds = 0, .first_step = 0}), c, half));
}

TEST_CASE("an index answers as a look at every node does while nodes come and go", "[placement][property]") {
    for (std::uint64_t run = 0; run < 10; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        indexed_cluster<gpushare::best_fit> index(random_cluster(any, 5), {});
        std::vector<placement> placed;
        for (int step = 0; step < 200; ++step) {
            const gpushare::node_id id{static_cast<std::uint32_t>(any.below(index.nodes().size()))};
            const auto node = index.nodes()[id].whole;
            const gpushare::device_id d{static_cast<std::uint32_t>(any.below(node.devices + 1))};
            const auto what = any.below(24);
            index.change_nodes([&](cluster& c) {
                if (c.there(id).devices == 0 || d.index >= node.devices || what > 7) return;
                if (what == 0) c.drain(id);
                if (what == 1) c.resume(id);
                if (what == 2) c.drain(id, d);
                if (what == 3 && index.nodes().could_serve({}, id, d)) c.resume(id, d);
                if (what == 4) c.resize(id, d, 1_GiB * any.below(17));
                if (what == 5) (void)c.add(id, 16_GiB);
                if (what == 6) (void)c.add(node);
                if (what == 7 && c.size() > 3 && any.one_in(4)) c.remove(id);
            });
            const auto r = random_request(any);
            const auto p = index.choose(r);
            REQUIRE(p == choose(gpushare::best_fit{}, index.nodes(), r));
            REQUIRE(p.has_value() == !index.nodes().why_not(r));
            if (p) {
                index.apply(*p);
                placed.push_back(*p);
            } else if (!placed.empty() && any.one_in(2)) {
                index.release(placed.back());  // also where it was on has gone
                placed.pop_back();
            }
        }
        for (const auto& p : placed) index.release(p);
        REQUIRE(index.nodes() == index.nodes().emptied());
    }
}

TEST_CASE("a request that needs nothing is placed beside drained nodes, too", "[placement]") {
    cluster c;
    for (int i = 0; i < 3; ++i) c.add({});
    c.drain({0});
    const gpushare::fragmentation_descent policy{gpushare::workload(std::vector<placement_request>{{}})};
    indexed_cluster index(c, policy);
    CHECK(index.choose({}) == choose(policy, c, {}));
    CHECK(index.choose({}));
}
