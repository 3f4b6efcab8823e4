// SPDX-License-Identifier: Apache-2.0
// Short submissions that share one point at their end, over streams on which points can be recorded
// later.
#include <chrono>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"
#include "support/sharing_stream.hpp"

namespace batch_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::instant;
using gpushare::ns;
using support::manual_clock;
using support::sharing_stream;

namespace {

using limiter = gpushare::compute_limiter<sharing_stream, manual_clock>;

struct setup {
    explicit setup(gpushare::limiter_options options = {}) : compute(options, clock) {}

    limiter::ticket submit(client_id c, sharing_stream& s, ns length = 50us) {
        return compute.submit(c, s, [length](sharing_stream& to) { to.enqueue(length); }).value();
    }
    /// Lets the limiter know what kernels of `c` take.
    void teach(client_id c, sharing_stream& s, ns length = 50us) {
        for (int i = 0; i < 3; ++i) {
            (void)submit(c, s, length);
            s.manual().reach_all();
            compute.poll();
            clock.advance(length);
        }
    }
    /// Through the gate, a kernel of 50 us, and what `then` does while it is being enqueued.
    template <class F>
    void enqueue(client_id c, F then, ns cost = {}) {
        compute.acquire(c, gpushare::never, {}, {.cost = cost}).value().enqueue(stream, [&](sharing_stream& s) {
            s.enqueue(50us);
            then();
        });
    }
    /// Until whatever ends has ended.
    void finish() {
        for (int end = 0; end < 8; ++end) {
            compute.poll();
            stream.manual().reach_all();
            clock.advance(1ms);
        }
    }
    [[nodiscard]] ns used(client_id c) { return compute.usage(c).device_time; }

    manual_clock clock;
    sharing_stream stream;
    limiter compute;
};

/// Calls something, once, before it records a point itself.
struct hooked_stream : sharing_stream {
    [[nodiscard]] point record() {
        if (const auto call = std::exchange(before_record, nullptr)) call();
        return sharing_stream::record();
    }
    std::function<void()> before_record;
};
static_assert(gpushare::shared_timeline<hooked_stream>);

}  // namespace

TEST_CASE("new and long work has points of its own, and short kernels share them", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    t.teach(c, t.stream);
    CHECK(t.stream.records() == 6);  // a begin and an end each
    const auto before = t.stream.records();
    std::vector<limiter::ticket> tickets;
    for (int i = 0; i < 10; ++i) tickets.push_back(t.submit(c, t.stream));
    CHECK(t.stream.records() == before + 2);  // one begin, and an end when they were 500 us together
    for (int i = 0; i < 10; ++i) tickets.push_back(t.submit(c, t.stream));
    CHECK(t.stream.records() == before + 3);  // the second begins where the first ends
    CHECK(t.compute.usage(c).in_flight == 20);
    (void)t.submit(c, t.stream);  // as much as may be in flight
    CHECK(t.compute.usage(c).in_flight == 20);
    t.stream.manual().reach_next();
    t.stream.manual().reach_next();
    t.compute.poll();
    CHECK(tickets[9].done());
    CHECK_FALSE(tickets[10].done());
    t.stream.manual().reach_all();
    t.compute.poll();
    t.stream.manual().reach_all();
    CHECK(t.used(c) == 24 * 50us);
    CHECK(tickets[19].device_time() == 50us);

    const auto d = t.compute.add({.weight = 10_pct});
    t.teach(d, t.stream, 400us);
    const auto now = t.stream.records();
    (void)t.submit(d, t.stream, 400us);
    (void)t.submit(d, t.stream, 400us);
    CHECK(t.stream.records() == now + 3);
}

TEST_CASE("a batch's time is split in proportion to the predictions", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    const auto submit = [&](std::uint64_t key, ns length) {
        return t.compute.submit(c, t.stream, [length](sharing_stream& to) { to.enqueue(length); }, {.key = key})
            .value();
    };
    for (int i = 0; i < 3; ++i)
        for (const std::uint64_t key : {1U, 2U}) {
            (void)submit(key, key * 30us);
            t.stream.manual().reach_all();
            t.compute.poll();
        }
    const auto one = submit(1, 33us), two = submit(2, 66us), three = submit(1, 33us);
    CHECK_FALSE(one.done());
    t.compute.poll();  // ends the batch
    t.stream.manual().reach_all();
    t.compute.poll();
    REQUIRE(three.done());
    CHECK(one.device_time() == 33us);
    CHECK(two.device_time() == 66us);
    CHECK(three.device_time() == 33us);
}

TEST_CASE("a thread that asks for a submission's end ends its batch", "[compute]") {
    setup t{{.depth = 1, .horizon = 200us}};
    const auto c = t.compute.add({.longest = 50us});
    t.teach(c, t.stream);
    const auto first = t.submit(c, t.stream), second = t.submit(c, t.stream);
    CHECK(t.stream.manual().open() >= 1);
    t.stream.manual().on_wait([&] { t.stream.manual().reach_all(); });
    SECTION("a ticket's holder") { CHECK(first.wait()); }
    SECTION("the dispatcher") {
        std::stop_source stop;
        t.stream.manual().on_wait([&] {
            t.stream.manual().reach_all();
            stop.request_stop();
        });
        t.compute.run(stop.get_token());
    }
    SECTION("who closes") { CHECK(t.compute.close(c)); }
    SECTION("poll, which doesn't wait for it") {
        t.compute.poll();
        t.stream.manual().reach_all();
        t.compute.poll();
    }
    SECTION("the account") {
        (void)t.used(c);
        t.stream.manual().reach_all();
        CHECK(t.used(c) == 250us);
    }
    SECTION("the gate, for want of room") {
        std::vector<limiter::ticket> more;
        for (int i = 0; i < 4; ++i) more.push_back(t.submit(c, t.stream));
        CHECK(t.compute.acquire(c));
    }
    CHECK(first.done());
    CHECK(second.done());
}

TEST_CASE("somebody else's work on the stream ends a batch, with the point at which it begins itself", "[compute]") {
    setup t{{.depth = 8}};
    const auto a = t.compute.add({.weight = 50_pct}), b = t.compute.add({.weight = 50_pct});
    t.teach(a, t.stream);
    t.teach(b, t.stream);
    const auto before = t.stream.records();
    const auto of_a = t.used(a), of_b = t.used(b);
    for (int i = 0; i < 3; ++i) (void)t.submit(a, t.stream);
    for (int i = 0; i < 2; ++i) (void)t.submit(b, t.stream);
    CHECK(t.stream.records() == before + 2);
    t.compute.poll();
    CHECK(t.stream.records() == before + 2);  // the first batch can be watched
    t.stream.manual().reach_all();
    t.compute.poll();
    CHECK(t.stream.records() == before + 3);
    t.stream.manual().reach_all();
    CHECK(t.used(a) == of_a + 150us);
    CHECK(t.used(b) == of_b + 100us);
}

TEST_CASE("a batch that is overtaken while somebody enters it ends, and nobody joins it any more", "[compute]") {
    setup t{{.depth = 8}};
    const auto a = t.compute.add({.weight = 50_pct}), b = t.compute.add({.weight = 50_pct});
    t.teach(a, t.stream);
    t.teach(b, t.stream);
    const auto of_a = t.used(a), of_b = t.used(b);
    const auto nothing = [] {};
    t.enqueue(a, nothing);
    t.enqueue(a, nothing);
    const auto before = t.stream.records();
    // While the third enters the batch of the first two, it can't end.
    t.enqueue(a, [&] {
        t.enqueue(b, nothing);
        t.enqueue(a, nothing);
    });
    t.finish();
    CHECK(t.stream.records() - before == 4);  // two begins, of which one is an end, and two ends
    CHECK(t.used(a) == of_a + 4 * 50us);
    CHECK(t.used(b) == of_b + 50us);
}

TEST_CASE("a batch that is overtaken is charged what ran before the next one, though more than predicted",
          "[compute]") {
    setup t{{.depth = 64}};
    const auto a = t.compute.add({.weight = 50_pct});
    t.teach(a, t.stream);
    const auto before = t.used(a);
    t.compute.acquire(a).value().enqueue(t.stream, [&](sharing_stream& s) {
        s.enqueue(100ms);
        t.compute.acquire(a, gpushare::never, {}, {.cost = 600us}).value().enqueue(t.stream, [](sharing_stream& next) {
            next.enqueue(1us);
        });
    });
    t.finish();
    CHECK(t.compute.usage(a).in_flight == 0);
    CHECK(t.used(a) - before >= 100ms);
    CHECK(t.used(a) - before <= 100ms + 50us);
}

TEST_CASE("a batch is charged its own span if what boarded behind it begins behind its end", "[compute][threads]") {
    const bool begun = GENERATE(false, true);
    const bool comes = GENERATE(false, true);  // or can't be enqueued after all
    CAPTURE(begun, comes);
    manual_clock clock;
    gpushare::compute_limiter<hooked_stream, manual_clock> compute({}, clock);
    hooked_stream s;
    const auto c = compute.add({});
    const auto submit = [&](ns length) {
        return compute.submit(c, s, [length](hooked_stream& to) { to.enqueue(length); }).value();
    };
    for (int i = 0; i < 3; ++i) {
        (void)submit(50us);
        s.manual().reach_all();
        compute.poll();
        clock.advance(50us);
    }
    const auto before = compute.usage(c).device_time;
    (void)submit(150us);  // longer than predicted
    std::latch inside(1), go_on(1);
    std::jthread enters([&] {
        compute.acquire(c)->enqueue(s, [&](hooked_stream& to) {
            to.enqueue(150us);
            inside.count_down();
            go_on.wait();
        });
    });
    inside.wait();
    s.before_record = [&] {  // the next one has boarded, and is about to begin
        go_on.count_down();
        enters.join();
        if (!comes) throw std::runtime_error("no point");
    };
    const auto behind = [](hooked_stream& to) { to.enqueue(10us); };
    const auto enqueue_behind = [&] { return compute.enqueue(c, s, behind, instant::min(), {}, {.key = 9}); };
    if (comes)
        CHECK(enqueue_behind() == errc::none);
    else
        CHECK_THROWS_AS(enqueue_behind(), std::runtime_error);
    clock.advance(1ms);
    CHECK(s.manual().reach_next());
    CHECK(s.manual().reach_next());  // the end
    while (begun && s.manual().reach_next()) {
    }
    CHECK(compute.usage(c).device_time - before == 300us + (begun && comes ? 10us : 0us));
    s.manual().reach_all();
}

TEST_CASE("a batch whose end can't be recorded while another began behind it ends later", "[compute]") {
    setup t{{.depth = 64}};
    const auto a = t.compute.add({.weight = 50_pct}), b = t.compute.add({.weight = 50_pct});
    t.teach(a, t.stream);
    t.teach(b, t.stream);
    const auto nothing = [] {};
    for (int i = 0; i < 9; ++i) t.enqueue(a, nothing);
    const auto last_that_fits = [&] {
        t.enqueue(a, [&] {
            t.enqueue(b, nothing, 600us);
            t.stream.manual().fail_next_record();
        });
    };
    CHECK_THROWS(last_that_fits());
    t.finish();
    CHECK(t.compute.usage(a).in_flight == 0);
    CHECK(t.compute.usage(b).in_flight == 0);
}

TEST_CASE("that work lasted longer beside others doesn't make it cost more, nor hold room longer", "[compute]") {
    manual_clock clock;
    clock.advance(1s);
    sharing_stream mine;
    (void)mine.record();
    mine.manual().reach_next_at(clock.now());
    sharing_stream theirs(mine, clock.now());
    limiter gate({.depth = 8, .horizon = 10ms}, clock);
    const auto a = gate.add({.weight = 50_pct}), b = gate.add({.weight = 50_pct});
    const auto put = [&](client_id c, sharing_stream& s) {
        auto p = gate.try_acquire(c);
        REQUIRE(p);
        p->enqueue(s, [](sharing_stream& to) { to.enqueue(100us); });
    };
    const auto reach = [&](sharing_stream& s) { s.manual().reach_next_at(clock.now()); };
    for (int i = 0; i < 8; ++i) {  // 100 us alone
        put(a, mine);
        reach(mine);
        clock.advance(100us);
        reach(mine);
        gate.poll();
    }
    for (int round = 0; round < 40; ++round) {  // and eight times as long beside the other
        put(b, theirs);
        put(a, mine);
        reach(theirs);
        reach(mine);
        clock.advance(700us);
        reach(theirs);
        gate.poll();
        clock.advance(100us);
        reach(mine);
        gate.poll();
        clock.advance(10us);
    }
    const auto before = gate.usage(a).device_time;
    put(b, theirs);
    reach(theirs);
    constexpr int kernels = 30;
    for (int i = 0; i < kernels; ++i) {  // alone again but for something small, and with gaps
        const auto records = mine.records();
        put(a, mine);
        if (mine.records() - records == 2) reach(mine);
        clock.advance(100us);
        reach(mine);
        clock.advance(200us);
    }
    reach(theirs);
    gate.poll();
    CHECK(gate.usage(a).device_time - before == kernels * 100us);
}

TEST_CASE("while others are in flight on other streams everything has points of its own", "[compute]") {
    setup t{{.depth = 8}};
    sharing_stream other(t.stream, instant{1s});
    const auto a = t.compute.add({.weight = 50_pct}), b = t.compute.add({.weight = 50_pct});
    t.teach(a, t.stream);
    t.teach(b, other);
    (void)t.submit(a, t.stream);
    (void)t.submit(a, t.stream);
    const auto before = t.stream.records();
    (void)t.submit(b, other);
    CHECK(t.stream.records() == before + 1);  // what was open is ended
    (void)t.submit(b, other);
    CHECK(other.records() == 6 + 3);  // the second begins at the end of the first
    t.stream.manual().reach_all();
    other.manual().reach_all();
    t.compute.poll();
    CHECK(t.compute.usage(a).in_flight == 0);
    CHECK(t.compute.usage(b).in_flight == 0);
}

TEST_CASE("idle time between the submissions of a batch, and after it, is nobody's", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    t.teach(c, t.stream);
    const auto before = t.used(c);
    SECTION("between them") {
        (void)t.submit(c, t.stream);
        t.clock.advance(10ms);          // the kernel is long over ...
        t.stream.enqueue(10ms - 50us);  // ... the device idle: what lies between two points counts it all the same
        (void)t.submit(c, t.stream);
    }
    SECTION("after them") {
        (void)t.submit(c, t.stream);
        (void)t.submit(c, t.stream);
        t.clock.advance(10ms);
        t.stream.enqueue(10ms - 100us);
    }
    t.compute.poll();
    t.stream.manual().reach_all();
    CHECK(t.used(c) == before + 100us);
    const auto next = t.submit(c, t.stream);  // and nothing was learnt from that
    t.compute.poll();
    t.stream.manual().reach_all();
    t.compute.poll();
    CHECK(t.compute.usage(c).longest == 50us);
    CHECK(next.device_time() == 50us);
}

TEST_CASE("a batch outlives the stream object that it was enqueued on", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    t.teach(c, t.stream);
    auto gone = std::make_unique<sharing_stream>(t.stream, instant{1s});
    auto points = gone->manual();
    const auto ticket = t.submit(c, *gone);
    gone.reset();
    points.on_wait([&] { points.reach_all(); });
    CHECK(ticket.wait());
    CHECK(ticket.device_time() == 50us);
    CHECK(t.compute.close(c));
}

TEST_CASE("a callable that throws in a batch fails its own ticket", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    t.teach(c, t.stream);
    const auto before = t.stream.records();
    const auto good = t.submit(c, t.stream);
    const auto bad = t.compute
                         .submit(c, t.stream,
                                 [](sharing_stream& s) {
                                     s.enqueue(50us);
                                     throw std::runtime_error("mine");
                                 })
                         .value();
    CHECK(t.stream.records() == before + 1);
    const auto next = t.submit(c, t.stream);
    CHECK(t.stream.records() == before + 2);  // nobody joins behind a member that failed
    t.stream.manual().on_wait([&] { t.stream.manual().reach_all(); });
    CHECK(next.wait());
    CHECK(bad.wait());
    CHECK(good.status() == errc::none);
    CHECK(bad.status() == errc::submission_failed);
    CHECK(next.status() == errc::none);
    CHECK(t.compute.usage(c).failed == 1);
}

TEST_CASE("a stream that can't be marked now is marked later", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    t.teach(c, t.stream);
    const auto ticket = t.submit(c, t.stream);
    t.stream.capture(true);
    t.compute.poll();
    CHECK_FALSE(ticket.wait(instant::min()));
    CHECK_FALSE(t.compute.close(c, t.clock.now()));
    t.stream.capture(false);
    t.compute.poll();
    t.stream.manual().reach_all();
    t.compute.poll();
    CHECK(ticket.status() == errc::none);
    CHECK(ticket.device_time() == 50us);
}

TEST_CASE("permits share points too, and one that is held doesn't keep others from theirs", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    t.teach(c, t.stream);
    const auto before = t.stream.records();
    for (int i = 0; i < 8; ++i) t.compute.acquire(c)->enqueue(t.stream, [](sharing_stream& s) { s.enqueue(50us); });
    CHECK(t.stream.records() == before + 1);
    const auto ticket = t.submit(c, t.stream);
    auto held = t.compute.acquire(c).value();
    t.stream.manual().on_wait([&] { t.stream.manual().reach_all(); });
    CHECK(ticket.wait());
    CHECK_THROWS_AS(held.enqueue(t.stream, [](sharing_stream&) { throw std::logic_error("holder"); }),
                    std::logic_error);
    t.compute.poll();
    t.stream.manual().reach_all();
    CHECK(t.compute.usage(c).in_flight == 0);
    CHECK(t.compute.usage(c).failed == 1);
    CHECK(t.used(c) == (3 + 9) * 50us);
}

TEST_CASE("backlogged clients on one stream are charged what they used, batch or no batch", "[compute]") {
    for (std::uint64_t nth = 0; nth < 50; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        setup t{{.depth = static_cast<std::uint32_t>(1 + any.below(4))}};
        std::vector<client_id> clients;
        std::vector<ns> truth(3);
        std::vector<ns> length;
        for (int i = 0; i < 3; ++i) {
            clients.push_back(t.compute.add({.weight = gpushare::share::of_permille(100 + any.below(200))}));
            length.push_back(ns{1000} * static_cast<int>(5 + any.below(150)));
        }
        std::uint64_t submitted = 0;
        const auto submit = [&](std::size_t i) {
            const auto took = length[i] + ns{static_cast<std::int64_t>(any.below(3000))};
            (void)t.compute.submit(clients[i], t.stream, [&truth, i, took](sharing_stream& s) {
                s.enqueue(took);
                truth[i] += took;
            });
            ++submitted;
        };
        for (int step = 0; step < 400; ++step) {
            for (std::size_t i = 0; i < 3; ++i)
                if (t.compute.usage(clients[i]).waiting < 4) submit(i);
            t.stream.manual().reach_next();
            t.clock.advance(20us);
        }
        for (int end = 0; end < 400; ++end) {
            t.compute.poll();
            t.stream.manual().reach_all();
        }
        ns sum{};
        std::uint64_t completed = 0;
        for (std::size_t i = 0; i < 3; ++i) {
            const auto u = t.compute.usage(clients[i]);
            completed += u.completed;
            sum += u.device_time;
            const auto error =
                static_cast<double>((u.device_time - truth[i]).count()) / static_cast<double>(truth[i].count());
            CHECK(std::abs(error) < 0.02);
        }
        CHECK(completed == submitted);
    }
}

}  // namespace batch_test
