// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The values that workload-aware policies compute: fragmentation, bid prices, the value of a node.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/detail/bid_prices.hpp>
#include <gpushare/placement/detail/device_filling.hpp>
#include <gpushare/placement/detail/node_value.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/value_descent.hpp>
#include <gpushare/units.hpp>

#include "placement/random_cluster.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare::literals;
using gpushare::cluster;
using gpushare::node_view;
using gpushare::placement_request;
using gpushare::request_kind;
using gpushare::share;
using gpushare::workload;
using gpushare::detail::reduced_node;

namespace {

/// Fragmentation as it is defined, kind by kind.
double plain_fragmentation(const node_view& n, std::span<const request_kind> kinds) {
    double sum = 0;
    for (const auto& [r, weight] : kinds) {
        std::uint64_t usable = 0, devices = 0, free = 0;
        for (const auto& d : n.devices) {
            free += d.permille;
            if (d.permille < r.each.permille()) continue;
            ++devices;
            usable += d.permille;
        }
        // Memory is looked at for requests for several devices only.
        const bool fits = r.devices != 0 && devices >= r.devices && r.cpu_milli <= n.cpu_milli &&
                          r.models.allows(n.whole.model) && (r.devices == 1 || r.memory <= n.memory);
        sum += weight * static_cast<double>(fits ? free - usable : free);
    }
    return sum;
}

std::vector<placement_request> several(std::size_t count, const placement_request& r) {
    return std::vector<placement_request>(count, r);
}

double price_of(const workload& w, const std::vector<double>& price, const placement_request& r) {
    for (std::size_t i = 0; i < price.size(); ++i)
        if (w.kinds()[i].request == r) return price[i];
    FAIL("no such kind");
    return 0;
}

}  // namespace

TEST_CASE("a workload counts distinct requests, whatever their labels", "[placement]") {
    std::vector<placement_request> all = several(3, {.cpu_milli = 5});
    all.push_back({.cpu_milli = 7, .devices = 2, .each = 50_pct});
    all[1].group = {4};
    const workload w(all);
    REQUIRE(w.kinds().size() == 2);
    CHECK(w.kinds()[0].weight == 0.75);
    CHECK(w.kinds()[1].weight == 0.25);
    CHECK(w.mean_permille() == 250);
    CHECK(workload(std::vector<placement_request>{}).mean_permille() == 0);
}

TEST_CASE("fragmentation is what its definition says, kind by kind", "[placement]") {
    for (std::uint64_t run = 0; run < 30; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        cluster c = random_cluster(any, 4);
        const auto requests = random_requests(any, 15, 100);
        const workload w(requests);
        const gpushare::fragmentation measure(w.kinds());
        for (const auto& r : requests) {
            if (const auto p = choose(gpushare::first_fit{}, c, r)) {
                const double ahead = measure(reduced_node(c[p->node], r, p->devices));
                c.apply(*p);
                REQUIRE(ahead == Approx(measure(reduced_node(c[p->node]))));
            }
            for (std::uint32_t n = 0; n < c.size(); ++n)
                REQUIRE(measure(reduced_node(c[{n}])) == Approx(plain_fragmentation(c[{n}], w.kinds())).margin(1e-9));
        }
    }
}

TEST_CASE("a device's best filling is that of a search through all fillings", "[placement]") {
    const std::vector<request_kind> kinds{{{.devices = 1, .each = 81_pct}, 0.5},
                                          {{.devices = 1, .each = 47_pct}, 0.3},
                                          {{.devices = 1, .each = 19_pct}, 0.2}};
    gpushare::detail::device_filling device(kinds);
    CHECK(device.unit() == 10);
    const std::vector<double> net{820, 480, 150};
    for (std::size_t i = 0; i < 3; ++i) device.offer(i, net[i]);
    const auto value = device.solve();
    const auto worth = [&](std::size_t i) {
        return net[i] + gpushare::detail::device_filling::temperature * std::log(kinds[i].weight);
    };
    for (std::size_t units = 0; units <= 100; ++units) {
        double best = 0;
        for (std::size_t a = 0; a * 81 <= units; ++a)
            for (std::size_t b = 0; a * 81 + b * 47 <= units; ++b)
                for (std::size_t c = 0; a * 81 + b * 47 + c * 19 <= units; ++c)
                    best = std::max(best, static_cast<double>(a) * worth(0) + static_cast<double>(b) * worth(1) +
                                              static_cast<double>(c) * worth(2));
        CHECK(value[units] == Approx(best).margin(1e-9));
    }
    std::vector<double> count;
    device.best(count);
    double sum = 0;
    for (std::size_t i = 0; i < 3; ++i) sum += count[device.size_of(i)] * worth(i);
    CHECK(sum == Approx(value.back()));
}

TEST_CASE("of kinds of one size, the more profitable is chosen more often, and all chances sum to one", "[placement]") {
    const std::vector<request_kind> kinds{{{.cpu_milli = 1, .devices = 1, .each = 50_pct}, 0.5},
                                          {{.cpu_milli = 2, .devices = 1, .each = 50_pct}, 0.5}};
    gpushare::detail::device_filling device(kinds);
    device.offer(0, 500);
    device.offer(1, 500 + device.temperature);
    device.solve();
    CHECK(device.chance(0, 500) + device.chance(1, 500 + device.temperature) == Approx(1));
    CHECK(device.chance(1, 500 + device.temperature) / device.chance(0, 500) == Approx(std::exp(1)));
    device.clear();
    device.offer(0, -1e9);  // neither overflows nor is a number lost
    device.offer(1, 1e9);
    CHECK(device.solve().back() > 0);
}

TEST_CASE("an average request costs the device time that it takes; what fits nowhere costs nothing", "[placement]") {
    for (std::uint64_t run = 0; run < 10; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        const cluster c = random_cluster(any, 6);
        const auto requests = random_requests(any, 15, 200);
        const workload w(requests);
        const auto price = gpushare::detail::bid_prices(c, w);
        double cost = 0;
        bool any_fits = false;
        for (std::size_t i = 0; i < price.size(); ++i) {
            const auto& r = w.kinds()[i].request;
            REQUIRE(std::isfinite(price[i]));
            REQUIRE(price[i] >= 0);
            if (device_permille(r) == 0) continue;
            cost += w.kinds()[i].weight * price[i];
            bool fits = false;
            for (std::uint32_t n = 0; n < c.size(); ++n) fits = fits || gpushare::detail::fits_empty(r, c[{n}].whole);
            REQUIRE((price[i] > 0) == fits);
            any_fits = any_fits || fits;
        }
        if (any_fits) CHECK(cost == Approx(w.mean_permille()));
    }
}

TEST_CASE("requests pay for scarce cores, and not for abundant ones", "[placement]") {
    const placement_request light{.cpu_milli = 2'000, .devices = 1, .each = 100_pct},
        heavy{.cpu_milli = 16'000, .devices = 1, .each = 100_pct};
    auto both = several(1, light);
    both.push_back(heavy);
    const workload w(both);
    const auto ratio = [&](std::uint64_t cpu_milli) {
        cluster c;
        c.add({.cpu_milli = cpu_milli, .devices = 8});
        const auto price = gpushare::detail::bid_prices(c, w, 600);
        return price_of(w, price, heavy) / price_of(w, price, light);
    };
    CHECK(ratio(32'000) > 2);
    CHECK(ratio(200'000) == Approx(1).margin(0.05));
}

TEST_CASE("free time that nobody asks for is worth nothing", "[placement]") {
    cluster c;
    c.add({.cpu_milli = 64'000, .devices = 1});
    auto all = several(9, {.cpu_milli = 1'000, .devices = 1, .each = 81_pct});
    all.push_back({.cpu_milli = 1'000, .devices = 1, .each = 50_pct});
    const workload w(all);
    const gpushare::detail::node_value value(w, gpushare::detail::bid_prices(c, w));
    const double full = value(reduced_node(c[{0}]));
    CHECK(full > 600);
    CHECK(full <= 1000);
    c.apply({{.devices = 1, .each = 81_pct}, {0}, {{0}}});
    CHECK(value(reduced_node(c[{0}])) == Approx(0).margin(1e-3));
}

TEST_CASE("devices without the cores to use them are worth little", "[placement]") {
    cluster c;
    c.add({.cpu_milli = 64'000, .devices = 8});
    const workload w(several(1, {.cpu_milli = 8'000, .devices = 1, .each = 100_pct}));
    const gpushare::detail::node_value value(w, std::vector<double>{1000.0});
    CHECK(value(reduced_node(c[{0}])) == Approx(8000).epsilon(0.01));
    c.apply({{.cpu_milli = 56'000}, {0}, {}});  // cores for one device
    CHECK(value(reduced_node(c[{0}])) == Approx(1000).epsilon(0.1));
    c.apply({{.cpu_milli = 8'000}, {0}, {}});
    CHECK(value(reduced_node(c[{0}])) == Approx(0).margin(1));
}

TEST_CASE("more left is never worth less", "[placement]") {
    for (std::uint64_t run = 0; run < 20; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        cluster c = random_cluster(any, 3);
        const auto requests = random_requests(any, 12, 100);
        const workload w(requests);
        const gpushare::detail::node_value value(w, gpushare::detail::bid_prices(c, w));
        for (const auto& r : requests) {
            const auto p = choose(gpushare::spreading{}, c, r);
            if (!p) continue;
            const double before = value(reduced_node(c[p->node]));
            const double ahead = value(reduced_node(c[p->node], r, p->devices));
            c.apply(*p);
            REQUIRE(ahead == value(reduced_node(c[p->node])));
            REQUIRE(ahead <= before + 1e-2);
            REQUIRE(ahead >= -1e-2);
        }
    }
}

TEST_CASE("the few nodes that can hold the largest requests stay whole while others will do", "[placement]") {
    cluster c;
    c.add({.cpu_milli = 64'000, .devices = 8});
    for (int i = 0; i < 4; ++i) c.add({.cpu_milli = 16'000, .devices = 2});
    auto all = several(20, {.cpu_milli = 4'000, .devices = 1, .each = 100_pct});
    const placement_request large{.cpu_milli = 32'000, .devices = 8, .each = 100_pct};
    all.push_back(large);
    const gpushare::value_descent policy(c, workload(all));
    for (int i = 0; i < 8; ++i) {
        const auto p = choose(policy, c, all.front());
        REQUIRE(p);
        c.apply(*p);
    }
    CHECK(choose(policy, c, large));
}

TEST_CASE("an average request costs what it takes, however few rounds the search has", "[placement]") {
    cluster c;
    c.add({.cpu_milli = 16'000, .memory = 64_GiB, .devices = 4});
    auto all = several(3, {.cpu_milli = 2'000, .devices = 1, .each = 50_pct});
    all.push_back({.cpu_milli = 4'000, .devices = 2, .each = 100_pct});
    const workload w(all);
    for (const std::uint64_t rounds : {0U, 1U, 2U, 3U, 4U, 151U}) {
        CAPTURE(rounds);
        const auto price = gpushare::detail::bid_prices(c, w, rounds);
        double mean = 0;
        for (std::size_t i = 0; i < price.size(); ++i) mean += w.kinds()[i].weight * price[i];
        CHECK(mean == Approx(w.mean_permille()));
    }
}

TEST_CASE("nothing expected, and no nodes, are no trouble", "[placement]") {
    cluster c;
    c.add({.cpu_milli = 4'000, .memory = 1_GiB, .devices = 2});
    const workload none;
    const placement_request r{.cpu_milli = 1'000, .devices = 1, .each = 50_pct};
    CHECK(choose(gpushare::value_descent(c, none), c, r));
    CHECK(choose(gpushare::fragmentation_descent(none), c, r));
    CHECK_FALSE(choose(gpushare::value_descent(cluster{}, workload(several(2, r))), cluster{}, r));
    // Kinds with devices but no share of them, and with neither cores nor memory.
    auto odd = several(1, {.devices = 2});
    odd.push_back({.devices = 1, .each = 100_pct});
    odd.push_back({});
    odd.push_back({.memory = 512_MiB});
    const gpushare::value_descent policy(c, workload(odd));
    for (const auto& o : odd) {
        const auto p = choose(policy, c, o);
        REQUIRE(p);
        c.apply(*p);
    }
}
