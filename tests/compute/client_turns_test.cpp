// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Turns: on a device that doesn't report usage, clients of a level whose work doesn't fit side by
// side run one after the other, whatever their work consists of.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/detached.hpp"
#include "support/manual_timeline.hpp"

namespace client_turns_test {

using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::ns;
using gpushare::priority;
using support::manual_clock;

namespace {

/// A manual stream with a name, on which "A>B" is written down when A is to wait for what B
/// recorded last.
class joining_stream {
public:
    using point = support::manual_point;

    joining_stream(std::string name, std::vector<std::string>& log) : name_(std::move(name)), log_(&log) {}

    void enqueue(ns length) { manual_.enqueue(length); }
    [[nodiscard]] point record() { return last_ = manual_.record(); }
    void wait(const point& p) {
        if (std::exchange(fail_next_wait, false)) throw std::runtime_error("the test lets wait() fail");
        if (on_wait) on_wait();
        const auto of = std::ranges::find(known, p, [](const joining_stream* s) { return s->last_; });
        log_->push_back(name_ + ">" + (of == known.end() ? "?" : (*of)->name_));
    }
    void finish_one() {
        manual_.reach_next();
        manual_.reach_next();
    }

    bool fail_next_wait = false;
    std::function<void()> on_wait;
    std::vector<joining_stream*> known;

private:
    support::manual_stream manual_;
    std::string name_;
    std::vector<std::string>* log_;
    point last_;
};
static_assert(gpushare::joining_timeline<joining_stream>);
static_assert(!gpushare::joining_timeline<support::manual_stream>);

using limiter = gpushare::compute_limiter<joining_stream, manual_clock>;
using names = std::vector<std::string>;

struct three_clients {
    explicit three_clients(gpushare::limiter_options o) : compute(o, clock) {
        for (const char* n : {"A", "B", "C", "a"}) streams.emplace_back(n, log);
        for (auto& s : streams)
            for (auto& other : streams) s.known.push_back(&other);
    }
    limiter::ticket submit(client_id who, std::size_t s) {
        return compute.submit(who, streams[s], [](joining_stream& on) { on.enqueue(1ms); }).value();
    }

    names log;
    manual_clock clock;
    std::deque<joining_stream> streams;
    limiter compute;
    client_id a = compute.add({}), b = compute.add({}), c = compute.add({});
};

}  // namespace

TEST_CASE("a stream waits for the client before it and not for all that were before that one", "[compute]") {
    three_clients t{{.depth = 8}};
    const auto a1 = t.submit(t.a, 0);
    CHECK(t.log.empty());
    const auto b1 = t.submit(t.b, 1);
    CHECK(t.log == names{"B>A"});
    const auto b2 = t.submit(t.b, 1);  // in order behind b1 as it is
    CHECK(t.log == names{"B>A"});
    const auto c1 = t.submit(t.c, 2);
    CHECK(t.log.size() >= 2);
    CHECK(t.log[1].starts_with("C>"));
    CHECK(std::ranges::count(t.log, "C>A") == 0);
    t.log.clear();
    const auto a2 = t.submit(t.a, 3);  // the client's other stream
    CHECK(std::ranges::count(t.log, "a>C") == 1);
    CHECK(std::ranges::count(t.log, "a>A") == 0);
    for (auto& s : t.streams)
        for (int i = 0; i < 2; ++i) s.finish_one();
    t.compute.poll();
    for (const auto* ticket : {&a1, &b1, &b2, &c1, &a2}) CHECK(ticket->status() == errc::none);
}

TEST_CASE("a thread that was held up while another client had its turn changes nothing", "[compute]") {
    three_clients t{{.depth = 8}};
    const auto submit = [&](ns enqueuing, ns length) {
        const auto work = [&t, enqueuing, length](joining_stream& on) {
            t.clock.advance(enqueuing);
            on.enqueue(length);
        };
        return t.compute.submit(t.b, t.streams[1], work).value();
    };
    for (int i = 0; i < 5; ++i) {
        const auto usual = submit(5us, 1ms);
        t.streams[1].finish_one();
        t.compute.poll();
        REQUIRE(usual.device_time() == 1ms);
    }
    const auto work = [](joining_stream& on) { on.enqueue(4ms); };
    const auto before = t.compute.submit(t.a, t.streams[0], work, {.cost = 4ms}).value();
    const auto held_up = submit(3ms, 2ms);
    for (auto& s : t.streams) s.finish_one();
    t.compute.poll();
    CHECK(before.done());
    CHECK(held_up.device_time() == 2ms);
}

TEST_CASE("work that fits side by side doesn't wait, and neither does one level for another", "[compute]") {
    three_clients t{{.depth = 8}};
    const auto half = [&](client_id who, std::size_t s) {
        return t.compute
            .submit(who, t.streams[s], [](joining_stream& on) { on.enqueue(1ms); }, {.width = gpushare::sm_width(0.5)})
            .value();
    };
    const auto a1 = half(t.a, 0), b1 = half(t.b, 1);
    CHECK(t.log.empty());
    const auto c1 = t.submit(t.c, 2);  // all of it
    CHECK(std::ranges::count(t.log, "C>A") == 1);
    CHECK(std::ranges::count(t.log, "C>B") == 1);
    three_clients u{{.depth = 8}};
    const auto high = u.compute.add({.level = priority{1}});
    const auto low_one = u.submit(u.a, 0), high_one = u.submit(high, 1);
    CHECK(u.log.empty());
    for (auto* all : {&t, &u})
        for (auto& s : all->streams)
            for (int i = 0; i < 2; ++i) s.finish_one();
}

TEST_CASE("a stream that can't wait fails its own submission alone", "[compute]") {
    three_clients t{{.depth = 8}};
    const auto a1 = t.submit(t.a, 0);
    t.streams[1].fail_next_wait = true;
    const auto b1 = t.submit(t.b, 1);
    CHECK(b1.status() == errc::submission_failed);
    t.streams[2].fail_next_wait = true;
    {
        auto p = t.compute.try_acquire(t.c);
        REQUIRE(p);
        CHECK_THROWS_AS(p->enqueue(t.streams[2], [](joining_stream& s) { s.enqueue(1ms); }), std::runtime_error);
    }
    const auto c1 = t.submit(t.c, 2);
    for (auto& s : t.streams) s.finish_one();
    t.compute.poll();
    CHECK(a1.status() == errc::none);
    CHECK(c1.status() == errc::none);
    CHECK(t.compute.usage(t.b).in_flight == 0);
    CHECK(t.compute.usage(t.c).in_flight == 0);
}

TEST_CASE("a coroutine that is destroyed while its stream is told to wait never has its work enqueued", "[compute]") {
    three_clients t{{.depth = 2}};
    const auto a1 = t.submit(t.a, 0), a2 = t.submit(t.a, 0);
    bool enqueued = false, resumed = false;
    const auto wait = [&]() -> support::held {
        (void)co_await gpushare::async_submit(t.compute, t.b, t.streams[1], [&](joining_stream&) { enqueued = true; });
        resumed = true;
    };
    std::optional<support::held> waiting(wait());
    t.streams[1].on_wait = [&] { waiting.reset(); };  // another thread could do this as well
    t.streams[0].finish_one();
    t.compute.poll();
    CHECK(t.log == names{"B>A"});
    CHECK_FALSE(waiting);
    CHECK_FALSE(enqueued);
    CHECK_FALSE(resumed);
    const auto usage = t.compute.usage(t.b);
    CHECK(usage.in_flight == 0);
    CHECK(usage.waiting == 0);
    CHECK(usage.cancelled[gpushare::unrun::stopped] == 1);
    t.streams[1].on_wait = {};
    t.streams[0].finish_one();
    t.compute.poll();
    CHECK(t.compute.close(t.b, gpushare::instant::min()));
}

}  // namespace client_turns_test
