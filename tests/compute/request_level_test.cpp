// SPDX-License-Identifier: Apache-2.0
// Requests with a priority of their own.
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/policies/any_policy.hpp>
#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/compute/request.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/manual_timeline.hpp"

namespace request_level_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::priority;
using support::manual_clock;
using support::manual_stream;

namespace {

using limiter = gpushare::compute_limiter<manual_stream, manual_clock, gpushare::any_policy>;
using request = gpushare::request<limiter>;
using names = std::vector<std::string>;

struct setup {
    void submit(client_id c, std::string name) {
        (void)compute.submit(c, stream, [this, name = std::move(name)](manual_stream& s) {
            s.enqueue(1ms);
            enqueued.push_back(name);
        });
    }
    void submit(request& r, std::string name) {
        (void)r.submit(stream, [this, name = std::move(name)](manual_stream& s) {
            s.enqueue(1ms);
            enqueued.push_back(name);
        });
    }
    void finish_all() {
        for (compute.poll(); stream.open() != 0; compute.poll()) {
            stream.reach_next();
            clock.advance(1ms);
        }
    }
    /// Each tells its name when it is let in, though the room of its level is free.
    names order() {
        finish_all();
        return std::exchange(enqueued, {});
    }

    manual_clock clock;
    manual_stream stream;
    limiter compute{{.depth = 1, .horizon = 0ms, .anticipation = 0ms}, clock};
    client_id a = compute.add({.weight = 50_pct}), b = compute.add({.weight = 50_pct});
    names enqueued;
};

}  // namespace

TEST_CASE("a request goes at its own level, with what is in front of it in the queue", "[compute]") {
    setup t;
    t.submit(t.a, "a0");
    for (const auto* name : {"a1", "a2", "a3"}) t.submit(t.a, name);
    t.submit(t.b, "b0");
    {
        request r(t.compute, t.b, {.level = priority{1}});
        CHECK(t.enqueued == names{"a0", "b0"});  // at once: the level has room of its own
        t.submit(r, "b1");
        t.submit(r, "b2");
        CHECK(t.order() == names{"a0", "b0", "b1", "b2", "a1", "a2", "a3"});
    }
    SECTION("and its client goes at its own level again once it is over") {
        t.submit(t.a, "a4");
        t.submit(t.b, "b3");
        CHECK(t.enqueued == names{"a4"});
        CHECK(t.order() == names{"a4", "b3"});
    }
}

TEST_CASE("of several requests the highest counts, and none lowers its client", "[compute]") {
    setup t;
    t.compute.change(t.b, {.weight = 50_pct, .level = {1}, .longest = 1ms});
    t.compute.change(t.a, {.weight = 50_pct, .longest = 1ms});
    const auto c = t.compute.add({.level = {2}, .longest = 1ms});
    // By what lies below it one sees where the client is.
    const auto below_b = [&] { return t.compute.bound_of(t.b) / 1ms; };
    CHECK(below_b() == 1);
    {
        request lower(t.compute, t.b, {.level = priority{0}});
        CHECK(below_b() == 1);
        request higher(t.compute, t.b, {.level = priority{3}});
        CHECK(below_b() == 2);
        {
            request twice(t.compute, t.b, {.level = priority{3}});
            request plain(t.compute, t.b);
        }
        CHECK(below_b() == 2);
        SECTION("a live change is in force beneath") {
            t.compute.change(t.b, {.weight = 10_pct, .level = {0}, .longest = 1ms});
            CHECK(below_b() == 2);
        }
        SECTION("so is one beyond it") {
            t.compute.change(t.b, {.weight = 10_pct, .level = {4}, .longest = 1ms});
            CHECK(below_b() == 2);
            CHECK(t.compute.close(c));
            CHECK(below_b() == 1);
        }
    }
    t.compute.change(t.b, {.weight = 50_pct, .level = {1}, .longest = 1ms});
    CHECK(below_b() == 1);
}

TEST_CASE("a level that the policy refuses is no request's", "[compute]") {
    setup t;
    CHECK(t.compute.set_policy(gpushare::equal_share{2}) == errc::none);
    const auto c = t.compute.add({.level = {1}}), d = t.compute.add({.level = {1}});
    CHECK(support::code_of([&] { (void)request(t.compute, t.a, {.level = priority{1}}); }) == errc::share_exceeded);
    t.submit(t.a, "a");
    CHECK(t.order() == names{"a"});
    CHECK(t.compute.close(c));
    CHECK(support::code_of([&] { (void)request(t.compute, t.a, {.level = priority{1}}); }) == errc::none);
    CHECK(t.compute.close(d));
    CHECK(t.compute.close(t.a));
    CHECK(support::code_of([&] { (void)request(t.compute, t.a, {.level = priority{5}}); }) == errc::none);
}

}  // namespace request_level_test
