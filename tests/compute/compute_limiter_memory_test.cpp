// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Memory: a limiter that is warm doesn't allocate, and a failed allocation does no harm.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include "support/failing_new.hpp"

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::ns;
using support::manual_clock;
using support::this_heap;

constexpr instant long_past = instant::min();

/// A device that counts: work and points are numbers, reached when `done` has come so far.
/// Allocates nothing.
struct counting_device {
    std::uint64_t enqueued = 0, done = 0;
    bool runs_while_waited_for = true;
    int failing_waits = 0;
};

struct counting_stream {
    struct point {
        [[nodiscard]] bool reached() const noexcept { return device == nullptr || device->done >= number; }
        bool wait(instant deadline) const { return wait_any(std::span(this, 1), deadline); }
        static bool wait_any(std::span<const point> points, instant) {
            auto& d = *points.front().device;
            if (d.failing_waits > 0) {
                --d.failing_waits;
                throw std::runtime_error("the device can't be asked");
            }
            if (d.runs_while_waited_for) d.done = d.enqueued;
            return d.runs_while_waited_for;
        }
        [[nodiscard]] static errc status() noexcept { return errc::none; }
        friend ns elapsed(const point& a, const point& b) noexcept {
            return ns{static_cast<std::int64_t>(b.number) - static_cast<std::int64_t>(a.number)};
        }

        counting_device* device = nullptr;
        std::uint64_t number = 0;
    };

    void enqueue(ns length) noexcept { device->enqueued += static_cast<std::uint64_t>(length.count()); }
    [[nodiscard]] point record() const noexcept { return {device, device->enqueued}; }

    counting_device* device;
};
static_assert(gpushare::timeline<counting_stream>);

using limiter = gpushare::compute_limiter<counting_stream, manual_clock>;

constexpr auto work = [](counting_stream& s) { s.enqueue(10us); };

}  // namespace

TEST_CASE("a warm limiter allocates nothing", "[compute][memory]") {
    counting_device device;
    counting_stream stream{&device};
    limiter compute{{.depth = 3}};
    const auto a = compute.add({.weight = 50_pct});
    const auto b = compute.add({.weight = 50_pct, .level = {1}});
    const auto round = [&] {
        compute.acquire(a)->enqueue(stream, work);
        (void)compute.acquire(b);  // given back
        for (int i = 0; i < 20; ++i) {
            (void)compute.submit(a, stream, work);
            (void)compute.submit(b, stream, work);
        }
        device.runs_while_waited_for = false;
        (void)compute.try_acquire(a);
        device.runs_while_waited_for = true;
        const auto last = compute.submit(a, stream, work);
        if (!last->wait()) FAIL("must end");
        (void)compute.usage(a);
        (void)compute.wait_bound();
        device.done = device.enqueued;
        compute.poll();
    };
    round();
    const auto before = this_heap.allocations;
    for (int i = 0; i < 100; ++i) round();
    const auto after = this_heap.allocations;
    CHECK(after - before == 0);
    CHECK(compute.usage(a).completed == 101 * 22);
}

TEST_CASE("requests that raise a client's level take memory as a vector does", "[compute][memory]") {
    limiter compute{{.depth = 3}};
    const auto a = compute.add({.weight = 50_pct});
    (void)compute.add({.weight = 50_pct, .level = {1}});
    std::size_t refused = 0;
    const auto before = this_heap.allocations;
    for (int i = 0; i < 64; ++i) refused += compute.begin_request(a, {1}) == errc::none ? 0 : 1;
    const auto after = this_heap.allocations;
    for (int i = 0; i < 64; ++i) compute.end_request(a, {1});
    CHECK(refused == 0);
    CHECK(after - before < 16);
}

TEST_CASE("the heap of this program does count and fail", "[compute][memory]") {
    const auto before = this_heap.allocations;
    std::vector<int> v(10);
    const auto after = this_heap.allocations;  // CHECK allocates too
    CHECK(after == before + 1);
    this_heap = {.good = 0, .recovers = true};
    CHECK_THROWS_AS(v.resize(1000), std::bad_alloc);
    CHECK_NOTHROW(v.resize(1000));
}

TEST_CASE("running out of memory at any moment loses no submission and strands nobody", "[compute][memory]") {
    const bool recovers = GENERATE(true, false);
    std::size_t failures = 0;
    // The nth allocation fails (or it and all that follow), for every n until the whole course goes
    // without.
    for (std::size_t nth = 0;; ++nth) {
        counting_device device;
        counting_stream stream{&device};
        limiter compute{{.depth = 3}};
        const auto a = compute.add({.weight = 50_pct});
        std::vector<limiter::ticket> tickets;
        tickets.reserve(40);
        std::optional<gpushare::client_id> b;
        std::size_t refused = 0, permits = 0;
        const auto attempt = [&](auto call) {
            try {
                call();
            } catch (const std::bad_alloc&) {
                ++refused;
            }
        };
        this_heap = {.good = nth, .recovers = recovers};
        for (int i = 0; i < 12; ++i) attempt([&] { tickets.push_back(compute.submit(a, stream, work).value()); });
        attempt([&] { b = compute.add({.weight = 50_pct, .level = {1}}); });
        if (b) {
            for (int i = 0; i < 4; ++i) attempt([&] { tickets.push_back(compute.submit(*b, stream, work).value()); });
            attempt([&] {
                compute.acquire(*b)->enqueue(stream, work);
                ++permits;
            });
            attempt([&] { (void)compute.change(*b, {.level = {2}}); });
        }
        attempt([&] { (void)compute.try_acquire(a); });
        if (!tickets.empty()) attempt([&] { (void)tickets.back().wait(); });
        const bool went_without = this_heap.good != SIZE_MAX && this_heap.good > 0;
        this_heap = {};
        failures += refused;

        // What was promised is kept.
        std::size_t broken = 0;
        for (const auto& t : tickets)
            if (!t.wait() || t.status() != errc::none) ++broken;
        CAPTURE(nth);
        device.done = device.enqueued;
        compute.poll();
        const auto completed = compute.usage(a).completed + (b ? compute.usage(*b).completed : 0);
        if (broken != 0 || completed != tickets.size() + permits) {
            CHECK(broken == 0);
            CHECK(completed == tickets.size() + permits);
        }
        if (!compute.close(a, long_past) || (b && !compute.close(*b, long_past))) FAIL_CHECK("something is in flight");
        if (went_without) break;
        REQUIRE(nth < 1000);
    }
    CHECK(failures > 0);
}

TEST_CASE("a device that can't be asked for a while is asked again", "[compute]") {
    counting_device device{.failing_waits = 3};
    counting_stream stream{&device};
    limiter compute;
    const auto c = compute.add({});
    const auto ticket = compute.submit(c, stream, work).value();
    CHECK(ticket.wait());
    CHECK(device.failing_waits == 0);
    CHECK(ticket.status() == errc::none);
}

TEST_CASE("without memory on the host, running work isn't reported as over", "[compute][memory]") {
    using host_limiter = gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock>;
    for (std::size_t nth = 0;; ++nth) {
        CAPTURE(nth);
        gpushare::host::node node{{.sms = 1}};  // whose points are all to be made yet
        auto stream = node.make_stream({0});
        host_limiter compute;
        const auto c = compute.add({});
        std::atomic<bool> go{false};
        bool launched = false;
        std::optional<host_limiter::ticket> ticket;
        const auto call = [&](gpushare::host::stream& to) {
            to.launch({}, [&](auto&) {
                while (!go) std::this_thread::yield();
            });
            launched = true;
        };
        this_heap = {.good = nth, .recovers = false};
        try {
            if (auto t = compute.submit(c, stream, call)) ticket = *std::move(t);
        } catch (const std::bad_alloc&) {
        }
        const bool went_without = this_heap.good > 0;
        this_heap = {};
        CHECK((!launched || (ticket && !ticket->done())));
        go = true;
        if (ticket) CHECK(ticket->wait());
        CHECK((!launched || ticket->status() == errc::none));
        if (went_without) break;
        REQUIRE(nth < 1000);
    }
}

TEST_CASE("a permit's work that was enqueued is charged, whichever allocation fails", "[compute][memory]") {
    const bool recovers = GENERATE(true, false);
    for (std::size_t nth = 0;; ++nth) {
        CAPTURE(nth);
        gpushare::host::node node{{.devices = 1, .sms = 1}};
        gpushare::host::stream stream = node.make_stream({0});
        gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock> compute{};
        const auto c = compute.add({});
        bool launched = false;
        {
            auto p = compute.acquire(c).value();
            this_heap = {.good = nth, .recovers = recovers};
            try {
                p.enqueue(stream, [&](gpushare::host::stream& s) {
                    s.enqueue(10us);
                    launched = true;
                });
            } catch (const std::bad_alloc&) {
            }
        }
        const bool went_without = !this_heap.failed;
        this_heap = {};
        while (compute.usage(c).in_flight != 0) std::this_thread::yield();
        CHECK((!launched || compute.usage(c).completed == 1));
        if (went_without) break;
        REQUIRE(nth < 1000);
    }
}

#endif
