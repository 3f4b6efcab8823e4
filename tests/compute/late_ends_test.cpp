// SPDX-License-Identifier: Apache-2.0
// How much work is queued behind long work if points don't say when they were reached, as on CUDA:
// the limiter goes by the largest possible delay in noticing ends. In virtual time.
#include <algorithm>
#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"

namespace late_ends_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::ns;

namespace {

/// Runs one after the other what is enqueued. Who waits looks at it every `nap`.
struct serial_device {
    instant now{1s}, free_at{};
    ns nap{}, busy{};
};

struct clock {
    [[nodiscard]] instant now() const noexcept { return device->now; }
    serial_device* device;
};
static_assert(gpushare::clock<clock>);

struct point {
    [[nodiscard]] bool reached() const noexcept { return device == nullptr || device->now >= at; }
    bool wait(instant deadline) const { return wait_any(std::span(this, 1), deadline); }
    static bool wait_any(std::span<const point> points, instant deadline) {
        instant pending_at{};
        return wait_any(points, deadline, pending_at);
    }
    static bool wait_any(std::span<const point> points, instant deadline, instant& pending_at) {
        if (points.empty()) return false;
        auto& d = *points.front().device;
        for (;; d.now += d.nap) {
            if (std::ranges::any_of(points, &point::reached)) return true;
            pending_at = d.now;
            if (d.now >= deadline) return false;
        }
    }
    [[nodiscard]] static errc status() noexcept { return errc::none; }
    friend ns elapsed(const point& a, const point& b) noexcept { return b.at - a.at; }
    friend bool operator==(const point&, const point&) = default;

    serial_device* device = nullptr;
    instant at{};
};
static_assert(gpushare::looking_point<point>);
static_assert(!gpushare::dated_point<point>);

/// Its points are shared, as CUDA's are.
struct stream {
    using point = late_ends_test::point;
    struct handle {
        [[nodiscard]] explicit operator bool() const noexcept { return device != nullptr; }
        [[nodiscard]] point record() const { return {device, std::max(device->free_at, device->now)}; }
        serial_device* device = nullptr;
    };

    void enqueue(ns length) {
        device->free_at = std::max(device->free_at, device->now) + length;
        device->busy += length;
    }
    [[nodiscard]] point record() { return share().record(); }
    [[nodiscard]] handle share() const noexcept { return {device}; }
    [[nodiscard]] std::uint64_t timeline() const noexcept { return name; }

    serial_device* device;
    std::uint64_t name;
};
static_assert(gpushare::shared_timeline<stream>);

/// What a limiter did with two backlogged clients.
struct seen {
    std::vector<ns> behind;  // how much was in flight when each call was enqueued
    ns idle{};               // of the device, from the first call that was looked at to the last
    ns took{};               // the same time
};

/// `calls` of each, of `length`, whose callables take their thread `host` each, and the first one
/// `cold`.
seen run(ns length, ns nap, ns host = {}, int calls = 200, ns cold = {}) {
    serial_device device{.nap = nap};
    gpushare::compute_limiter<stream, clock> compute({}, clock{&device});
    stream a{&device, 1}, b{&device, 2};
    const auto first = compute.add({.weight = 50_pct}), second = compute.add({.weight = 50_pct});
    seen all;
    instant from{};
    ns busy_before{};
    const auto call = [&](stream& s) {
        device.now += all.behind.empty() ? std::max(host, cold) : host;
        all.behind.push_back(std::max(device.free_at - device.now, ns{0}));
        if (static_cast<int>(all.behind.size()) == calls) from = device.now, busy_before = device.busy;  // half of them
        s.enqueue(length);
    };
    using ticket = decltype(compute)::ticket;
    std::vector<ticket> tickets;
    for (int i = 0; i < calls; ++i) {
        tickets.push_back(compute.submit(first, a, call).value());
        tickets.push_back(compute.submit(second, b, call).value());
    }
    for (const auto& t : tickets) CHECK(t.wait());
    all.took = device.now - from;
    all.idle = all.took - (device.busy - busy_before);
    all.behind.erase(all.behind.begin(), all.behind.begin() + calls);
    return all;
}

}  // namespace

TEST_CASE("no work is enqueued behind long work whose ends are noticed soon, even if points have no dates",
          "[compute]") {
    const ns length = GENERATE(10ms, 25ms, 75ms);
    const auto s = run(length, 60us);
    CHECK(std::ranges::max(s.behind) == ns{0});
    CHECK(s.idle * 50 <= s.took);  // 2 %
}

TEST_CASE("if ends are noticed late, more work is enqueued, and the device isn't idle", "[compute]") {
    const auto s = run(25ms, 2ms);
    CHECK(std::ranges::min(s.behind) > ns{0});
    CHECK(s.idle * 50 <= s.took);
}

TEST_CASE("more work is enqueued behind work that is short compared with noticing its end", "[compute]") {
    const auto s = run(2ms, 60us);
    CHECK(std::ranges::min(s.behind) > ns{0});
    CHECK(s.idle * 50 <= s.took);
}

TEST_CASE("if callables take long on their thread, the next one is enqueued while the device is busy", "[compute]") {
    const auto s = run(25ms, 20us, 3ms);
    CHECK(std::ranges::min(s.behind) > ns{0});
    CHECK(s.idle * 50 <= s.took);
}

TEST_CASE("a first call that loads and compiles for seconds doesn't make later calls queue behind each other for long",
          "[compute]") {
    const auto s = run(25ms, 60us, {}, 40, 2s);
    CHECK(std::ranges::max(s.behind) == ns{0});
}

}  // namespace late_ends_test
