// SPDX-License-Identifier: Apache-2.0
// Many threads use one limiter. No test depends on durations: every wait has a deadline far beyond
// its need, and a lost wake-up shows as an exceeded deadline.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/timed_device.hpp"

namespace compute_limiter_threads_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using support::in_good_time;
using support::steady;
using support::timed_device;

namespace {

using stream = timed_device::stream;
using limiter = gpushare::compute_limiter<stream, steady>;

struct setup {
    explicit setup(gpushare::limiter_options options = {}) : compute(options) {}

    timed_device device;
    limiter compute;
};

/// run() on a thread of its own.
struct dispatcher {
    explicit dispatcher(limiter& compute) : thread([&compute](const std::stop_token& stop) { compute.run(stop); }) {}
    std::jthread thread;
};

}  // namespace

TEST_CASE("eight threads at the gate all get through", "[compute][threads]") {
    const bool dispatched = GENERATE(false, true);
    const auto depth = GENERATE(1U, 3U);
    CAPTURE(dispatched, depth);
    setup t{{.depth = depth}};
    std::optional<dispatcher> driver;
    if (dispatched) driver.emplace(t.compute);
    std::vector<gpushare::client_id> clients;
    for (int i = 0; i < 4; ++i) clients.push_back(t.compute.add({.weight = 25_pct, .level = {i / 2}}));
    std::atomic<int> refused{0};
    support::together(8, [&](unsigned rank) {
        stream s(t.device);
        for (int i = 0; i < 100; ++i) {
            auto p = t.compute.acquire(clients[rank / 2], in_good_time());
            if (!p) {
                ++refused;
            } else if (i % 10 != 0) {  // some are given back unused
                p->enqueue(s, [](stream& to) { to.enqueue(5us); });
            }
        }
    });
    CHECK(refused == 0);
    for (const auto c : clients) {
        CHECK(t.compute.close(c, in_good_time()));
    }
}

TEST_CASE("callables run one at a time, and those of a client in the order of submission", "[compute][threads]") {
    const bool dispatched = GENERATE(false, true);
    CAPTURE(dispatched);
    setup t{{.depth = 3}};
    std::optional<dispatcher> driver;
    if (dispatched) driver.emplace(t.compute);
    constexpr unsigned threads = 4;
    std::vector<gpushare::client_id> clients;
    for (unsigned i = 0; i < threads; ++i) clients.push_back(t.compute.add({.weight = 25_pct}));
    std::vector<int> last(threads, -1);  // of each client; only the one callable that runs touches them
    std::atomic<int> running{0}, overlaps{0}, disorders{0}, unfinished{0}, failed{0};
    support::together(threads, [&](unsigned rank) {
        stream s(t.device);
        std::vector<limiter::ticket> tickets;
        for (int i = 0; i < 200; ++i) {
            tickets.push_back(t.compute
                                  .submit(clients[rank], s,
                                          [&, rank, i](stream& to) {
                                              if (running.fetch_add(1) != 0) ++overlaps;
                                              if (last[rank] != i - 1) ++disorders;
                                              last[rank] = i;
                                              to.enqueue(3us);
                                              running.fetch_sub(1);
                                          })
                                  .value());
            if (i % 16 == 0 && !tickets.back().wait(in_good_time())) ++unfinished;
        }
        for (const auto& ticket : tickets) {
            if (!ticket.wait(in_good_time())) ++unfinished;
            if (ticket.status() != errc::none) ++failed;
        }
    });
    CHECK(unfinished == 0);
    CHECK(failed == 0);
    CHECK(overlaps == 0);
    CHECK(disorders == 0);
    for (const auto c : clients) {
        const auto usage = t.compute.usage(c);
        CHECK(usage.completed == 200);
        CHECK(usage.waiting == 0);
        CHECK(usage.in_flight == 0);
    }
}

TEST_CASE("the gate, the queue and the dispatcher work side by side", "[compute][threads]") {
    setup t{{.depth = 2}};
    const dispatcher driver(t.compute);
    const auto low = t.compute.add({});
    const auto high = t.compute.add({.level = {1}});
    std::atomic<int> lost{0};
    // A thread that asks for figures all the time notices ends that others wait for: it must not
    // keep them to itself.
    support::background curious(1, [&](unsigned) { (void)t.compute.usage(low); });
    support::together(6, [&](unsigned rank) {
        stream s(t.device);
        const auto c = rank % 2 == 0 ? low : high;
        for (int i = 0; i < 100; ++i) {
            if (rank < 3) {
                auto p = t.compute.acquire(c, in_good_time());
                if (!p) ++lost;
                if (p) p->enqueue(s, [](stream& to) { to.enqueue(5us); });
            } else {
                const auto ticket = t.compute.submit(c, s, [](stream& to) { to.enqueue(5us); });
                if (!ticket || !ticket->wait(in_good_time())) ++lost;
            }
        }
    });
    CHECK(lost == 0);
}

TEST_CASE("a dispatcher alone finishes what others only submit", "[compute][threads]") {
    setup t{{.depth = 1}};
    const dispatcher driver(t.compute);
    const auto c = t.compute.add({});
    stream s(t.device);
    for (int round = 0; round < 50; ++round) {
        std::vector<limiter::ticket> tickets;
        for (int i = 0; i < 5; ++i)
            tickets.push_back(t.compute.submit(c, s, [](stream& to) { to.enqueue(5us); }).value());
        const auto deadline = in_good_time();
        while (!tickets.back().done() && steady::now() < deadline) {  // done() drives nothing
            if (round % 2 == 0) (void)t.compute.usage(c);
            std::this_thread::yield();
        }
        REQUIRE(tickets.back().done());
    }
}

TEST_CASE("deadlines and stop requests under contention leave no trace", "[compute][threads]") {
    setup t{{.depth = 2}};
    const auto c = t.compute.add({});
    const auto seed = support::seed(1);
    CAPTURE(seed);
    std::atomic<std::uint64_t> granted{0};
    std::atomic<int> odd{0};
    support::together(8, [&](unsigned rank) {
        support::random any(seed + rank);
        stream s(t.device);
        for (int i = 0; i < 100; ++i) {
            std::stop_source stop;
            std::jthread stopper;
            const auto kind = any.below(4);
            if (kind == 0) stopper = std::jthread([&] { stop.request_stop(); });
            const auto patience = std::chrono::microseconds(any.below(200));
            auto p = kind == 1 ? t.compute.try_acquire(c)
                               : t.compute.acquire(c, kind == 2 ? steady::now() + patience : in_good_time(),
                                                   stop.get_token());
            if (p) {
                p->enqueue(s, [](stream& to) { to.enqueue(10us); });
                ++granted;
            } else if (p.code() != (kind == 0 ? errc::stopped : errc::deadline_exceeded) || kind == 3) {
                ++odd;
            }
        }
    });
    CHECK(odd == 0);
    CHECK(t.compute.usage(c).waiting == 0);
    stream s(t.device);
    const auto last = t.compute.submit(c, s, [](stream&) {}).value();
    CHECK(last.wait(in_good_time()));
    CHECK(t.compute.usage(c).completed == granted + 1);
    CHECK(t.compute.usage(c).in_flight == 0);
}

TEST_CASE("a wait that only a stop request can end is ended by it", "[compute][threads]") {
    setup t{{.depth = 1}};
    const auto c = t.compute.add({});
    auto held = std::make_unique<limiter::permit>(t.compute.acquire(c).value());
    std::stop_source stop;
    std::atomic<int> stopped{0};
    {
        std::vector<std::jthread> waiting;
        for (int i = 0; i < 4; ++i)
            waiting.emplace_back([&] {
                if (t.compute.acquire(c, gpushare::never, stop.get_token()).code() == errc::stopped) ++stopped;
            });
        waiting.emplace_back([&] { t.compute.run(stop.get_token()); });
        while (t.compute.usage(c).waiting < 4) std::this_thread::yield();
        stop.request_stop();
    }
    CHECK(stopped == 4);
    CHECK(t.compute.usage(c).waiting == 0);
    held.reset();
    CHECK(t.compute.try_acquire(c));
}

TEST_CASE("closing ends the waits of all others", "[compute][threads]") {
    for (int round = 0; round < 20; ++round) {
        setup t{{.depth = 1}};
        const auto c = t.compute.add({});
        stream s(t.device);
        auto held = std::make_unique<limiter::permit>(t.compute.acquire(c).value());
        std::atomic<int> closed{0}, odd{0};
        {
            std::vector<std::jthread> waiting;
            for (int i = 0; i < 3; ++i)
                waiting.emplace_back(
                    [&] { ++(t.compute.acquire(c, in_good_time()).code() == errc::closed ? closed : odd); });
            for (int i = 0; i < 3; ++i)
                waiting.emplace_back([&] {
                    const auto ticket = t.compute.submit(c, s, [](stream&) {});
                    const bool ended = ticket ? ticket->wait(in_good_time()) : ticket.code() == errc::closed;
                    ++(ended && (!ticket || ticket->status() == errc::closed) ? closed : odd);
                });
            if (round % 2 == 0)
                while (t.compute.usage(c).waiting < 6) std::this_thread::yield();
            waiting.emplace_back([&] { ++(t.compute.close(c, in_good_time()) ? closed : odd); });
            while (t.compute.submit(c, s, [](stream&) {}).code() != errc::closed) std::this_thread::yield();
            held->enqueue(s, [](stream& to) { to.enqueue(10us); });
            if (!t.compute.close(c, in_good_time())) ++odd;
        }
        CHECK(closed == 7);
        CHECK(odd == 0);
    }
}

namespace {

/// A thread that closes a client, with no deadline of its own.
class closer {
public:
    /// Returns once the thread has nothing left to do but wait.
    closer(limiter& compute, gpushare::client_id c)
        : thread_([this, &compute, c] { over_ = compute.close(c, gpushare::never, stop_.get_token()); }) {
        while (compute.try_acquire(c).code() != errc::closed) std::this_thread::yield();
        std::this_thread::sleep_for(20ms);
    }
    closer(const closer&) = delete;
    closer& operator=(const closer&) = delete;
    ~closer() { stop_.request_stop(); }

    [[nodiscard]] bool over() const { return over_; }

private:
    std::stop_source stop_;
    std::atomic<bool> over_{false};
    std::jthread thread_;
};
/// Somebody waits at it until it is opened.
struct gate {
    void pass() {
        reached = true;
        while (!open) std::this_thread::yield();
    }
    std::atomic<bool> reached{false}, open{false};
};

}  // namespace

TEST_CASE("a close comes back once the client's last permit was given back unused", "[compute][threads]") {
    setup t;
    const auto c = t.compute.add({});
    auto held = std::make_unique<limiter::permit>(t.compute.acquire(c).value());
    const closer closing(t.compute, c);
    CHECK_FALSE(closing.over());
    held.reset();
    CHECK(support::becomes([&] { return closing.over(); }));
}

TEST_CASE("a close comes back once the client's last callback has returned", "[compute][threads]") {
    setup t;
    const auto c = t.compute.add({});
    stream s(t.device);
    gate callback;
    const auto done = [&callback](const gpushare::completion&) { callback.pass(); };
    // All in one thread: the callback comes inside submit() if the device is done by then.
    const std::jthread submitter([&] {
        const auto work = [](stream& to) { to.enqueue(1us); };
        (void)t.compute.submit(c, s, work, {}, done).value().wait();
    });
    CHECK(support::becomes([&] { return callback.reached.load(); }));
    const closer closing(t.compute, c);
    CHECK_FALSE(closing.over());
    callback.open = true;
    CHECK(support::becomes([&] { return closing.over(); }));
}

TEST_CASE("a close comes back once the client's last cancelled callable is destroyed", "[compute][threads]") {
    setup t{{.depth = 1}};
    const auto c = t.compute.add({});
    stream s(t.device);
    gate destroyed;
    auto held = std::make_unique<limiter::permit>(t.compute.acquire(c).value());
    auto callable = std::shared_ptr<gate>(&destroyed, [](gate* g) { g->pass(); });
    const auto ticket = t.compute.submit(c, s, [kept = std::move(callable)](stream&) {}).value();
    const std::jthread canceller([&] { (void)ticket.cancel(); });
    CHECK(support::becomes([&] { return destroyed.reached.load(); }));
    held.reset();
    const closer closing(t.compute, c);
    CHECK_FALSE(closing.over());
    destroyed.open = true;
    CHECK(support::becomes([&] { return closing.over(); }));
}

TEST_CASE("clients that come and go don't disturb each other", "[compute][threads]") {
    setup t{{.depth = 2}};
    std::atomic<int> odd{0};
    support::together(6, [&](unsigned rank) {
        stream s(t.device);
        for (int i = 0; i < 40; ++i) {
            const auto c = t.compute.add({.weight = 10_pct, .level = {static_cast<std::int32_t>(rank % 3)}});
            std::vector<limiter::ticket> tickets;
            for (int k = 0; k < 4; ++k)
                tickets.push_back(t.compute
                                      .submit(c, s,
                                              [&, k](stream& to) {
                                                  to.enqueue(3us);
                                                  if (k == 2) throw std::runtime_error("on purpose");
                                              })
                                      .value());
            if (i % 2 == 0 && !tickets.back().wait(in_good_time())) ++odd;
            if (t.compute.change(c, {.level = {static_cast<std::int32_t>(i % 3)}}) != errc::none) ++odd;
            if (!t.compute.close(c, in_good_time())) ++odd;
            for (std::size_t k = 0; k < tickets.size(); ++k) {
                const auto expected = k == 2 ? errc::submission_failed : errc::none;
                if (!tickets[k].wait(in_good_time())) ++odd;
                if (tickets[k].status() != expected && (i % 2 == 0 || tickets[k].status() != errc::closed)) ++odd;
            }
            if (t.compute.try_acquire(c).code() != errc::closed) ++odd;
        }
    });
    CHECK(odd == 0);
}

TEST_CASE("while a callable takes its time, the ends of others are noticed", "[compute][threads]") {
    setup t{{.depth = 2}};
    const auto c = t.compute.add({});
    stream s(t.device);
    std::optional<limiter::ticket> first;
    std::atomic<bool> go{false}, noticed{false};
    std::jthread waiter([&] {
        while (!go) std::this_thread::yield();
        noticed = first->wait(in_good_time());
        go = false;
    });
    first = t.compute.submit(c, s, [](stream& to) { to.enqueue(1ms); }).value();
    const auto slow = t.compute
                          .submit(c, s,
                                  [&](stream&) {
                                      go = true;
                                      const auto deadline = in_good_time();
                                      while (go && steady::now() < deadline) std::this_thread::yield();
                                  })
                          .value();
    CHECK(noticed);
    CHECK(slow.wait(in_good_time()));
}

TEST_CASE("an urgent call gets in between two parts of one that yields, and its bound says when",
          "[compute][threads]") {
    namespace host = gpushare::host;
    host::node node{{.sms = 1}};
    auto low = node.make_stream(gpushare::device_id{0}), high = node.make_stream(gpushare::device_id{0}, {1});
    gpushare::compute_limiter<host::stream, host::steady_clock> compute;
    const auto generates = compute.add({.yields_within = 3s}), urgent = compute.add({.level = {1}});
    std::atomic<bool> inside{false}, came{false};
    const auto call = compute.submit(generates, low, [&](host::stream& s) {
        s.launch({}, [&](auto& context) {
            const auto next_token = [&] { gpushare::yield_point(context); };  // an engine's callback
            for (inside = true; !came;) next_token();
        });
    });
    while (!inside) std::this_thread::yield();
    const auto quick =
        compute.submit(urgent, high, [&](host::stream& s) { s.launch({}, [&](auto&) { came = true; }); });
    CHECK(quick->bound() == 3s);  // though nothing is known yet of how long the call takes
    CHECK(quick->wait(in_good_time()));
    came = true;  // had it waited for the whole call, it would wait still
    CHECK(call->wait(in_good_time()));
    CHECK(compute.usage(generates).completed == 1);
    // On streams that can't yield, nobody may rely on it.
    setup t;
    (void)t.compute.add({.yields_within = 3s});
    CHECK(t.compute.bound_of(t.compute.add({.level = {1}})) == 0s);
}

}  // namespace compute_limiter_threads_test
