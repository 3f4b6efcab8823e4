// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// One thread, a device that the test controls, and a clock that stands still: every order of events
// on purpose.
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"

namespace compute_limiter_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::instant;
using gpushare::ns;
using support::manual_clock;
using support::manual_stream;

namespace {

using limiter = gpushare::compute_limiter<manual_stream, manual_clock>;

constexpr instant long_past = instant::min();

struct setup {
    explicit setup(gpushare::limiter_options options = {.depth = 1}) : compute(options, clock) {}

    /// Queues a kernel that takes `length` and writes its name down when it is enqueued.
    limiter::ticket submit(client_id c, std::string name, ns length = 1ms) {
        auto t = compute.submit(c, stream, [this, name = std::move(name), length](manual_stream& s) {
            s.enqueue(length);
            enqueued.push_back(name);
        });
        return std::move(t).value();
    }
    /// The device finishes its oldest submission.
    void finish_one(errc status = errc::none) {
        stream.reach_next();  // the point before it
        stream.reach_next(status);
    }
    /// While anybody waits, the device finishes one submission after the other, and time passes.
    void run_while_waiting() {
        stream.on_wait([this] {
            finish_one();
            clock.advance(1ms);
        });
    }
    /// While anybody waits, time passes and nothing else happens.
    void stand_still() {
        stream.on_wait([this] { clock.advance(1ms); });
    }

    manual_clock clock;
    manual_stream stream;
    std::vector<std::string> enqueued;
    limiter compute;
};

using names = std::vector<std::string>;

}  // namespace

TEST_CASE("work with room is enqueued in the call, the rest when room is made", "[compute]") {
    setup t{{.depth = 2}};
    const auto c = t.compute.add({});
    const auto one = t.submit(c, "1"), two = t.submit(c, "2"), three = t.submit(c, "3"), four = t.submit(c, "4");
    CHECK(t.enqueued == names{"1", "2"});
    t.compute.poll();
    CHECK(t.enqueued == names{"1", "2"});
    CHECK_FALSE(one.done());
    t.finish_one();
    CHECK_FALSE(one.done());  // nobody has looked yet
    t.compute.poll();
    CHECK(one.done());
    CHECK(one.status() == errc::none);
    CHECK(t.enqueued == names{"1", "2", "3"});
    t.finish_one();
    t.finish_one();
    t.compute.poll();
    CHECK(t.enqueued == names{"1", "2", "3", "4"});
    CHECK(two.done());
    CHECK(three.done());
    CHECK_FALSE(four.done());
}

TEST_CASE("work behind other work on its stream needs one point, and is charged from where that ends", "[compute]") {
    setup t{{.depth = 3}};
    const auto a = t.compute.add({}), b = t.compute.add({});
    manual_stream other(t.stream, {});
    const auto first = t.submit(a, "first", 3ms), second = t.submit(b, "second", 2ms);
    CHECK(t.stream.open() == 3);  // begin, end, end
    const auto elsewhere = t.compute.submit(a, other, [](manual_stream& s) { s.enqueue(1ms); }).value();
    CHECK(other.open() == 2);
    t.stream.reach_all();
    t.compute.poll();
    CHECK(first.device_time() == 3ms);
    CHECK(second.device_time() == 2ms);
    const auto third = t.submit(a, "third", 4ms);  // behind nothing: what lies between isn't charged
    CHECK(t.stream.open() == 2);
    t.stream.reach_next_at(instant{100ms});
    t.stream.reach_next();
    t.compute.poll();
    CHECK(third.device_time() == 4ms);
    other.reach_all();
    t.compute.poll();
    CHECK(elsewhere.done());
}

TEST_CASE("a ticket tells what the work took, and when its end was noticed", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    const auto first = t.submit(c, "first", 3ms), second = t.submit(c, "second", 2ms);
    t.clock.advance(10ms);
    t.finish_one();
    t.compute.poll();
    CHECK(first.device_time() == 3ms);
    CHECK(first.finished_at() == instant{10ms});
    t.clock.advance(10ms);
    t.finish_one();
    t.compute.poll();
    CHECK(second.device_time() == 2ms);
    CHECK(second.finished_at() == instant{20ms});
    CHECK(t.compute.usage(c).device_time == 5ms);
    CHECK(t.compute.usage(c).completed == 2);
    CHECK(t.compute.usage(c).longest == 3ms);
    CHECK(t.compute.usage(c).in_flight == 0);
}

TEST_CASE("waiting for a ticket drives the limiter", "[compute]") {
    setup t;
    t.run_while_waiting();
    const auto c = t.compute.add({});
    const auto one = t.submit(c, "1"), two = t.submit(c, "2"), three = t.submit(c, "3");
    CHECK(three.wait());
    CHECK(one.done());
    CHECK(two.done());
    CHECK(t.enqueued == names{"1", "2", "3"});
    CHECK(one.wait(long_past));
    const auto four = t.submit(c, "4");
    t.finish_one();
    CHECK(four.wait(long_past));  // looks before it gives up
}

TEST_CASE("a wait ends at its deadline, or when a stop is requested, and changes nothing", "[compute]") {
    setup t;
    t.stand_still();
    const auto c = t.compute.add({});
    const auto one = t.submit(c, "1"), two = t.submit(c, "2");
    std::stop_source stopped;
    stopped.request_stop();
    SECTION("of a ticket") {
        CHECK_FALSE(one.wait(long_past));
        CHECK_FALSE(two.wait(t.clock.now()));
        CHECK_FALSE(two.wait(t.clock.now() + 20ms));
        CHECK_FALSE(two.wait(gpushare::never, stopped.get_token()));
    }
    SECTION("at the gate") {
        CHECK(t.compute.try_acquire(c).code() == errc::deadline_exceeded);
        CHECK(t.compute.acquire(c, t.clock.now() + 20ms).code() == errc::deadline_exceeded);
        CHECK(t.compute.acquire(c, gpushare::never, stopped.get_token()).code() == errc::stopped);
    }
    SECTION("of the dispatcher") { t.compute.run(stopped.get_token()); }
    SECTION("of somebody who closes") {
        const auto other = t.compute.add({});
        CHECK(t.compute.close(other, long_past));
        CHECK_FALSE(t.compute.close(c, long_past));
        CHECK_FALSE(t.compute.close(c, t.clock.now() + 20ms));
        CHECK_FALSE(t.compute.close(c, gpushare::never, stopped.get_token()));
        CHECK(two.done());
        t.finish_one();
        CHECK(t.compute.close(c, long_past));
        return;
    }
    CHECK(t.compute.usage(c).waiting == 1);
    t.run_while_waiting();
    CHECK(two.wait());
    CHECK(t.enqueued == names{"1", "2"});
}

TEST_CASE("a stop that is requested during the wait ends it", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    const auto ticket = t.submit(c, "1");
    std::stop_source stop;
    t.stream.on_wait([&] { stop.request_stop(); });
    SECTION("ticket") { CHECK_FALSE(ticket.wait(gpushare::never, stop.get_token())); }
    SECTION("gate") { CHECK(t.compute.acquire(c, gpushare::never, stop.get_token()).code() == errc::stopped); }
    SECTION("dispatcher") { t.compute.run(stop.get_token()); }
    CHECK(stop.stop_requested());
    CHECK(t.compute.usage(c).waiting == 0);
}

TEST_CASE("a permit lets its holder enqueue once", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    {
        auto p = t.compute.acquire(c);
        REQUIRE(p);
        CHECK(t.compute.usage(c).in_flight == 1);
        CHECK(t.compute.try_acquire(c).code() == errc::deadline_exceeded);
        p->enqueue(t.stream, [](manual_stream& s) { s.enqueue(4ms); });
    }
    CHECK(t.compute.usage(c).in_flight == 1);
    CHECK(t.compute.try_acquire(c).code() == errc::deadline_exceeded);
    t.finish_one();
    CHECK(t.compute.usage(c).in_flight == 0);
    CHECK(t.compute.usage(c).device_time == 4ms);
    CHECK(t.compute.try_acquire(c));
}

TEST_CASE("a permit that isn't used is given back, and lets in who waits", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    std::optional<limiter::permit> held(t.compute.acquire(c).value());
    const auto ticket = t.submit(c, "waits");
    CHECK(t.enqueued.empty());
    SECTION("destroyed") { held.reset(); }
    SECTION("moved, then destroyed") {
        { auto other = std::move(*held); }
        CHECK(t.enqueued == names{"waits"});
        held.reset();
    }
    SECTION("record() throws before anything is enqueued") {
        t.stream.fail_next_record();
        CHECK_THROWS_AS(held->enqueue(t.stream, [](manual_stream&) { FAIL("must not be called"); }),
                        std::runtime_error);
        held.reset();
    }
    CHECK(t.enqueued == names{"waits"});
    t.finish_one();
    t.compute.poll();
    CHECK(t.compute.usage(c).completed == 1);  // the unused permit wasn't work
}

TEST_CASE("an exception of a permit's holder passes through, and its enqueued work is charged", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    {
        auto p = t.compute.acquire(c).value();
        CHECK_THROWS_AS(p.enqueue(t.stream,
                                  [](manual_stream& s) {
                                      s.enqueue(2ms);
                                      throw std::logic_error("holder");
                                  }),
                        std::logic_error);
    }
    CHECK(t.compute.usage(c).in_flight == 1);
    t.finish_one();
    CHECK(t.compute.usage(c).device_time == 2ms);
    CHECK(t.compute.usage(c).failed == 1);
}

TEST_CASE("gate and queue of one client are served in the order of asking", "[compute]") {
    setup t;
    t.run_while_waiting();
    const auto c = t.compute.add({});
    const auto one = t.submit(c, "1"), two = t.submit(c, "2");
    auto p = t.compute.acquire(c).value();  // waits for both
    CHECK(t.enqueued == names{"1", "2"});
    CHECK(two.done());
    const auto four = t.submit(c, "4");
    CHECK(t.enqueued == names{"1", "2"});
    p.enqueue(t.stream, [&](manual_stream& s) {
        s.enqueue(1ms);
        t.enqueued.push_back("3");
    });
    CHECK(four.wait());
    CHECK(t.enqueued == names{"1", "2", "3", "4"});
}

TEST_CASE("shares and levels decide who goes next", "[compute]") {
    setup t;
    const auto big = t.compute.add({.weight = 75_pct, .longest = 1ms});
    const auto small = t.compute.add({.weight = 25_pct, .longest = 1ms});
    const auto urgent = t.compute.add({.level = {1}});
    std::vector<limiter::ticket> tickets;
    for (int i = 0; i < 100; ++i) tickets.push_back(t.submit(big, "big"));
    for (int i = 0; i < 100; ++i) tickets.push_back(t.submit(small, "small"));
    for (int i = 0; i < 40; ++i) {
        t.finish_one();
        t.compute.poll();
    }
    CHECK(std::abs((t.compute.usage(big).device_time - 30ms).count()) <= ns{1ms}.count());
    CHECK(std::abs((t.compute.usage(small).device_time - 10ms).count()) <= ns{1ms}.count());
    t.enqueued.clear();
    tickets.push_back(t.submit(urgent, "urgent"));
    CHECK(t.enqueued == names{"urgent"});  // room of its own: at once
    CHECK(t.compute.wait_bound() == 1ms);
}

TEST_CASE("a callable that throws fails its own ticket, and nothing else", "[compute]") {
    setup t;
    t.run_while_waiting();
    const auto c = t.compute.add({});
    const auto before = t.submit(c, "before");
    const auto bad = t.compute
                         .submit(c, t.stream,
                                 [](manual_stream& s) {
                                     s.enqueue(2ms);
                                     throw std::out_of_range("mine");
                                 })
                         .value();
    const auto after = t.submit(c, "after");
    CHECK(after.wait());
    CHECK(after.status() == errc::none);
    CHECK(before.status() == errc::none);
    REQUIRE(bad.done());
    CHECK(bad.status() == errc::submission_failed);
    CHECK(bad.device_time() == 2ms);  // it had enqueued that
    CHECK_THROWS_AS(bad.rethrow(), std::out_of_range);
    const auto usage = t.compute.usage(c);
    CHECK(usage.completed == 3);
    CHECK(usage.failed == 1);
    CHECK(usage.in_flight == 0);
    CHECK(usage.waiting == 0);
    CHECK(usage.device_time == 4ms);
}

TEST_CASE("a stream that can't record fails the ticket, and the room is free again", "[compute]") {
    setup t;
    t.run_while_waiting();
    const auto c = t.compute.add({});
    std::optional<limiter::ticket> bad;
    SECTION("before the work") {
        t.stream.fail_next_record();
        bad = t.submit(c, "never enqueued");
        CHECK(t.enqueued.empty());
    }
    SECTION("after the work") {
        bad = t.compute.submit(c, t.stream, [](manual_stream& s) { s.fail_next_record(); }).value();
    }
    SECTION("after a callable that threw: the later exception is the one that is kept") {
        bad = t.compute
                  .submit(c, t.stream,
                          [](manual_stream& s) {
                              s.fail_next_record();
                              throw std::logic_error("first");
                          })
                  .value();
    }
    REQUIRE(bad->done());
    CHECK(bad->status() == errc::submission_failed);
    CHECK_THROWS_AS(bad->rethrow(), std::runtime_error);
    CHECK(t.compute.usage(c).in_flight == 0);
    const auto next = t.submit(c, "next");
    CHECK(next.wait());
    CHECK(next.status() == errc::none);
}

TEST_CASE("work that fails on the device fails its ticket", "[compute]") {
    setup t{{.depth = 2}};
    const auto c = t.compute.add({});
    const auto bad = t.submit(c, "bad"), good = t.submit(c, "good");
    t.finish_one(errc::kernel_failed);
    t.finish_one();
    t.compute.poll();
    CHECK(bad.status() == errc::kernel_failed);
    CHECK(good.status() == errc::none);
    CHECK(t.compute.usage(c).failed == 1);
    try {
        bad.rethrow();
        FAIL("must throw");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == errc::kernel_failed);
    }
}

TEST_CASE("so many submissions of a client wait and no more", "[compute]") {
    setup t{{.depth = 1, .queue_limit = 2}};
    const auto c = t.compute.add({});
    const auto other = t.compute.add({});
    std::vector<limiter::ticket> tickets;
    for (int i = 0; i < 3; ++i) tickets.push_back(t.submit(c, "fits"));
    CHECK(t.compute.submit(c, t.stream, [](manual_stream&) {}).code() == errc::queue_full);
    CHECK(t.compute.acquire(c).code() == errc::queue_full);
    t.finish_one();
    t.compute.poll();
    tickets.push_back(t.submit(c, "fits again"));
    CHECK(t.compute.usage(c).waiting == 2);
    tickets.push_back(t.submit(other, "has a limit of its own"));
}

TEST_CASE("closing cancels what waits, waits for what is in flight, and forgets the client", "[compute]") {
    setup t;
    t.run_while_waiting();
    const auto c = t.compute.add({});
    const auto other = t.compute.add({});
    const auto running = t.submit(c, "running"), waiting = t.submit(c, "waiting"), others = t.submit(other, "other's");
    CHECK(t.compute.close(c));
    CHECK(running.status() == errc::none);
    CHECK(waiting.status() == errc::closed);
    CHECK(others.wait());
    CHECK(t.enqueued == names{"running", "other's"});
    SECTION("what knows the client by its old name is refused") {
        const auto again = t.compute.add({});
        CHECK(again.index == c.index);
        CHECK(t.compute.submit(c, t.stream, [](manual_stream&) {}).code() == errc::closed);
        CHECK(t.compute.acquire(c).code() == errc::closed);
        CHECK(t.compute.change(c, {}) == errc::closed);
        CHECK(t.compute.usage(c).completed == 0);
        CHECK(t.compute.close(c));
        CHECK(t.submit(again, "again").wait());
    }
    SECTION("a client that never was is refused too") {
        const client_id nobody{.index = 77, .generation = 1};
        CHECK(t.compute.submit(nobody, t.stream, [](manual_stream&) {}).code() == errc::closed);
        CHECK(t.compute.try_acquire(nobody).code() == errc::closed);
        CHECK(t.compute.usage(nobody).device_time == 0ns);
        CHECK(t.compute.close(nobody));
    }
}

TEST_CASE("closing takes nothing new from the start, however long it waits", "[compute]") {
    setup t;
    t.stand_still();
    const auto c = t.compute.add({});
    const auto running = t.submit(c, "running");
    CHECK_FALSE(t.compute.close(c, t.clock.now() + 5ms));
    CHECK(t.compute.submit(c, t.stream, [](manual_stream&) {}).code() == errc::closed);
    CHECK(t.compute.try_acquire(c).code() == errc::closed);
    CHECK(t.compute.change(c, {.weight = 1_pct}) == errc::none);
    t.finish_one();
    CHECK(t.compute.close(c, long_past));
    CHECK(running.done());
}

TEST_CASE("a permit that somebody holds keeps its client from closing", "[compute]") {
    setup t;
    t.stand_still();
    const auto c = t.compute.add({});
    std::optional<limiter::permit> held(t.compute.acquire(c).value());
    CHECK_FALSE(t.compute.close(c, long_past));
    SECTION("given back") {}
    SECTION("used") {
        held->enqueue(t.stream, [](manual_stream& s) { s.enqueue(1ms); });
        CHECK_FALSE(t.compute.close(c, t.clock.now() + 5ms));
        t.finish_one();
    }
    held.reset();
    CHECK(t.compute.close(c, long_past));
}

TEST_CASE("a callable may use the limiter that runs it", "[compute]") {
    setup t;
    t.run_while_waiting();
    const auto c = t.compute.add({});
    std::optional<limiter::ticket> inner;
    const auto outer = t.compute
                           .submit(c, t.stream,
                                   [&](manual_stream& s) {
                                       t.enqueued.push_back("outer begins");
                                       inner = t.submit(c, "inner");
                                       CHECK_FALSE(inner->done());
                                       t.compute.poll();
                                       CHECK(t.compute.usage(c).in_flight == 1);
                                       CHECK(t.compute.change(c, {.weight = 10_pct}) == errc::none);
                                       CHECK(t.compute.wait_bound() >= 0ns);
                                       CHECK(t.compute.try_acquire(c).code() == errc::deadline_exceeded);
                                       s.enqueue(1ms);
                                       t.enqueued.push_back("outer ends");
                                   })
                           .value();
    CHECK(inner->wait());
    CHECK(outer.done());
    CHECK(t.enqueued == names{"outer begins", "outer ends", "inner"});
}

namespace {

/// Calls the limiter when it is destroyed: hangs if that happens under its lock.
struct calls_back {
    explicit calls_back(limiter& l) : compute(&l) {}
    calls_back(calls_back&& other) noexcept : compute(std::exchange(other.compute, nullptr)) {}
    calls_back(const calls_back& other) = default;
    calls_back& operator=(calls_back&&) = delete;
    ~calls_back() {
        if (compute != nullptr) (void)compute->wait_bound();
    }
    void operator()(manual_stream&) const {}

    limiter* compute;
};

}  // namespace

TEST_CASE("no callable and no exception is destroyed under the lock", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    SECTION("callables: run, refused, cancelled") {
        auto running = t.compute.submit(c, t.stream, calls_back(t.compute)).value();
        auto cancelled = t.compute.submit(c, t.stream, calls_back(t.compute)).value();
        CHECK_FALSE(t.compute.close(c, long_past));
        t.finish_one();
        CHECK(t.compute.submit(c, t.stream, calls_back(t.compute)).code() == errc::closed);
        CHECK(cancelled.status() == errc::closed);
        t.compute.poll();
        CHECK(running.done());
    }
    SECTION("exceptions whose ticket is gone") {
        const auto bad = [&](manual_stream&) { throw calls_back(t.compute); };
        (void)t.compute.submit(c, t.stream, bad);
        (void)t.compute.submit(c, t.stream, bad);
        t.finish_one();
        t.compute.poll();
        t.finish_one();
        CHECK(t.compute.usage(c).failed == 2);
        t.stream.fail_next_record();
        (void)t.compute.submit(c, t.stream, bad);
        CHECK(t.compute.usage(c).in_flight == 0);
    }
    SECTION("exceptions whose ticket goes last") {
        const auto kept = t.compute.submit(c, t.stream, [&](manual_stream&) { throw calls_back(t.compute); }).value();
        t.finish_one();
        t.compute.poll();
        CHECK_THROWS_AS(kept.rethrow(), calls_back);
    }
    SECTION("callables that wait, and exceptions in flight, when the limiter goes") {
        auto other = std::make_unique<limiter>(gpushare::limiter_options{.depth = 1}, t.clock);
        const auto d = other->add({});
        (void)other->submit(d, t.stream, [&](manual_stream&) { throw calls_back(t.compute); });
        const auto waiting = other->submit(d, t.stream, calls_back(*other)).value();
        other.reset();
        CHECK(waiting.status() == errc::closed);
    }
}

TEST_CASE("tickets outlive their limiter", "[compute]") {
    manual_clock clock;
    manual_stream stream;
    std::vector<gpushare::ticket<limiter>> tickets;
    {
        limiter compute{{.depth = 1}, clock};
        const auto c = compute.add({});
        for (int i = 0; i < 3; ++i)
            tickets.push_back(compute.submit(c, stream, [](manual_stream& s) { s.enqueue(1ms); }).value());
        stream.reach_next();
        stream.reach_next();
        compute.poll();
    }
    for (auto& t : tickets) {
        CHECK(t.done());
        CHECK(t.wait(long_past));
    }
    CHECK(tickets[0].status() == errc::none);
    CHECK(tickets[1].status() == errc::closed);  // in flight
    CHECK(tickets[2].status() == errc::closed);  // waiting
    CHECK_THROWS_AS(tickets[2].rethrow(), gpushare::operation_error);
    tickets[0] = std::move(tickets[2]);
    CHECK(tickets[0].status() == errc::closed);
}

TEST_CASE("a dropped ticket changes nothing about the work", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    for (int i = 0; i < 3; ++i) (void)t.submit(c, "dropped");
    for (int i = 0; i < 3; ++i) {
        t.finish_one();
        t.compute.poll();
    }
    CHECK(t.enqueued.size() == 3);
    CHECK(t.compute.usage(c).completed == 3);
}

TEST_CASE("a thread that notices the end of work admits the work that waited for it", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    const auto other = t.compute.add({});
    const auto first = t.submit(c, "first"), second = t.submit(c, "second");
    t.finish_one();
    SECTION("poll") { t.compute.poll(); }
    SECTION("a question about usage, of anybody") { (void)t.compute.usage(other); }
    SECTION("a change of settings") { CHECK(t.compute.change(other, {}) == errc::none); }
    SECTION("another submission") { (void)t.submit(other, "third"); }
    SECTION("the gate") { CHECK_FALSE(t.compute.try_acquire(c)); }
    CHECK(first.done());
    REQUIRE(t.enqueued.size() == 2);
}

TEST_CASE("a client that is raised to a level with room is admitted at once", "[compute]") {
    setup t;
    const auto low = t.compute.add({});
    const auto raised = t.compute.add({});
    const auto held = t.compute.acquire(low).value();
    const auto ticket = t.submit(raised, "raised");
    CHECK(t.enqueued.empty());
    CHECK(t.compute.change(raised, {.level = {1}}) == errc::none);
    CHECK(t.enqueued == names{"raised"});
}

TEST_CASE("work that is done at once lets in the next at once", "[compute]") {
    struct instant_stream {
        using point = gpushare::immediate_point;
        static point record() noexcept { return {}; }
    };
    manual_clock clock;
    gpushare::compute_limiter<instant_stream, manual_clock> compute{{.depth = 1}, clock};
    instant_stream stream;
    const auto c = compute.add({});
    int runs = 0;
    for (int i = 0; i < 1000; ++i) (void)compute.submit(c, stream, [&](instant_stream&) { ++runs; });
    CHECK(runs == 1000);
    for (int i = 0; i < 1000; ++i) compute.acquire(c)->enqueue(stream, [&](instant_stream&) { ++runs; });
    CHECK(runs == 2000);
    CHECK(compute.close(c));
}

TEST_CASE("while nobody waits on any level, few ends of permits' work are dated", "[compute]") {
    struct instant_stream {
        using point = gpushare::immediate_point;
        static point record() noexcept { return {}; }
    };
    struct counting_clock {
        int* reads;
        [[nodiscard]] instant now() const noexcept { return instant{ns{++*reads}}; }
    };
    int reads = 0;
    gpushare::compute_limiter<instant_stream, counting_clock> compute{{}, counting_clock{&reads}};
    instant_stream stream;
    const auto c = compute.add({});
    const auto reads_of = [&](int permits) {
        const int before = reads;
        for (int i = 0; i < permits; ++i) compute.acquire(c)->enqueue(stream, [](instant_stream&) {});
        return reads - before;
    };
    CHECK(reads_of(1600) <= 101);
    (void)compute.add({.level = {1}});  // whose bounds count how long work has been on the device
    CHECK(reads_of(160) >= 160);
}

TEST_CASE("a bound counts all the time that work has had, whenever an end was last dated", "[compute]") {
    setup t;
    const auto low = t.compute.add({.longest = 1ms});
    const auto begin = [&] { t.compute.acquire(low)->enqueue(t.stream, [](manual_stream& s) { s.enqueue(1ms); }); };
    const int ends = GENERATE(1, 2, 15, 16, 17, 40);
    CAPTURE(ends);
    for (int i = 0; i < ends; ++i) {
        begin();
        t.clock.advance(1ms);
        t.finish_one();
        t.compute.poll();
    }
    begin();
    t.clock.advance(50ms);
    t.compute.poll();
    const auto high = t.compute.add({.level = {1}});
    const auto urgent = t.submit(high, "urgent");
    CHECK(urgent.bound() >= 50ms);
    CHECK(urgent.bound() <= 66ms);  // fifteen undated ends before it
    for (int i = 0; i < 2; ++i) {
        t.finish_one();
        t.compute.poll();
    }
    CHECK(urgent.done());
}

}  // namespace compute_limiter_test
