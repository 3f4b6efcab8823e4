// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"

namespace submission_log_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::ns;
using gpushare::submission_record;
using support::manual_clock;
using support::manual_stream;

namespace {

constexpr instant start{};

struct setup {
    explicit setup(std::uint32_t depth = 1) : compute({.depth = depth}, clock) {}

    auto submit(gpushare::client_id c, ns length = 1ms, std::uint64_t key = 0) {
        return compute.submit(c, stream, [length](manual_stream& s) { s.enqueue(length); }, {.key = key}).value();
    }
    /// The device takes what is enqueued from `begin` to `end`; the limiter sees it `later`.
    void run(instant begin, instant end, ns later, errc status = errc::none) {
        stream.reach_next_at(begin);
        stream.reach_next_at(end, status);
        clock.advance(end + later - clock.now());
        compute.poll();
    }
    std::vector<submission_record> records() {
        std::array<submission_record, 3> some;
        std::vector<submission_record> all;
        for (auto n = compute.take_records(some); n != 0; n = compute.take_records(some))
            all.insert(all.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(n));
        return all;
    }

    manual_clock clock;
    manual_stream stream;
    gpushare::compute_limiter<manual_stream, manual_clock> compute;
};

}  // namespace

TEST_CASE("nothing is recorded unless it is asked for", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    (void)t.submit(c);
    t.run(start, start + 1ms, 0ms);
    CHECK(t.records().empty());
    (void)t.submit(c);
    t.compute.record(10);  // in flight already: when it was let in isn't known
    t.run(start + 1ms, start + 2ms, 0ms);
    CHECK(t.records().empty());
    (void)t.submit(c);
    t.compute.record(0);
    t.run(start + 2ms, start + 3ms, 0ms);
    CHECK(t.records().empty());
}

TEST_CASE("a record has the times of its submission, on the limiter's clock", "[compute]") {
    setup t;
    const auto c = t.compute.add({.tag = 5}), d = t.compute.add({.tag = 6});
    t.compute.record(10);
    t.clock.advance(10ms);
    (void)t.submit(c, 1ms, 77);
    t.clock.advance(200us);
    (void)t.submit(d);
    // Seen 300 us late: nothing tells how late, so the end counts as just then.
    t.run(start + 10ms, start + 11ms, 300us);
    // Seen at once, which tells that the first was seen late.
    t.run(start + 11300us, start + 12300us, 0us, errc::kernel_failed);
    (void)t.submit(c);
    t.run(start + 12300us, start + 13300us, 5ms);  // and this one as well

    const auto r = t.records();
    REQUIRE(r.size() == 3);
    CHECK(r[0].client == c);
    CHECK(r[0].tag == 5);
    CHECK(r[0].key == 77);
    CHECK(r[0].arrived == start + 10ms);
    CHECK(r[0].let_in == start + 10ms);
    CHECK(r[0].noticed == start + 11300us);
    CHECK(r[0].ended == start + 11300us);
    CHECK(r[0].began == start + 10300us);
    CHECK(r[0].device_time == 1ms);
    CHECK(r[0].status == errc::none);
    CHECK(r[1].client == d);
    CHECK(r[1].tag == 6);
    CHECK(r[1].arrived == start + 10200us);
    CHECK(r[1].let_in == start + 11300us);
    CHECK(r[1].ended == start + 12300us);
    CHECK(r[1].began == start + 11300us);
    CHECK(r[1].status == errc::kernel_failed);
    CHECK(r[2].noticed == start + 18300us);
    CHECK(r[2].ended == start + 13300us);
    CHECK(r[2].began == start + 12300us);
}

TEST_CASE("a point's time on the host's clock lies between admission and observation", "[compute]") {
    manual_stream s;
    const auto point_at = [&](instant at) {
        const auto p = s.record();
        s.reach_next_at(at);
        return p;
    };
    gpushare::detail::point_clock<manual_stream::point> clock;
    CHECK(clock.place(point_at(start + 1ms), start, start + 101ms) == start + 101ms);
    CHECK(clock.place(point_at(start + 2ms), start, start + 200ms) == start + 102ms);
    CHECK(clock.place(point_at(start + 3ms), start, start + 102500us) == start + 102500us);
    CHECK(clock.place(point_at(start + 4ms), start, start + 200ms) == start + 103500us);
    CHECK(clock.place(point_at(start + 5ms), start + 110ms, start + 200ms) == start + 110ms);  // clocks drift
    CHECK(clock.place(point_at(start + 6ms), start, start + 200ms) == start + 111ms);
    CHECK(clock.place(point_at(start + 5500us), start, start + 200ms) == start + 110500us);  // a stream beside it
}

TEST_CASE("the latest records are kept, and the others counted", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    t.compute.record(4);
    for (int i = 0; i < 10; ++i) {
        (void)t.submit(c);
        t.run(start + i * 1ms, start + (i + 1) * 1ms, 0ms);
    }
    CHECK(t.compute.records_lost() == 6);
    const auto r = t.records();
    REQUIRE(r.size() == 4);
    CHECK(r.front().ended == start + 7ms);
    CHECK(r.back().ended == start + 10ms);
    CHECK(t.records().empty());
    t.compute.record(4);
    CHECK(t.compute.records_lost() == 0);
}

TEST_CASE("an admitted submission that is never enqueued leaves no record, and neither does its slot", "[compute]") {
    setup t{2};
    const auto c = t.compute.add({});
    t.compute.record(10);
    { const auto unused = t.compute.acquire(c); }
    t.compute.acquire(c)->enqueue(t.stream, [](manual_stream& s) { s.enqueue(1ms); });
    t.run(start, start + 1ms, 0ms);
    REQUIRE(t.records().size() == 1);
}

TEST_CASE("more in flight than ever before are all recorded", "[compute]") {
    setup t{200};
    const auto c = t.compute.add({});
    t.compute.record(500);
    for (int i = 0; i < 200; ++i) (void)t.submit(c, 1us);
    t.stream.reach_all();
    t.compute.poll();
    CHECK(t.records().size() == 200);
}

TEST_CASE("on a simulated device the records are what it did", "[compute]") {
    gpushare::sim::world world;
    gpushare::sim::clock_of clock{world};
    struct span {
        std::uint32_t tag;
        instant begin, end;
    };
    std::vector<span> truth;
    world.on_kernel([&](const gpushare::sim::kernel_span& k) { truth.push_back({k.tag, k.begin, k.end}); });
    gpushare::compute_limiter<gpushare::sim::stream, gpushare::sim::clock_of> limiter{{.depth = 2}, clock};
    gpushare::sim::stream a{world, {0}, {}, 1}, b{world, {0}, {}, 2};
    const auto one = limiter.add({.weight = 50_pct, .tag = 1}), two = limiter.add({.weight = 50_pct, .tag = 2});
    limiter.record(100);
    std::vector<decltype(limiter)::ticket> tickets;
    for (int i = 1; i <= 20; ++i) {
        tickets.push_back(limiter.submit(one, a, [i](auto& s) { s.enqueue(i * 10us); }).value());
        tickets.push_back(limiter.submit(two, b, [i](auto& s) { s.enqueue(i * 20us); }).value());
    }
    for (const auto& t : tickets) CHECK(t.wait());
    std::array<submission_record, 64> r;
    REQUIRE(limiter.take_records(r) == 40);
    REQUIRE(truth.size() == 40);
    for (std::size_t i = 0; i < 40; ++i) {
        CAPTURE(i);
        CHECK(r[i].tag == truth[i].tag);
        CHECK(r[i].began == truth[i].begin);
        CHECK(r[i].ended == truth[i].end);
        CHECK(r[i].arrived == start);
        CHECK(r[i].let_in <= r[i].began);
    }
}

}  // namespace submission_log_test
