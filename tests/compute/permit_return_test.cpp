// SPDX-License-Identifier: Apache-2.0
// A permit's holder returns its submission to the limiter without the mutex, and equal submissions
// of a batch return as one. Callers can't notice the difference.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"
#include "support/sharing_stream.hpp"
#include "support/threads.hpp"
#include "support/timed_device.hpp"

namespace permit_return_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::instant;
using gpushare::ns;
using support::in_good_time;
using support::manual_clock;
using support::sharing_stream;
using support::spin;
using support::steady;
using support::timed_device;

namespace {

struct setup {
    explicit setup(gpushare::limiter_options options = {}) : compute(options, clock) {}

    void enqueue(client_id c, int times, std::uint64_t key = 0, ns length = 50us) {
        for (int i = 0; i < times; ++i)
            REQUIRE(compute.enqueue(c, stream, [&](sharing_stream& s) { s.enqueue(length); }, instant::min(), {},
                                    {.key = key}) == errc::none);
    }
    /// What the device does from now on is known to take this long.
    void teach(client_id c, std::uint64_t key = 0, ns length = 50us) {
        for (int i = 0; i < 3; ++i) {
            enqueue(c, 1, key, length);
            finish();
            clock.advance(length);
        }
    }
    void finish(errc status = errc::none) {
        compute.poll();
        while (stream.manual().reach_next(status)) {
        }
        compute.poll();
    }

    manual_clock clock;
    sharing_stream stream;
    gpushare::compute_limiter<sharing_stream, manual_clock> compute;
};

}  // namespace

TEST_CASE("submissions of a batch that are alike count one by one, recorded or not", "[compute]") {
    const bool recorded = GENERATE(false, true);
    setup t;
    const auto c = t.compute.add({});
    t.teach(c);
    if (recorded) t.compute.record(64);
    t.enqueue(c, 10);
    CHECK(t.compute.usage(c).in_flight == 10);
    t.finish();
    const auto u = t.compute.usage(c);
    CHECK(u.in_flight == 0);
    CHECK(u.completed == 13);
    CHECK(u.failed == 0);
    CHECK(u.device_time == 13 * 50us);
    std::vector<gpushare::submission_record> records(64);
    records.resize(t.compute.take_records(records));
    CHECK(records.size() == (recorded ? 10 : 0));
    ns sum{};
    for (const auto& r : records) sum += r.device_time;
    CHECK(sum == (recorded ? 10 * 50us : 0us));
}

TEST_CASE("submissions of a batch that differ are charged as each was predicted", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    t.teach(c, 1, 20us);
    t.teach(c, 2, 80us);
    const auto before = t.compute.usage(c).device_time;
    for (int i = 0; i < 3; ++i) {  // in the order 1 1 2, so that two of each three are alike
        t.enqueue(c, 2, 1, 20us);
        t.enqueue(c, 1, 2, 80us);
    }
    t.finish();
    CHECK(t.compute.usage(c).device_time - before == 3 * 120us);
    CHECK(t.compute.usage(c).completed == 6 + 9);
    // What was learnt of each is still its own: with records, which say what each was charged.
    t.compute.record(64);
    t.enqueue(c, 1, 1, 20us);
    t.enqueue(c, 1, 2, 80us);
    t.finish();
    std::vector<gpushare::submission_record> r(64);
    REQUIRE(t.compute.take_records(r) == 2);
    CHECK(r[0].device_time == 20us);
    CHECK(r[1].device_time == 80us);
}

TEST_CASE("submissions of a batch that fail are failures in a row, each", "[compute]") {
    setup t{{.quarantine_after = 5}};
    const auto c = t.compute.add({});
    t.teach(c);
    t.enqueue(c, 10);
    t.finish(errc::invalid_specification);
    const auto u = t.compute.usage(c);
    CHECK(u.in_flight == 0);
    CHECK(u.failed == 10);
    CHECK(u.completed == 13);
    CHECK(u.device_time == 13 * 50us);
    const auto event = t.compute.take_event();
    REQUIRE(event);
    CHECK(event->what == gpushare::limiter_event::kind::quarantined);
    CHECK(event->failures == 5);
    CHECK_FALSE(t.compute.take_event());
}

TEST_CASE("submissions of a batch that is stuck are written off, and charged should it end", "[compute]") {
    setup t{{.stuck_after = 1s}};
    const auto c = t.compute.add({});
    t.teach(c);
    t.enqueue(c, 10);
    t.compute.poll();
    t.clock.advance(2s);
    t.compute.poll();
    CHECK(t.compute.usage(c).in_flight == 0);
    CHECK(t.compute.usage(c).failed == 10);
    CHECK(t.compute.usage(c).completed == 13);  // those that failed are over
    t.finish();
    CHECK(t.compute.usage(c).completed == 13);
    CHECK(t.compute.usage(c).device_time == 13 * 50us);
}

TEST_CASE("several that are alike end in the core as they do one by one", "[compute]") {
    for (std::uint64_t nth = 0; nth < 50; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        gpushare::limiter_core<> one_by_one{{.depth = 64}}, at_once{{.depth = 64}};
        std::vector<client_id> clients;
        for (int i = 0; i < 3; ++i) {
            const gpushare::client_settings s{.weight = gpushare::share::of_permille(100 + any.below(200))};
            clients.push_back(one_by_one.add(s));
            REQUIRE(at_once.add(s) == clients.back());
        }
        for (int step = 0; step < 100; ++step) {
            const auto n = static_cast<std::uint32_t>(1 + any.below(10));
            const auto c = clients[any.below(3)];
            const gpushare::submission_facts facts{.head = {.key = any.below(3)}};
            std::vector<gpushare::admission> granted;
            for (std::uint32_t i = 0; i < n; ++i) {
                one_by_one.arrive(c, {}, facts);
                at_once.arrive(c, {}, facts);
                const auto a = one_by_one.next({}), b = at_once.next({});
                REQUIRE(a);
                REQUIRE(b);
                CHECK(a->client == b->client);
                CHECK(a->predicted == b->predicted);
                granted.push_back(*a);
            }
            const ns each = ns{1000} * static_cast<int>(any.below(100));
            auto sum = granted.front();
            for (std::uint32_t i = 1; i < n; ++i) sum.predicted += granted[i].predicted;
            for (const auto& g : granted)
                (void)one_by_one.complete(g, {.took = each, .from = gpushare::charge::source::shared});
            (void)at_once.complete(
                sum, {.took = each * static_cast<int>(n), .from = gpushare::charge::source::shared, .times = n});
            CHECK(one_by_one.usage(c).device_time == at_once.usage(c).device_time);
            CHECK(one_by_one.usage(c).completed == at_once.usage(c).completed);
            CHECK(at_once.usage(c).in_flight == 0);
        }
        // Whom each would serve now tells that the policies know the same.
        for (int turn = 0; turn < 30; ++turn)
            for (const auto c : clients) {
                one_by_one.arrive(c, {});
                at_once.arrive(c, {});
            }
        for (int turn = 0; turn < 60; ++turn) {
            const auto a = one_by_one.next({}), b = at_once.next({});
            REQUIRE(a.has_value() == b.has_value());
            if (a) CHECK(a->client == b->client);
        }
    }
}

TEST_CASE("permits that are used in another order than they were taken end in the order of the stream", "[compute]") {
    gpushare::compute_limiter<support::manual_stream, manual_clock> compute{{.depth = 2}};
    const auto c = compute.add({});
    support::manual_stream s;
    auto first = compute.acquire(c).value(), second = compute.acquire(c).value();
    second.enqueue(s, [](support::manual_stream& to) { to.enqueue(10us); });
    first.enqueue(s, [](support::manual_stream& to) { to.enqueue(70us); });
    for (int points = 0; points < 2; ++points) REQUIRE(s.reach_next());
    CHECK(compute.usage(c).in_flight == 1);
    CHECK(compute.usage(c).device_time == 10us);
    while (s.reach_next()) {
    }
    CHECK(compute.usage(c).in_flight == 0);
    CHECK(compute.usage(c).device_time == 80us);
}

TEST_CASE("a permit whose stream can't be marked is still there, and may be used once it can", "[compute]") {
    setup t{{.depth = 3}};
    const auto c = t.compute.add({});
    auto before = t.compute.acquire(c).value(), p = t.compute.acquire(c).value(), behind = t.compute.acquire(c).value();
    const auto work = [](sharing_stream& s) { s.enqueue(50us); };
    for (int tries = 0; tries < 3; ++tries) {
        t.stream.capture(true);
        CHECK_THROWS_AS(p.enqueue(t.stream, work), std::runtime_error);
        t.stream.capture(false);
    }
    behind.enqueue(t.stream, work);
    p.enqueue(t.stream, work);
    before.enqueue(t.stream, work);
    CHECK(t.compute.usage(c).in_flight == 3);
    t.finish();
    CHECK(t.compute.usage(c).in_flight == 0);
    CHECK(t.compute.usage(c).completed == 3);
    CHECK(t.compute.usage(c).device_time == 150us);
}

TEST_CASE("nobody joins a batch whose end another thread is about to record", "[compute][threads]") {
    setup t;
    const auto c = t.compute.add({});
    t.teach(c, 1, 60us);
    t.teach(c, 2, 1us);
    t.enqueue(c, 7, 1, 60us);  // the next is the last that fits, and there would be room for a short one
    std::latch inside(1), both_inside(1), settled(1);
    std::jthread late([&] {
        inside.wait();
        (void)t.compute.enqueue(c, t.stream,
                                [&](sharing_stream& s) {
                                    both_inside.count_down();
                                    settled.wait();
                                    s.enqueue(1us);
                                },
                                gpushare::never, {}, {.key = 2});
    });
    CHECK(t.compute.enqueue(c, t.stream,
                            [&](sharing_stream& s) {
                                inside.count_down();
                                both_inside.wait();
                                s.enqueue(60us);
                            },
                            instant::min(), {}, {.key = 1}) == errc::none);
    t.stream.manual().reach_all();
    t.compute.poll();
    CHECK(t.compute.usage(c).in_flight == 1);
    settled.count_down();
    late.join();
    t.finish();
    CHECK(t.compute.usage(c).in_flight == 0);
    CHECK(t.compute.usage(c).completed == 6 + 9);
    CHECK(t.compute.usage(c).device_time == 3 * 61us + 8 * 60us + 1us);
}

TEMPLATE_TEST_CASE("a waiting thread misses no permit that comes back meanwhile", "[compute][threads]",
                   timed_device::stream, timed_device::sharing_stream) {
    const auto seed = support::seed(1);
    CAPTURE(seed);
    support::random any(seed);
    timed_device device;
    std::atomic<int> missed{0};
    for (int round = 0; round < 300; ++round) {
        gpushare::compute_limiter<TestType, steady> compute{{.depth = 1}};
        const auto c = compute.add({});
        TestType s(device);
        auto held = std::make_optional(compute.acquire(c).value());
        const auto early = any.below(3000), late = any.below(3000);
        const auto how = round % 3;
        support::together(2, [&](unsigned rank) {
            if (rank == 0) {
                spin(early);
                held->enqueue(s, [](TestType& to) { to.enqueue(1us); });
            } else {
                spin(late);
                if (how == 0) {
                    if (!compute.acquire(c, in_good_time())) ++missed;
                } else if (how == 1) {
                    if (!compute.close(c, in_good_time())) ++missed;
                } else {
                    const auto behind = compute.submit(c, s, [](TestType&) {}).value();
                    if (!behind.wait(in_good_time())) ++missed;
                }
            }
        });
        held.reset();
        if (how != 1 && !compute.close(c, in_good_time())) ++missed;
    }
    CHECK(missed == 0);
}

TEMPLATE_TEST_CASE("threads that land side by side lose nothing of what each has used", "[compute][threads]",
                   timed_device::stream, timed_device::sharing_stream) {
    const auto depth = GENERATE(1U, 2U, 6U);
    CAPTURE(depth);
    const auto seed = support::seed(2);
    CAPTURE(seed);
    timed_device device;
    gpushare::compute_limiter<TestType, steady> compute{{.depth = depth}};
    std::vector<client_id> clients;
    for (int i = 0; i < 2; ++i) clients.push_back(compute.add({.weight = 50_pct}));
    std::atomic<int> refused{0};
    support::together(4, [&](unsigned rank) {
        support::random any(seed + rank);
        TestType s(device);
        for (int i = 0; i < 200; ++i) {
            const auto work = [&](TestType& to) {
                if (any.below(2) == 0) spin(any.below(200));
                to.enqueue(ns{any.below(3) == 0 ? 1000 : 0});
            };
            if (compute.enqueue(clients[rank % 2], s, work, in_good_time()) != errc::none) ++refused;
        }
    });
    CHECK(refused == 0);
    for (const auto c : clients) {
        gpushare::client_usage account;
        CHECK(compute.close(c, in_good_time(), {}, &account));
        CHECK(account.completed == 400);
        CHECK(account.in_flight == 0);
        CHECK(account.failed == 0);
    }
}

}  // namespace permit_return_test
