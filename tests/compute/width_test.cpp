// SPDX-License-Identifier: Apache-2.0
// Tags: slow
// Width: work that fits side by side on a device runs side by side, a charge is duration times
// width, and a share is a share of the device's SM time. First the core alone, in virtual time.
// Then models of engines on a modelled device, with opaque calls of one block that take from 0.3 to
// 75 ms: by the device's own ledger, and the same in every run.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/ledger.hpp>
#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/drain.hpp"
#include "support/modelled_device.hpp"

namespace width_test {

using namespace std::chrono_literals;
using gpushare::admission;
using gpushare::client_id;
using gpushare::client_settings;
using gpushare::instant;
using gpushare::limiter_core;
using gpushare::ns;
using gpushare::share;
using gpushare::sm_width;
using support::drain;
using support::modelled_device;

namespace {

/// A submission of a quarter of the device, which lasts `length`, on a stream.
gpushare::submission_facts quarter(ns length, std::uint64_t stream) {
    return {.head = {.cost = length / 4}, .width = sm_width(0.25), .timeline = stream};
}

}  // namespace

static_assert(sm_width{}.part() == 1 && !sm_width{}.known());
static_assert(sm_width(0.25).part() == 0.25 && sm_width(0.25).known());
static_assert(sm_width(3).part() == 1 && !sm_width(-1).known());
static_assert(sm_width::of_sms(33, 132) == sm_width(0.25));
static_assert(!sm_width::of_sms(0, 0).known());

TEST_CASE("as many long ones are let in as fit side by side", "[compute][width]") {
    limiter_core<> core;
    std::vector<client_id> clients;
    for (std::uint64_t i = 0; i < 8; ++i) {
        clients.push_back(core.add({}));
        core.arrive(clients.back(), instant{}, quarter(25ms, i + 1));
    }
    const auto in = drain(core);
    REQUIRE(in.size() == 4);
    core.complete(in[1], 25ms / 4);
    CHECK(drain(core).size() == 1);
}

TEST_CASE("work that fills the device goes when some of it is free, and then nothing long goes beside it",
          "[compute][width]") {
    limiter_core<> core;
    const auto a = core.add({}), b = core.add({}), c = core.add({});
    core.arrive(a, instant{}, quarter(25ms, 1));
    core.arrive(b, instant{}, {.head = {.cost = 25ms}, .width = sm_width(1), .timeline = 2});
    CHECK(drain(core).size() == 2);
    core.arrive(c, instant{}, quarter(25ms, 3));
    CHECK(drain(core).empty());
}

TEST_CASE("the first of a kind may fill the device or a block of it: others go beside it, few others like it",
          "[compute][width]") {
    limiter_core<> core({.depth = 3});
    const auto a = core.add({}), b = core.add({});
    core.arrive(a, instant{}, {.head = {.cost = 25ms}, .timeline = 1});
    CHECK(drain(core).size() == 1);
    core.arrive(b, instant{}, quarter(25ms, 2));
    CHECK(drain(core).size() == 1);
    for (std::uint64_t i = 0; i < 4; ++i)
        core.arrive(core.add({}), instant{}, {.head = {.cost = 25ms}, .timeline = i + 3});
    CHECK(drain(core).size() == 1);  // three are in flight
}

TEST_CASE("of short ones as many again are let in ahead, beside others and behind their own", "[compute][width]") {
    limiter_core<> core;
    std::vector<client_id> clients;
    for (std::uint64_t i = 0; i < 12; ++i) {
        clients.push_back(core.add({.longest = 1ms}));
        core.arrive(clients.back(), instant{}, quarter(100us, i + 1));
    }
    CHECK(drain(core).size() == 8);
    limiter_core<> one;
    const auto only = one.add({.longest = 1ms});
    for (int i = 0; i < 12; ++i) one.arrive(only, instant{}, quarter(200us, 1));
    std::vector<admission> in;
    for (std::optional<admission> next; (next = one.next(instant{}, [](client_id) { return quarter(200us, 1); }));)
        in.push_back(*next);
    CHECK(in.size() == 3);  // until the stream has enough for half a millisecond
}

TEST_CASE("of what may take any time, one goes on each stream", "[compute][width]") {
    limiter_core<> core;
    const auto c = core.add({});
    const auto next = [&] { return core.next(instant{}, [](client_id) { return quarter(10us, 1); }); };
    for (int i = 0; i < 4; ++i) core.arrive(c, instant{}, quarter(10us, 1));
    CHECK(next());
    CHECK_FALSE(next());
}

TEST_CASE("a client that waits for a stream full of others' work goes on when the stream has room",
          "[compute][width]") {
    limiter_core<> core;
    const auto a = core.add({}), b = core.add({});
    core.arrive(a, instant{}, quarter(25ms, 1));
    const auto first = core.next(instant{});
    REQUIRE(first);
    core.arrive(b, instant{}, quarter(25ms, 1));
    CHECK_FALSE(core.next(instant{}));
    core.complete(*first, 25ms / 4);
    const auto second = core.next(instant{});
    REQUIRE(second);
    CHECK(second->client == b);
}

TEST_CASE("a client that waits for its own stream lets others by, and is owed the time that it falls behind",
          "[compute][width]") {
    limiter_core<> core;
    const auto a = core.add({.weight = share::of_permille(500)}), b = core.add({.weight = share::of_permille(500)});
    const auto first_of = [&](client_id c) { return quarter(25ms, c == a ? 1 : 2); };
    for (int i = 0; i < 3; ++i) core.arrive(a, instant{}, quarter(25ms, 1));
    const auto one = core.next(instant{}, first_of);
    REQUIRE(one);
    CHECK(one->client == a);
    CHECK_FALSE(core.next(instant{}, first_of));  // behind its own, which takes long
    core.arrive(b, instant{}, quarter(25ms, 2));
    const auto other = core.next(instant{}, first_of);
    REQUIRE(other);
    CHECK(other->client == b);
    core.complete(*one, 25ms / 4);
    const auto again = core.next(instant{}, first_of);
    REQUIRE(again);
    CHECK(again->client == a);
}

TEST_CASE("lower levels don't fill the room of a higher one, whatever their width", "[compute][width]") {
    limiter_core<> core;
    const auto low = core.add({}), high = core.add({.level = {1}});
    for (std::uint64_t i = 0; i < 6; ++i) core.arrive(low, instant{}, quarter(25ms, 1));
    std::uint64_t stream = 0;
    const auto next_low = [&](client_id) { return quarter(25ms, ++stream + 1); };
    std::size_t n = 0;
    while (core.next(instant{}, next_low)) ++n;
    CHECK(n == 4);
    core.arrive(high, instant{}, quarter(25ms, 100));
    const auto up = core.next(instant{});
    REQUIRE(up);
    CHECK(up->client == high);
}

TEST_CASE("kept SMs are free of long work below, and open to short work", "[compute][width][kept]") {
    limiter_core<> core;
    const auto high = core.add({.level = {1}, .keeps = sm_width(0.5)});
    std::vector<client_id> low;
    for (std::uint64_t i = 0; i < 6; ++i) {
        low.push_back(core.add({.longest = 25ms}));
        core.arrive(low.back(), instant{}, quarter(25ms, i + 1));
    }
    const auto in = drain(core);
    REQUIRE(in.size() == 2);
    SECTION("whatever the level above has there") {
        for (std::uint64_t i = 0; i < 2; ++i) core.arrive(high, instant{}, quarter(25ms, i + 10));
        const auto facts = [n = 10U](client_id) mutable { return quarter(25ms, ++n); };
        CHECK(core.next(instant{}, facts));
        CHECK(core.next(instant{}, facts));
        CHECK(drain(core).empty());
        core.complete(in[0], 25ms / 4);
        CHECK(drain(core).size() == 1);
    }
    SECTION("and a level above both keeps its own") {
        const auto top = core.add({.level = {2}, .keeps = sm_width(0.25)});
        core.complete(in[0], 25ms / 4);
        CHECK(drain(core).empty());  // 1/4 of four quarters is left to them
        for (std::uint64_t i = 0; i < 4; ++i) core.arrive(high, instant{}, quarter(25ms, i + 10));
        const auto facts = [n = 10U](client_id) mutable { return quarter(25ms, ++n); };
        CHECK(core.next(instant{}, facts));
        CHECK(core.next(instant{}, facts));
        CHECK_FALSE(core.next(instant{}, facts));
        core.arrive(top, instant{}, quarter(25ms, 20));
        CHECK(core.next(instant{}));
    }
    SECTION("short work goes there") {
        const auto brief = core.add({.weight = share::of_permille(1000), .longest = 100us});
        core.arrive(brief, instant{}, quarter(100us, 20));
        // The others are owed more: what waits of them has no room.
        for (const auto c : low)
            if (core.usage(c).waiting > 0) core.withdraw(c);
        CHECK(drain(core).size() == 1);
    }
    SECTION("until nobody keeps it") {
        core.change(high, {.level = {1}});
        CHECK(drain(core).size() == 2);
    }
}

TEST_CASE("short work goes to the kept part though the one whose turn it is can't have it", "[compute][width][kept]") {
    limiter_core<> core;
    (void)core.add({.level = {1}, .keeps = sm_width(0.5)});
    const auto pages = core.add({.longest = 25ms});
    const auto brief = core.add({.weight = share::of_permille(1), .longest = 100us});
    const auto half = [](ns length, std::uint64_t stream) {
        return gpushare::submission_facts{.head = {.cost = length / 2}, .width = sm_width(0.5), .timeline = stream};
    };
    core.arrive(brief, instant{}, half(100us, 3));
    const auto had = core.next(instant{});
    REQUIRE(had);
    core.complete(*had, 100us / 2);  // far beyond its share: from now on it isn't its turn
    for (std::uint64_t i = 0; i < 2; ++i) core.arrive(pages, instant{}, half(25ms, i + 1));
    const auto other_stream = [&](client_id) { return half(25ms, 2); };
    const auto first = core.next(instant{}, other_stream);
    REQUIRE(first);
    CHECK_FALSE(core.next(instant{}, other_stream));
    core.arrive(brief, instant{}, half(100us, 3));
    const auto beside = core.next(instant{}, other_stream);
    REQUIRE(beside);
    CHECK(beside->client == brief);
    core.complete(*beside, 100us / 2);
    CHECK_FALSE(core.next(instant{}, other_stream));  // the kept half is free, and not for this one
    core.complete(*first, 25ms / 2);
    const auto second = core.next(instant{}, other_stream);
    REQUIRE(second);
    CHECK(second->client == pages);
}

TEST_CASE("work that yields is kept off like other long work", "[compute][width][kept]") {
    limiter_core<> core;
    const auto high = core.add({.level = {1}, .keeps = sm_width(0.5)});
    const auto yields = core.add({.longest = 25ms, .yields_within = 100us});
    for (std::uint64_t i = 0; i < 2; ++i)
        core.arrive(yields, instant{}, {.head = {.cost = 25ms / 2}, .width = sm_width(0.5), .timeline = i + 1});
    CHECK(drain(core).size() == 1);
    CHECK(core.bound_of(high, 0, sm_width(0.5)) == 250us);
}

TEST_CASE("work below a level that keeps SMs leaves its objective in reach", "[compute][width][kept]") {
    limiter_core<> core;
    (void)core.add({.longest = 25ms});
    client_settings s{.level = {1}, .keeps = sm_width(0.5)};
    const auto high = core.add(s);
    s.longest = 1ms, s.slo = 2ms;
    CHECK(core.change(high, s) == gpushare::errc::none);
    s.slo = 3ms, s.keeps = {};
    CHECK(core.change(high, s) == gpushare::errc::slo_unreachable);
}

TEST_CASE("if a level keeps all SMs, or all but a useless rest, the levels below go on", "[compute][width][kept]") {
    for (const double keeps : {0.995, 1.0}) {
        CAPTURE(keeps);
        limiter_core<> core;
        (void)core.add({.level = {1}, .keeps = sm_width(keeps)});
        core.arrive(core.add({.longest = 25ms}), instant{}, {.head = {.cost = 25ms}, .timeline = 1});
        CHECK(drain(core).size() == 1);
        core.arrive(core.add({.longest = 25ms}), instant{}, quarter(25ms, 2));
        CHECK(drain(core).size() == 1);
    }
}

TEST_CASE("the bound of what fits on the kept part is that of short work, unless something can't be kept off",
          "[compute][width][kept]") {
    limiter_core<> core;
    const auto low = core.add({.longest = 75ms});
    const auto high = core.add({.level = {1}, .keeps = sm_width(0.5)});
    CHECK(core.bound_of(high) == 150ms);  // of its width nothing is known
    CHECK(core.bound_of(high, 0, sm_width(0.75)) == 150ms);
    CHECK(core.bound_of(high, 0, sm_width(0.5)) == 250us);  // what is short: a quarter of the horizon
    core.arrive(low, instant{}, {.head = {.cost = 25ms}, .width = sm_width(0.5), .timeline = 1});
    REQUIRE(core.next(instant{}));
    CHECK(core.bound_of(high, 0, sm_width(0.5)) == 250us);
    core.arrive(low, instant{}, {.head = {.cost = 75ms}, .width = sm_width(1), .timeline = 2});
    REQUIRE(core.next(instant{}));
    CHECK(core.bound_of(high, 0, sm_width(0.5)) == 150ms);
}

TEST_CASE("the bound is the longer one until what lay on the kept part before has ended", "[compute][width][kept]") {
    limiter_core<> core;
    const auto low = core.add({.longest = 75ms});
    std::vector<admission> in;
    for (std::uint64_t i = 0; i < 4; ++i) {
        core.arrive(low, instant{}, quarter(75ms, i + 1));
        const auto one = drain(core);
        REQUIRE(one.size() == 1);
        in.push_back(one.front());
    }
    const auto high = core.add({.level = {1}, .keeps = sm_width(0.25)});
    CHECK(core.bound_of(high, 0, sm_width(0.25)) == 150ms);
    core.complete(in[0], 75ms / 4);
    CHECK(core.bound_of(high, 0, sm_width(0.25)) == 250us);
}

TEST_CASE("the bound counts calls on the kept part that are predicted to be short but may be long",
          "[compute][width][kept]") {
    gpushare::detail::in_flight_budget budget{2, 20ms};
    const auto low = budget.open(gpushare::priority{0}), high = budget.open(gpushare::priority{1});
    budget.add_client(low);
    budget.add_client(high, sm_width(0.5));
    budget.raise_longest(low, {.longest = 50ms, .opaque = 50ms});
    const auto call_on = [&](std::uint64_t stream) {
        admission a;
        a.level_index = low;
        a.width = sm_width(0.5);
        a.timeline = stream;
        a.length = a.predicted = 1ms;
        a.longest = 50ms;
        a.known = true;
        return a;
    };
    for (int i = 0; i < 3; ++i)
        for (const std::uint64_t stream : {1U, 2U}) {
            const auto a = call_on(stream);
            REQUIRE(budget.room_for(a, false) == gpushare::detail::in_flight_budget::room::yes);
            (void)budget.enter(a);
        }
    CHECK(budget.bound_now(high, sm_width(0.5)) >= 150ms);  // three on each half of the device
}

TEST_CASE("the first of a kind goes by itself beside what is kept", "[compute][width][kept]") {
    limiter_core<> core;
    (void)core.add({.level = {1}, .keeps = sm_width(0.5)});
    for (std::uint64_t i = 0; i < 3; ++i)
        core.arrive(core.add({}), instant{}, {.head = {.cost = 25ms}, .timeline = i + 1});
    const auto in = drain(core);
    REQUIRE(in.size() == 1);
    core.complete(in[0], {.took = 25ms / 2, .width = sm_width(0.5)});
    CHECK(drain(core).size() == 1);
}

namespace {

/// A tenant with an engine: calls of so many blocks, each from one of its threads, which has a
/// stream and always calls again.
struct engine {
    ns length{};
    std::uint32_t blocks = 1;
    unsigned permille = 0;
    std::uint32_t threads = 1;
    ns gap{};      // not 0: each thread waits for a call, and submits the next one so much later
    ns stretch{};  // not 0: it yields so often
};

/// Calls of a level above, of a block, that come at random.
struct urgent_engine {
    ns length{}, mean_gap{};
    sm_width keeps{};
};

struct measured {
    double share_pp = 0, metering_pct = 0, idle_pct = 0;  // the worst of all
    ns longest_wait{}, bound{};  // of what is urgent: by the ledger, and as published at the end
    std::uint64_t broken = 0;    // bounds
};

/// Twenty seconds of these, by the device's ledger. An end is noticed 20 us later. `by_thread`: at
/// first all calls of one thread wait before those of the next.
measured run(std::uint32_t sms, const std::vector<engine>& engines, bool declared, bool by_thread = false,
             urgent_engine urgent = {}) {
    using stream = modelled_device::stream;
    using limiter = gpushare::compute_limiter<stream, modelled_device::clock>;
    constexpr ns to_notice = 20us;
    struct tenant {
        engine what;
        client_id id;
        std::deque<stream> streams;
    };
    bool over = false;  // outlives the limiter, which tells callers that it ends
    modelled_device device(sms);
    limiter compute({}, modelled_device::clock(device));
    std::deque<tenant> tenants;
    for (const auto& e : engines) {
        auto& t = tenants.emplace_back();
        t.what = e;
        t.id = compute.add({.weight = share::of_permille(e.permille), .yields_within = e.stretch});
        const auto tag = static_cast<std::uint32_t>(tenants.size() - 1);
        for (std::uint32_t i = 0; i < e.threads; ++i) t.streams.emplace_back(device, gpushare::priority{}, tag);
    }
    struct caller {
        const modelled_device* device;
        limiter* compute;
        tenant* of;
        std::size_t thread;
        sm_width width;
        const bool* over;
        std::multimap<instant, caller>* later;
        void operator()() const {
            const auto work = [e = of->what](stream& s) { s.launch(e.blocks, e.length, e.stretch); };
            const auto again = [self = *this](const gpushare::completion&) {
                if (*self.over) return;
                if (self.of->what.gap > 0ns)
                    self.later->emplace(self.device->now() + self.of->what.gap, self);
                else
                    self();
            };
            (void)compute->submit(of->id, of->streams[thread], work, {.width = width}, again);
        }
    };
    std::multimap<instant, caller> later;
    constexpr std::size_t ahead = 8;  // always more than are let in
    for (std::size_t nth = 0; nth < ahead; ++nth) {
        for (auto& t : tenants) {
            const auto width = declared ? sm_width::of_sms(t.what.blocks, sms) : sm_width{};
            for (std::size_t i = 0; i < t.streams.size(); ++i) {
                const auto call = nth * t.streams.size() + i;
                if (nth > 0 && t.what.gap > 0ns) continue;
                caller{&device, &compute, &t, by_thread ? call / ahead : i, width, &over, &later}();
            }
        }
    }
    const auto from = device.now() + 1s, to = from + 20s;
    const auto urgent_tag = static_cast<std::uint32_t>(engines.size());
    const bool has_urgent = urgent.length > 0ns;
    const auto above = has_urgent ? compute.add({.level = {1}, .keeps = urgent.keeps}) : client_id{};
    stream its(device, {1}, urgent_tag);
    std::vector<instant> arrivals;
    gpushare::sim::random any(7);
    auto next = has_urgent ? device.now() + any.exponential(urgent.mean_gap) : gpushare::never;
    const auto is_over = [&] { return device.now() >= to; };
    bool all_known = false;
    while (!is_over()) {
        if (device.now() >= from && !std::exchange(all_known, true))  // before, how long calls take is being learnt
            while (compute.take_event()) continue;
        const auto event =
            std::min({next, later.empty() ? gpushare::never : later.begin()->first, compute.resume_at()});
        if (!device.step(to_notice, event) && event == gpushare::never) FAIL("nothing runs, and nothing is let in");
        while (!later.empty() && later.begin()->first <= device.now()) later.extract(later.begin()).mapped()();
        if (device.now() >= next) {
            arrivals.push_back(device.now());
            const auto work = [l = urgent.length](stream& s) { s.launch(1, l); };
            REQUIRE(compute.submit(above, its, work, {.key = 1}));
            next = device.now() + any.exponential(urgent.mean_gap);
        }
        compute.poll();
    }
    over = true;
    while (device.step(to_notice)) compute.poll();

    auto blocks = device.blocks();
    measured worst;
    if (has_urgent) {
        auto end = instant{};
        std::size_t nth = 0;
        for (const auto& b : blocks) {  // in order of their ends, and these of one stream
            if (b.tag != urgent_tag) continue;
            // The first calls are predicted from nothing, and what is in flight then was let in for
            // nobody above.
            if (nth >= 50) worst.longest_wait = std::max(worst.longest_wait, b.start - std::max(arrivals[nth], end));
            end = b.end;
            ++nth;
        }
        REQUIRE(nth == arrivals.size());
        std::erase_if(blocks, [=](const auto& b) { return b.tag == urgent_tag; });
        worst.bound = compute.bound_of(above, 1);
        CHECK(compute.estimate(above, 1).bound == worst.bound);
        CHECK(compute.estimate(above, 1).longest == urgent.length);
        while (const auto e = compute.take_event())
            worst.broken += e->what == gpushare::limiter_event::kind::waited_beyond_bound ? 1 : 0;
    }
    const auto window = gpushare::host::sm_time_by_tag(blocks, from, to, sms);
    const auto in_all = gpushare::host::sm_time_by_tag(blocks, instant{}, gpushare::never, sms);
    REQUIRE(window.size() == engines.size());
    ns used{};
    for (const auto& t : window) used += t.busy;
    worst.idle_pct = 100 * (1 - std::chrono::duration<double>(used) / (to - from));
    for (std::size_t i = 0; i < engines.size(); ++i) {
        const double part = std::chrono::duration<double>(window[i].busy) / used;
        worst.share_pp = std::max(worst.share_pp, std::abs(100 * part - engines[i].permille / 10.0));
        const auto charged = compute.usage(tenants[i].id).device_time;
        const double off = std::chrono::duration<double>(charged - in_all[i].busy) / in_all[i].busy;
        worst.metering_pct = std::max(worst.metering_pct, 100 * std::abs(off));
    }
    return worst;
}

}  // namespace

TEST_CASE("engines of one-block calls: shares, metering, and no idle SM while anybody waits",
          "[compute][sweep][width][promises]") {
    for (const bool declared : {true, false}) {
        for (const std::uint32_t sms : {2U, 4U}) {
            const std::vector<std::vector<engine>> cases{
                {{75ms, 1, 300, sms}, {25ms, 1, 700, sms}},
                {{75ms, 1, 700, sms}, {300us, 1, 300, sms}},
                {{25ms, 1, 300, sms}, {300us, 1, 700, sms}},
                {{75ms, 1, 300, sms}, {25ms, 1, 500, sms}, {300us, 1, 200, sms}},
                {{300us, 1, 300, sms}, {300us, sms, 700, 2}},  // widths from a quarter to all
                {{300us, 1, 300, sms}, {300us, 2, 400, 2}, {300us, sms, 300, 2}},
                {{300us, sms, 300, 1}, {300us, sms, 700, 1}},
            };
            for (std::size_t i = 0; i < cases.size(); ++i) {
                CAPTURE(declared, sms, i);
                const auto worst = run(sms, cases[i], declared);
                CHECK(worst.share_pp <= 0.5);
                CHECK(worst.metering_pct <= 1);
                CHECK(worst.idle_pct <= 1);
            }
        }
    }
}

TEST_CASE("calls of a tenant's other threads go by one that waits for its stream",
          "[compute][sweep][width][promises]") {
    for (const bool declared : {true, false}) {
        for (const std::uint32_t sms : {2U, 4U}) {
            CAPTURE(declared, sms);
            for (const auto& engines : std::vector<std::vector<engine>>{{{75ms, 1, 300, sms}, {25ms, 1, 700, sms}},
                                                                        {{25ms, 1, 300, sms}, {300us, 1, 700, sms}}}) {
                const auto worst = run(sms, engines, declared, true);
                CHECK(worst.share_pp <= 0.5);
                CHECK(worst.metering_pct <= 1);
                CHECK(worst.idle_pct <= 1);
            }
        }
    }
}

TEST_CASE("kernels that fill the device among long calls of a block: shares and metering hold, and no SM is idle",
          "[compute][sweep][width][promises]") {
    for (const std::uint32_t sms : {2U, 4U}) {
        CAPTURE(sms);
        const auto worst = run(sms, {{75ms, 1, 300, sms}, {25ms, 2, 400, 2}, {300us, sms, 300, 2}}, false);
        CHECK(worst.share_pp <= 0.5);
        CHECK(worst.metering_pct <= 1);
        CHECK(worst.idle_pct <= 1);
    }
}

TEST_CASE("a tenant with one thread gets what one stream can use, and the rest isn't left idle", "[compute][width]") {
    const auto worst = run(2, {{25ms, 1, 300, 1}, {75ms, 1, 700, 1}}, false);
    CHECK(worst.idle_pct <= 1);
    CHECK(worst.share_pp == Approx(20).margin(0.5));  // half of two SMs each: neither can use more
    CHECK(worst.metering_pct <= 1);
}

TEST_CASE("a level that keeps an SM never waits for the long calls below it",
          "[compute][sweep][width][kept][promises]") {
    constexpr urgent_engine detector{.length = 300us, .mean_gap = 10ms};
    for (const std::uint32_t sms : {2U, 4U}) {
        CAPTURE(sms);
        const std::vector<engine> engines{{75ms, 1, 300, sms}, {25ms, 1, 700, sms}};
        auto keeps = detector;
        keeps.keeps = sm_width::of_sms(1, sms);
        const auto without = run(sms, engines, false, false, detector), with = run(sms, engines, false, false, keeps);
        CHECK(without.longest_wait > 15ms);
        CHECK(with.longest_wait == 0ns);
        CHECK(with.bound == 250us);
        CHECK(with.broken == 0);
        CHECK(with.share_pp <= 0.5);
        CHECK(with.metering_pct <= 1);
        CHECK(with.idle_pct == Approx(100.0 / sms).margin(2));  // what it costs: the SM, but for what is urgent
    }
    // Short work below may use it: less than the bound is waited, and little is idle.
    auto keeps = detector;
    keeps.keeps = sm_width(0.5);
    const auto brief = run(2, {{75ms, 1, 500, 2}, {100us, 1, 500, 2}}, false, false, keeps);
    CHECK(brief.longest_wait <= 250us);
    CHECK(brief.broken == 0);
    CHECK(brief.idle_pct <= 5);  // of which 3 are the urgent calls themselves
}

TEST_CASE("a level waits for the calls below it that yield until their next yield",
          "[compute][sweep][width][promises]") {
    constexpr urgent_engine detector{.length = 300us, .mean_gap = 10ms};
    for (const std::uint32_t sms : {2U, 4U}) {
        CAPTURE(sms);
        const auto m = run(sms, {{75ms, 1, 300, sms, {}, 5ms}, {25ms, 1, 700, sms, {}, 2ms}}, false, false, detector);
        CHECK(m.longest_wait <= 5ms);
        CHECK(m.bound == 5ms);
        CHECK(m.broken == 0);
        CHECK(m.share_pp <= 0.5);
        CHECK(m.metering_pct <= 1);
        CHECK(m.idle_pct <= 3.0 / sms + 1);  // 3 % of an SM are the urgent calls themselves
    }
}

TEST_CASE("a level that keeps an SM waits for what fills the device, of three widths",
          "[compute][sweep][width][kept][promises]") {
    // What fills the device can't be kept off: 300 us, and one behind it.
    const urgent_engine detector{.length = 300us, .mean_gap = 10ms, .keeps = sm_width::of_sms(1, 4)};
    const auto wide = run(4, {{75ms, 1, 300, 4, {}, 100us}, {25ms, 2, 400, 2, {}, 100us}, {300us, 4, 300, 2}}, false,
                          false, detector);
    CHECK(wide.longest_wait <= 600us);
    CHECK(wide.bound <= 600us);
    CHECK(wide.broken == 0);
    CHECK(wide.share_pp <= 0.5);
    CHECK(wide.metering_pct <= 1);
}

TEST_CASE("a client that waits for each call before the next gets its share beside one that always has work waiting",
          "[compute][width][promises]") {
    constexpr engine pages{75ms, 1, 300, 2}, tokens{25ms, 1, 700, 1, 200us};
    SECTION("on one SM") {
        const auto one = run(1, {pages, tokens}, false);
        CHECK(one.share_pp <= 0.5);
        CHECK(one.idle_pct <= 2);
        CHECK(one.metering_pct <= 1);
    }
    SECTION("on two, where it can use one of them") {
        const auto two = run(2, {pages, tokens}, false);
        CHECK(two.share_pp == Approx(20).margin(0.5));
        CHECK(two.idle_pct <= 2);
    }
    SECTION("on two, by two threads") {
        auto by_two = tokens;
        by_two.threads = 2;
        const auto two = run(2, {pages, by_two}, false);
        CHECK(two.share_pp <= 1);
        CHECK(two.idle_pct <= 2);
    }
    SECTION("not where it comes back late: little is idle") {
        auto late = tokens;
        late.gap = 5ms;
        CHECK(run(1, {pages, late}, false).idle_pct <= 0.5);
    }
    SECTION("and of two that do, each gets its share") {
        const auto both = run(1, {{75ms, 1, 300, 1, 200us}, tokens}, false);
        CHECK(both.share_pp <= 0.5);
        CHECK(both.idle_pct <= 2);
    }
}

TEST_CASE("on one SM an urgent call waits for one long call, not for those behind it", "[compute][width][promises]") {
    const std::vector<engine> engines{{75ms, 1, 300, 2}, {25ms, 1, 700, 2}};
    const auto m = run(1, engines, false, false, {.length = 300us, .mean_gap = 50ms});
    CHECK(m.longest_wait <= 76ms);
    CHECK(m.bound <= 80ms);
    CHECK(m.broken == 0);
    CHECK(m.idle_pct <= 2);  // of which 0.6 are the urgent calls
    CHECK(m.share_pp <= 0.5);
}

}  // namespace width_test
