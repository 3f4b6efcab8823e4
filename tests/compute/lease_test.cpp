// SPDX-License-Identifier: Apache-2.0
// Leases: a client that alone uses the device has the next of its short submissions let in without the limiter's mutex.
// Nobody must be able to tell, but by the clock.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/detail/lease.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"
#include "support/sharing_stream.hpp"
#include "support/threads.hpp"
#include "support/timed_device.hpp"

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::client_settings;
using gpushare::errc;
using gpushare::grant;
using gpushare::instant;
using gpushare::ns;
using gpushare::outcome;
using support::manual_clock;
using support::sharing_stream;
using support::spin;
using support::steady;
using support::timed_device;

/// Has no short way of its own, and so no leases.
struct long_way : gpushare::weighted_fair {};

/// Tells how often the mutex was taken for what came in by the short way: for each, or once for several.
struct counting : gpushare::weighted_fair {
    using fast_path_of = counting;
    void serve_alone(client_id c, ns cost, std::uint32_t n) noexcept {
        ++*served;
        gpushare::weighted_fair::serve_alone(c, cost, n);
    }
    int* served = nullptr;
};
static_assert(gpushare::has_fast_path<counting>);
static_assert(!gpushare::has_fast_path<long_way>);

void check_same(const gpushare::client_usage& a, const gpushare::client_usage& b) {
    CHECK(a.device_time == b.device_time);
    CHECK(a.longest == b.longest);
    CHECK(a.completed == b.completed);
    CHECK(a.failed == b.failed);
    CHECK(a.waiting == b.waiting);
    CHECK(a.in_flight == b.in_flight);
}

/// One client, on one stream, whose short submissions are known.
struct setup {
    explicit setup(gpushare::limiter_options options = {}) : compute(options, clock, policy()) {
        for (int i = 0; i < 3; ++i) {
            enqueue();
            finish();
        }
        served = 0;
    }

    template <class F>
    errc enqueue(F&& work, std::uint64_t key = 0) {
        return compute.enqueue(client, stream, work, instant::min(), {}, {.key = key});
    }
    void enqueue(int times = 1) {
        for (int i = 0; i < times; ++i) REQUIRE(enqueue([](sharing_stream& s) { s.enqueue(10us); }) == errc::none);
    }
    void finish(errc status = errc::none) {
        compute.poll();
        while (stream.line().reach_next(status)) {
        }
        clock.advance(10us);
        compute.poll();
    }
    [[nodiscard]] gpushare::client_usage usage() { return compute.usage(client); }

    int served = 0;
    [[nodiscard]] counting policy() {
        counting p;
        p.served = &served;
        return p;
    }
    manual_clock clock;
    sharing_stream stream;
    gpushare::compute_limiter<sharing_stream, manual_clock, counting> compute;
    client_id client = compute.add({.weight = 50_pct});
};

/// A thread that is enqueuing, and goes on when it is told to.
class one_inside {
public:
    explicit one_inside(setup& t)
        : thread_([this, &t] {
              (void)t.enqueue([&](sharing_stream& s) {
                  inside_.count_down();
                  told_.wait();
                  s.enqueue(10us);
              });
          }) {
        inside_.wait();
    }
    void go_on() {
        told_.count_down();
        thread_.join();
    }

private:
    std::latch inside_{1}, told_{1};
    std::jthread thread_;  // last: it uses the others
};

instant in_good_time() { return steady::now() + 20s; }

}  // namespace

TEST_CASE("a lease is for one client, timeline and kind, for a number and until a time", "[compute]") {
    gpushare::detail::lease leave;
    const client_id c{3, 7};
    constexpr std::uint64_t a = 11, b = 12;
    CHECK_FALSE(leave.take(c, a, 5, instant{1us}));
    leave.open({.client = c, .timeline = a, .key = 5, .each = 2us, .busy_until = instant{4us}, .until = instant{9us}},
               3);
    CHECK_FALSE(leave.take({3, 8}, a, 5, instant{1us}));
    CHECK_FALSE(leave.take({4, 7}, a, 5, instant{1us}));
    CHECK_FALSE(leave.take(c, b, 5, instant{1us}));
    CHECK_FALSE(leave.take(c, a, 6, instant{1us}));
    CHECK_FALSE(leave.take(c, a, 5, instant{9us}));
    CHECK(leave.take(c, a, 5, instant{1us}));
    CHECK(leave.busy_until() == instant{6us});
    CHECK(leave.take(c, a, 5, instant{6us}));
    CHECK_FALSE(leave.any_late());
    CHECK(leave.busy_until() == instant{8us});
    leave.give_back();
    CHECK(leave.collect() == 1);
    CHECK(leave.collect() == 0);
    SECTION("recalled with one left") { CHECK(leave.recall() == 2); }
    SECTION("recalled with none left") {
        CHECK(leave.take(c, a, 5, instant{8us} + 500ns));
        CHECK(leave.any_late());  // the device had nothing to do for 500 ns
        CHECK(leave.busy_until() == instant{10us} + 500ns);
        CHECK_FALSE(leave.take(c, a, 5, instant{2us}));
        CHECK(leave.recall() == 3);
        leave.give_back();
        CHECK(leave.collect() == 1);
    }
    CHECK_FALSE(leave.take(c, a, 5, instant{2us}));
    leave.give_back();
    CHECK(leave.collect() == 1);
    leave.open({.client = c, .timeline = a}, 1);
    CHECK_FALSE(leave.any_late());
    CHECK(leave.take(c, a, 0, instant{1us}));
    CHECK(leave.recall() == 1);
}

TEST_CASE("let in in advance or one by one: the same is let in, and the same is known of it", "[compute]") {
    std::size_t in_advance = 0;
    for (std::uint64_t nth = 0; nth < 60; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        const gpushare::limiter_options options{.depth = static_cast<std::uint32_t>(1 + any.below(4)),
                                                .horizon = 100us * static_cast<ns::rep>(1 + any.below(30))};
        gpushare::limiter_core<gpushare::weighted_fair> one(options);
        gpushare::limiter_core<long_way> other(options);
        struct tenant {
            client_id id;
            ns length;
        };
        std::vector<tenant> tenants;
        const auto micros = [&](std::uint64_t most) { return ns{1us} * static_cast<ns::rep>(1 + any.below(most)); };
        const auto settings = [&] {
            return client_settings{.weight = gpushare::share::of_permille(100 + any.below(200)),
                                   .level = {static_cast<std::int32_t>(any.one_in(8) ? 1 : 0)},
                                   .longest = any.one_in(3) ? micros(200) : ns{}};
        };
        const auto add = [&] {
            const auto s = settings();
            const auto c = one.add(s);
            REQUIRE(c == other.add(s));
            tenants.push_back({c, micros(60)});
        };
        add();
        add();
        std::vector<grant> in_one, in_other;
        instant now{1s};
        std::size_t at = 0;
        const auto let_in = [&](grant& g) {
            if (other.pass(g, tenants[at].id, now, nullptr)) return true;
            other.withdraw(tenants[at].id, now);
            return false;
        };
        for (int step = 0; step < 2000; ++step) {
            now += 1us;
            if (any.one_in(40)) at = any.below(tenants.size());
            if (any.one_in(300) && tenants.size() < 5) add();
            if (any.one_in(150)) {
                const auto s = settings();
                REQUIRE(one.change(tenants[at].id, s) == other.change(tenants[at].id, s));
            }
            grant a, b;
            const bool passed = one.pass(a, tenants[at].id, now, nullptr);
            if (!passed) one.withdraw(tenants[at].id, now);
            REQUIRE(passed == let_in(b));
            if (passed) {
                in_one.push_back(a);
                in_other.push_back(b);
                CHECK(a.bound == b.bound);
                CHECK(a.predicted == b.predicted);
                CHECK(a.may_share == b.may_share);
                grant each;
                const auto most = one.may_pass(each, tenants[at].id, 0);
                const auto n = static_cast<std::uint32_t>(any.below(most + std::uint64_t{1}));
                one.have_passed(each, n);
                in_advance += n;
                for (std::uint32_t i = 0; i < n; ++i) {
                    REQUIRE(let_in(b));
                    CHECK(each.predicted == b.predicted);
                    CHECK(each.bound == b.bound);
                    CHECK(b.may_share);
                    in_one.push_back(each);
                    in_other.push_back(b);
                }
            }
            while (!in_one.empty() && (!passed || any.one_in(2) || in_one.size() > 80)) {
                const auto i = any.one_in(4) ? any.below(in_one.size()) : 0;
                auto& length = std::ranges::find(tenants, in_one[i].client, &tenant::id)->length;
                if (any.one_in(100)) length = micros(60);
                constexpr std::array sources{outcome::source::own, outcome::source::alone, outcome::source::shared};
                const outcome o{.took = length, .failed = any.one_in(50), .from = any.of(sources)};
                one.complete(in_one[i], o, now);
                other.complete(in_other[i], o, now);
                in_one.erase(in_one.begin() + static_cast<std::ptrdiff_t>(i));
                in_other.erase(in_other.begin() + static_cast<std::ptrdiff_t>(i));
                if (passed) break;
            }
            REQUIRE(one.wait_bound() == other.wait_bound());
        }
        for (const auto& t : tenants) check_same(one.usage(t.id), other.usage(t.id));
    }
    CHECK(in_advance > 2000);  // none where clients of two levels are in all the time
}

TEST_CASE("with leases or without: the same is enqueued, recorded and charged", "[compute]") {
    for (std::uint64_t nth = 0; nth < 60; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        const gpushare::limiter_options options{.depth = static_cast<std::uint32_t>(1 + any.below(4)),
                                                .horizon = 100us * static_cast<ns::rep>(2 + any.below(12)),
                                                .quarantine_after = static_cast<std::uint32_t>(any.below(4))};
        manual_clock clock;
        int served = 0;
        counting count;
        count.served = &served;
        gpushare::compute_limiter<sharing_stream, manual_clock, counting> leased(options, clock, count);
        gpushare::compute_limiter<sharing_stream, manual_clock, long_way> plain(options, clock);
        std::array<sharing_stream, 2> a, b;
        std::vector<sharing_stream> gone;
        std::vector<client_id> clients;
        for (int i = 0; i < 2; ++i) {
            clients.push_back(leased.add({.weight = 50_pct}));
            REQUIRE(plain.add({.weight = 50_pct}) == clients.back());
        }
        const auto in_both = [&](auto f) {
            const auto one = f(leased, a), other = f(plain, b);
            REQUIRE(one == other);
        };
        int let_in = 0;
        std::size_t client = 0, stream = 0;
        std::uint64_t key = 0;
        for (int step = 0; step < 1500; ++step) {
            if (any.one_in(60)) client = any.below(2);
            if (any.one_in(60)) stream = any.below(2);
            if (any.one_in(30)) key = any.below(3);
            const auto length = 1us * static_cast<ns::rep>(1 + key * 4 + any.below(2));
            const bool throws = any.one_in(100), asks = any.one_in(60);
            const ns stated = any.one_in(10) ? 1us * static_cast<ns::rep>(1 + any.below(50)) : 0us;
            clock.advance(any.one_in(20) ? 200us : length * static_cast<ns::rep>(any.below(2)));
            CAPTURE(step, throws, asks, client, stream, key, let_in);
            in_both([&](auto& compute, auto& streams) {
                const auto in_flight = asks ? compute.usage(clients[client]).in_flight : 0;
                const auto work = [&](sharing_stream& s) {
                    if (asks) CHECK(compute.usage(clients[client]).in_flight == in_flight + 1);
                    s.enqueue(length);
                    if (throws) throw std::runtime_error("after it");
                };
                try {
                    return compute.enqueue(clients[client], streams[stream], work, instant::min(), {},
                                           {.key = key, .cost = stated});
                } catch (const std::runtime_error&) {
                    return errc::submission_failed;
                }
            });
            for (int more = 0; more < 20 && !throws; ++more) {  // nothing in between
                const auto idle = any.one_in(15) ? 300us : 0us;
                clock.advance(idle);
                in_both([&](auto& compute, auto& streams) {
                    return compute.enqueue(clients[client], streams[stream],
                                           [&](sharing_stream& s) { s.enqueue(idle + length); }, instant::min(), {},
                                           {.key = key});
                });
                ++let_in;
                if (any.one_in(10)) break;
            }
            const auto status = any.one_in(50) ? errc::submission_failed : errc::none;
            const bool quick = any.one_in(3);
            for (std::size_t i = 0; i < 2; ++i) REQUIRE(a[i].records() == b[i].records());
            for (std::size_t i = 0; i < 2; ++i)
                while (!quick || any.one_in(2)) {
                    const bool was = a[i].line().reach_next(status);
                    REQUIRE(was == b[i].line().reach_next(status));
                    if (!was) break;
                }
            if (any.one_in(10)) in_both([](auto& compute, auto&) { return compute.poll(), 0; });
            if (any.one_in(100))
                in_both([&](auto& compute, auto& streams) {  // another comes to lie where it was
                    gone.push_back(streams[stream]);
                    streams[stream] = sharing_stream(streams[stream], instant{});
                    return compute.usage(clients[0]).completed;
                });
            for (std::size_t i = 0; i < 2; ++i) REQUIRE(a[i].records() == b[i].records());
            if (any.one_in(200)) in_both([](auto& compute, auto&) { return compute.record(16), 0; });
            if (any.one_in(20)) in_both([](auto& compute, auto&) { return compute.record(0), 0; });
            if (any.one_in(20)) in_both([&](auto& compute, auto&) { return compute.pardon(clients[client]); });
        }
        for (const auto c : clients) check_same(leased.usage(c), plain.usage(c));
        CHECK(served < let_in);
    }
}

TEST_CASE("short submissions of a client that alone uses the device come in by leases", "[compute]") {
    setup t;
    t.enqueue(40);
    CHECK(t.served < 12);
    CHECK(t.usage().in_flight == 40);
    CHECK(t.served < 14);
    t.finish();
    CHECK(t.usage().completed == 43);
    CHECK(t.usage().device_time == 43 * 10us);
}

TEST_CASE("nothing comes in by a lease beside others' work, past the room there is, or where each is recorded",
          "[compute]") {
    const auto way = GENERATE(0, 1, 2, 3);
    CAPTURE(way);
    setup t{{.depth = 1, .horizon = way == 1 ? 60us : 1ms}};
    int expected = 20;
    if (way == 0) {  // another client waits
        const auto other = t.compute.add({.weight = 50_pct, .longest = 10ms});
        t.enqueue(4);
        (void)t.compute.submit(other, t.stream, [](sharing_stream& s) { s.enqueue(10us); });
        expected = 4;
    } else if (way == 1) {  // 60 us of 10 us each
        expected = 6;
    } else if (way == 2) {
        t.compute.record(64);
    } else {  // after which each would have to wait
        t.enqueue(5);
        t.clock.advance(1s);
        t.compute.poll();
        t.clock.advance(1s);
    }
    int came_in = way == 0 ? 4 : 0;
    for (int i = 0; i < 20; ++i) came_in += t.enqueue([](sharing_stream& s) { s.enqueue(10us); }) == errc::none ? 1 : 0;
    CHECK(came_in == expected);
    if (way == 2) CHECK(t.served >= 20);
    t.finish();
    t.finish();
    CHECK(t.usage().in_flight == 0);
}

TEST_CASE("a client that is closed between its permit and its place in the batch gets no lease", "[compute]") {
    // The clock is read in between, where another thread may do anything.
    struct hooked_clock {
        [[nodiscard]] instant now() const noexcept {
            if (--*reads == 0) (*then)();
            return time.now();
        }
        manual_clock time;
        std::shared_ptr<int> reads = std::make_shared<int>(0);
        std::shared_ptr<std::function<void()>> then = std::make_shared<std::function<void()>>();
    };
    const hooked_clock clock;
    gpushare::compute_limiter<sharing_stream, hooked_clock> compute({.take_turns = true}, clock);
    const auto c = compute.add({.weight = 50_pct});
    sharing_stream s;
    const auto enqueue = [&] {
        return compute.enqueue(
            c, s, [](sharing_stream& to) { to.enqueue(10us); }, instant::min());
    };
    for (int i = 0; i < 4; ++i) {
        CHECK(enqueue() == errc::none);
        compute.poll();
        s.line().reach_all();
        compute.poll();
    }
    for (int i = 0; i < 5; ++i) CHECK(enqueue() == errc::none);
    compute.poll();
    for (int i = 0; i < 3; ++i) CHECK(enqueue() == errc::none);
    (void)compute.resume_at();  // recalls
    const auto when = GENERATE(1, 2);
    *clock.reads = when;
    *clock.then = [&] { CHECK_FALSE(compute.close(c, instant::min())); };
    CHECK(enqueue() == (when == 1 ? errc::closed : errc::none));
    CHECK(enqueue() == errc::closed);
    s.line().reach_all();
    compute.poll();
    s.line().reach_all();
}

TEST_CASE("a request at a level of its own doesn't end leases for good", "[compute]") {
    setup t;
    REQUIRE(t.compute.begin_request(t.client, {5}) == errc::none);
    t.enqueue(3);
    t.compute.end_request(t.client, {5});
    t.finish();
    t.finish();
    t.served = 0;
    t.enqueue(40);
    CHECK(t.served < 12);
    t.finish();
}

TEST_CASE("a callable that can only be called as it is named comes in by a lease, too", "[compute]") {
    struct named {
        void operator()(sharing_stream& s) & { s.enqueue(10us); }
    } work;
    setup t;
    for (int i = 0; i < 10; ++i) CHECK(t.enqueue<named&>(work) == errc::none);
    t.finish();
    CHECK(t.usage().completed == 13);
}

TEST_CASE("what throws on a lease fails alone, and counts towards a quarantine", "[compute]") {
    setup t{{.quarantine_after = 3}};
    t.enqueue(10);
    const auto fail = [](sharing_stream&) { throw std::runtime_error("no kernel"); };
    for (int i = 0; i < 2; ++i) CHECK_THROWS_AS(t.enqueue(fail), std::runtime_error);
    t.enqueue(1);
    CHECK(t.usage().in_flight == 13);
    t.finish();
    t.finish();  // nobody joined a batch in which one had failed
    CHECK(t.usage().failed == 2);
    CHECK(t.usage().completed == 16);
    CHECK_FALSE(t.compute.take_event());
    t.enqueue(10);
    for (int i = 0; i < 3; ++i) CHECK_THROWS_AS(t.enqueue(fail), std::runtime_error);
    t.finish();
    t.finish();
    CHECK(t.usage().failed == 5);
    CHECK(t.enqueue([](sharing_stream&) {}) == errc::quarantined);
}

TEST_CASE("who is enqueuing on a lease is in flight, and waited for", "[compute][threads]") {
    setup t;
    t.enqueue(10);
    one_inside late(t);
    const auto served = t.served;
    CHECK(t.usage().in_flight == 11);
    CHECK(t.served == served + 1);  // it came in on a lease
    CHECK_FALSE(t.compute.close(t.client, instant::min()));
    t.finish();
    CHECK(t.usage().in_flight == 11);  // no point is behind what isn't enqueued yet
    late.go_on();
    t.finish();
    CHECK(t.usage().in_flight == 0);
    CHECK(t.usage().completed == 14);
    CHECK(t.compute.close(t.client, instant::min()));
}

TEST_CASE("while one is enqueuing on a lease others begin the next batch", "[compute][threads]") {
    const bool elsewhere = GENERATE(false, true);
    CAPTURE(elsewhere);
    setup t;
    t.enqueue(10);
    sharing_stream other(t.stream, {});
    one_inside late(t);
    for (int i = 0; i < 70; ++i)
        CHECK(t.compute.enqueue(
                  t.client, elsewhere ? other : t.stream, [](sharing_stream& s) { s.enqueue(10us); }, instant::min()) ==
              errc::none);
    late.go_on();
    for (int batches = 0; batches < 4; ++batches) {
        t.finish();
        other.line().reach_all();
        t.finish();
    }
    CHECK(t.usage().in_flight == 0);
    CHECK(t.usage().completed == 3 + 81);
}

TEST_CASE("a lease ends with what its client may do", "[compute]") {
    setup t;
    t.enqueue(10);
    const auto work = [](sharing_stream& s) { s.enqueue(10us); };
    SECTION("closed") {
        CHECK_FALSE(t.compute.close(t.client, instant::min()));
        CHECK(t.enqueue(work) == errc::closed);
    }
    SECTION("another stream") {
        sharing_stream other(t.stream, {});
        CHECK(t.compute.enqueue(t.client, other, work, instant::min()) == errc::none);
        CHECK(other.records() > 0);
    }
    SECTION("another kind, of which nothing is known") {
        const auto records = t.stream.records();
        CHECK(t.enqueue(work, 7) == errc::none);
        CHECK(t.stream.records() > records);
    }
    SECTION("a lost device") {
        t.finish(errc::device_lost);
        CHECK(t.enqueue(work) == errc::device_lost);
    }
}

TEST_CASE("threads that come in by leases beside others that recall them lose nothing", "[compute][threads]") {
    const auto seed = support::seed(3);
    CAPTURE(seed);
    timed_device device;
    gpushare::compute_limiter<timed_device::sharing_stream, steady> compute;
    const auto c = compute.add({.weight = 50_pct});
    timed_device::sharing_stream s(device);
    constexpr int each = 2000;
    std::atomic<int> refused{0}, thrown{0}, inconsistent{0};
    support::together(4, [&](unsigned rank) {
        support::random any(seed + rank);
        auto mine = s;  // the same timeline
        for (int i = 0; i < each; ++i) {
            if (rank == 3) {  // recalls
                if (any.one_in(4)) compute.poll();
                const auto u = compute.usage(c);
                if (u.in_flight > 3 * 128 || u.completed > 3 * std::uint64_t{each}) ++inconsistent;
                spin(any.below(4000));
                continue;
            }
            const bool throws = any.one_in(100);
            const auto work = [&](timed_device::sharing_stream& to) {
                if (throws) throw std::runtime_error("not this one");
                to.enqueue(ns{0});
            };
            try {
                if (compute.enqueue(c, mine, work, in_good_time()) != errc::none) ++refused;
            } catch (const std::runtime_error&) {
                ++thrown;
            }
        }
    });
    CHECK(refused == 0);
    CHECK(inconsistent == 0);
    gpushare::client_usage account;
    CHECK(compute.close(c, in_good_time(), {}, &account));
    CHECK(account.completed == 3 * each);
    CHECK(account.failed == static_cast<std::uint64_t>(thrown));
    CHECK(account.in_flight == 0);
}
