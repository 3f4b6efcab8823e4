// SPDX-License-Identifier: Apache-2.0
// Tenants that are placed by a plan: the queue, reservations, moves, and notices to go.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/tenant_planner.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/host_tenants.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace planner_test {

using namespace support::host_tenants;
using gpushare::admission_result;

namespace {

/// For the planner time stands still, and host memory is short when the test says so.
struct told_tenancy : tenancy {
    using tenancy::tenancy;

    [[nodiscard]] gpushare::instant now() const noexcept { return time; }
    tenant admit(tenant_spec spec) {
        if (std::exchange(lacks_host_memory, false)) throw std::bad_alloc();
        return tenancy::admit(std::move(spec));
    }

    gpushare::instant time = tenancy::now();
    bool lacks_host_memory = false;
};

struct fixture {
    node n{modelled(2, 1)};
    told_tenancy shared{n};
    gpushare::tenant_planner<told_tenancy, gpushare::bin_packing> plan{
        shared, gpushare::bin_packing{}, {.most_waiting = 1}};

    [[nodiscard]] auto arrive(const char* name, gpushare::share compute = 50_pct, int level = 0) {
        return plan.arrive(spec_of(name, compute, level));
    }
    static tenant_spec spec_of(const char* name, gpushare::share compute = 50_pct, int level = 0) {
        return {.name = name, .memory = 16_MiB, .compute = compute, .level = {level}};
    }
    static device_id where(const tenancy::tenant& t) { return t.spec().on.at(0); }
};

}  // namespace

TEST_CASE_METHOD(fixture, "a tenant without room waits, and is admitted when another one has left",
                 "[tenant][planner]") {
    auto a = arrive("a"), b = arrive("b"), whole = arrive("whole", 100_pct);
    REQUIRE((a.who && b.who && whole.who));
    CHECK(where(*a.who) == where(*b.who));
    CHECK(where(*whole.who) != where(*a.who));
    auto waits = arrive("waits");
    CHECK(waits.outcome == admission_result::queued);
    CHECK(waits.why.missing != gpushare::shortage::none);
    const auto full = arrive("one too many");
    CHECK(full.outcome == admission_result::refused);
    CHECK(full.code == errc::queue_full);
    CHECK(arrive("never", gpushare::share::whole(), 0).outcome == admission_result::refused);
    CHECK(plan.advance().empty());
    a.who->close();
    plan.left("a");
    const auto now = plan.advance();
    REQUIRE(now.size() == 1);
    CHECK(now[0].id == waits.id);
    CHECK(now[0].name == "waits");
    REQUIRE(now[0].who);
    CHECK(where(*now[0].who) == where(*b.who));
    CHECK(plan.advance().empty());

    auto late = plan.arrive(fixture::spec_of("late"), shared.now() + 1ms);
    CHECK(late.outcome == admission_result::queued);
    CHECK(plan.next_deadline() == shared.now() + 1ms);
    CHECK(plan.advance().empty());
    shared.time += 1ms;
    const auto expired = plan.advance();
    REQUIRE(expired.size() == 1);
    CHECK(expired[0].outcome == admission_result::expired);
    const auto gone = arrive("gone");
    CHECK(plan.withdraw(gone.id));
    CHECK_FALSE(plan.withdraw(gone.id));
}

TEST_CASE_METHOD(fixture, "a placement that the tenancy refuses is planned no more", "[tenant][planner]") {
    const auto before = plan.free();
    CHECK(code_of([&] { (void)plan.arrive({.name = "", .memory = 1_MiB}); }) == errc::invalid_specification);
    CHECK(plan.free() == before);
    {
        auto past = shared.admit({.name = "past", .memory = 64_MiB, .devices = 1, .on = {{0}}});
        auto other = shared.admit({.name = "other", .memory = 64_MiB, .devices = 1, .on = {{1}}});
        const auto waits = arrive("a");  // what came past the planner takes room as anybody does
        CHECK(waits.outcome == admission_result::queued);
        CHECK(waits.why.missing == gpushare::shortage::device_memory);
        CHECK(waits.why.left == 0);
        CHECK(plan.advance().empty());
        CHECK(plan.withdraw(waits.id));
    }
    CHECK(plan.free() == before);
    auto a = arrive("a");
    CHECK(code_of([&] { (void)arrive("a"); }) == errc::duplicate_name);
    auto named = plan.arrive({.name = "named", .memory = 16_MiB, .compute = 60_pct, .on = {where(*a.who)}});
    CHECK(named.outcome == admission_result::queued);
    CHECK(named.why.missing == gpushare::shortage::device_share);
    CHECK(plan.withdraw(named.id));
    named = plan.arrive({.name = "named", .memory = 16_MiB, .compute = 50_pct, .on = {where(*a.who)}});
    CHECK(named.outcome == admission_result::placed);
    a.who->close(), named.who->close();
    plan.left("a"), plan.left("named");
    CHECK(plan.free() == before);
}

TEST_CASE_METHOD(fixture, "room that is reserved for later is nobody's who might be there then", "[tenant][planner]") {
    const auto now = shared.now();
    const auto job = fixture::spec_of("job", 100_pct);
    const auto soon = plan.reserve(job, now, now + 1h);
    const auto later = plan.reserve(job, now + 1h, now + 2h);
    REQUIRE((soon && later));
    const auto other = plan.reserve(job, now + 90min, now + 3h);
    REQUIRE(other);
    CHECK(other->where.devices != later->where.devices);
    CHECK(arrive("a").outcome == admission_result::queued);
    CHECK(plan.earliest(job, 2h) == now + 2h);
    CHECK(code_of([&] { (void)plan.redeem(later->id, job); }) == errc::invalid_specification);  // too early
    CHECK(code_of([&] { (void)plan.redeem(soon->id, fixture::spec_of("job")); }) == errc::invalid_specification);
    auto there = plan.redeem(soon->id, job);
    CHECK(where(there) == *soon->where.devices.begin());
    CHECK(code_of([&] { (void)plan.redeem(soon->id, job); }) == errc::duplicate_name);
    CHECK(code_of([&] { (void)plan.redeem(soon->id, fixture::spec_of("second", 100_pct)); }) ==
          errc::invalid_specification);
    const auto taken = plan.free();
    plan.left("second");
    CHECK_FALSE(plan.cancel(soon->id));
    CHECK(plan.free() == taken);
    CHECK(plan.overdue().empty());
    CHECK(plan.cancel(later->id));
    CHECK_FALSE(plan.cancel(later->id));
    CHECK(plan.cancel(other->id));

    const auto brief = plan.reserve(fixture::spec_of("brief", 1_pct), shared.now(), shared.now() + 20ms);
    REQUIRE(brief);
    auto overstays = plan.redeem(brief->id, fixture::spec_of("brief", 1_pct));
    shared.time = brief->end;
    CHECK(plan.overdue() == std::vector<std::string>{"brief"});
    (void)plan.advance();
    CHECK(plan.overdue() == std::vector<std::string>{"brief"});
    const auto beside = plan.free();
    overstays.close();
    plan.left("brief");
    CHECK(plan.overdue().empty());
    CHECK(plan.free() != beside);
}

TEST_CASE_METHOD(fixture, "a tenant in the way is moved with its data, or nothing happens", "[tenant][planner]") {
    auto a = arrive("a", 60_pct), b = arrive("b", 60_pct);
    auto x = arrive("x", 40_pct);
    REQUIRE((a.who && b.who && x.who));
    (where(*x.who) == where(*a.who) ? a : b).who->close();  // the other one has a device, and x another
    const bool left_a = where(*x.who) == where(*a.who);
    plan.left(left_a ? "a" : "b");
    const auto moves = plan.make_room(fixture::spec_of("whole", 100_pct));
    REQUIRE(moves);
    REQUIRE(moves->size() == 1);
    const auto& m = moves->front();
    auto& who = m.tenant == "x" ? *x.who : *(left_a ? b : a).who;
    std::vector<gpushare::moving_block> its{{.at = who.memory().allocate(1000), .size = 1000}};
    const void* const was = its[0].at;
    std::memset(its[0].at, 7, 1000);
    const auto before = plan.free();
    const auto to = *m.plan.to.devices.begin();
    n.memory(to).fail_allocations(0, 1'000'000);
    CHECK(code_of([&] { (void)plan.carry_out(m, who, its); }) == errc::out_of_memory);
    CHECK(plan.try_carry_out(m, who, its).code() == errc::out_of_memory);
    CHECK(plan.free() == before);
    CHECK(its[0].at == was);
    n.memory(to).fail_allocations(0, 0);
    const auto report = plan.carry_out(m, who, its);
    CHECK(report.closed.complete);
    CHECK(where(who) == to);
    CHECK(its[0].at != was);
    CHECK(static_cast<unsigned char*>(its[0].at)[999] == 7);
    CHECK(code_of([&] { (void)plan.carry_out(m, who, its); }) ==
          errc::invalid_specification);  // it isn't there any more
    CHECK(arrive("whole", 100_pct).outcome == admission_result::placed);
}

TEST_CASE_METHOD(fixture, "tenants of lower levels are told to go, and their place is kept", "[tenant][planner]") {
    const auto of = [](const char* name, bytes memory, int level) {
        return tenant_spec{.name = name, .memory = memory, .compute = 80_pct, .level = {level}};
    };
    auto a = plan.arrive(of("a", 40_MiB, 0)), b = plan.arrive(of("b", 40_MiB, 0));
    REQUIRE((a.who && b.who));
    const auto urgent = of("urgent", 48_MiB, 1);
    CHECK_FALSE(plan.preempt(of("small", 8_MiB, 1), 1s));  // fits anyway: shares are of the levels
    CHECK_FALSE(plan.preempt(of("equal", 48_MiB, 0), 1s));
    const auto notice = plan.preempt(urgent, 10s);
    REQUIRE(notice);
    REQUIRE(notice->victims.size() == 1);
    auto& victim = notice->victims[0] == "a" ? a : b;
    CHECK(plan.remaining(*notice) == notice->victims);
    CHECK(code_of([&] { (void)plan.take_place(*notice, urgent); }) == errc::no_room);
    CHECK(plan.try_take_place(*notice, urgent).why().asked == 1);
    auto beside = arrive("beside", 20_pct);  // fits on either device; one is being cleared
    REQUIRE(beside.who);
    CHECK(where(*beside.who) != where(*victim.who));
    victim.who->close();
    plan.left(victim.name);
    auto waits = arrive("waits", 20_pct);
    CHECK(waits.outcome == admission_result::queued);
    CHECK(plan.remaining(*notice).empty());
    auto there = plan.take_place(*notice, urgent);
    CHECK(there.name() == "urgent");
    CHECK(code_of([&] { (void)plan.take_place(*notice, urgent); }) == errc::invalid_specification);
    auto now = plan.advance();
    REQUIRE(now.size() == 1);  // beside urgent, whose share is of another level
    CHECK(where(*now[0].who) == where(there));

    const auto other = plan.preempt(of("more urgent", 48_MiB, 2), 1s);
    REQUIRE(other);
    plan.call_off(*other);
    CHECK(plan.remaining(*other).size() == other->victims.size());
    CHECK(code_of([&] { (void)plan.take_place(*other, urgent); }) == errc::invalid_specification);
}

TEST_CASE_METHOD(fixture, "a reservation of one tenant is nobody else's, nor a tenant's place", "[tenant][planner]") {
    auto a = arrive("a");
    const auto r = plan.reserve(fixture::spec_of("r"), shared.now(), shared.now() + 1h);
    REQUIRE((a.who && r));
    const auto before = plan.free();
    for (std::uint64_t id = 1; id < r->id; ++id) {  // of "a", whatever its number is
        CHECK_FALSE(plan.cancel(id));
        CHECK(code_of([&] { (void)plan.redeem(id, fixture::spec_of("b")); }) == errc::invalid_specification);
    }
    CHECK(plan.free() == before);
    shared.lacks_host_memory = true;
    CHECK_THROWS_AS(plan.redeem(r->id, fixture::spec_of("r")), std::bad_alloc);
    CHECK(plan.free() == before);
    CHECK(plan.try_redeem(r->id + 1, fixture::spec_of("r")).code() == errc::invalid_specification);
    const auto there = plan.try_redeem(r->id, fixture::spec_of("r"));
    REQUIRE(there);
    CHECK(there->name() == "r");
}

TEST_CASE_METHOD(fixture, "a waiting tenant is told of a failure, and the next one comes in", "[tenant][planner]") {
    gpushare::tenant_planner<told_tenancy, gpushare::bin_packing> all{shared, gpushare::bin_packing{}};
    auto a = all.arrive(fixture::spec_of("a", 100_pct)), b = all.arrive(fixture::spec_of("b", 100_pct));
    REQUIRE((a.who && b.who));
    const auto first = all.arrive(fixture::spec_of("first")), second = all.arrive(fixture::spec_of("second"));
    a.who->close();
    all.left("a");
    shared.lacks_host_memory = true;
    const auto now = all.advance();
    REQUIRE(now.size() == 2);
    CHECK(now[0].id == first.id);
    CHECK(now[0].name == "first");
    CHECK(now[0].outcome == admission_result::refused);
    CHECK(now[0].code == errc::out_of_memory);
    CHECK(now[1].id == second.id);
    CHECK(now[1].name == "second");
    CHECK(now[1].who);
    CHECK(all.advance().empty());
    CHECK(all.arrive(fixture::spec_of("first")).who);  // nothing of it was left
}

TEST_CASE("a tenant moves to devices of which it has one already", "[tenant][planner]") {
    node n{{.devices = 4, .memory = 64_MiB, .sms = 1, .timing = gpushare::host::timing::modelled}};
    told_tenancy shared{n};
    gpushare::tenant_planner<told_tenancy, gpushare::spreading> plan{shared, gpushare::spreading{}};
    auto wide = plan.arrive({.name = "wide", .memory = 16_MiB, .devices = 2, .compute = 60_pct, .on = {{1}, {2}}});
    REQUIRE(wide.who);
    auto& who = *wide.who;
    std::vector<gpushare::moving_block> blocks{{.part = 0, .at = who.memory(0).allocate(1000), .size = 1000},
                                               {.part = 1, .at = who.memory(1).allocate(1000), .size = 1000}};
    std::memset(blocks[0].at, 7, 1000);
    void* const stays = blocks[1].at;
    auto to = gpushare::place_of(who.spec());
    to.devices = {{2}, {3}};
    const auto from = gpushare::place_of(who.spec());
    (void)plan.carry_out({.tenant = "wide", .plan = {.from = from, .to = to}}, who, blocks);
    CHECK(who.spec().on == std::vector<device_id>{{3}, {2}});
    CHECK(static_cast<unsigned char*>(blocks[0].at)[999] == 7);
    CHECK(blocks[1].at == stays);
    CHECK(plan.arrive({.name = "whole", .memory = 1_MiB, .compute = 100_pct, .on = {{1}}}).who);
    CHECK_FALSE(plan.arrive({.name = "more", .memory = 1_MiB, .compute = 50_pct, .on = {{3}}}).who);
    (void)who.close();
    plan.left("wide");
}

TEST_CASE("moves that make room can be carried out one by one", "[tenant][planner]") {
    node n{{.devices = 4, .memory = 64_MiB, .sms = 1, .timing = gpushare::host::timing::modelled}};
    support::random any{support::seed(0)};
    int plans = 0;
    for (int round = 0; round < 60; ++round) {
        told_tenancy shared{n};
        gpushare::tenant_planner<told_tenancy, gpushare::spreading> plan{shared, gpushare::spreading{}};
        std::map<std::string, tenancy::tenant> there;
        for (int i = 0; i < 7; ++i) {
            const auto d = static_cast<std::uint32_t>(any.below(4));
            std::vector<device_id> on{{d}};
            if (any.below(3) == 0) on.push_back({(d + 1) % 4});
            const auto each = gpushare::share::of_permille(static_cast<std::uint32_t>(100 * (1 + any.below(6))));
            auto a = plan.arrive({.name = std::to_string(i),
                                  .memory = 1_MiB * on.size(),
                                  .devices = static_cast<std::uint32_t>(on.size()),
                                  .compute = each,
                                  .on = on});
            if (a.who) there.emplace(a.name, *std::move(a.who));
        }
        const auto each = gpushare::share::of_permille(static_cast<std::uint32_t>(100 * (3 + any.below(8))));
        const tenant_spec wanted{.name = "wanted", .memory = 1_MiB, .compute = each};
        const auto moves = plan.make_room(wanted);
        if (!moves) continue;
        ++plans;
        for (const auto& m : *moves) (void)plan.carry_out(m, there.at(m.tenant), {});
        CHECK(plan.arrive(wanted).who);
    }
    CHECK(plans > 0);
}

TEST_CASE_METHOD(fixture, "devices that a notice promises are promised to no other tenant", "[tenant][planner]") {
    auto a = plan.arrive({.name = "a", .memory = 40_MiB, .compute = 60_pct}),
         b = plan.arrive({.name = "b", .memory = 40_MiB, .compute = 60_pct});
    REQUIRE((a.who && b.who));
    const tenant_spec first_spec{.name = "first", .memory = 32_MiB, .compute = 80_pct, .level = {1}},
        second_spec{.name = "second", .memory = 32_MiB, .compute = 50_pct, .level = {1}};
    const auto first = plan.preempt(first_spec, 1ms), second = plan.preempt(second_spec, 1ms);
    REQUIRE((first && second));
    CHECK(first->victims != second->victims);  // one device each
    CHECK(first->added.devices != second->added.devices);
    CHECK_FALSE(plan.preempt({.name = "third", .memory = 32_MiB, .compute = 50_pct, .level = {1}}, 1ms));
    CHECK_FALSE(plan.reserve(fixture::spec_of("r", 40_pct), shared.now(), shared.now() + 1h));
    CHECK_FALSE(plan.make_room(fixture::spec_of("r", 60_pct)));
    CHECK(plan.earliest(fixture::spec_of("r", 40_pct), 1h) == gpushare::never);
    shared.time += 2ms;  // over, and still kept
    CHECK(plan.advance().empty());
    CHECK_FALSE(arrive("late", 20_pct).who);
    a.who->close(), b.who->close();
    plan.left("a"), plan.left("b");
    CHECK_FALSE(plan.reserve(fixture::spec_of("r", 10_pct), shared.now(), shared.now() + 1h));
    const auto there = plan.take_place(*second, second_spec), too = plan.take_place(*first, first_spec);
    CHECK(there.name() == "second");
    CHECK(too.name() == "first");
    CHECK(plan.earliest(fixture::spec_of("r", 10_pct), 1h) == shared.time);
    CHECK(plan.reserve(fixture::spec_of("r", 10_pct), shared.now(), shared.now() + 1h));
}

namespace {

/// With room in the queue.
struct planned {
    node n{modelled(2, 1)};
    tenancy shared{n};
    gpushare::tenant_planner<tenancy, gpushare::best_fit> plan{shared, gpushare::best_fit{}};

    [[nodiscard]] auto arrive(const std::string& name, bytes memory, gpushare::share compute = 10_pct,
                              std::vector<device_id> on = {}) {
        return plan.arrive({.name = name, .memory = memory, .compute = compute, .on = std::move(on)});
    }
    template <class Arrival>
    void leave(Arrival& a) {
        CHECK(a.who->close().complete);
        plan.left(a.name);
    }
};

}  // namespace

TEST_CASE_METHOD(planned, "a lost device is no device", "[tenant][planner]") {
    n.faults({0}).lose_device();
    for (const auto* name : {"a", "b", "c"}) {
        auto a = arrive(name, 8_MiB);
        REQUIRE(a.who);
        CHECK(a.who->spec().on == std::vector<device_id>{{1}});
        leave(a);
    }
    const auto both = plan.arrive({.name = "both", .memory = 16_MiB, .devices = 2, .compute = 10_pct});
    CHECK(both.outcome == admission_result::refused);  // no other one will come
    CHECK(both.code == errc::too_few_devices);
    CHECK(shared.lost({0}));
    CHECK(shared.promisable()[0].whole == bytes{});
    CHECK(gpushare::as_cluster(shared).devices() == 1);
}

TEST_CASE_METHOD(planned, "others' part of a device isn't promised, and may come back", "[tenant][planner]") {
    (void)n.faults({0}).take_memory(60_MiB);
    std::vector<decltype(arrive("a", 16_MiB))> all;
    for (const auto* name : {"a", "b", "c"}) {
        all.push_back(arrive(name, 16_MiB));
        REQUIRE(all.back().who);
        CHECK(all.back().who->spec().on == std::vector<device_id>{{1}});
    }
    const auto more = arrive("more", 32_MiB);
    CHECK(more.outcome == admission_result::queued);
    CHECK(more.why.missing == gpushare::shortage::device_memory);
    CHECK(arrive("never", 65_MiB).code == errc::no_room);
    CHECK(plan.advance().empty());
    (void)n.faults({0}).take_memory(bytes{});
    const auto now = plan.advance();
    REQUIRE(now.size() == 1);
    CHECK(now[0].name == "more");
    CHECK(now[0].who->spec().on == std::vector<device_id>{{0}});
    for (auto& a : all) leave(a);
}

TEST_CASE_METHOD(planned, "a waiting tenant goes where there is room, and isn't lost with a device",
                 "[tenant][planner]") {
    auto a = arrive("a", 60_MiB, 90_pct), b = arrive("b", 60_MiB, 90_pct);
    REQUIRE((a.who && b.who));
    for (const auto* name : {"w1", "w2", "w3"})
        REQUIRE(arrive(name, 20_MiB, 30_pct).outcome == admission_result::queued);
    const auto lost = a.who->spec().on[0], left = b.who->spec().on[0];
    const auto never_more = plan.arrive({.name = "both", .memory = 2_MiB, .devices = 2, .compute = 100_pct});
    CHECK(never_more.outcome == admission_result::queued);
    n.faults(lost).lose_device();
    (void)a.who->close(soon());
    leave(b);
    plan.left("a");
    auto all = plan.advance();
    REQUIRE(all.size() == 4);
    std::size_t placed = 0;
    for (auto& one : all) {
        if (one.name == "both") {
            CHECK(one.outcome == admission_result::refused);
            CHECK(one.code == errc::too_few_devices);
            continue;
        }
        REQUIRE(one.who);
        CHECK(one.who->spec().on == std::vector{left});
        ++placed;
    }
    CHECK(placed == 3);
}

TEST_CASE_METHOD(planned, "burst that is lent keeps nobody out of another device", "[tenant][planner]") {
    auto lender = shared.admit({.name = "lender", .memory = 1_MiB, .burst = gpushare::all_burst, .on = {{0}}});
    void* const p = lender.memory().allocate(60 << 20);
    auto a = arrive("a", 32_MiB);
    REQUIRE(a.who);  // the tenancy refuses device 0, which the plan took for free
    CHECK(a.who->spec().on == std::vector<device_id>{{1}});
    const auto waits = arrive("b", 40_MiB);
    CHECK(waits.outcome == admission_result::queued);
    CHECK(waits.why.missing == gpushare::shortage::device_memory);
    CHECK(lender.memory().deallocate(p, 60 << 20) == errc::none);
    auto now = plan.advance();
    REQUIRE(now.size() == 1);
    CHECK(now[0].who->spec().on == std::vector<device_id>{{0}});
}

TEST_CASE_METHOD(planned, "a refused tenant overtakes no other", "[tenant][planner]") {
    auto a = arrive("a", 16_MiB);
    auto other = shared.admit({.name = "other", .memory = 1_MiB});
    const auto big = plan.arrive({.name = "big", .memory = 120_MiB, .devices = 2, .compute = 100_pct});
    CHECK(big.outcome == admission_result::queued);
    for (int i = 0; i < 20; ++i) {
        CHECK(code_of([&] { (void)arrive("a", 1_MiB, 1_pct); }) == errc::duplicate_name);
        const auto again = arrive("big", 1_MiB, 1_pct);  // it waits
        CHECK(again.outcome == admission_result::refused);
        CHECK(again.code == errc::duplicate_name);
        CHECK(code_of([&] { (void)arrive("other", 1_MiB, 1_pct); }) == errc::duplicate_name);  // the tenancy says so
    }
    CHECK(arrive("b", 1_MiB, 1_pct).who);
}

TEST_CASE_METHOD(planned, "tenants that name a device or reserve one don't go past the queue uncounted",
                 "[tenant][planner]") {
    auto x = arrive("x", 8_MiB, 50_pct, {{0}});
    const auto big = plan.arrive({.name = "big", .memory = 64_MiB, .devices = 2, .compute = 100_pct});
    REQUIRE(big.outcome == admission_result::queued);
    int past = 0;
    for (int i = 0; i < 12; ++i) {
        auto small = arrive("s" + std::to_string(i), 1_MiB, 50_pct, {{1}});
        if (!small.who) break;
        ++past;
        leave(small);
    }
    for (int i = 0; i < 12; ++i) {
        const auto r = plan.reserve({.name = "r", .memory = 1_MiB, .compute = 50_pct}, shared.now(), shared.now() + 1h);
        if (!r) break;
        ++past;
        CHECK(plan.cancel(r->id));
    }
    CHECK(past == 16);
    const auto held = arrive("held", 1_MiB, 50_pct, {{1}});
    CHECK(held.outcome == admission_result::queued);
    CHECK(held.why.missing == gpushare::shortage::turn);
    CHECK(held.why.asked == big.id);
    const auto late =
        plan.arrive({.name = "late", .memory = 60_MiB, .compute = 100_pct, .on = {{0}}}, shared.now() + 1h);
    CHECK(late.outcome == admission_result::queued);
    leave(x);
    auto now = plan.advance();
    REQUIRE(now.size() == 1);
    CHECK(now[0].name == "big");
    CHECK(plan.withdraw(held.id));
    CHECK(plan.withdraw(late.id));
}

TEST_CASE_METHOD(planned, "shares are planned level by level, as the tenancy promises them", "[tenant][planner]") {
    const auto of = [](const char* name, gpushare::share compute, int level, bytes memory = 1_MiB) {
        return tenant_spec{.name = name, .memory = memory, .compute = compute, .level = {level}, .on = {{0}}};
    };
    auto low = plan.arrive(of("low", 80_pct, 0)), high = plan.arrive(of("high", 80_pct, 1));
    REQUIRE((low.who && high.who));
    const auto waits = plan.arrive(of("waits", 30_pct, 1));
    CHECK(waits.outcome == admission_result::queued);
    CHECK(waits.why.missing == gpushare::shortage::device_share);
    CHECK(waits.why.left == 200);
    for (int i = 0; i < 30; ++i) {  // takes no share that it waits for
        auto other = plan.arrive(of("other", 20_pct, 0));
        REQUIRE(other.who);
        leave(other);
    }
    const auto later = plan.reserve(of("later", 100_pct, 2), shared.now(), shared.now() + 1h);
    REQUIRE(later);
    CHECK_FALSE(plan.reserve(of("more", 10_pct, 2), shared.now(), shared.now() + 1h));
    CHECK(plan.earliest({.name = "more", .memory = 1_MiB, .devices = 2, .compute = 10_pct, .level = {2}}, 1h) ==
          later->end);
    auto redeemed = plan.redeem(later->id, of("later", 100_pct, 2));
    leave(high);
    const auto now = plan.advance();
    REQUIRE(now.size() == 1);
    CHECK(now[0].name == "waits");
}

TEST_CASE_METHOD(planned, "a move for another level's room needs room at its own", "[tenant][planner]") {
    const auto of = [](const char* name, bytes memory, gpushare::share compute, int level, std::uint32_t on) {
        return tenant_spec{.name = name, .memory = memory, .compute = compute, .level = {level}, .on = {{on}}};
    };
    auto moves = plan.arrive(of("moves", 30_MiB, 60_pct, 1, 0)), stays = plan.arrive(of("stays", 8_MiB, 60_pct, 1, 1));
    auto beside = plan.arrive(of("beside", 20_MiB, 10_pct, 0, 1));
    REQUIRE((moves.who && stays.who && beside.who));
    const tenant_spec wanted{.name = "wanted", .memory = 40_MiB, .compute = 50_pct};
    auto all = plan.make_room(wanted, 1);
    REQUIRE(all);
    REQUIRE(all->size() == 1);
    CHECK(all->front().tenant == "beside");  // the others' level has no share left on the other device
    (void)plan.carry_out(all->front(), *beside.who, {});
    CHECK(plan.arrive(wanted).who);
}

TEST_CASE("the tenancy admits exactly the tenants that the planner's view takes", "[tenant][planner][property]") {
    std::uint64_t taken = 0, refused = 0;
    for (std::uint64_t nth = 0; nth < support::few(std::uint64_t{20}); ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        planned p;
        std::vector<tenancy::tenant> there;
        for (int step = 0; step < 60; ++step) {
            tenant_spec spec{.name = std::to_string(step),
                             .memory = 2_MiB * (1 + any.below(9)),
                             .devices = static_cast<std::uint32_t>(1 + any.below(2)),
                             .compute = gpushare::share::of_permille(100 * any.below(8)),
                             .level = {static_cast<int>(any.below(4)) - 1}};
            if (any.one_in(4) && !there.empty()) {
                auto& one = any.of(there);
                (void)one.close();
                p.plan.left(std::string(one.name()));
                std::swap(one, there.back());
                there.pop_back();
            }
            (void)p.shared.remeasure();
            const bool fits = !p.plan.free(spec.level).why_not(gpushare::placement_of(spec));
            auto admitted = p.shared.try_admit(spec);
            CAPTURE(step, spec.memory.count(), spec.devices, spec.compute.permille(), spec.level.level);
            CHECK(fits == static_cast<bool>(admitted));
            ++(fits ? taken : refused);
            if (!admitted) continue;
            if (any.one_in(2)) {
                (void)admitted->close();
                auto again = p.plan.arrive(spec);
                REQUIRE(again.who);
                there.push_back(*std::move(again.who));
            } else {
                there.push_back(*std::move(admitted));
            }
        }
    }
    CHECK(taken > 0);
    CHECK(refused > 0);
}

TEST_CASE_METHOD(planned, "a tenant that makes others go overtakes waiting ones", "[tenant][planner]") {
    auto keeper = plan.arrive({.name = "keeper", .memory = 40_MiB, .compute = 10_pct, .level = {2}, .on = {{0}}});
    const auto big = plan.arrive({.name = "big", .memory = 128_MiB, .devices = 2, .compute = 10_pct, .level = {1}});
    REQUIRE(big.outcome == admission_result::queued);
    int rounds = 0;
    for (; rounds < 20; ++rounds) {
        auto victim = arrive("victim", 40_MiB, 10_pct, {{1}});
        if (!victim.who) break;
        const tenant_spec urgent{.name = "urgent", .memory = 40_MiB, .compute = 10_pct, .level = {1}};
        const auto notice = plan.preempt(urgent, 1ms);
        REQUIRE(notice);
        leave(victim);
        auto there = plan.take_place(*notice, urgent);
        (void)there.close();
        plan.left("urgent");
    }
    CHECK(rounds == 8);  // each the victim, and who made it go: of 16
}

TEST_CASE_METHOD(planned, "devices are drained, resumed and removed", "[tenant][planner]") {
    const auto soon_spec = tenant_spec{.name = "r", .memory = 8_MiB, .compute = 100_pct};
    const auto now = shared.now();
    const auto first = plan.reserve(soon_spec, now, now + 1h), second = plan.reserve(soon_spec, now, now + 1h);
    REQUIRE((first && second));
    CHECK(plan.cancel(second->id));
    const auto d = *first->where.devices.begin();
    CHECK(plan.unkept().empty());
    plan.drain(d);
    CHECK(plan.unkept().size() == 1);
    for (int i = 0; i < 3; ++i) {
        auto a = arrive("a", 1_MiB);
        REQUIRE(a.who);
        CHECK(a.who->spec().on[0] != d);
        leave(a);
    }
    auto named = arrive("named", 1_MiB, 10_pct, {d});
    CHECK(named.outcome == admission_result::queued);
    plan.resume(d);
    CHECK(plan.cancel(first->id));
    auto resumed = plan.advance();
    REQUIRE(resumed.size() == 1);
    CHECK(resumed[0].who->spec().on[0] == d);
    const auto third = plan.reserve(soon_spec, shared.now(), shared.now() + 1h);
    REQUIRE(third);
    const auto its = *third->where.devices.begin();
    n.faults(its).lose_device();
    (void)resumed[0].who->close(soon());
    plan.left("named");
    auto elsewhere = plan.redeem(third->id, soon_spec);  // it was promised a device, and gets another one
    CHECK(elsewhere.spec().on[0] != its);
    const auto other = elsewhere.spec().on[0];
    const auto waits = arrive("w", 1_MiB);
    plan.remove(other);
    CHECK(code_of([&] { plan.resume(other); }) == errc::no_device);
    CHECK(code_of([&] { plan.drain({7}); }) == errc::no_device);
    const auto gone = plan.advance();
    REQUIRE(gone.size() == 1);
    CHECK(gone[0].id == waits.id);
    CHECK(gone[0].outcome == admission_result::refused);
    (void)elsewhere.close(soon());
    plan.left("r");
}

TEST_CASE_METHOD(planned, "a reservation of several named devices is redeemed by who made it", "[tenant][planner]") {
    const tenant_spec wide{.name = "wide", .memory = 16_MiB, .compute = 50_pct, .on = {{0}, {1}}};
    const auto r = plan.reserve(wide, shared.now(), shared.now() + 1h);
    REQUIRE(r);
    CHECK(r->where.devices == gpushare::device_set{{0}, {1}});
    auto there = plan.try_redeem(r->id, wide);
    REQUIRE(there);
    CHECK(there->spec().on == wide.on);
    CHECK(there->spec().memory == 16_MiB);
    CHECK(plan.reserve({.name = "no such", .memory = 1_MiB, .on = {{64}}}, shared.now(), shared.now() + 1h).code() ==
          errc::no_device);
}

TEST_CASE_METHOD(planned, "a tenant that names devices gets its reservation on these, in its order",
                 "[tenant][planner]") {
    const auto until = shared.now() + 1h;
    const tenant_spec wide{.name = "wide", .memory = 16_MiB, .compute = 50_pct, .on = {{1}, {0}}};
    const auto both = plan.reserve(wide, shared.now(), until);
    REQUIRE(both);
    CHECK(plan.redeem(both->id, wide).spec().on == wide.on);
    plan.left("wide");

    tenant_spec one{.name = "one", .memory = 8_MiB, .compute = 50_pct, .on = {{0}}};
    const auto r = plan.reserve(one, shared.now(), until);
    REQUIRE(r);
    one.on = {{1}};
    CHECK(plan.try_redeem(r->id, one).code() == errc::invalid_specification);
    one.on = {{0}};
    n.faults({0}).lose_device();
    CHECK(plan.try_redeem(r->id, one).code() == errc::no_room);  // there would be room on the other
    one.on.clear();
    CHECK(plan.redeem(r->id, one).spec().on == std::vector<device_id>{{1}});
}

TEST_CASE_METHOD(planned, "a reservation on a drained device is redeemed elsewhere", "[tenant][planner]") {
    const tenant_spec spec{.name = "r", .memory = 8_MiB, .compute = 50_pct};
    const auto r = plan.reserve(spec, shared.now(), shared.now() + 1h);
    REQUIRE(r);
    const auto its = *r->where.devices.begin();
    const device_id other{1 - its.index};
    plan.drain(its);
    plan.drain(other);
    CHECK(plan.earliest(spec, 1ms) == gpushare::never);
    CHECK(plan.try_redeem(r->id, spec).code() == errc::no_room);
    plan.resume(other);
    CHECK(plan.redeem(r->id, spec).spec().on == std::vector{other});
}

TEST_CASE("a reservation isn't redeemed where an overdue tenant still is", "[tenant][planner]") {
    node n{modelled(3, 1)};
    told_tenancy shared{n};
    gpushare::tenant_planner<told_tenancy, gpushare::first_fit> plan{shared, gpushare::first_fit{}};
    const auto now = shared.now();
    const auto of = [](const char* name, std::vector<device_id> on) {
        return tenant_spec{.name = name, .memory = 40_MiB, .compute = 50_pct, .on = std::move(on)};
    };
    const auto brief = plan.reserve(of("brief", {{1}}), now, now + 1h);
    const auto r = plan.reserve(of("r", {}), now + 1h, now + 2h);
    REQUIRE((brief && r));
    REQUIRE(r->where.devices == gpushare::device_set{{0}});
    auto overstays = plan.redeem(brief->id, of("brief", {{1}}));
    shared.time += 1h;
    REQUIRE(plan.overdue() == std::vector<std::string>{"brief"});
    plan.drain({0});
    CHECK(plan.redeem(r->id, of("r", {})).spec().on == std::vector<device_id>{{2}});
}

TEST_CASE_METHOD(planned, "the place of a notice is for the tenant for which it was given", "[tenant][planner]") {
    auto a = plan.arrive({.name = "a", .memory = 48_MiB, .on = {{0}}}),
         b = plan.arrive({.name = "b", .memory = 56_MiB, .on = {{1}}});
    REQUIRE((a.who && b.who));
    const tenant_spec urgent{.name = "urgent", .memory = 40_MiB, .level = {1}};
    const auto notice = plan.preempt(urgent, 1ms);
    REQUIRE(notice);
    const auto its = *notice->added.devices.begin();
    leave(its == device_id{0} ? a : b);
    auto wrong = urgent;
    SECTION("larger") { wrong.memory = 48_MiB; }
    SECTION("of another level") { wrong.level = {2}; }
    SECTION("on another device") { wrong.on = {{1 - its.index}}; }
    SECTION("on more devices") { wrong.devices = 2; }
    CHECK(plan.try_take_place(*notice, wrong).code() == errc::invalid_specification);
    plan.drain(its);
    CHECK(plan.try_take_place(*notice, urgent).code() == errc::no_room);
    plan.resume(its);
    wrong = urgent;
    wrong.on = {its};
    CHECK(plan.take_place(*notice, wrong).spec().on == std::vector{its});
}

TEST_CASE_METHOD(planned, "room for a tenant that names its devices is on these devices", "[tenant][planner]") {
    const auto of = [](const char* name, bytes memory, int level, std::uint32_t on) {
        return tenant_spec{.name = name, .memory = memory, .compute = 10_pct, .level = {level}, .on = {{on}}};
    };
    SECTION("in time") {
        const auto r = plan.reserve(of("r", 64_MiB, 0, 0), shared.now(), shared.now() + 1h);
        REQUIRE(r);
        CHECK(plan.earliest(of("on it", 8_MiB, 0, 0), 1h) == r->end);
        CHECK(plan.earliest(of("beside it", 8_MiB, 0, 1), 1h) < r->end);
    }
    SECTION("by a notice") {
        auto first = plan.arrive(of("first", 40_MiB, 0, 0)), second = plan.arrive(of("second", 40_MiB, 0, 1));
        REQUIRE((first.who && second.who));
        CHECK_FALSE(plan.preempt(of("fits", 8_MiB, 1, 0), 1ms));
        const auto on = GENERATE(0U, 1U);
        const auto urgent = of("urgent", 40_MiB, 1, on);
        const auto notice = plan.preempt(urgent, 1ms);
        REQUIRE(notice);
        CHECK(notice->victims == std::vector<std::string>{on == 0 ? "first" : "second"});
        leave(on == 0 ? first : second);
        CHECK(plan.take_place(*notice, urgent).spec().on == urgent.on);
    }
    SECTION("by moves") {
        auto large = plan.arrive(of("large", 40_MiB, 0, 0)), small = plan.arrive(of("small", 20_MiB, 0, 1));
        REQUIRE((large.who && small.who));
        const auto wanted = of("wanted", 50_MiB, 0, GENERATE(0U, 1U));
        const auto moves = plan.make_room(wanted);
        REQUIRE(moves);
        REQUIRE(moves->size() == 1);
        (void)plan.carry_out(moves->front(), moves->front().tenant == "large" ? *large.who : *small.who, {});
        CHECK(plan.arrive(wanted).who);
    }
    SECTION("by a move to the device where it would fit as well") {
        auto busy = plan.arrive(of("busy", 20_MiB, 0, 0));
        REQUIRE(busy.who);
        const auto wanted = of("wanted", 60_MiB, 0, 0);
        CHECK_FALSE(plan.make_room(of("fits", 60_MiB, 0, 1)));
        const auto moves = plan.make_room(wanted);
        REQUIRE(moves);
        REQUIRE(moves->size() == 1);
        (void)plan.carry_out(moves->front(), *busy.who, {});
        CHECK(busy.who->spec().on == std::vector<device_id>{{1}});
        CHECK(plan.arrive(wanted).who);
    }
}

TEST_CASE("moves for a tenant that names its device leave the policy no other", "[tenant][planner]") {
    node n{modelled(3, 1)};
    tenancy shared{n};
    gpushare::tenant_planner<tenancy, gpushare::best_fit> plan{shared, gpushare::best_fit{}};
    auto both = plan.arrive({.name = "both", .memory = 60_MiB, .devices = 2, .compute = 10_pct, .on = {{0}, {1}}});
    auto third = plan.arrive({.name = "third", .memory = 30_MiB, .compute = 10_pct, .on = {{2}}});
    REQUIRE((both.who && third.who));
    const tenant_spec wanted{.name = "wanted", .memory = 40_MiB, .compute = 10_pct, .on = {{GENERATE(0U, 1U)}}};
    const auto moves = plan.make_room(wanted);
    REQUIRE(moves);
    REQUIRE(moves->size() == 1);
    CHECK_FALSE(moves->front().plan.to.devices.contains(wanted.on.front()));
    (void)plan.carry_out(moves->front(), *both.who, {});
    CHECK(plan.arrive(wanted).who);
}

}  // namespace planner_test
