// SPDX-License-Identifier: Apache-2.0
// Tenancies over devices whose SMs are in slices: where tenants run, by the ledger; the promises of
// each slice; and sharing only by time on a device without slices.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/tenant/move.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/told_policy.hpp"

namespace slices_test {

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using support::code_of;

namespace {

constexpr device_id d{0};
constexpr std::array<std::uint32_t, 2> halves{1, 1}, quarters{3, 1};

tenant_spec named(std::string name, share compute, std::uint32_t slice = any_slice) {
    return {.name = std::move(name), .memory = 1_KiB, .compute = compute, .slice = slice};
}

/// SMs that no driver can split.
struct whole_sms : host::device_sms {
    using host::device_sms::device_sms;
    [[nodiscard]] static sm_split split() { throw operation_error(errc::not_supported, {}, "no such thing"); }
};
static_assert(sm_partitionable<whole_sms>);

}  // namespace

TEST_CASE("tenants of different slices run on different SMs, and those of one slice share it", "[tenant]") {
    for (const auto t : {host::timing::real, host::timing::modelled}) {
        host::node node{{.memory = 1_MiB, .sms = 8, .timing = t}};
        tenancy shared{node};
        REQUIRE(shared.slice<host::device_sms>(d, quarters) == errc::none);
        CHECK(shared.slices(d) == std::vector{75_pct, 25_pct});
        auto a = shared.admit(named("a", 40_pct)), b = shared.admit(named("b", 30_pct)),
             c = shared.admit(named("c", 20_pct));
        CHECK(a.slice() == 0);
        CHECK(b.slice() == 0);
        CHECK(c.slice() == 1);
        CHECK_NOTHROW(shared.verify(d));
        std::vector<decltype(a)::ticket> done;
        for (int round = 0; round < 30; ++round)
            for (auto* who : {&a, &b, &c})
                done.push_back(who->submit([](auto& s) { s.launch({.blocks = 9, .hold = 10us}, [](auto&) {}); }));
        for (const auto& each : done) CHECK(each.wait());
        std::map<std::uint32_t, std::set<std::uint32_t>> had;
        for (const auto& block : node.ledger(d).take().blocks) had[block.tag].insert(block.sm);
        for (auto* who : {&a, &b})
            for (const std::uint32_t sm : had.at(who->tag())) CHECK(sm < 6);
        CHECK(had.at(c.tag()) == std::set<std::uint32_t>{6, 7});
        CHECK(c.usage().completed == 30);
    }
}

TEST_CASE("tenants of different slices don't wait for one another, whatever their levels", "[tenant]") {
    host::node node{{.memory = 1_MiB, .sms = 2}};
    tenancy shared{node, {.limiter = {.depth = 1}}};
    REQUIRE(shared.slice<host::device_sms>(d, halves) == errc::none);
    auto high = shared.admit({.name = "high", .memory = 1_KiB, .compute = 50_pct, .level = {7}});
    auto low = shared.admit(named("low", 50_pct));
    std::jthread one([&](const std::stop_token& stop) { shared.dispatch(d, stop, high.slice()); });
    std::jthread two([&](const std::stop_token& stop) { shared.dispatch(d, stop, low.slice()); });
    std::atomic<bool> low_ran{false};
    const auto first = high.submit([&](auto& s) {
        s.launch({}, [&](auto& ctx) {
            for (std::uint32_t turn = 0; !low_ran && !ctx.device_lost(); ++turn) ctx.backoff(turn);
        });
    });
    const auto second = low.submit([&](auto& s) { s.launch({}, [&](auto&) { low_ran = true; }); });
    CHECK(second.wait());
    CHECK(first.wait());
    CHECK(&shared.limiter_of(d, 0) != &shared.limiter_of(d, 1));
}

TEST_CASE("a share is promised of one slice, and returns to it", "[tenant]") {
    host::node node{{.devices = 2, .memory = 1_MiB, .sms = 4}};
    tenancy shared{node};
    REQUIRE(shared.slice<host::device_sms>(d, halves) == errc::none);
    const auto on_0 = [](tenant_spec s) {
        s.on = {d};
        return s;
    };
    CHECK_THROWS_WITH(shared.admit(on_0(named("big", 60_pct))),
                      Contains("asked for 60 % of the device's time, 50 % of 100 % left"));
    CHECK(shared.admit(named("big", 60_pct)).spec().on == std::vector{device_id{1}});  // which is whole
    auto a = shared.admit(on_0(named("a", 30_pct))), b = shared.admit(on_0(named("b", 20_pct)));
    CHECK(b.slice() == 1);
    CHECK(shared.unpromised(d, 0) == 20_pct);
    CHECK(shared.unpromised(d, 1) == 30_pct);
    CHECK(shared.unpromised(d) == 50_pct);
    CHECK(code_of([&] { (void)shared.admit(on_0(named("c", 40_pct))); }) == errc::share_exceeded);  // 50 in all
    CHECK(code_of([&] { (void)shared.admit(on_0(named("c", 30_pct, 0))); }) == errc::share_exceeded);
    auto c = shared.admit(on_0(named("c", 20_pct, 0)));
    CHECK(c.slice() == 0);
    CHECK(code_of([&] { b.resize({.compute = 60_pct}); }) == errc::share_exceeded);
    b.resize({.compute = 50_pct});
    CHECK(shared.unpromised(d, 1) == 0_pct);
    CHECK(a.close().complete);
    CHECK(shared.unpromised(d, 0) == 30_pct);
    CHECK(shared.unpromised(d, 1) == 0_pct);
}

TEST_CASE("a tenant moves to another slice of its device with all that it has", "[tenant][move]") {
    host::node node{{.memory = 1_MiB, .sms = 4}};
    tenancy shared{node};
    REQUIRE(shared.slice<host::device_sms>(d, halves) == errc::none);
    auto a = shared.admit({.name = "a", .memory = 900_KiB, .compute = 40_pct, .slice = 0});
    auto b = shared.admit(named("b", 30_pct, 1));
    std::vector<moving_block> blocks{{.at = a.memory().allocate(1000), .size = 1000}};
    const void* const before = blocks[0].at;
    CHECK(code_of([&] { (void)move_tenant(shared, a, {d}, blocks, never, 1); }) == errc::share_exceeded);
    CHECK(b.close().complete);
    auto moved = move_tenant(shared, a, {d}, blocks, never, 1);
    CHECK(moved.report.closed.complete);
    a = std::move(moved.successor);
    CHECK(a.slice() == 1);
    CHECK(blocks[0].at == before);
    CHECK(shared.unpromised(d, 0) == 50_pct);
    CHECK(shared.unpromised(d, 1) == 10_pct);
    CHECK(a.submit([](auto& s) { s.launch({.blocks = 4}, [](auto&) {}); }).wait());
    for (const auto& block : node.ledger(d).take().blocks)
        if (block.tag == a.tag()) CHECK(block.sm >= 2);
    CHECK(a.memory().deallocate(blocks[0].at, 1000) == errc::none);
    CHECK(a.close().complete);
    CHECK(shared.unpromised(d, 1) == 50_pct);
}

TEST_CASE("of several devices a tenant has a slice each", "[tenant]") {
    host::node node{{.devices = 2, .memory = 1_MiB, .sms = 4}};
    tenancy shared{node};
    REQUIRE(shared.slice<host::device_sms>({0}, halves) == errc::none);
    auto before = shared.admit({.name = "before", .memory = 1_KiB, .compute = 10_pct, .on = {device_id{0}}});
    REQUIRE(shared.slice<host::device_sms>({1}, quarters) == errc::none);
    auto both = shared.admit({.name = "both", .memory = 2_KiB, .devices = 2, .compute = 50_pct});
    CHECK(both.slice(0) == 1);
    CHECK(both.slice(1) == 0);
    for (const std::size_t part : {0U, 1U})
        CHECK(both.submit([](auto& s) { s.launch({}, [](auto&) {}); }, part).wait());
    CHECK(both.usage().completed == 2);
    // Where the slice that it names isn't, or has no room, it doesn't go.
    const auto with_slice = [](std::uint32_t slice, std::vector<device_id> on) {
        return tenant_spec{.name = "x", .memory = 1_KiB, .compute = 10_pct, .on = std::move(on), .slice = slice};
    };
    CHECK(code_of([&] { (void)shared.admit(with_slice(2, {})); }) == errc::invalid_specification);
    CHECK(code_of([&] { (void)shared.admit(with_slice(2, {device_id{0}})); }) == errc::invalid_specification);
}

TEST_CASE("weights and caps are told to a slice's policy as those of the slice, live changes too", "[tenant]") {
    host::node node{{.memory = 1_MiB, .sms = 4}};
    std::vector<client_settings> told;
    tenancy shared{node, {}, [&](device_id) {
                       support::told_policy policy;
                       policy.told = &told;
                       return policy;
                   }};
    REQUIRE(shared.slice<host::device_sms>(d, quarters) == errc::none);
    auto t = shared.admit({.name = "t", .memory = 1_KiB, .compute = 15_pct, .slice = 1, .cap = 20_pct});
    REQUIRE(told.size() == 1);
    CHECK(told.back().weight == 60_pct);
    CHECK(told.back().cap == 80_pct);
    t.resize({.compute = 25_pct, .cap = 50_pct});
    CHECK(told.back().weight == share::whole());
    CHECK(told.back().cap == share::whole());
    CHECK(t.spec().compute == 25_pct);
}

TEST_CASE("a stream in no slice is found and named", "[tenant]") {
    host::node node{{.memory = 1_MiB, .sms = 4}};
    tenancy shared{node};
    {
        auto stray = node.make_stream(d, {}, 42);
        CHECK_NOTHROW(shared.verify(d));  // nobody relies on slices
        REQUIRE(shared.slice<host::device_sms>(d, halves) == errc::none);
        CHECK_THROWS_WITH(shared.verify(d), Contains("tags 42"));
    }
    CHECK_NOTHROW(shared.verify(d));
}

TEST_CASE("one slice of all SMs shares time, and nobody is outside of it", "[tenant]") {
    host::node node{{.memory = 1_MiB, .sms = 4}};
    tenancy shared{node};
    REQUIRE(shared.slice<host::device_sms>(d, std::array{1U}) == errc::none);
    CHECK(shared.slices(d) == std::vector{share::whole()});
    auto a = shared.admit(named("a", 60_pct)), b = shared.admit(named("b", 40_pct));
    CHECK_NOTHROW(shared.verify(d));
    CHECK(b.submit([](auto& s) { s.launch({.blocks = 4}, [](auto&) {}); }).wait());
    const auto stray = node.make_stream(d, {}, 7);
    CHECK_THROWS_WITH(shared.verify(d), Contains("tags 7"));
}

TEST_CASE("a device that can't be sliced stays whole, and its tenants share its time", "[tenant]") {
    host::node node{{.memory = 1_MiB, .sms = 4, .sm_unit = 2}};
    tenancy shared{node};
    CHECK(shared.slice<whole_sms>(d, halves) == errc::not_supported);
    CHECK(shared.slice<host::device_sms>(d, std::array{1U, 1U, 1U}) == errc::too_few_sms);
    CHECK(shared.slices(d) == std::vector{share::whole()});
    auto a = shared.admit(named("a", 60_pct)), b = shared.admit(named("b", 40_pct));
    CHECK(b.slice() == 0);
    CHECK(a.submit([](auto& s) { s.launch({.blocks = 4}, [](auto&) {}); }).wait());
    CHECK_NOTHROW(shared.verify(d));
}

TEST_CASE("slices that are refused change nothing", "[tenant]") {
    host::node node{{.memory = 1_MiB, .sms = 4}};
    {
        tenancy shared{node};
        const auto refused = [&](std::span<const std::uint32_t> weights, device_id on = d) {
            return code_of([&] { (void)shared.slice<host::device_sms>(on, weights); });
        };
        CHECK(refused({}) == errc::invalid_specification);
        CHECK(refused(std::array{1U, 0U}) == errc::invalid_specification);
        CHECK(refused(halves, {1}) == errc::no_device);
        {
            auto others = host::device_sms{node, d}.partition(std::array{2U});
            CHECK(refused(halves) == errc::too_few_sms);
        }
        {
            auto a = shared.admit(named("a", 10_pct));
            CHECK(refused(halves) == errc::invalid_specification);
            CHECK(a.close().complete);
            CHECK(refused(halves) == errc::invalid_specification);  // its stream is still there, on all SMs
        }
        CHECK(shared.slices(d) == std::vector{share::whole()});
        CHECK(shared.slice<host::device_sms>(d, halves) == errc::none);
        CHECK(refused(halves) == errc::invalid_specification);
        CHECK(code_of([&] { (void)shared.limiter_of(d, 2); }) == errc::invalid_specification);
        CHECK(code_of([&] { (void)shared.unpromised(d, 2); }) == errc::invalid_specification);
        CHECK(code_of([&] { (void)shared.slices({1}); }) == errc::no_device);
    }
    // The SMs are free again, also after a policy that couldn't be made.
    int policies = 0;
    tenancy broken{node, {}, [&](device_id) {
                       if (++policies == 3) throw std::runtime_error("no policy");
                       return weighted_fair{};
                   }};
    CHECK_THROWS_AS(broken.slice<host::device_sms>(d, std::array{2U, 1U, 1U}), std::runtime_error);
    CHECK(broken.slices(d) == std::vector{share::whole()});
    CHECK(broken.slice<host::device_sms>(d, halves) == errc::none);
    CHECK(broken.slices(d) == std::vector{50_pct, 50_pct});
}

}  // namespace slices_test
