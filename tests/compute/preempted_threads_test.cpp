// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Threads that lose their core after recording the point in front of their work and before
// enqueuing the work: the device idles meanwhile, and nobody is charged for that.
#include <chrono>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/detail/charging.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"
#include "support/sharing_stream.hpp"

namespace preempted_threads_test {

using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::instant;
using gpushare::ns;
using gpushare::detail::enqueue_time;
using gpushare::detail::usual_enqueue_time;
using support::manual_clock;
using support::manual_stream;
using support::sharing_stream;

namespace {

/// A clock that calls something, once, when it is looked at.
struct hooked_clock {
    [[nodiscard]] instant now() const noexcept {
        if (const auto call = std::exchange(*hook, nullptr)) call();
        return time.now();
    }
    manual_clock time;
    std::shared_ptr<std::function<void()>> hook = std::make_shared<std::function<void()>>();
};
static_assert(gpushare::clock<hooked_clock>);

/// Kernels of a millisecond, too long to be timed together, by whichever way in; before each its
/// thread may be held up.
template <class Stream>
struct setup {
    using limiter = gpushare::compute_limiter<Stream, hooked_clock>;

    /// Charged for one whose thread was held up for `stall`, with the device idle for `idle` of
    /// that.
    ns charged_for(ns stall, ns idle, bool at_the_gate = false, ns length = 1ms) {
        const auto before = compute.usage(client).device_time;
        const auto work = [=, this](Stream& s) {
            clock.time.advance(stall);
            s.enqueue(idle + length);
        };
        if (at_the_gate)
            compute.acquire(client).value().enqueue(stream, work);
        else
            (void)compute.submit(client, stream, work).value();
        finish();
        return compute.usage(client).device_time - before;
    }
    void finish() {
        for (int i = 0; i < 4; ++i) {
            compute.poll();
            line().reach_all();
            clock.time.advance(10ms);
        }
        compute.poll();
    }
    manual_stream& line() {
        if constexpr (std::is_same_v<Stream, manual_stream>)
            return stream;
        else
            return stream.manual();
    }

    hooked_clock clock;
    Stream stream;
    limiter compute{{}, clock};
    client_id client = compute.add({});
};

}  // namespace

TEST_CASE("a thread is held up where enqueuing takes far longer than it usually does", "[compute]") {
    usual_enqueue_time usual;
    CHECK_FALSE(usual.is_held_up({}));
    CHECK_FALSE(usual.is_held_up({.took = 5us, .idle = 5us}));  // the first says what is usual
    for (int i = 0; i < 20; ++i) CHECK_FALSE(usual.is_held_up({.took = 5us, .idle = 5us}));
    CHECK_FALSE(usual.is_held_up({.took = 39us, .idle = 39us}));
    CHECK(usual.is_held_up({.took = 3ms, .idle = 1ms}));
    CHECK_FALSE(usual.is_held_up({.took = 3ms, .idle = 0ms}));  // the device had enough to do
    CHECK(usual.is_held_up({.took = 3ms, .idle = 1ns}));
    // What is always long becomes usual, though it comes all at once.
    int held_up = 0;
    for (int i = 0; i < 100; ++i) held_up += usual.is_held_up({.took = 3ms, .idle = 3ms}) ? 1 : 0;
    CHECK(held_up < 20);
    CHECK_FALSE(usual.is_held_up({.took = 3ms, .idle = 3ms}));
    CHECK(usual.is_held_up({.took = 30ms, .idle = 1ms}));
}

TEST_CASE("work whose thread was held up took what was predicted, as far as that can be", "[compute]") {
    const auto took = [](ns span, ns predicted, ns idle) {
        return usual_enqueue_time::without_gap(span, predicted, {.took = 9ms, .idle = idle});
    };
    CHECK(took(5ms, 1ms, 4500us) == 1ms);
    CHECK(took(5ms, 1ms, 2ms) == 3ms);     // at least what the device wasn't idle
    CHECK(took(5ms, 7ms, 4500us) == 5ms);  // at most all of it
    CHECK(took(5ms, 1ms, 20ms) == 1ms);
    CHECK(took(0ms, 1ms, 1ms) == 0ms);
    STATIC_REQUIRE(enqueue_time::between(instant{5ms}, instant{7ms}, 500us).idle == 1500us);
    STATIC_REQUIRE(enqueue_time::between(instant{5ms}, instant{7ms}, 3ms).idle == 0ms);
    STATIC_REQUIRE(enqueue_time::between(instant{5ms}, instant{7ms}, ns::max()).idle == 0ms);
    STATIC_REQUIRE(enqueue_time::between(instant{5ms}, instant{}, 0ms).took == 0ms);  // nobody looked
}

TEMPLATE_TEST_CASE("the gap in front of a kernel whose thread lost its core isn't charged", "[compute]", manual_stream,
                   sharing_stream) {
    setup<TestType> t;
    for (int i = 0; i < 5; ++i) REQUIRE(t.charged_for(10us, 10us) == 1010us);  // a little is in every span
    CHECK(t.charged_for(5ms, 5ms) == 1010us);
    if constexpr (!gpushare::shared_timeline<TestType>)
        CHECK(t.charged_for(0us, 0us, true, 3ms) == 3ms);  // what is charged next wasn't
    CHECK(t.charged_for(10us, 10us, false, 1200us) == 1210us);
    if constexpr (gpushare::shared_timeline<TestType>) {  // where points are cheap, a permit reads no clock
        for (int i = 0; i < 5; ++i) REQUIRE(t.charged_for(10us, 10us, true) == 1010us);
        CHECK(t.charged_for(5ms, 5ms, true) < 1100us);
    }
    // That it was held up tells nothing of how long such kernels are, nor of how long it waited for
    // others.
    CHECK(t.compute.usage(t.client).longest < 4ms);
    while (const auto e = t.compute.take_event())
        CHECK(e->what == gpushare::limiter_event::kind::overran);  // what was meant to
}

TEST_CASE("a call that always takes its thread long is charged all of its span", "[compute]") {
    setup<sharing_stream> t;
    for (int i = 0; i < 8; ++i) REQUIRE(t.charged_for(3ms, 3ms) == 4ms);
    CHECK(t.charged_for(5ms, 3ms) == 4ms);
}

TEMPLATE_TEST_CASE("a thread that was held up while the device was busy changes nothing", "[compute]", manual_stream,
                   sharing_stream) {
    setup<TestType> t;
    for (int i = 0; i < 5; ++i) REQUIRE(t.charged_for(10us, 0us) == 1ms);
    const auto first = t.compute.submit(t.client, t.stream, [](TestType& s) { s.enqueue(4ms); }, {.cost = 4ms}).value();
    const auto second = t.compute
                            .submit(t.client, t.stream,
                                    [&](TestType& s) {
                                        t.clock.time.advance(3ms);
                                        s.enqueue(2ms);
                                    })
                            .value();
    t.finish();
    CHECK(first.device_time() == 4ms);
    CHECK(second.device_time() == 2ms);
}

TEST_CASE("work isn't charged from the end of what was done before it was enqueued", "[compute]") {
    setup<manual_stream> t;
    const auto first = t.compute.submit(t.client, t.stream, [](manual_stream& s) { s.enqueue(1ms); }).value();
    const auto before = t.stream.open();
    // Done when nobody looks any more; then the thread loses its core.
    *t.clock.hook = [&] {
        t.stream.reach_all();
        t.clock.time.advance(7ms);
    };
    const auto second = t.compute.submit(t.client, t.stream, [](manual_stream& s) { s.enqueue(1ms); }).value();
    REQUIRE(before == 2);
    REQUIRE(t.stream.open() == 2);  // a begin of its own
    t.stream.reach_next_at(instant{8ms});
    t.stream.reach_next();
    t.compute.poll();
    CHECK(first.device_time() == 1ms);
    CHECK(second.device_time() == 1ms);
}

}  // namespace preempted_threads_test
