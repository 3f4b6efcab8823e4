// SPDX-License-Identifier: Apache-2.0
// The contract of every timeline, and of every queue on top of it. A backend is a
// default-constructible type with
//   typename stream                          the model under test
//   stream make_stream(priority)             on a device of its own making
//   void hold(stream&), void let_go(stream&) nothing enqueued in between is done before it is let go
//   gpushare::instant now()                  of the clock that its waits are on
#pragma once

#include <chrono>
#include <cstddef>
#include <stop_token>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include "support/catch.hpp"

namespace conformance {

/// While `s` is held, work on `t` gets done.
template <class Backend, gpushare::queue Stream>
void check_not_held_up(Backend& backend, Stream& s, Stream& t) {
    using namespace std::chrono_literals;
    backend.hold(s);
    s.enqueue(1us);
    t.enqueue(1us);
    const auto held = s.record();
    CHECK(t.record().wait(gpushare::never));
    CHECK_FALSE(held.reached());
    backend.let_go(s);
    CHECK(held.wait(gpushare::never));
}

template <class Backend>
requires gpushare::queue<typename Backend::stream>
void check_timeline() {
    using namespace gpushare;
    using namespace std::chrono_literals;
    using point = typename Backend::stream::point;
    Backend backend;
    auto s = backend.make_stream(priority{0});

    SECTION("a default-constructed point is reached") {
        const point p;
        CHECK(p.reached());
        CHECK(p.wait(instant::min()));
        CHECK(p.status() == errc::none);
        CHECK(elapsed(p, p) == 0ns);
    }
    SECTION("a wait for a point ends by a stop request, at its deadline, and when the point is reached") {
        struct {
            Backend& of;
            [[nodiscard]] instant now() const noexcept { return of.now(); }
        } const time{backend};
        std::stop_source source;
        backend.hold(s);
        s.enqueue(10us);
        const point p = s.record();
        CHECK_FALSE(wait_or_stop(p, time, backend.now(), source.get_token()));
        CHECK_FALSE(wait_or_stop(p, time, backend.now() + 3ms, source.get_token()));
        (void)source.request_stop();
        CHECK_FALSE(wait_or_stop(p, time, never, source.get_token()));
        backend.let_go(s);
        CHECK(wait_or_stop(p, time, never, std::stop_source{}.get_token()));
        CHECK(wait_or_stop(p, time, never, {}));
        CHECK(wait_or_stop(p, time, never, source.get_token()));  // it is reached, whatever was asked for
    }
    SECTION("a point is reached after what was enqueued before it, and its copies with it") {
        backend.hold(s);
        s.enqueue(10us);
        const point p = s.record();
        const point copy = p;
        CHECK_FALSE(p.reached());
        CHECK_FALSE(p.wait(instant::min()));
        CHECK_FALSE(p.wait(backend.now()));
        CHECK_FALSE(point::wait_any(std::vector{p, copy}, backend.now()));
        CHECK(p.status() == errc::none);
        backend.let_go(s);
        CHECK(p.wait(never));
        CHECK(p.reached());
        CHECK(copy.reached());
        CHECK(copy.wait(instant::min()));
        CHECK(p.status() == errc::none);
    }
    SECTION("points are reached in the order of the stream") {
        backend.hold(s);
        std::vector<point> points;
        for (int i = 0; i < 50; ++i) {
            if (i % 3 != 0) s.enqueue(1us);
            points.push_back(s.record());
        }
        backend.let_go(s);
        for (std::size_t i = points.size(); i-- > 0;) {
            CHECK(points[i].wait(never));
            for (std::size_t k = 0; k < i; ++k) REQUIRE(points[k].reached());
        }
        for (std::size_t i = 1; i < points.size(); ++i) REQUIRE(elapsed(points[i - 1], points[i]) >= 0ns);
    }
    SECTION("elapsed is device time, and has a sign") {
        const point a = s.record();
        s.enqueue(2ms);
        const point b = s.record();
        CHECK(b.wait(never));
        CHECK(elapsed(a, b) >= 2ms);
        CHECK(elapsed(b, a) == -elapsed(a, b));
        CHECK(elapsed(a, a) == 0ns);
    }
    SECTION("waiting for any needs one, of whichever stream") {
        auto t = backend.make_stream(priority{0});
        backend.hold(s);
        s.enqueue(1us);
        t.enqueue(1us);
        std::vector<point> points;
        for (int i = 0; i < 40; ++i) points.push_back(s.record());
        CHECK_FALSE(point::wait_any(points, backend.now()));
        points.push_back(t.record());
        CHECK(point::wait_any(points, never));
        CHECK(points.back().reached());
        CHECK_FALSE(points.front().reached());
        backend.let_go(s);
        CHECK(points.front().wait(never));
    }
    SECTION("a point survives its stream") {
        point p;
        {
            auto t = backend.make_stream(priority{0});
            t.enqueue(100us);
            p = t.record();
        }
        CHECK(p.wait(never));
        CHECK(p.status() == errc::none);
    }
}

template <class Backend>
requires gpushare::queue<typename Backend::stream>
void check_queue() {
    using namespace gpushare;
    using namespace std::chrono_literals;
    Backend backend;

    SECTION("a queue knows its priority, also when it was moved") {
        auto s = backend.make_stream(priority{3});
        CHECK(s.level() == priority{3});
        auto t = std::move(s);
        CHECK(t.level() == priority{3});
        t.enqueue(1us);
        CHECK(t.record().wait(never));
    }
    SECTION("lengths of one queue add up") {
        auto s = backend.make_stream(priority{0});
        const auto a = s.record();
        for (int i = 0; i < 10; ++i) s.enqueue(300us);
        s.enqueue(0ns);
        const auto b = s.record();
        CHECK(b.wait(never));
        CHECK(elapsed(a, b) >= 3ms);
    }
    SECTION("a held queue doesn't hold others") {
        auto s = backend.make_stream(priority{5}), t = backend.make_stream(priority{0});
        check_not_held_up(backend, s, t);
    }
}

}  // namespace conformance
