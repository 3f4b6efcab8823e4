// SPDX-License-Identifier: Apache-2.0
// The gate in one step and in two, over streams that share points and over streams that don't: both
// ways behave the same.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"
#include "support/sharing_stream.hpp"

namespace two_step_gate_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::instant;
using gpushare::ns;
using support::manual_clock;
using support::manual_stream;
using support::sharing_stream;

namespace {

constexpr instant at_once = instant::min();

manual_stream& manual_of(manual_stream& s) { return s; }
manual_stream& manual_of(sharing_stream& s) { return s.manual(); }

enum class way { one_step, two_steps };

template <class Stream>
struct setup {
    using limiter = gpushare::compute_limiter<Stream, manual_clock>;

    explicit setup(gpushare::limiter_options options = {.depth = 1}) : compute(options, clock) {}

    /// A kernel through the gate; `called` counts those that came through.
    errc enqueue(client_id c, Stream& s, ns length, way how = way::one_step, instant deadline = at_once,
                 const gpushare::submit_options& o = gpushare::no_options) {
        const auto work = [&](Stream& to) {
            ++called;
            to.enqueue(length);
        };
        if (how == way::one_step) return compute.enqueue(c, s, work, deadline, {}, o);
        auto p = compute.acquire(c, deadline, {}, o);
        if (p) p->enqueue(s, work);
        return p.code();
    }
    void finish_all(Stream& s, errc status = errc::none) {
        for (int i = 0; i < 3; ++i) {  // what is open ends, and what follows it
            compute.poll();
            while (manual_of(s).reach_next(status)) {
            }
        }
        compute.poll();
    }

    manual_clock clock;
    Stream stream;
    limiter compute;
    int called = 0;
};

}  // namespace

TEST_CASE("one step through the gate decides, charges and records as two do", "[compute]") {
    for (std::uint64_t nth = 0; nth < 20; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        const gpushare::limiter_options options{.depth = static_cast<std::uint32_t>(1 + any.below(4)),
                                                .horizon = any.one_in(3) ? 200us : 1ms,
                                                .quarantine_after = 4};
        setup<manual_stream> one(options), two(options);
        std::vector<client_id> clients;
        for (int i = 0; i < 3; ++i) {
            const gpushare::client_settings s{.weight = 30_pct, .level = {static_cast<int>(any.below(2))}};
            clients.push_back(one.compute.add(s));
            REQUIRE(two.compute.add(s) == clients.back());
        }
        const auto both = [&](auto f) {
            const auto a = f(one, one.stream, way::one_step), b = f(two, two.stream, way::two_steps);
            REQUIRE(a == b);
        };
        for (int step = 0; step < 300; ++step) {
            const auto c = any.of(clients);
            const ns length{10'000 + static_cast<ns::rep>(any.below(60'000))};
            const std::uint64_t key = any.below(3);
            const ns passed{static_cast<ns::rep>(any.below(100'000))};
            const auto status = any.one_in(40) ? errc::kernel_failed : errc::none;
            switch (any.below(8)) {
                case 0:
                    both([&](auto& s, auto& on, way) {
                        (void)manual_of(on).reach_next(status);
                        s.compute.poll();
                        return s.compute.usage(c).completed;
                    });
                    break;
                case 1: both([&](auto&, auto& on, way) { return manual_of(on).reach_next(status); }); break;
                case 2:
                    both([&](auto& s, auto&, way) {
                        s.clock.advance(passed);
                        s.compute.pardon(c);
                        return 0;
                    });
                    break;
                case 3:
                    both([&](auto& s, auto& on, way how) {
                        return s.enqueue(c, on, length, how, at_once, {.key = key, .of_request = false});
                    });
                    break;
                default: both([&](auto& s, auto& on, way how) { return s.enqueue(c, on, length, how); });
            }
            both([&](auto& s, auto& on, way) { return std::pair(s.called, manual_of(on).open()); });
        }
        both([&](auto& s, auto& on, way) {
            s.finish_all(on);
            return s.called;
        });
        CHECK(one.called > 20);
        for (const auto c : clients)
            both([&](auto& s, auto&, way) {
                const auto u = s.compute.usage(c);
                CHECK(u.in_flight == 0);
                CHECK(u.waiting == 0);
                return std::tuple(u.completed, u.failed, u.device_time, u.longest);
            });
    }
}

// Where points are shared, one step looks at what is due first, and so may know a client's kernels
// one submission earlier.
TEST_CASE("in one step or in two, with shared points or not: the device's work is charged exactly once", "[compute]") {
    for (std::uint64_t nth = 0; nth < 40; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        setup<sharing_stream> t{{.depth = static_cast<std::uint32_t>(1 + any.below(4)), .horizon = 400us}};
        const std::vector clients{t.compute.add({.weight = 30_pct}), t.compute.add({.weight = 70_pct})};
        std::vector<ns> enqueued(2);
        std::vector<int> through(2);
        ns all{};
        for (int step = 0; step < 400; ++step) {
            const auto i = any.below(2);
            const ns length{20'000 + static_cast<ns::rep>(any.below(5))};  // shares are in proportion to predictions
            if (any.one_in(5)) (void)t.stream.manual().reach_next();
            if (any.one_in(9)) t.compute.poll();
            t.clock.advance(ns{static_cast<ns::rep>(any.below(30'000))});
            if (t.enqueue(clients[i], t.stream, length, any.one_in(2) ? way::one_step : way::two_steps) != errc::none)
                continue;
            enqueued[i] += length;
            ++through[i];
            all += length;
        }
        t.finish_all(t.stream);
        ns charged{};
        for (std::size_t i = 0; i < 2; ++i) {
            const auto u = t.compute.usage(clients[i]);
            CHECK(u.in_flight == 0);
            CHECK(u.completed == static_cast<std::uint64_t>(through[i]));
            CHECK(std::abs((u.device_time - enqueued[i]).count()) <= 5 * through[i]);
            charged += u.device_time;
        }
        CHECK(charged <= all);  // what may have had gaps is charged as predicted, if that is less
        CHECK((all - charged).count() <= 5 * t.called);
        CHECK(t.called > 50);
    }
}

TEMPLATE_TEST_CASE("a caller that doesn't get through the gate learns why, and its work isn't called", "[compute]",
                   manual_stream, sharing_stream) {
    setup<TestType> t{{.depth = 1, .queue_limit = 1, .quarantine_after = 1}};
    const auto c = t.compute.add({});
    SECTION("no such client") {
        CHECK(t.enqueue({7, 1}, t.stream, 1ms) == errc::closed);
        CHECK(t.enqueue({c.index, c.generation + 1}, t.stream, 1ms) == errc::closed);
        t.compute.close(c);
        CHECK(t.enqueue(c, t.stream, 1ms) == errc::closed);
        CHECK(t.called == 0);
        return;
    }
    REQUIRE(t.enqueue(c, t.stream, 10ms) == errc::none);
    REQUIRE(t.called == 1);
    SECTION("no room by the deadline") {
        CHECK(t.enqueue(c, t.stream, 1ms) == errc::deadline_exceeded);
        CHECK(t.compute.usage(c).waiting == 0);
    }
    SECTION("a full queue") {
        (void)t.compute.submit(c, t.stream, [](TestType& s) { s.enqueue(1ms); });
        CHECK(t.enqueue(c, t.stream, 1ms, way::one_step, gpushare::never) == errc::queue_full);
    }
    SECTION("a stop, requested before or during the wait") {
        std::stop_source stop;
        SECTION("before") { stop.request_stop(); }
        SECTION("during") {
            manual_of(t.stream).on_wait([&] {
                t.clock.advance(1ms);
                stop.request_stop();
                t.clock.advance(1s);
            });
        }
        const auto why = t.compute.enqueue(
            c, t.stream, [&](TestType&) { ++t.called; }, instant{} + 100ms, stop.get_token());
        CHECK((why == errc::stopped || why == errc::deadline_exceeded));
        CHECK(t.compute.usage(c).waiting == 0);
    }
    SECTION("quarantine") {
        t.finish_all(t.stream, errc::kernel_failed);
        CHECK(t.enqueue(c, t.stream, 1ms) == errc::quarantined);
    }
    CHECK(t.called == 1);
    t.finish_all(t.stream);
    t.compute.pardon(c);
    CHECK(t.enqueue(c, t.stream, 1ms) == errc::none);
    t.finish_all(t.stream);
}

TEMPLATE_TEST_CASE("an exception of the work passes through the gate, and its enqueued work is charged", "[compute]",
                   manual_stream, sharing_stream) {
    setup<TestType> t{{.depth = 2}};
    const auto c = t.compute.add({.longest = 50us});
    for (int i = 0; i < 4; ++i) {  // the last ones share points, where that is possible
        REQUIRE(t.enqueue(c, t.stream, 50us) == errc::none);
        if (i < 3) t.finish_all(t.stream);
    }
    CHECK_THROWS_AS(t.compute.enqueue(c, t.stream,
                                      [](TestType& s) {
                                          s.enqueue(50us);
                                          throw std::logic_error("holder");
                                      }),
                    std::logic_error);
    CHECK(t.compute.usage(c).in_flight == 2);
    t.finish_all(t.stream);
    CHECK(t.compute.usage(c).failed == 1);
    CHECK(t.compute.usage(c).completed == 5);
    CHECK(t.compute.usage(c).device_time == 5 * 50us);
    CHECK(t.enqueue(c, t.stream, 50us) == errc::none);
    t.finish_all(t.stream);
}

TEMPLATE_TEST_CASE("a caller that is turned away at the gate passes on the ends that it noticed", "[compute]",
                   manual_stream, sharing_stream) {
    setup<TestType> t{{.depth = 1, .quarantine_after = 1}};
    const auto bad = t.compute.add({.weight = 50_pct}), good = t.compute.add({.weight = 50_pct});
    REQUIRE(t.enqueue(bad, t.stream, 1ms) == errc::none);
    t.finish_all(t.stream, errc::kernel_failed);
    REQUIRE(t.enqueue(bad, t.stream, 1ms) == errc::quarantined);

    bool told = false;
    (void)t.compute
        .submit(
            good, t.stream, [](TestType& s) { s.enqueue(1ms); }, {}, [&](const gpushare::completion&) { told = true; })
        .value();
    t.compute.poll();
    while (manual_of(t.stream).reach_next()) {
    }
    t.clock.advance(1s);
    CHECK(t.enqueue(bad, t.stream, 1ms) == errc::quarantined);
    CHECK(told);  // by the one who was turned away: nobody else came by
}

TEST_CASE("the gate in front of a lost device says so at once", "[compute]") {
    setup<manual_stream> t{{.depth = 2}};
    const auto c = t.compute.add({.weight = 50_pct}), other = t.compute.add({.weight = 50_pct});
    REQUIRE(t.enqueue(c, t.stream, 1ms) == errc::none);
    while (t.stream.reach_next(errc::device_lost)) {
    }
    CHECK(t.enqueue(other, t.stream, 1ms) == errc::device_lost);
    CHECK(t.compute.acquire(other).code() == errc::device_lost);
    CHECK(t.called == 1);
}

namespace {

/// A stream whose driver has no answer for now, as while another thread frees memory.
struct slow_stream {
    struct driver {
        std::atomic<bool> busy{false};
        std::atomic<int> asked{0};  // and not answered yet
        std::function<void()> meanwhile;

        void answer() {
            if (meanwhile) meanwhile();
            asked.fetch_add(1);
            busy.wait(true);
            asked.fetch_sub(1);
        }
    };
    struct point {
        manual_stream::point at;
        driver* of = nullptr;

        [[nodiscard]] bool reached() const noexcept {
            if (of != nullptr) of->answer();
            return at.reached();
        }
        [[nodiscard]] errc status() const noexcept { return at.status(); }
        bool wait(instant deadline) const { return at.wait(deadline); }
        static bool wait_any(std::span<const point> points, instant deadline) {
            return !points.empty() && points.front().wait(deadline);
        }
        friend ns elapsed(const point& a, const point& b) noexcept { return elapsed(a.at, b.at); }
    };
    struct handle {
        slow_stream* of = nullptr;
        explicit operator bool() const noexcept { return of != nullptr; }
        [[nodiscard]] point record() const { return of->record(); }
    };

    [[nodiscard]] point record() { return {line.record(), &device}; }
    [[nodiscard]] handle share() const noexcept { return {const_cast<slow_stream*>(this)}; }
    [[nodiscard]] std::uint64_t timeline() const noexcept { return 1; }

    manual_stream line;
    driver device;
};
static_assert(gpushare::shared_timeline<slow_stream>);

}  // namespace

TEST_CASE("no thread at the gate waits for a driver that is busy with another thread's call", "[compute][threads]") {
    manual_clock clock;
    slow_stream s;
    gpushare::compute_limiter<slow_stream, manual_clock> compute({.depth = 4}, clock);
    const auto one = compute.add({}), other = compute.add({});
    const gpushare::submit_options brief{.cost = 10us};  // so that there is room for both
    compute.acquire(one, gpushare::never, {}, brief)->enqueue(s, [](slow_stream& to) { to.line.enqueue(10us); });
    compute.poll();  // its end is recorded
    s.device.busy = true;
    std::jthread polls([&] { compute.poll(); });
    while (s.device.asked == 0) std::this_thread::yield();
    std::jthread gives_up([&] {  // else a failure would be a hang
        for (int i = 0; i < 500 && s.device.busy; ++i) std::this_thread::sleep_for(10ms);
        s.device.busy = false;
        s.device.busy.notify_all();
    });
    {
        auto p = compute.acquire(other, gpushare::never, {}, brief);
        CHECK(p);
        CHECK(s.device.busy);
        CHECK(s.device.asked == 1);
        s.device.busy = false;
        s.device.busy.notify_all();
    }
    polls.join();
    while (s.line.reach_next()) {
    }
    compute.poll();
    CHECK(compute.usage(one).in_flight == 0);
    CHECK(compute.usage(one).device_time == 10us);
}

TEST_CASE("a thread's queries to the device end, although other threads enqueue more meanwhile", "[compute]") {
    manual_clock clock;
    slow_stream s;
    gpushare::compute_limiter<slow_stream, manual_clock> compute({.depth = 4}, clock);
    const auto c = compute.add({});
    const auto enqueue = [&] {
        return static_cast<bool>(compute.submit(c, s, [](slow_stream& to) { to.line.enqueue(1ms); }));
    };
    REQUIRE(enqueue());
    int asked = 0, enqueued = 1;
    s.device.meanwhile = [&] {  // as from another thread: the limiter's mutex is free
        if (++asked < 100) enqueued += enqueue() ? 1 : 0;
        s.line.reach_all();
    };
    compute.poll();
    CHECK(asked == 1);
    CHECK(enqueued == 2);
    s.device.meanwhile = {};
    s.line.reach_all();
    compute.poll();
    CHECK(compute.usage(c).in_flight == 0);
    CHECK(compute.usage(c).device_time == enqueued * 1ms);
}

TEMPLATE_TEST_CASE("a used permit says when its work is over, and how it went", "[compute]", manual_stream,
                   sharing_stream) {
    setup<TestType> s;
    const auto c = s.compute.add({.weight = 50_pct}), other = s.compute.add({.weight = 50_pct});
    auto p = s.compute.acquire(c);
    REQUIRE(p);
    CHECK_FALSE(p->done());
    CHECK_FALSE(p->wait());  // nothing to wait for
    p->enqueue(s.stream, [](TestType& to) { to.enqueue(3ms); });
    TestType beside(s.stream, {});
    bool came = false;
    const auto next = s.compute.submit(other, beside, [&](TestType&) { came = true; });
    CHECK_FALSE(p->poll());
    CHECK_FALSE(p->done());
    CHECK_FALSE(came);  // one may be in flight
    const auto status = GENERATE(errc::none, errc::kernel_failed);
    CAPTURE(status);
    s.clock.advance(5ms);
    while (manual_of(s.stream).reach_next(status)) {
    }
    CHECK_FALSE(p->done());  // nobody has looked
    CHECK(p->poll());
    CHECK(came);  // by the same call
    CHECK(p->done());
    CHECK(p->wait());
    CHECK(p->status() == status);
    CHECK(p->device_time() == 3ms);
    CHECK(p->finished_at() == s.clock.now());
    if (status == errc::none)
        CHECK_NOTHROW(p->rethrow());
    else
        CHECK_THROWS_AS(p->rethrow(), gpushare::operation_error);
}

TEMPLATE_TEST_CASE("a permit whose callable threw says so once the work before that is over", "[compute]",
                   manual_stream, sharing_stream) {
    setup<TestType> s;
    const auto c = s.compute.add({.weight = 50_pct});
    auto p = s.compute.acquire(c);
    const auto half = [](TestType& to) {
        to.enqueue(1ms);
        throw std::runtime_error("after the half of it");
    };
    CHECK_THROWS_AS(p->enqueue(s.stream, half), std::runtime_error);
    CHECK_FALSE(p->poll());
    s.finish_all(s.stream);
    CHECK(p->done());
    CHECK(p->status() == errc::submission_failed);
    CHECK(p->device_time() == 1ms);
}

TEST_CASE("a permit whose work got stuck says so, and its record is free when the work ends after all", "[compute]") {
    setup<manual_stream> s({.depth = 1, .stuck_after = 10ms});
    const auto c = s.compute.add({.weight = 50_pct});
    {
        auto p = s.compute.acquire(c);
        p->enqueue(s.stream, [](manual_stream& to) { to.enqueue(1ms); });
        CHECK_FALSE(p->poll());
        s.clock.advance(20ms);
        (void)p->poll();  // stands first on its stream from now on
        s.clock.advance(20ms);
        CHECK(p->poll());
        CHECK(p->status() == errc::stuck);
        s.finish_all(s.stream, errc::kernel_failed);
        CHECK(p->status() == errc::stuck);  // as it was told
    }
    CHECK(s.compute.usage(c).in_flight == 0);
    CHECK(s.compute.pardon(c) == errc::none);
    CHECK(s.enqueue(c, s.stream, 1ms) == errc::none);
}

TEMPLATE_TEST_CASE("permits that are kept for any time each report their own charge", "[compute]", manual_stream,
                   sharing_stream) {
    int num_told = 0;
    for (std::uint64_t nth = 0; nth < 40; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        setup<TestType> s({.depth = 1 + static_cast<std::uint32_t>(any.below(6))});
        const auto c = s.compute.add({.weight = 50_pct});
        using permit = typename setup<TestType>::limiter::permit;
        std::list<permit> kept;
        ns told{};
        bool each_told = true;
        for (int step = 0; step < 200; ++step) {
            s.clock.advance(ns{static_cast<ns::rep>(any.below(20'000))});
            if (any.one_in(3)) (void)manual_of(s.stream).reach_next();
            if (any.one_in(4)) s.compute.poll();
            if (any.one_in(5) && !kept.empty()) {
                each_told = each_told && kept.front().done();
                if (kept.front().done()) told += kept.front().device_time();
                kept.pop_front();
            }
            auto p = s.compute.try_acquire(c);
            if (!p || any.one_in(8)) continue;  // an unused one goes back
            p->enqueue(s.stream, [](TestType& to) { to.enqueue(10us); });
            const bool keep = nth % 2 == 0 || any.one_in(3);
            each_told = each_told && keep;
            if (keep) kept.push_back(*std::move(p));
        }
        s.finish_all(s.stream);
        for (const auto& p : kept) {
            CHECK(p.done());
            CHECK(p.status() == errc::none);
            told += p.device_time();
        }
        const auto u = s.compute.usage(c);
        CHECK(u.in_flight == 0);
        CHECK(told <= u.device_time);
        if (each_told) CHECK(told == u.device_time);
        num_told += each_told ? 1 : 0;
        kept.clear();
        CHECK(s.compute.close(c));
    }
    CHECK(num_told > 0);
}
}  // namespace two_step_gate_test
