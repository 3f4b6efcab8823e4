// SPDX-License-Identifier: Apache-2.0
// The manual timeline, on which other tests rely, keeps the promises of the timeline concept.
#include <array>
#include <chrono>
#include <thread>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"

using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using gpushare::ns;
using support::manual_point;
using support::manual_stream;
using namespace std::chrono_literals;

TEST_CASE("a manual point is reached when the test says so", "[support]") {
    manual_stream s;
    s.enqueue(5ms);
    const auto a = s.record();
    s.enqueue(2ms);
    s.enqueue(1ms);
    const auto b = s.record();
    CHECK_FALSE(a.reached());
    CHECK_FALSE(b.wait(instant{1h}));
    CHECK(s.open() == 2);

    s.reach(b);
    CHECK(a.reached());
    CHECK(b.wait(instant{}));
    CHECK(elapsed(a, b) == ns{3ms});
    CHECK(elapsed(b, a) == -ns{3ms});
    CHECK(a.at() == instant{5ms});
    CHECK(manual_point{}.reached());
    CHECK_FALSE(s.reach_next());
}

TEST_CASE("a manual point carries a status and an explicit device time", "[support]") {
    manual_stream s;
    const auto a = s.record(), b = s.record();
    s.reach_next_at(instant{7us});
    s.reach_next(errc::kernel_failed);
    CHECK(a.status() == errc::none);
    CHECK(b.status() == errc::kernel_failed);
    CHECK(b.at() == instant{7us});
}

TEST_CASE("a wait on a manual point lets the test's hook make progress", "[support]") {
    manual_stream s;
    manual_stream urgent(s, {2});
    CHECK(urgent.level().level == 2);
    const std::array points{s.record(), urgent.record()};
    s.on_wait([&] { urgent.reach_next(); });
    CHECK(manual_point::wait_any(points, never));
    CHECK_FALSE(points[0].reached());
    CHECK(points[1].reached());
}

TEST_CASE("a wait without a deadline ends when another thread reaches the point", "[support]") {
    manual_stream s;
    const auto p = s.record();
    std::jthread other([s]() mutable { s.reach_all(); });
    CHECK(p.wait(never));
}

TEST_CASE("a manual stream can fail to record once", "[support]") {
    manual_stream s;
    s.fail_next_record();
    CHECK_THROWS_AS(s.record(), std::runtime_error);
    CHECK(s.open() == 0);
    CHECK_FALSE(s.record().reached());
}
