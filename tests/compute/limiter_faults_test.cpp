// SPDX-License-Identifier: Apache-2.0
// The effects of one client's failures on that client, and the absence of effects on others.
#include <chrono>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"

namespace limiter_faults_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::instant;
using gpushare::limiter_event;
using gpushare::ns;
using support::manual_clock;
using support::manual_stream;

namespace {

using limiter = gpushare::compute_limiter<manual_stream, manual_clock>;
using kind = limiter_event::kind;

struct setup {
    explicit setup(gpushare::limiter_options options) : compute(options, clock) {}

    limiter::ticket submit(client_id c, manual_stream& s, ns length = 1ms) {
        return compute.submit(c, s, [length](manual_stream& to) { to.enqueue(length); }).value();
    }
    void finish_one(manual_stream& s, errc status = errc::none) {
        s.reach_next();
        s.reach_next(status);
        compute.poll();
    }

    manual_clock clock;
    manual_stream stream;
    limiter compute;
};

}  // namespace

TEST_CASE("a client that fails too often in a row is quarantined until it is pardoned", "[compute]") {
    setup t{{.depth = 1, .quarantine_after = 3}};
    const auto bad = t.compute.add({.weight = 50_pct, .name = "bad"}), good = t.compute.add({.weight = 50_pct});
    const auto fail = [&] {
        (void)t.submit(bad, t.stream);
        t.finish_one(t.stream, errc::kernel_failed);
    };
    fail();
    fail();
    (void)t.submit(bad, t.stream);
    t.finish_one(t.stream);  // one that works: the count begins anew
    fail();
    fail();
    CHECK_FALSE(t.compute.take_event());
    const auto third = t.submit(bad, t.stream), waiting = t.submit(bad, t.stream);
    t.finish_one(t.stream, errc::kernel_failed);
    CHECK(third.status() == errc::kernel_failed);
    REQUIRE(waiting.done());
    CHECK(waiting.status() == errc::quarantined);
    CHECK(t.compute.submit(bad, t.stream, [](manual_stream&) {}).code() == errc::quarantined);
    CHECK(t.compute.try_acquire(bad).code() == errc::quarantined);
    const auto e = t.compute.take_event();
    REQUIRE(e);
    CHECK(e->what == kind::quarantined);
    CHECK(e->client == bad);
    CHECK(e->name.view() == "bad");
    CHECK(e->failures == 3);
    CHECK_THROWS_WITH(third.rethrow(), "tenant 'bad': submission: the work failed on the device");

    const auto others = t.submit(good, t.stream);
    t.finish_one(t.stream);
    CHECK(others.status() == errc::none);

    CHECK(t.compute.pardon(bad) == errc::none);
    const auto again = t.submit(bad, t.stream);
    t.finish_one(t.stream);
    CHECK(again.status() == errc::none);
    CHECK(t.compute.close(bad));
    CHECK(t.compute.pardon(bad) == errc::closed);
}

TEST_CASE("a callable that throws counts as a failure", "[compute]") {
    setup t{{.depth = 1, .quarantine_after = 2}};
    const auto c = t.compute.add({});
    for (int i = 0; i < 2; ++i) {
        (void)t.compute.submit(c, t.stream, [](manual_stream&) { throw std::runtime_error("mine"); });
        t.finish_one(t.stream);
    }
    CHECK(t.compute.try_acquire(c).code() == errc::quarantined);
}

TEST_CASE("work that doesn't end fails its ticket, and leaves its slot to other work", "[compute]") {
    setup t{{.depth = 1, .stuck_after = 10ms}};
    manual_stream elsewhere(t.stream, {});
    const auto bad = t.compute.add({.weight = 50_pct}), good = t.compute.add({.weight = 50_pct});
    const auto stuck = t.submit(bad, t.stream), behind = t.submit(bad, t.stream);
    const auto others = t.submit(good, elsewhere);
    t.compute.poll();
    t.clock.advance(9ms);
    t.compute.poll();
    CHECK_FALSE(stuck.done());
    t.clock.advance(1ms);
    t.compute.poll();
    REQUIRE(stuck.done());
    CHECK(stuck.status() == errc::stuck);
    REQUIRE(behind.done());
    CHECK(behind.status() == errc::quarantined);
    const auto e = t.compute.take_event();
    REQUIRE(e);
    CHECK(e->what == kind::stuck);
    CHECK(e->client == bad);
    CHECK_FALSE(t.compute.take_event());
    elsewhere.reach_all();
    t.compute.poll();
    CHECK(others.status() == errc::none);
    SECTION("it is charged if it ends after all") {
        const auto before = t.compute.usage(bad);
        CHECK(before.completed == 1);  // it is over: it failed
        CHECK(before.failed == 1);
        t.stream.reach_next_at(instant{1s});
        t.stream.reach_next_at(instant{1s + 20ms});
        CHECK(t.compute.usage(bad).device_time == 20ms);
        CHECK(t.compute.usage(bad).completed == 1);  // not a second time
        CHECK(t.compute.usage(bad).failed == 1);
        CHECK(t.compute.close(bad));
    }
    SECTION("its client can go, and whoever comes in its place isn't charged for it") {
        CHECK(t.compute.close(bad));
        const auto next = t.compute.add({.weight = 50_pct});
        t.stream.reach_all();
        t.compute.poll();
        CHECK(t.compute.usage(next).device_time == 0ns);
        CHECK(t.compute.usage(next).in_flight == 0);
    }
    SECTION("its client can go, and a device that is lost isn't blamed on whoever comes in its place") {
        CHECK(t.compute.close(bad));
        const auto next = t.compute.add({.weight = 50_pct});
        CHECK(next.index == bad.index);
        (void)t.submit(good, elsewhere);
        t.finish_one(elsewhere, errc::device_lost);
        const auto told = t.compute.take_event();
        REQUIRE(told);
        CHECK(told->what == kind::device_lost);
        CHECK(told->client == good);
        CHECK_FALSE(t.compute.take_event());
    }
    SECTION("the limiter can go") {}
}

TEST_CASE("a wait for work that never ends comes to an end", "[compute]") {
    setup t{{.depth = 1, .stuck_after = 10ms}};
    const auto c = t.compute.add({});
    const auto stuck = t.submit(c, t.stream);
    t.stream.on_wait([&] { t.clock.advance(1ms); });
    CHECK(stuck.wait(t.clock.now() + 1s));
    CHECK(stuck.status() == errc::stuck);
    CHECK(t.clock.now() < instant{20ms});
}

TEST_CASE("a kernel that takes longer than its bound assumed raises an event", "[compute]") {
    setup t{{.depth = 1}};
    const auto declared = t.compute.add({.weight = 50_pct, .longest = 1ms});
    const auto learnt = t.compute.add({.weight = 50_pct});
    (void)t.submit(declared, t.stream, 1ms);
    t.finish_one(t.stream);
    (void)t.submit(learnt, t.stream, 2ms);  // nothing was known of it
    t.finish_one(t.stream);
    CHECK_FALSE(t.compute.take_event());
    CHECK(t.compute.wait_bound() == 2ms);
    (void)t.submit(declared, t.stream, 5ms);
    t.finish_one(t.stream);
    const auto e = t.compute.take_event();
    REQUIRE(e);
    CHECK(e->what == kind::overran);
    CHECK(e->client == declared);
    CHECK(e->took == 5ms);
    CHECK(e->bound == 1ms);
    CHECK(t.compute.wait_bound() == 5ms);  // and published from now on
    (void)t.compute.submit(learnt, t.stream, [](manual_stream& s) { s.enqueue(3ms); }, {.key = 7});
    t.finish_one(t.stream);
    CHECK(t.compute.take_event()->key == 7);
}

TEST_CASE("of the events that no thread takes, the limiter keeps the latest ones", "[compute]") {
    setup t{{.depth = 1, .quarantine_after = 0}};
    const auto c = t.compute.add({.longest = 1us});
    for (int i = 1; i <= 100; ++i) {
        (void)t.submit(c, t.stream, ns{1ms} * i);
        t.finish_one(t.stream);
    }
    CHECK(t.compute.events_dropped() == 36);
    CHECK(t.compute.take_event()->took == 37ms);
    int kept = 1;
    while (t.compute.take_event()) ++kept;
    CHECK(kept == 64);
}

TEST_CASE("a lost device raises an event for each client with work in flight, and admits no more work", "[compute]") {
    gpushare::host::node node({.devices = 2, .timing = gpushare::host::timing::modelled});
    using host_limiter = gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock>;
    host_limiter broken({.depth = 2});
    const auto a = broken.add({.weight = 30_pct}), b = broken.add({.weight = 30_pct}),
               idle = broken.add({.weight = 30_pct});
    auto s = node.make_stream({0}, {}, 1), s2 = node.make_stream({0}, {}, 2);
    const auto long_kernel = [](gpushare::host::stream& to) { to.enqueue(60s); };
    const auto of_a = broken.submit(a, s, long_kernel).value();
    const auto of_b = broken.submit(b, s2, long_kernel).value();
    const auto waits = broken.submit(b, s2, long_kernel).value();
    node.faults({0}).lose_device();
    CHECK(of_a.wait());
    CHECK(of_b.wait());
    CHECK(waits.wait());
    CHECK(of_a.status() == errc::device_lost);
    CHECK(of_b.status() == errc::device_lost);
    CHECK(waits.status() == errc::device_lost);
    std::set<std::uint32_t> named;
    while (const auto e = broken.take_event())
        if (e->what == kind::device_lost) named.insert(e->client.index);
    CHECK(named == std::set<std::uint32_t>{a.index, b.index});
    CHECK(broken.submit(idle, s, long_kernel).code() == errc::device_lost);
    CHECK(broken.acquire(idle).code() == errc::device_lost);

    // Recovery: everything comes to its end, accounts can be read, and another limiter, on a device
    // that works, goes on.
    gpushare::client_usage account;
    CHECK(broken.close(a, gpushare::never, {}, &account));
    CHECK(account.failed == 1);
    CHECK(broken.close(b));
    host_limiter next({.depth = 2});
    const auto again = next.add({});
    auto good = node.make_stream({1}, {}, 1);
    const auto ticket = next.submit(again, good, [](gpushare::host::stream& to) { to.enqueue(10us); }).value();
    CHECK(ticket.wait());
    CHECK(ticket.status() == errc::none);
}

TEST_CASE("an exception of a permit's kernel is reported with its client's name, whichever client had a permit before",
          "[compute]") {
    gpushare::host::node node({.devices = 1, .sms = 2});
    auto stream = node.make_stream(gpushare::device_id{0});
    gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock> compute;
    const auto chat = compute.add({.name = "chat"}), code = compute.add({.name = "code"});
    for (const auto c : {code, chat, code}) {
        auto p = compute.acquire(c).value();
        p.enqueue(stream, [](gpushare::host::stream& to) {
            to.launch({.blocks = 1}, [](auto&) { throw std::out_of_range("in the kernel"); });
        });
        CHECK(p.wait());
        CHECK(p.status() == errc::kernel_failed);
        CHECK_THROWS_WITH(p.rethrow(),
                          Catch::Contains("in the kernel") && Catch::Contains(c == chat ? "chat" : "code"));
    }
    CHECK(compute.usage(code).failed == 2);
    CHECK(compute.close(code));
    CHECK(compute.close(chat));
}

TEST_CASE("of several reasons to refuse work, the limiter reports the one that lasts longest", "[compute]") {
    setup t{{.depth = 1, .quarantine_after = 1}};
    const auto bad = t.compute.add({.weight = 50_pct}), other = t.compute.add({.weight = 50_pct});
    const auto told = [&] { return t.compute.submit(bad, t.stream, [](manual_stream&) {}).code(); };
    (void)t.submit(bad, t.stream);
    t.finish_one(t.stream, errc::submission_failed);
    CHECK(told() == errc::quarantined);
    CHECK(t.compute.sleep(bad, gpushare::never, {}, gpushare::while_asleep::refuse));
    CHECK(told() == errc::asleep);
    (void)t.submit(other, t.stream);
    t.finish_one(t.stream, errc::device_lost);
    CHECK(told() == errc::device_lost);
    CHECK(t.compute.close(bad));
    CHECK(told() == errc::closed);
}

}  // namespace limiter_faults_test
