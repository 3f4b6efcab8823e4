// SPDX-License-Identifier: Apache-2.0
// A tenancy whose devices are chosen by a placement policy, or by any function of the embedder's.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/placement/placement_policies.hpp>
#include <gpushare/placement/value_descent.hpp>
#include <gpushare/placement/workload.hpp>
#include <gpushare/tenant/placed_by.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"

namespace placed_by_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::device_id;
using gpushare::device_room;
using gpushare::errc;
using gpushare::node_view;
using gpushare::partition;
using gpushare::tenant_spec;
using node = gpushare::host::node;
using tenancy = gpushare::tenancy<node>;
using support::code_of;

namespace {

gpushare::host::node_options four_devices() {
    return {.devices = 4, .memory = 64_MiB, .sms = 1, .timing = gpushare::host::timing::modelled};
}

tenant_spec small(const std::string& name) { return {.name = name, .memory = 16_MiB, .compute = 30_pct}; }
tenant_spec wide(std::uint32_t devices) {
    return {.name = "wide", .memory = 60_MiB * devices, .devices = devices, .compute = 100_pct};
}

void check_untouched(const tenancy& t) {
    for (const auto& room : t.rooms()) CHECK(room.free == 64_MiB);
    for (std::uint32_t d = 0; d < 4; ++d) CHECK(t.unpromised({d}) == gpushare::share::whole());
}

}  // namespace

TEST_CASE("a placement policy leaves whole devices to tenants that need them", "[tenant][placement]") {
    node n(four_devices());
    tenancy by_room(n), packed(n), learnt(n);
    packed.choose_devices(gpushare::placed_by(gpushare::bin_packing{}));
    const std::vector<gpushare::placement_request> expected{gpushare::placement_of(small("")),
                                                            gpushare::placement_of(wide(3))};
    const gpushare::workload usual(expected);
    learnt.choose_devices(gpushare::placed_by(gpushare::value_descent(gpushare::as_cluster(learnt), usual)));
    const auto three_small = [](tenancy& t) {
        std::vector<tenancy::tenant> all;
        for (const auto* name : {"a", "b", "c"}) all.push_back(t.admit(small(name)));
        return all;
    };
    {
        const auto spread = three_small(by_room);
        CHECK(code_of([&] { (void)by_room.admit(wide(3)); }) == errc::share_exceeded);
    }
    for (auto* t : {&packed, &learnt}) {
        const auto together = three_small(*t);
        for (const auto& one : together) CHECK(one.spec().on == together.front().spec().on);
        const auto rest = t->admit(wide(3));
        CHECK(rest.spec().on.size() == 3);
        CHECK(code_of([&] { (void)t->admit(small("d")); }) == errc::share_exceeded);
    }
    check_untouched(packed);
}

TEST_CASE("a placement policy sees memory and device time of every device", "[tenant][placement]") {
    node n(four_devices());
    tenancy shared(n);
    std::vector<std::pair<std::uint32_t, bytes>> seen;
    shared.choose_devices([&](const tenant_spec& spec, const std::vector<device_room>& rooms, const node_view& all) {
        seen.clear();
        for (const auto& d : all.devices) seen.emplace_back(d.permille, d.memory);
        CHECK(all.whole.devices == 4);
        CHECK(all.whole.device_memory == 64_MiB);
        return gpushare::equal_split(spec.memory, spec.devices, rooms, spec.unit);
    });
    const auto named = shared.admit({.name = "named", .memory = 20_MiB, .compute = 40_pct, .on = {{2}}});
    CHECK(seen.empty());  // it said where
    CHECK(named.spec().on == std::vector<device_id>{{2}});
    const auto large = shared.admit({.name = "large", .memory = 60_MiB, .compute = 10_pct});
    CHECK(seen ==
          std::vector<std::pair<std::uint32_t, bytes>>{{1000, 64_MiB}, {1000, 64_MiB}, {600, 44_MiB}, {1000, 64_MiB}});
    shared.choose_devices(gpushare::placed_by(gpushare::bin_packing{}));
    const auto beside = shared.admit({.name = "beside", .memory = 30_MiB, .compute = 10_pct});
    CHECK(beside.spec().on == std::vector<device_id>{{2}});  // the fullest with so much memory
    const auto elsewhere = shared.admit({.name = "elsewhere", .memory = 30_MiB, .compute = 10_pct});
    CHECK(elsewhere.spec().on != std::vector<device_id>{{2}});
    shared.choose_devices({});
    CHECK(shared.admit(small("most room")).spec().on.size() == 1);
}

TEST_CASE("a choice of devices that is wrong, or throws, admits nobody and takes nothing", "[tenant][placement]") {
    node n(four_devices());
    tenancy shared(n);
    const auto refused_with = [&](std::vector<device_id> on, bytes each, std::uint32_t devices = 2) {
        shared.choose_devices([=](const auto&, const auto&, const auto&) { return partition{each, 0, on}; });
        const auto why = code_of(
            [&] { (void)shared.admit({.name = "x", .memory = 32_MiB, .devices = devices, .compute = 30_pct}); });
        check_untouched(shared);
        return why;
    };
    CHECK(refused_with({{0}, {1}}, 16_MiB) == errc::none);
    CHECK(refused_with({{0}, {0}}, 16_MiB) == errc::no_room);
    CHECK(refused_with({{0}, {7}}, 16_MiB) == errc::no_room);
    CHECK(refused_with({{0}}, 65_MiB) == errc::no_room);
    CHECK(refused_with({{0}, {1}}, 8_MiB) == errc::not_whole);
    CHECK(refused_with({}, 16_MiB) == errc::not_whole);
    const auto full = shared.admit({.name = "full", .memory = 1_MiB, .compute = 90_pct, .on = {{1}}});
    shared.choose_devices([](const auto&, const auto&, const auto&) { return partition{32_MiB, 0, {{1}}}; });
    CHECK(code_of([&] { (void)shared.admit({.name = "y", .memory = 32_MiB, .compute = 30_pct}); }) == errc::no_room);
    shared.choose_devices([](const auto&, const auto&, const auto&) -> partition { throw std::runtime_error("no"); });
    CHECK_THROWS_WITH(shared.admit(small("z")), "no");
    CHECK(shared.rooms()[0].free == 64_MiB);
}

TEST_CASE("whatever comes and goes, a placed tenancy promises what it has, as one that isn't placed does",
          "[tenant][placement]") {
    for (std::uint64_t nth = 0; nth < 8; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        node n(four_devices());
        tenancy shared(n);
        shared.choose_devices(gpushare::placed_by(gpushare::fragmentation_descent(
            gpushare::workload(std::vector{gpushare::placement_of(small("")), gpushare::placement_of(wide(2))}))));
        std::vector<tenancy::tenant> all;
        for (int step = 0; step < 200; ++step) {
            if (!all.empty() && any.below(3) == 0) {
                const auto at = static_cast<std::ptrdiff_t>(any.below(all.size()));
                all.erase(all.begin() + at);
                continue;
            }
            const auto devices = static_cast<std::uint32_t>(1 + any.below(3));
            const tenant_spec spec{.name = "t" + std::to_string(step),
                                   .memory = 1_MiB * (devices * (1 + any.below(40))),
                                   .devices = devices,
                                   .compute = gpushare::share::of_permille(50 + any.below(950))};
            // It is admitted where as many devices as it wants have room for it, and else refused.
            const auto rooms = shared.rooms();
            std::uint32_t with_room = 0;
            for (std::uint32_t d = 0; d < 4; ++d)
                with_room += shared.unpromised({d}) >= spec.compute && rooms[d].free >= spec.memory / devices ? 1U : 0U;
            try {
                all.push_back(shared.admit(spec));
                CHECK(with_room >= devices);
            } catch (const gpushare::operation_error& e) {
                CHECK(with_room < devices);
                CHECK(e.tenant() == spec.name);
            }
        }
        all.clear();
        check_untouched(shared);
    }
}

}  // namespace placed_by_test
