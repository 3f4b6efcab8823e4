// SPDX-License-Identifier: Apache-2.0
// Callables that take their thread long: which threads wait for them, and which don't.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <latch>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/timed_device.hpp"

namespace slow_callables_test {

using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::ns;
using gpushare::priority;
using support::manual_clock;
using support::manual_stream;

namespace {

constexpr priority low{}, high{1};

struct setup {
    using limiter = gpushare::compute_limiter<manual_stream, manual_clock>;
    using names = std::vector<std::string>;

    /// One that is enqueued at once, if it is let in.
    limiter::ticket submit(client_id c, manual_stream& s, std::string name) {
        return compute
            .submit(c, s,
                    [this, name = std::move(name)](manual_stream& to) {
                        to.enqueue(1ms);
                        const std::lock_guard lock(mutex);
                        enqueued.push_back(name);
                    })
            .value();
    }
    /// Submits, on a thread of its own, a callable of `c` that runs until `let_go` is called;
    /// returns once it runs.
    void hold(client_id c, manual_stream& s) {
        thread = std::jthread([this, c, &s] {
            (void)compute.submit(c, s, [this](manual_stream& to) {
                runs.count_down();
                go.wait();
                to.enqueue(1ms);
                const std::lock_guard lock(mutex);
                enqueued.push_back("held");
            });
        });
        runs.wait();
    }
    void let_go() {
        go.count_down();
        thread.join();
    }
    names so_far() {
        const std::lock_guard lock(mutex);
        return enqueued;
    }
    void finish() {
        for (int i = 0; i < 6; ++i) {
            below.reach_all();
            above.reach_all();
            compute.poll();
        }
    }

    manual_clock clock;
    manual_stream below, above{below, high};
    limiter compute{{.depth = 4}, clock};
    client_id slow = compute.add({}), neighbour = compute.add({}), urgent = compute.add({.level = high});
    std::mutex mutex;
    names enqueued;
    std::latch runs{1}, go{1};
    std::jthread thread;
};

using names = setup::names;

}  // namespace

TEST_CASE("work of a higher level doesn't wait for a callable of a lower one", "[compute][threads]") {
    setup t;
    t.hold(t.slow, t.below);
    const auto queued = t.submit(t.urgent, t.above, "urgent");
    CHECK(t.so_far() == names{"urgent"});
    {
        auto at_the_gate = t.compute.try_acquire(t.urgent);
        REQUIRE(at_the_gate);
        at_the_gate->enqueue(t.above, [](manual_stream& s) { s.enqueue(1ms); });
    }
    t.above.reach_all();
    CHECK(queued.wait());
    t.let_go();
    t.finish();
    CHECK(t.compute.usage(t.urgent).completed == 2);
    CHECK(t.compute.usage(t.slow).completed == 1);
}

TEST_CASE("work of a lower level doesn't wait for a callable of a higher one", "[compute][threads]") {
    setup t;
    t.hold(t.urgent, t.above);
    const auto other = t.submit(t.slow, t.below, "below");
    CHECK(t.so_far() == names{"below"});
    t.let_go();
    t.finish();
    CHECK(other.status() == errc::none);
}

TEST_CASE("of one level, one callable runs at a time, and who runs it goes on with what came meanwhile",
          "[compute][threads]") {
    setup t;
    t.hold(t.slow, t.below);
    manual_stream another(t.below, low);
    const auto second = t.submit(t.neighbour, another, "neighbour"), third = t.submit(t.slow, t.below, "slow");
    t.compute.poll();
    CHECK(t.so_far().empty());
    CHECK(t.compute.try_acquire(t.neighbour).code() == errc::deadline_exceeded);
    t.let_go();
    CHECK(t.so_far() == names{"held", "neighbour"});  // two of a level that isn't the highest
    t.finish();
    CHECK(t.so_far() == names{"held", "neighbour", "slow"});
    another.reach_all();
    t.finish();
    CHECK(second.status() == errc::none);
    CHECK(third.status() == errc::none);
}

TEST_CASE("a client's work stays in order though its level changes under way", "[compute][threads]") {
    setup t;
    t.hold(t.slow, t.below);
    REQUIRE(t.compute.change(t.slow, {.level = high}) == errc::none);
    const auto second = t.submit(t.slow, t.below, "second");
    CHECK(t.so_far().empty());
    const auto urgent = t.submit(t.urgent, t.above, "urgent");  // the policy's next is the other one, perhaps
    t.let_go();
    t.finish();
    const auto all = t.so_far();
    REQUIRE(all.size() == 3);
    CHECK(std::ranges::find(all, "held") < std::ranges::find(all, "second"));
    CHECK(urgent.status() == errc::none);
    CHECK(second.status() == errc::none);
}

TEST_CASE("a callable may submit at another level, where it is enqueued at once", "[compute]") {
    setup t;
    std::optional<setup::limiter::ticket> inner;
    const auto outer = t.compute
                           .submit(t.slow, t.below,
                                   [&](manual_stream& s) {
                                       inner = t.submit(t.urgent, t.above, "inner");
                                       CHECK(t.so_far() == names{"inner"});
                                       s.enqueue(1ms);
                                   })
                           .value();
    t.finish();
    CHECK(inner->status() == errc::none);
    CHECK(outer.status() == errc::none);
}

TEST_CASE("threads of several levels whose callables take long: all is enqueued, in the order of each client",
          "[compute][threads]") {
    const auto seed = support::seed(1);
    CAPTURE(seed);
    using stream = support::timed_device::stream;
    constexpr unsigned clients = 6;
    constexpr int each = 120;
    support::timed_device device;
    gpushare::compute_limiter<stream, support::steady> compute{{.depth = 3}};
    // Written in callables of one client: what orders these is the limiter, as ThreadSanitizer
    // sees.
    std::vector<std::vector<int>> order(clients);
    std::vector<int> running(clients, 0);
    std::atomic<bool> twice{false};
    support::together(clients, [&](unsigned rank) {
        support::random any(seed + rank);
        stream s(device);
        const auto level = [&] { return priority{static_cast<std::int32_t>(any.below(3))}; };
        const auto c = compute.add({.level = level()});
        for (int n = 0; n < each; ++n) {
            const std::chrono::microseconds hold(any.below(60));
            const auto ticket = compute
                                    .submit(c, s,
                                            [&, rank, n, hold](stream& to) {
                                                if (running[rank]++ != 0) twice = true;
                                                std::this_thread::sleep_for(hold);
                                                to.enqueue(ns{n % 7 * 1000});
                                                order[rank].push_back(n);
                                                --running[rank];
                                            })
                                    .value();
            if (n % 40 == 39) (void)compute.change(c, {.level = level()});
            if (n % 9 == 0) compute.poll();
            if (n == each - 1) (void)ticket.wait();
        }
        compute.close(c);
    });
    CHECK_FALSE(twice);
    for (const auto& o : order) {
        CHECK(o.size() == each);
        CHECK(std::ranges::is_sorted(o));
    }
}

}  // namespace slow_callables_test
