// SPDX-License-Identifier: Apache-2.0
// Tenants that are put where a plan says: the queue, reservations, moves, and notices to go.
#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/placement/placement_policies.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant_planner.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace planner_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::admission_result;
using gpushare::device_id;
using gpushare::errc;
using gpushare::tenant_spec;
using node = gpushare::host::node;
using tenancy = gpushare::tenancy<node>;
using support::code_of;

namespace {

struct fixture {
    node n{{.devices = 2, .memory = 64_MiB, .sms = 1, .timing = gpushare::host::timing::modelled}};
    tenancy shared{n};
    gpushare::tenant_planner<tenancy, gpushare::bin_packing> plan{shared, gpushare::bin_packing{}, {.most_waiting = 1}};

    [[nodiscard]] auto arrive(const char* name, gpushare::share compute = 50_pct, int level = 0) {
        return plan.arrive(spec_of(name, compute, level));
    }
    static tenant_spec spec_of(const char* name, gpushare::share compute = 50_pct, int level = 0) {
        return {.name = name, .memory = 16_MiB, .compute = compute, .level = {level}};
    }
    static device_id where(const tenancy::tenant& t) { return t.spec().on.at(0); }
};

}  // namespace

TEST_CASE_METHOD(fixture, "who finds no room waits, and is admitted when somebody has left", "[tenant][planner]") {
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
    CHECK(plan.next_deadline() <= shared.now() + 1ms);
    while (shared.now() < plan.next_deadline()) {
    }
    const auto expired = plan.advance();
    REQUIRE(expired.size() == 1);
    CHECK(expired[0].outcome == admission_result::expired);
    const auto gone = arrive("gone");
    CHECK(plan.withdraw(gone.id));
    CHECK_FALSE(plan.withdraw(gone.id));
}

TEST_CASE_METHOD(fixture, "what the tenancy refuses is planned no more", "[tenant][planner]") {
    const auto before = plan.free();
    CHECK(code_of([&] { (void)plan.arrive({.name = "", .memory = 1_MiB}); }) == errc::invalid_specification);
    CHECK(plan.free() == before);
    {
        auto past = shared.admit({.name = "past", .memory = 64_MiB, .devices = 1, .on = {{0}}});
        auto other = shared.admit({.name = "other", .memory = 64_MiB, .devices = 1, .on = {{1}}});
        CHECK(code_of([&] { (void)arrive("a"); }) == errc::no_room);  // by what came past the plan
        CHECK(plan.free() == before);
    }
    auto a = arrive("a");
    CHECK(code_of([&] { (void)arrive("a"); }) == errc::duplicate_name);
    auto named = plan.arrive({.name = "named", .memory = 16_MiB, .compute = 60_pct, .on = {where(*a.who)}});
    CHECK(named.outcome == admission_result::refused);
    CHECK(named.code == errc::share_exceeded);
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
    CHECK(plan.overdue().empty());
    CHECK(plan.cancel(later->id));
    CHECK_FALSE(plan.cancel(later->id));
    CHECK(plan.cancel(other->id));

    const auto brief = plan.reserve(fixture::spec_of("brief", 1_pct), shared.now(), shared.now() + 20ms);
    REQUIRE(brief);
    auto overstays = plan.redeem(brief->id, fixture::spec_of("brief", 1_pct));
    while (shared.now() < brief->end) {
    }
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
    CHECK(plan.free() == before);
    CHECK(its[0].at == was);
    n.memory(to).fail_allocations(0, 0);
    const auto report = plan.carry_out(m, who, its, shared.now() + 10s);
    CHECK(report.closed.complete);
    CHECK(where(who) == to);
    CHECK(its[0].at != was);
    CHECK(static_cast<unsigned char*>(its[0].at)[999] == 7);
    CHECK(code_of([&] { (void)plan.carry_out(m, who, its); }) ==
          errc::invalid_specification);  // it isn't there any more
    CHECK(arrive("whole", 100_pct).outcome == admission_result::placed);
}

TEST_CASE_METHOD(fixture, "tenants of lower levels are told to go, and their place is kept", "[tenant][planner]") {
    auto a = arrive("a", 60_pct), b = arrive("b", 60_pct);
    REQUIRE((a.who && b.who));
    const auto urgent = fixture::spec_of("urgent", 80_pct, 1);
    CHECK_FALSE(plan.preempt(fixture::spec_of("small", 10_pct, 1), 1s));  // fits anyway
    CHECK_FALSE(plan.preempt(fixture::spec_of("equal", 80_pct), 1s));
    const auto notice = plan.preempt(urgent, 10s);
    REQUIRE(notice);
    REQUIRE(notice->victims.size() == 1);
    auto& victim = notice->victims[0] == "a" ? a : b;
    CHECK(plan.remaining(*notice) == notice->victims);
    CHECK(code_of([&] { (void)plan.take_place(*notice, urgent); }) == errc::no_room);
    auto beside = arrive("beside", 40_pct);  // fits on either device; one is being cleared
    REQUIRE(beside.who);
    CHECK(where(*beside.who) != where(*victim.who));
    victim.who->close();
    plan.left(victim.name);
    auto waits = arrive("waits", 40_pct);
    CHECK(waits.outcome == admission_result::queued);
    CHECK(plan.remaining(*notice).empty());
    auto there = plan.take_place(*notice, urgent);
    CHECK(there.name() == "urgent");
    CHECK(code_of([&] { (void)plan.take_place(*notice, urgent); }) == errc::invalid_specification);
    CHECK(plan.advance().empty());
    CHECK(plan.withdraw(waits.id));

    const auto other = plan.preempt(fixture::spec_of("more urgent", 80_pct, 2), 1s);
    REQUIRE(other);
    plan.call_off(*other);
    CHECK(plan.remaining(*other).size() == other->victims.size());
    CHECK(code_of([&] { (void)plan.take_place(*other, urgent); }) == errc::invalid_specification);
}

}  // namespace planner_test
