// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/host/host.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "host/gate.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace std::chrono_literals;
using host::point;
using host::timing;

TEST_CASE("a default-constructed point is reached", "[host]") {
    const point p;
    CHECK(p.reached());
    CHECK(p.wait(instant::min()));
    CHECK(p.status() == errc::none);
    CHECK(p.exception() == nullptr);
    CHECK(elapsed(p, p) == 0ns);
    CHECK(point::wait_any({&p, 1}, instant::min()));
    CHECK_FALSE(point::wait_any({}, never));
}

TEST_CASE("a wait ends at its deadline, and when the point is reached", "[host]") {
    gate g;
    host::node node{{.sms = 1}};
    const auto clock = node.get_clock();
    auto s = node.make_stream(device_id{0});
    s.launch({}, g.kernel());
    const auto p = s.record(), q = p;
    CHECK_FALSE(p.reached());
    CHECK_FALSE(p.wait(instant::min()));
    CHECK_FALSE(p.wait(clock.now()));
    const auto deadline = clock.now() + 3ms;
    CHECK_FALSE(p.wait(deadline));
    CHECK(clock.now() >= deadline);
    CHECK(p.status() == errc::none);
    CHECK(elapsed(p, q) == 0ns);
    g.open();
    CHECK(p.wait(never));
    CHECK(q.reached());
    CHECK(q.wait(instant::min()));
}

TEST_CASE("points of a stream are reached in order and have a distance", "[host]") {
    host::node node{{.sms = 2, .timing = timing::modelled}};
    auto s = node.make_stream(device_id{0});
    node.faults(device_id{0}).stall(s);
    s.enqueue(1ms);
    const auto a = s.record();
    s.enqueue(3ms);
    const auto b = s.record(), c = s.record();
    node.faults(device_id{0}).resume(s);
    CHECK(c.wait(never));
    CHECK(a.reached());
    CHECK(elapsed(a, b) == 3ms);
    CHECK(elapsed(b, a) == -3ms);
    CHECK(elapsed(b, c) == 0ns);
}

TEST_CASE("wait_any wakes at the first of many points on several devices", "[host]") {
    std::array<gate, 2> gates;
    host::node node{{.devices = 2, .sms = 1}};
    std::vector<host::stream> streams;
    std::vector<point> points;
    for (std::uint32_t d = 0; d < 2; ++d) {
        streams.push_back(node.make_stream(device_id{d}));
        streams[d].launch({}, gates[d].kernel());
        for (int i = 0; i < 20; ++i) points.push_back(streams[d].record());
    }
    CHECK_FALSE(point::wait_any(points, node.get_clock().now() + 2ms));
    std::thread opener{[&] { gates[1].open(); }};
    CHECK(point::wait_any(points, never));
    CHECK_FALSE(points.front().reached());
    CHECK(points.back().wait(never));
    const std::vector mixed{points.front(), point{}};
    CHECK(point::wait_any(mixed, instant::min()));
    opener.join();
    gates[0].open();
    for (const auto& p : points) CHECK(p.wait(never));
}

TEST_CASE("points of two nodes can't be waited for at once", "[host]") {
    gate g;
    host::node a{{.sms = 1}}, b{{.sms = 1}};
    auto s = a.make_stream(device_id{0}), t = b.make_stream(device_id{0});
    s.launch({}, g.kernel());
    t.launch({}, g.kernel());
    const std::vector points{s.record(), t.record()};
    CHECK_THROWS_AS(point::wait_any(points, never), operation_error);
    g.open();
}

TEST_CASE("many threads wait, and none is forgotten", "[host]") {
    const auto t = GENERATE(timing::real, timing::modelled);
    host::node node{{.devices = 2, .sms = 2, .timing = t}};
    std::atomic<int> finished{0};
    {
        std::vector<std::jthread> threads;
        for (std::uint32_t i = 0; i < 6; ++i) {
            threads.emplace_back([&, i] {
                auto s = node.make_stream(device_id{i % 2}, priority{static_cast<int>(i % 2)});
                std::vector<point> window(4);
                for (std::size_t n = 0; n < 500; ++n) {
                    s.launch({.blocks = 1 + i % 3, .hold = 3us}, [](auto&) {});
                    window[n % 4] = s.record();
                    if (n % 3 == 0 && !window[n % 4].wait(never)) return;
                    if (n % 7 == 0 && !point::wait_any(window, never)) return;
                    if (n % 5 == 0) (void)window[n % 4].wait(node.get_clock().now() + 10us);
                }
                if (s.record().wait(never)) ++finished;
            });
        }
    }
    CHECK(finished == 6);
}

TEST_CASE("deadlines that come with the points that are waited for, and many who wait for one", "[host]") {
    constexpr std::uint32_t waiting = 24;  // more than are woken at once
    host::node node{{.devices = 2, .sms = 2, .timing = timing::modelled}};
    auto s = node.make_stream(device_id{0}), t = node.make_stream(device_id{1});
    std::barrier round(waiting + 1);
    std::vector<point> points;  // the same ones in all threads; more than fit on their stacks
    std::atomic<int> wrong{0};
    std::vector<std::jthread> threads;
    for (std::uint32_t rank = 0; rank < waiting; ++rank)
        threads.emplace_back([&, rank] {
            for (int n = 0; n < 40; ++n) {
                round.arrive_and_wait();
                const auto few = std::span(points).subspan(rank % points.size(), 1);
                for (int i = 0; i < 4; ++i) {
                    const auto& some = (rank + static_cast<std::uint32_t>(i)) % 3 == 0 ? few : std::span(points);
                    const bool came =
                        point::wait_any(some, node.get_clock().now() + std::chrono::microseconds(10 * rank));
                    if (came && std::ranges::none_of(some, &point::reached)) ++wrong;
                }
                if (!points[rank % points.size()].wait(never)) ++wrong;
                round.arrive_and_wait();
            }
        });
    for (int n = 0; n < 40; ++n) {
        points.clear();
        for (int i = 0; i < 20; ++i) {
            auto& on = i % 2 == 0 ? s : t;
            on.enqueue(20us);
            points.push_back(on.record());
        }
        points.push_back(points.front());
        round.arrive_and_wait();
        round.arrive_and_wait();
    }
    threads.clear();
    CHECK(wrong == 0);
}

TEST_CASE("the status of a point covers the work since the one before it", "[host]") {
    const auto t = GENERATE(timing::real, timing::modelled);
    host::node node{{.sms = 2, .timing = t}};
    auto s = node.make_stream(device_id{0}), other = node.make_stream(device_id{0});
    int ran = 0;
    s.launch({}, [](auto&) {});
    const auto fine = s.record();
    s.launch({}, [](auto&) { throw std::runtime_error{"first"}; });
    s.launch({.blocks = 4}, [](auto&) { throw std::logic_error{"second"}; });
    s.launch({}, [&](auto&) { ++ran; });
    const auto failed = s.record(), again = s.record();
    s.launch({}, [&](auto&) { ++ran; });
    const auto after = s.record();
    other.launch({}, [](auto&) {});
    const auto elsewhere = other.record();
    CHECK(after.wait(never));
    CHECK(elsewhere.wait(never));
    CHECK(fine.status() == errc::none);
    CHECK(failed.status() == errc::kernel_failed);
    CHECK_THROWS_WITH(std::rethrow_exception(failed.exception()), "first");
    CHECK(again.status() == errc::kernel_failed);  // at the same place
    CHECK_THROWS_WITH(std::rethrow_exception(again.exception()), "first");
    CHECK(after.status() == errc::none);
    CHECK(elsewhere.status() == errc::none);
    CHECK(ran == 2);

    s.launch({}, [](auto&) { throw 5; });
    while (host::busy_union(node.ledger(device_id{0}).take().blocks, instant::min(), never) == 0ns) {
    }
    const auto late = s.record();  // perhaps on an idle stream
    CHECK(late.wait(never));
    CHECK(late.status() == errc::kernel_failed);
    CHECK_THROWS_AS(std::rethrow_exception(late.exception()), int);
}

TEST_CASE("a piece of work tells of its failure whoever records points on its stream", "[host][failures]") {
    using own_work = host::stream::own_work;
    const auto t = GENERATE(timing::real, timing::modelled);
    host::node node{{.sms = 2, .timing = t}};
    auto s = node.make_stream(device_id{0});
    const auto boom = [&](const char* what) { s.launch({}, [=](auto&) { throw std::runtime_error{what}; }); };
    const auto fine = [&] { s.launch({}, [](auto&) {}); };
    const auto check = [&](const auto& of, errc status) {
        CHECK(s.record().wait(never));
        CHECK(of.status() == status);
        CHECK((of.exception() != nullptr) == (status == errc::kernel_failed));
    };

    SECTION("who records points within it, and another thread, sees it too and takes nothing away") {
        boom("before");  // past all of it
        host::outcome all, next;
        std::vector<point> within;
        point theirs;
        {
            const own_work mine(s);
            all = mine.how_it_went();
            const auto begin = s.record();
            boom("first");
            for (int i = 0; i < 2; ++i) {
                within.push_back(s.record());
                std::thread([&] { theirs = s.record(); }).join();
                fine();
            }
            boom("second");
            within.push_back(s.record());
            check(begin, errc::none);
        }
        {
            const own_work mine(s);
            next = mine.how_it_went();
            fine();
            within.push_back(s.record());
        }
        const auto outside = s.record();
        fine();
        const auto later = s.record();
        check(all, errc::kernel_failed);
        CHECK_THROWS_WITH(std::rethrow_exception(all.exception()), "first");
        for (int i = 0; i < 3; ++i) {
            check(within[static_cast<std::size_t>(i)], errc::kernel_failed);
            CHECK_THROWS_WITH(std::rethrow_exception(within[static_cast<std::size_t>(i)].exception()), "first");
        }
        check(theirs, errc::kernel_failed);
        check(next, errc::none);
        check(within.back(), errc::none);
        check(outside, errc::kernel_failed);  // nobody before it has looked from outside
        CHECK_THROWS_WITH(std::rethrow_exception(outside.exception()), "before");
        check(later, errc::none);
    }
    SECTION("two threads that enqueue on one stream have each their own") {
        std::barrier turns(2);
        host::outcome bad, good;
        std::thread other([&] {
            const own_work mine(s);
            bad = mine.how_it_went();
            turns.arrive_and_wait();
            turns.arrive_and_wait();
            boom("of the other");
            turns.arrive_and_wait();
        });
        turns.arrive_and_wait();
        {
            const own_work mine(s);
            good = mine.how_it_went();
            turns.arrive_and_wait();
            fine();
            turns.arrive_and_wait();
        }
        other.join();
        check(bad, errc::kernel_failed);
        check(good, errc::none);
    }
    SECTION("of one that ended first, what it had enqueued is still its own") {
        host::outcome bad, helped, good;
        node.faults(device_id{0}).stall(s);
        std::optional<own_work> outer;
        outer.emplace(s);
        bad = outer->how_it_went();
        std::thread([&] {
            const own_work mine(s);
            good = mine.how_it_went();
            fine();
        }).join();
        {
            const own_work part(s);  // of this thread's
            helped = part.how_it_went();
            std::thread([&] { boom("of a helper"); }).join();
        }
        outer.reset();
        node.faults(device_id{0}).resume(s);
        check(bad, errc::kernel_failed);
        check(helped, errc::kernel_failed);
        check(good, errc::none);
    }
    SECTION("a stream may be gone, and its node, when it is asked") {
        host::outcome all;
        {
            host::node gone{{.sms = 1, .timing = t}};
            auto last = gone.make_stream(device_id{0});
            point end;
            {
                const own_work mine(last);
                all = mine.how_it_went();
                last.launch({}, [](auto&) { throw 7; });
                end = last.record();
            }
            CHECK(end.wait(never));
        }
        CHECK(all.status() == errc::kernel_failed);
        CHECK_THROWS_AS(std::rethrow_exception(all.exception()), int);
    }
    SECTION("what is lost is lost for all of it") {
        host::outcome all;
        node.faults(device_id{0}).stall(s);
        {
            const own_work mine(s);
            all = mine.how_it_went();
            fine();
            (void)s.record();
        }
        node.faults(device_id{0}).lose_device();
        check(all, errc::device_lost);
    }
}

TEST_CASE("exceptions that nobody reads are destroyed", "[host]") {
    static std::atomic<int> alive{0};
    struct loud {
        loud() { ++alive; }
        loud(const loud&) { ++alive; }
        ~loud() { --alive; }
    };
    {
        host::node node{{.sms = 2}};
        for (int i = 0; i < 50; ++i) {
            auto s = node.make_stream(device_id{0});
            s.launch({.blocks = 3}, [](auto&) { throw loud{}; });
            (void)s.record();
            s.launch({}, [](auto&) { throw loud{}; });
            const auto seen = s.record();
            s.launch({}, [](auto&) { throw loud{}; });
            {
                const host::stream::own_work mine(s), part(s);
                s.launch({}, [](auto&) { throw loud{}; });
                (void)s.record();
            }
            s.launch({}, [](auto&) {});
            CHECK(seen.wait(never));
        }
    }
    CHECK(alive == 0);
}

TEST_CASE("a wait ends when another thread ends it, before or meanwhile, or at its deadline", "[host]") {
    host::node node{{.sms = 1, .timing = timing::modelled}};
    auto s = node.make_stream(device_id{0});
    node.faults(device_id{0}).stall(s);
    s.launch({}, [](auto&) {});
    const std::array points{s.record(), s.record()};
    {
        point::interrupt early;
        early.raise();
        early.raise();
        CHECK_FALSE(point::wait_any(points, never, early));
    }
    for (int round = 0; round < 20; ++round) {
        point::interrupt by;
        std::jthread other([&] {
            if (round % 2 == 0) std::this_thread::sleep_for(200us);
            by.raise();
        });
        CHECK_FALSE(point::wait_any(points, never, by));
        other.join();  // it may be at it still
    }
    point::interrupt unused;
    CHECK_FALSE(point::wait_any(points, host::steady_clock::now() + 200us, unused));
    // Nobody is left in the points' queues.
    node.faults(device_id{0}).resume(s);
    CHECK(points[1].wait(never));
    point::interrupt late;
    CHECK(point::wait_any(points, never, late));
    // Reached and interrupted at once: whoever is first.
    for (int round = 0; round < 50; ++round) {
        s.launch({.hold = 20us}, gpushare::detail::empty_kernel{});
        const auto end = s.record();
        point::interrupt by;
        std::jthread other([&] { by.raise(); });
        (void)point::wait_any({&end, 1}, never, by);
        other.join();
        CHECK(end.wait(never));
    }
}

TEST_CASE("points and streams outlive their node", "[host]") {
    std::optional<host::stream> s;
    point reached, cut;
    {
        host::node node{{.sms = 1, .timing = timing::modelled}};
        s.emplace(node.make_stream(device_id{0}));
        s->launch({}, [](auto&) {});
        reached = s->record();
        CHECK(reached.wait(never));
        s->enqueue(1h);
        s->enqueue(1h);
        cut = s->record();
    }
    CHECK(reached.status() == errc::none);
    CHECK(cut.reached());
    CHECK(cut.status() == errc::device_lost);
    s->launch({}, [](auto&) {});
    CHECK(s->launch_cooperative({.blocks = 1}, [](auto&) {}) == errc::none);
    s->enqueue(1ms);
    s->wait(cut);
    const auto after = s->record();
    CHECK(after.wait(never));
    CHECK(after.status() == errc::device_lost);
    s.reset();
    const point copy = after;
    CHECK(copy.reached());
}
