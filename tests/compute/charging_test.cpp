// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The observation of a batch and its charge: charge_for() alone, without a limiter, a device or a
// clock.
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/charging.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"

namespace charging_test {

using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::ns;
using gpushare::detail::charge_for;
using gpushare::detail::enqueue_time;
using gpushare::detail::interval;
using gpushare::detail::observation;
using gpushare::detail::span_meter;
using gpushare::detail::usual_enqueue_time;
using source = gpushare::charge::source;

namespace {

constexpr client_id mine{0, 1}, other{1, 1};

constexpr interval at(ns begin, ns end) { return {begin.count(), end.count()}; }

/// What `usual` knows of a client that takes 10 us to enqueue.
usual_enqueue_time usually_10us() {
    usual_enqueue_time usual;
    for (int i = 0; i < 10; ++i) (void)usual.is_held_up({.took = 10us, .idle = 10us});
    return usual;
}

/// One observation on a device on which `other` was charged 0 to 100 us already.
struct charged {
    explicit charged(observation seen) {
        seen.client = mine;
        if (seen.length == 0ns && seen.span) seen.length = seen.span->length();
        span_meter meter;
        usual_enqueue_time usual = usually_10us(), unused;
        const auto nothing = [](client_id, ns) {};
        auto before = charge_for({.client = other, .span = at(0us, 100us), .length = 100us, .predicted = 100us}, meter,
                                 unused, nothing);
        (void)before.next(100us, true);
        auto all = charge_for(seen, meter, usual, [&](client_id c, ns t) { (c == other ? given_back : strange) += t; });
        from = all.from();
        took = all.next(seen.predicted, true).took;
    }
    ns took{}, given_back{}, strange{};
    source from{};
};

}  // namespace

TEST_CASE("a charge is duration times width", "[compute][width]") {
    span_meter meter;
    usual_enqueue_time usual;
    ns given_back{};
    const auto cost = [&](client_id c, interval span, double width) {
        const observation seen{.client = c,
                               .span = span,
                               .length = span.length(),
                               .predicted = span.length(),
                               .at_least = span.length(),
                               .width = width};
        auto all = charge_for(seen, meter, usual, [&](client_id, ns t) { given_back += t; });
        return all.next(seen.predicted, true).took;
    };
    CHECK(cost(mine, at(0us, 100us), 0.5) == 50us);
    CHECK(cost(other, at(0us, 100us), 0.5) == 50us);  // fits beside it
    CHECK(given_back == 0us);
    CHECK(cost({2, 1}, at(0us, 100us), 1) == 50us);  // twice what there is: each keeps half of its width
    CHECK(given_back == 50us);
    CHECK(cost(mine, at(100us, 200us), 0.25) == 25us);
    CHECK(cost(mine, at(150us, 250us), 0.25) == 25us);  // on another of its streams
}

TEST_CASE("a charge is the usage that the device reports", "[compute][width]") {
    span_meter meter;
    usual_enqueue_time usual = usually_10us();
    const observation seen{.client = mine,
                           .span = at(0us, 900us),
                           .length = 900us,
                           .predicted = 50us,
                           .used = gpushare::sm_use{.time = 60us, .width = gpushare::sm_width(0.25)},
                           .enqueued = {.took = 4900us, .idle = 4900us},
                           .doubtful = true};
    auto all = charge_for(seen, meter, usual, [](client_id, ns) {});
    CHECK(all.from() == source::alone);
    CHECK(all.next(50us, true).took == 60us);
}

TEST_CASE("an observation and what it costs", "[compute]") {
    struct row {
        std::string what;
        observation seen;
        ns took;
        source from = source::alone;
        ns given_back{};
    };
    const std::vector<row> table{
        {"alone on the device", {.span = at(100us, 180us), .predicted = 50us}, 80us},
        {"beside others' streams", {.span = at(100us, 180us), .predicted = 50us, .contended = true}, 80us, source::own},
        {"several together", {.span = at(100us, 180us), .predicted = 50us, .members = 4}, 80us, source::shared},
        {"after a pause", {.span = at(500us, 580us), .predicted = 50us}, 80us},
        {"waited for others first", {.span = at(20us, 180us), .predicted = 50us}, 80us},
        {"all of it while others ran", {.span = at(20us, 80us), .predicted = 50us}, 0us},
        {"proven to have run beside others",
         {.span = at(0us, 180us), .predicted = 50us, .at_least = 120us, .contended = true},
         100us,
         source::own,
         20us},
        {"of several nothing is proven",
         {.span = at(0us, 180us), .predicted = 50us, .at_least = 120us, .members = 2},
         80us,
         source::shared},
        {"empty", {.span = at(100us, 100us), .predicted = 50us}, 0us},

        {"gaps: no more than predicted",
         {.span = at(100us, 900us), .predicted = 50us, .doubtful = true},
         50us,
         source::doubt},
        {"gaps: but it took less",
         {.span = at(100us, 130us), .predicted = 50us, .doubtful = true},
         30us,
         source::doubt},

        {"overtaken: up to the next",
         {.span = at(100us, 180us), .length = 300us, .predicted = 50us, .overtaken = true},
         80us,
         source::doubt},
        {"overtaken: at least what was predicted",
         {.span = at(100us, 120us), .length = 300us, .predicted = 50us, .overtaken = true},
         50us,
         source::doubt},
        {"overtaken: the next isn't known",
         {.length = 300us, .predicted = 50us, .overtaken = true},
         50us,
         source::doubt},
        {"overtaken: nothing is proven",
         {.span = at(0us, 180us), .length = 300us, .predicted = 50us, .at_least = 180us, .overtaken = true},
         80us,
         source::doubt},

        {"held up: less the gap, at least as predicted",
         {.span = at(100us, 5100us), .predicted = 50us, .enqueued = {.took = 4900us, .idle = 4900us}},
         100us,
         source::doubt},
        {"held up: as predicted",
         {.span = at(100us, 5100us), .predicted = 500us, .enqueued = {.took = 4900us, .idle = 4900us}},
         500us,
         source::doubt},
        {"held up: never more than the span",
         {.span = at(100us, 300us), .predicted = 900us, .enqueued = {.took = 4900us, .idle = 4900us}},
         200us,
         source::doubt},
        {"slow while the device was busy",
         {.span = at(100us, 300us), .predicted = 50us, .enqueued = {.took = 4900us, .idle = 0us}},
         200us},
        {"as slow as usual",
         {.span = at(100us, 300us), .predicted = 50us, .enqueued = {.took = 12us, .idle = 12us}},
         200us},
        {"of several nobody knows who was slow",
         {.span = at(100us, 300us), .predicted = 50us, .enqueued = {.took = 4900us, .idle = 4900us}, .members = 2},
         200us,
         source::shared},
    };
    for (const auto& row : table) {
        CAPTURE(row.what);
        const charged c(row.seen);
        CHECK(c.took == row.took);
        CHECK(c.from == row.from);
        CHECK(c.given_back == row.given_back);
        CHECK(c.strange == 0ns);
    }
}

TEST_CASE("the members of a batch share its time as was predicted, and nothing is lost", "[compute]") {
    span_meter meter;
    usual_enqueue_time usual;
    auto all = charge_for({.client = mine, .span = at(0us, 100us), .length = 130us, .predicted = 60us, .members = 3},
                          meter, usual, [](client_id, ns) {});
    const auto a = all.next(10us, false), b = all.next(20us, false), c = all.next(30us, true);
    CHECK(a.took == 16'666ns);
    CHECK(b.took == 33'333ns);
    CHECK(c.took == 50'001ns);
    CHECK(a.took + b.took + c.took == 100us);
    CHECK(a.span + b.span + c.span == 130us);
    CHECK(a.after == b.span + c.span);
    CHECK(c.after == 0ns);
}

TEST_CASE("time that wasn't predicted at all goes to the last member", "[compute]") {
    span_meter meter;
    usual_enqueue_time usual;
    auto all = charge_for({.client = mine, .span = at(0us, 100us), .length = 100us, .members = 2}, meter, usual,
                          [](client_id, ns) {});
    CHECK(all.next(0us, false).took == 0us);
    CHECK(all.next(0us, true).took == 100us);
}

TEST_CASE("the same observations are charged the same, whatever was asked in between", "[compute]") {
    const auto run = [](bool twice) {
        span_meter meter;
        usual_enqueue_time usual;
        ns sum{};
        for (int i = 0; i < 20; ++i) {
            const observation seen{.client = i % 2 == 0 ? mine : other,
                                   .span = at(i * 10us, i * 10us + 15us),
                                   .length = 15us,
                                   .predicted = 15us,
                                   .at_least = 12us,
                                   .enqueued = {.took = 5us, .idle = 5us}};
            if (twice) {  // on copies: the state is all in the arguments
                auto other_meter = meter;
                auto other_usual = usual;
                (void)charge_for(seen, other_meter, other_usual, [](client_id, ns) {});
            }
            auto all = charge_for(seen, meter, usual, [&](client_id, ns t) { sum -= t; });
            sum += all.next(15us, true).took;
        }
        return sum;
    };
    CHECK(run(false) == run(true));
    CHECK(run(false) == 205us);  // the union of the spans
}

}  // namespace charging_test
