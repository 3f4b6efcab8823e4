// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The state of a cluster: placements are whole or not at all, releases undo them exactly, and
// refusals name the missing resource.
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/units.hpp>

#include "placement/random_cluster.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace cluster_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::cluster;
using gpushare::device_set;
using gpushare::errc;
using gpushare::label;
using gpushare::placement;
using gpushare::placement_request;
using gpushare::refusal;
using gpushare::share;
using gpushare::shortage;

namespace {

cluster one_node() {
    cluster c;
    c.add({.cpu_milli = 16'000, .memory = 64_GiB, .devices = 2, .device_memory = 16_GiB});
    return c;
}

/// A cluster that remembers placements instead of amounts.
class model {
public:
    explicit model(const cluster& empty) : empty_(empty) {}

    bool fits(const placement& p) const {
        const auto whole = empty_[p.node].whole;
        std::uint64_t cpu = p.request.cpu_milli, memory = p.request.memory.count();
        std::vector<std::uint64_t> permille(whole.devices), device_memory(whole.devices);
        bool friends = false, anywhere = false;
        const auto add = [&](const placement& q) {
            for (const auto d : q.devices) {
                permille[d.index] += q.request.each.permille();
                device_memory[d.index] += q.request.device_memory.count();
            }
        };
        add(p);
        for (const auto& [id, q] : placed) {
            anywhere = anywhere || (q.request.group == p.request.near);
            if (q.node != p.node) continue;
            cpu += q.request.cpu_milli;
            memory += q.request.memory.count();
            add(q);
            friends = friends || q.request.group == p.request.near;
            if (p.request.apart && q.request.group == p.request.apart) return false;
            if (p.request.group && q.request.apart == p.request.group) return false;
        }
        if (p.request.near && !friends && (anywhere || p.request.near != p.request.group)) return false;
        for (std::size_t d = 0; d < whole.devices; ++d)
            if (permille[d] > 1000 || device_memory[d] > whole.device_memory.count()) return false;
        if (p.request.devices != 0 && !p.request.models.allows(whole.model)) return false;
        return cpu <= whole.cpu_milli && memory <= whole.memory.count();
    }

    std::map<int, placement> placed;

private:
    cluster empty_;
};

placement random_placement(const cluster& c, const placement_request& r, support::random& any) {
    placement p{r, {static_cast<std::uint32_t>(any.below(c.size()))}, {}};
    const auto devices = c[p.node].whole.devices;
    if (r.devices <= devices)
        while (p.devices.size() < r.devices) p.devices.add({static_cast<std::uint32_t>(any.below(devices))});
    return p;
}

std::string text_of(const refusal& r) { return describe(r).c_str(); }

}  // namespace

TEST_CASE("a cluster grants exactly what a list of placements says is free", "[placement]") {
    for (std::uint64_t run = 0; run < 40; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        const bool labelled = any.one_in(2);
        cluster c = random_cluster(any, 4);
        const cluster empty = c;
        model m(c);
        int next = 0;
        for (int i = 0; i < 400; ++i) {
            if (!m.placed.empty() && any.one_in(3)) {
                const auto gone = std::next(m.placed.begin(), static_cast<std::ptrdiff_t>(any.below(m.placed.size())));
                REQUIRE(c.try_release(gone->second));
                m.placed.erase(gone);
                continue;
            }
            auto r = random_request(any);
            if (labelled) r = with_labels(r, any);
            const auto p = random_placement(c, r, any);
            const bool fits = p.devices.size() == r.devices && m.fits(p);
            CAPTURE(text_of(c.why_not(r)));
            const cluster before = c;
            const auto why = c.try_apply(p);
            REQUIRE(fits == !why);
            if (fits)
                m.placed.emplace(next++, p);
            else
                REQUIRE(c == before);
        }
        std::uint64_t taken = 0;
        for (const auto& [id, p] : m.placed) taken += device_permille(p.request);
        CHECK(c.placed_permille() == taken);
        for (const auto& [id, p] : m.placed) c.release(p);
        CHECK(c == empty);
    }
}

TEST_CASE("why_not names something exactly when the request fits nowhere", "[placement]") {
    for (std::uint64_t run = 0; run < 40; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        cluster c = random_cluster(any, 3);
        for (int i = 0; i < 200; ++i) {
            const auto r = with_labels(random_request(any), any);
            bool fits = false;
            for (std::uint32_t n = 0; n < c.size(); ++n) fits = fits || c.fits(r, {n});
            const auto why = c.why_not(r);
            CAPTURE(text_of(why));
            REQUIRE(fits == !why);
            if (why)
                REQUIRE((why.missing == shortage::model || why.missing == shortage::affinity || why.left < why.asked));
            const auto p = random_placement(c, r, any);
            (void)c.try_apply(p);
        }
    }
}

TEST_CASE("a refusal names what is missing, how much was asked for and what would have fitted", "[placement]") {
    cluster c = one_node();
    c.apply(
        {{.cpu_milli = 10'000, .memory = 60_GiB, .devices = 1, .each = 81_pct, .device_memory = 10_GiB}, {0}, {{0}}});
    const auto why = [&](const placement_request& r) { return text_of(c.why_not(r)); };
    CHECK(why({.cpu_milli = 8'000}) == "cpu: asked for 8000 milli, at most 6000 on node 0");
    CHECK(why({.memory = 8_GiB}) == "memory: asked for 8 GiB, at most 4 GiB on node 0");
    CHECK(why({.devices = 2, .each = 100_pct}) == "whole devices: asked for 2, at most 1 on node 0");
    CHECK(why({.devices = 3, .each = 10_pct}) == "whole devices: asked for 3, at most 2 on node 0");
    CHECK(why({.devices = 2, .each = 47_pct}) == "device share: asked for 470 permille, at most 190 on node 0");
    CHECK(why({.devices = 2, .each = 5_pct, .device_memory = 8_GiB}) ==
          "device memory: asked for 8 GiB, at most 6 GiB on node 0");
    CHECK(why({.devices = 1, .each = 5_pct, .models = {{7}}}) == "device model: no node has an allowed one");
    CHECK(why({.near = label{1}}) == "affinity: no node satisfies it; the closest is node 0");
    CHECK(text_of(cluster{}.why_not({})) == "node");
}

TEST_CASE("a device with the share and another with the memory don't make one with both", "[placement]") {
    cluster c = one_node();
    c.apply({{.devices = 1, .each = 90_pct}, {0}, {{0}}});
    c.apply({{.devices = 1, .device_memory = 15_GiB}, {0}, {{1}}});
    const placement_request r{.devices = 1, .each = 50_pct, .device_memory = 8_GiB};
    CHECK_FALSE(c.fits(r, {0}));
    const auto why = c.why_not(r);
    CHECK(why.missing == shortage::device_memory);
    CHECK(why.left == (1_GiB).count());
}

TEST_CASE("the closest node is the one that lacks least", "[placement]") {
    cluster c;
    c.add({.cpu_milli = 1'000, .memory = 1_GiB, .devices = 1});
    c.add({.cpu_milli = 7'000, .memory = 1_GiB, .devices = 1});
    c.add({.cpu_milli = 6'000, .memory = 1_GiB, .devices = 1});
    const auto why = c.why_not({.cpu_milli = 8'000, .devices = 1, .each = 50_pct});
    CHECK(why.missing == shortage::cpu);
    CHECK(why.node == gpushare::node_id{1});
    CHECK(why.asked == 8'000);
    CHECK(why.left == 7'000);
}

TEST_CASE("a placement that doesn't match its request or the cluster is refused and takes nothing", "[placement]") {
    cluster c = one_node();
    const cluster before = c;
    const placement_request r{.devices = 1, .each = 50_pct};
    CHECK(c.try_apply({r, {1}, {{0}}}).missing == shortage::nodes);
    CHECK(c.try_apply({r, {0}, {}}).missing == shortage::devices);
    CHECK(c.try_apply({r, {0}, {{2}}}).missing == shortage::devices);
    CHECK(c.try_apply({r, {0}, {{0}, {1}}}).missing == shortage::devices);
    CHECK(c.try_apply({r, {0}, {{1}, {63}}}).missing == shortage::devices);
    CHECK(c == before);
    try {
        c.apply({r, {0}, {{0}, {1}}});
        FAIL("no exception");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == errc::invalid_specification);
        CHECK(std::string_view(e.what()) == "devices of the placement: asked for 1, named 2 of node 0");
    }
}

TEST_CASE("a release of what was not applied is refused where it would give a node more than it has", "[placement]") {
    cluster c = one_node();
    const placement p{
        {.cpu_milli = 4'000, .memory = 1_GiB, .devices = 1, .each = 50_pct, .group = label{3}}, {0}, {{1}}};
    CHECK_FALSE(c.try_release(p));
    c.apply(p);
    auto other = p;
    other.devices = {{0}};
    CHECK_FALSE(c.try_release(other));
    other = p;
    other.request.group = label{4};
    CHECK_FALSE(c.try_release(other));
    other = p;
    other.node = {9};
    CHECK_FALSE(c.try_release(other));
    c.release(p);
    CHECK(c == one_node());
    CHECK_THROWS_AS(c.release(p), gpushare::operation_error);
}

TEST_CASE("amounts at the edge of their type neither wrap nor fit", "[placement]") {
    cluster c = one_node();
    const auto most = std::uint64_t{0} - 1;
    CHECK(c.why_not({.cpu_milli = most}).missing == shortage::cpu);
    CHECK(c.why_not({.memory = bytes::max()}).missing == shortage::memory);
    CHECK(c.why_not({.devices = 1, .each = 1_pct, .device_memory = bytes::max()}).missing == shortage::device_memory);
    CHECK(c.why_not({.devices = 0xFFFFFFFF, .each = 1_pct}).missing == shortage::whole_devices);
    CHECK_FALSE(c.try_release({{.cpu_milli = most}, {0}, {}}));
    CHECK_FALSE(c.try_release({{.memory = bytes::max()}, {0}, {}}));
}

TEST_CASE("hold refuses amounts whose sum no count can take, and then takes nothing", "[placement]") {
    const auto most = std::uint64_t{0} - 1;
    const std::array<placement, 3> all{{{{.cpu_milli = most}, {0}, {}},
                                        {{.memory = bytes::max()}, {0}, {}},
                                        {{.devices = 1, .each = 1_pct, .device_memory = bytes::max()}, {0}, {{1}}}}};
    for (const placement& p : all) {
        cluster c = one_node();
        c.hold(p);
        const cluster held = c;
        CHECK_THROWS_AS(c.hold(p), gpushare::operation_error);
        CHECK(c == held);
        CHECK_FALSE(c.fits(p.request, {0}));
        c.release(p);
        CHECK(c == one_node());
    }
}

TEST_CASE("hold refuses shares whose sum no count can take", "[placement]") {
    cluster c = one_node();
    const placement whole{{.devices = 1, .each = 100_pct}, {0}, {{1}}};
    for (std::uint32_t sum = 0; sum <= std::numeric_limits<std::uint32_t>::max() - 1000; sum += 1000) c.hold(whole);
    const cluster held = c;
    CHECK_THROWS_AS(c.hold(whole), gpushare::operation_error);
    CHECK(c == held);
}

TEST_CASE("a node has at most 64 devices, of 64 models", "[placement]") {
    cluster c;
    CHECK_THROWS_AS(c.add({.devices = 65}), gpushare::operation_error);
    CHECK_THROWS_AS(c.add({.devices = 1, .model = {64}}), gpushare::operation_error);
    CHECK(c == cluster{});
    c.add({.devices = 64, .model = {63}});
    device_set all;
    for (std::uint32_t d = 0; d < 64; ++d) all.add({d});
    CHECK(all.size() == 64);
    c.apply({{.devices = 64, .each = 100_pct, .models = {{63}}}, {0}, all});
    CHECK(c.placed_permille() == 64'000);
    CHECK(c.why_not({.devices = 1, .each = 1_pct}).missing == shortage::device_share);
}

TEST_CASE("a request for nothing fits on any node", "[placement]") {
    cluster c;
    c.add({});
    CHECK(c.fits({}, {0}));
    c.apply({{}, {0}, {}});
    CHECK(c.placed_permille() == 0);
}

TEST_CASE("affinity: the first of a group goes anywhere, the others follow, strangers stay away", "[placement]") {
    cluster c;
    for (int i = 0; i < 3; ++i) c.add({.cpu_milli = 8'000});
    const placement_request member{.cpu_milli = 1'000, .group = label{5}, .near = label{5}};
    CHECK(c.fits(member, {0}));
    CHECK(c.fits(member, {2}));
    c.apply({member, {1}, {}});
    CHECK_FALSE(c.fits(member, {0}));
    CHECK(c.fits(member, {1}));

    const placement_request loner{.group = label{6}, .apart = label{5}};
    CHECK_FALSE(c.fits(loner, {1}));
    c.apply({loner, {2}, {}});
    CHECK_FALSE(c.fits({.group = label{5}}, {2}));  // the loner was there first
    CHECK(c.fits({.group = label{7}}, {2}));
    CHECK_FALSE(c.fits({.near = label{8}}, {0}));  // nobody carries it
    c.release({loner, {2}, {}});
    CHECK(c.fits({.group = label{5}}, {2}));
}

TEST_CASE("drained nodes take nothing new, removed ones count no more, and both give back their placements",
          "[placement]") {
    cluster c = one_node();
    c.add({.cpu_milli = 16'000, .memory = 64_GiB, .devices = 1, .device_memory = 16_GiB});
    const placement_request half{.cpu_milli = 1'000, .devices = 1, .each = 50_pct, .device_memory = 4_GiB};
    const placement first{half, {0}, {{0}}}, second{half, {1}, {{0}}};
    const cluster empty = c;
    c.apply(first);
    c.apply(second);
    c.drain({0});
    CHECK_FALSE(c.fits(half, {0}));
    CHECK_FALSE(c.fits({}, {0}));  // not even for nothing
    CHECK(c.try_apply({half, {0}, {{1}}}).missing == shortage::drained);
    CHECK(c.why_not({.devices = 2, .each = 50_pct}).missing == shortage::whole_devices);
    CHECK(c.devices() == 3);
    CHECK(c.placed_permille() == 1000);
    c.resume({0});
    CHECK(c.fits(half, {0}));
    c.drain({0}, {0});
    CHECK_FALSE(c.try_apply({half, {0}, {{1}}}));
    c.release({half, {0}, {{1}}});
    CHECK(c.try_apply({half, {0}, {{0}}}).missing == shortage::drained);
    CHECK(c.try_apply({{.devices = 1}, {0}, {{0}}}).missing == shortage::drained);  // nor a device for nothing
    c.resume({0}, {0});

    c.remove({0}, {0});  // lost, while somebody is there
    CHECK(c.devices() == 2);
    CHECK(c.capacity_permille() == 2000);
    CHECK(c.why_not({.devices = 2}).left == 1);
    CHECK_THROWS_AS(c.resume({0}, {0}), gpushare::operation_error);
    CHECK_THROWS_AS(c.drain({0}, {7}), gpushare::operation_error);
    CHECK_THROWS_AS(c.drain({7}), gpushare::operation_error);
    CHECK(c.try_release(first));
    CHECK_FALSE(c.try_release(first));
    CHECK_FALSE(c.fits({.devices = 1, .each = 100_pct, .device_memory = 16_GiB}, {1}));
    c.remove({1});
    CHECK(c.devices() == 1);
    CHECK(c.there({1}).devices == 0);
    CHECK(c.try_apply(second).missing == shortage::nodes);
    CHECK_THROWS_AS(c.add({1}, 16_GiB), gpushare::operation_error);
    c.release(second);
    CHECK(c.placed_permille() == 0);
    CHECK(c.add({.devices = 1}).index == 2);  // ids aren't used again
    CHECK(c.size() == 3);
    CHECK(c.emptied() == c);
    CHECK(empty.devices() == 3);
}

TEST_CASE("devices of a node differ, and one that shrinks below what is there owes it", "[placement]") {
    cluster c = one_node();
    const auto third = c.add({0}, 32_GiB);
    CHECK(third.index == 2);
    CHECK(c[{0}].whole.devices == 3);
    CHECK(c[{0}].whole.device_memory == 32_GiB);
    const placement_request large{.devices = 1, .each = 10_pct, .device_memory = 24_GiB};
    CHECK(c.try_apply({large, {0}, {{1}}}).left == (16_GiB).count());
    const placement there{large, {0}, {third}};
    c.apply(there);
    c.resize({0}, third, 8_GiB);  // somebody else has taken the rest
    CHECK(c[{0}].devices[2].memory == 0_GiB);
    CHECK(c.why_not({.devices = 3, .each = 10_pct, .device_memory = 1_GiB}).left == 0);
    c.hold({{.devices = 1, .each = 95_pct}, {0}, {third}});  // and holds more than there is
    CHECK(c[{0}].devices[2].permille == 0);
    c.release(there);
    CHECK(c[{0}].devices[2].memory == 8_GiB);
    CHECK(c[{0}].devices[2].permille == 50);
    c.resize({0}, third, 32_GiB);
    CHECK(c[{0}].devices[2].memory == 32_GiB);
    CHECK_THROWS_AS(c.hold({large, {0}, {{3}}}), gpushare::operation_error);
    c.release({{.devices = 1, .each = 95_pct}, {0}, {third}});
    CHECK(c == c.emptied());
    cluster before = c;
    for (int i = 0; i < 3; ++i) before.add({.devices = 2});
    const auto other = before.add({1}, 1_GiB);  // of a node in the middle
    CHECK(other.index == 2);
    CHECK(before[{1}].devices.size() == 3);
    CHECK(before[{2}].devices.size() == 2);
    CHECK(before.capacity_memory() == 65_GiB);
}

TEST_CASE("a node without devices has none that could be resized", "[placement]") {
    cluster c = one_node();
    const auto none = c.add({.cpu_milli = 1'000});
    const auto behind = c.add({.devices = 1, .device_memory = 16_GiB});
    const auto before = c;
    CHECK_THROWS_AS(c.resize(none, {0}, 8_GiB), gpushare::operation_error);
    CHECK(c == before);
    CHECK(c.there(behind, {0}) == 16_GiB);
    CHECK_THROWS_AS(c.drain(none, {0}), gpushare::operation_error);
    CHECK(c.add(none, 8_GiB).index == 0);
    c.resize(none, {0}, 4_GiB);
    CHECK(c.there(none, {0}) == 4_GiB);
    CHECK(c.there(behind, {0}) == 16_GiB);
}

TEST_CASE("each figure of a refusal is true by itself", "[placement]") {
    cluster c;
    c.add({.devices = 2, .device_memory = 16_GiB});
    c.apply({{.devices = 1, .each = 40_pct, .device_memory = 14_GiB}, {0}, {{0}}});
    c.apply({{.devices = 1, .each = 30_pct, .device_memory = 15_GiB}, {0}, {{1}}});
    const auto why = c.why_not({.devices = 1, .each = 80_pct, .device_memory = 3_GiB});
    if (why.missing == shortage::device_share)
        CHECK(why.left == 700);
    else
        CHECK(why.left == (2_GiB).count());
    const auto both = c.why_not({.devices = 2, .each = 65_pct, .device_memory = 1_GiB});
    CHECK(both.missing == shortage::device_share);
    CHECK(both.left == 600);
}

TEST_CASE("a request that names a zone goes nowhere else", "[placement]") {
    cluster c;
    c.add({.devices = 1});
    c.add({.devices = 1, .zone = {1}});
    c.add({.devices = 1, .zone = {2}});
    const auto in = [](std::uint16_t zone) {
        return placement_request{.devices = 1, .each = share::of_permille(600), .zone = {zone}};
    };
    CHECK_FALSE(c.fits(in(2), {0}));
    CHECK_FALSE(c.fits(in(2), {1}));
    CHECK(c.fits(in(2), {2}));
    CHECK(c.could_fit(in(2), {2}));
    CHECK_FALSE(c.could_fit(in(2), {1}));
    for (std::uint32_t i = 0; i < 3; ++i) CHECK(c.fits(in(0), {i}));
    c.apply({in(2), {2}, {{0}}});
    CHECK(c.why_not(in(2)).missing == shortage::device_share);
    CHECK(c.why_not(in(3)).missing == shortage::zone);
    CHECK(c.try_apply({in(1), {0}, {{0}}}).missing == shortage::zone);
    CHECK_FALSE(c.why_not(in(1)));
}

}  // namespace cluster_test
