// SPDX-License-Identifier: Apache-2.0
// A device that does nothing by itself. Streams take work of a stated length, and the test decides
// when their points are reached, and at which device time. No call waits for real time.
//
//   support::manual_stream s;
//   s.enqueue(5ms);   auto p = s.record();      // p.reached() is false
//   s.reach_next();  // now it is, 5 ms of device time after the point before it
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace support {

/// A clock that stands still until it is moved. Copies show the same time. Safe from any thread.
class manual_clock {
public:
    [[nodiscard]] gpushare::instant now() const noexcept {
        return gpushare::instant{gpushare::ns{now_->load(std::memory_order_acquire)}};
    }
    void advance(gpushare::ns d) noexcept { now_->fetch_add(d.count(), std::memory_order_acq_rel); }

private:
    std::shared_ptr<std::atomic<gpushare::ns::rep>> now_ = std::make_shared<std::atomic<gpushare::ns::rep>>(0);
};
static_assert(gpushare::clock<manual_clock>);

namespace detail {

struct manual_device {
    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> on_wait;  // under the mutex; called without it
};

struct mark {
    explicit mark(std::shared_ptr<manual_device> d) : device(std::move(d)) {}

    std::shared_ptr<manual_device> device;
    gpushare::ns length{};   // of the work since the mark before
    gpushare::instant at{};  // at and status are final before reached is stored, with release
    gpushare::errc status = gpushare::errc::none;
    std::atomic<bool> reached{false};
};

}  // namespace detail

/// Copies are the same point. A default-constructed one is reached.
class manual_point {
public:
    manual_point() = default;
    explicit manual_point(std::shared_ptr<detail::mark> m) noexcept : mark_(std::move(m)) {}

    [[nodiscard]] bool reached() const noexcept { return !mark_ || mark_->reached.load(std::memory_order_acquire); }
    [[nodiscard]] gpushare::errc status() const noexcept { return mark_ ? mark_->status : gpushare::errc::none; }
    /// Once reached: the device time.
    [[nodiscard]] gpushare::instant at() const noexcept { return mark_ ? mark_->at : gpushare::instant{}; }

    /// Any deadline other than `never` counts as passed: returns false at once unless the point is
    /// reached. With `never`, waits for another thread to reach the point. In both cases the
    /// device's on_wait runs first.
    bool wait(gpushare::instant deadline) const { return wait_any(std::span(this, 1), deadline); }

    /// The same for several points, which must be on one device.
    static bool wait_any(std::span<const manual_point> points, gpushare::instant deadline) {
        const auto any = [&] { return std::ranges::any_of(points, &manual_point::reached); };
        if (any() || points.empty()) return any();
        auto& device = *points.front().mark_->device;
        std::unique_lock lock(device.mutex);
        if (const auto hook = device.on_wait) {
            lock.unlock();
            hook();
            lock.lock();
        }
        if (deadline == gpushare::never) device.changed.wait(lock, any);
        return any();
    }

    friend gpushare::ns elapsed(const manual_point& a, const manual_point& b) noexcept { return b.at() - a.at(); }
    friend bool operator==(const manual_point&, const manual_point&) = default;

private:
    std::shared_ptr<detail::mark> mark_;
};
static_assert(gpushare::timeline_point<manual_point>);

/// An in-order stream: reaching a point also reaches all points recorded before it. Copies are the
/// same stream. Safe from any thread.
class manual_stream {
public:
    using point = manual_point;

    explicit manual_stream(gpushare::priority level = {})
        : manual_stream(std::make_shared<detail::manual_device>(), level) {}
    /// A stream on the same device as `neighbour`.
    manual_stream(const manual_stream& neighbour, gpushare::priority level) : manual_stream(neighbour.device_, level) {}

    void enqueue(gpushare::ns length) {
        const std::lock_guard lock(device_->mutex);
        timeline_->enqueued += length;
    }

    [[nodiscard]] point record() {
        const std::lock_guard lock(device_->mutex);
        if (std::exchange(timeline_->fail_record, false)) throw std::runtime_error("the test lets record() fail");
        auto m = std::make_shared<detail::mark>(device_);
        m->length = std::exchange(timeline_->enqueued, gpushare::ns{0});
        timeline_->open.push_back(m);
        return point{std::move(m)};
    }
    /// The next record() throws.
    void fail_next_record() {
        const std::lock_guard lock(device_->mutex);
        timeline_->fail_record = true;
    }

    [[nodiscard]] gpushare::priority level() const noexcept { return level_; }
    /// The number of points that were recorded and aren't reached yet.
    [[nodiscard]] std::size_t open() const {
        const std::lock_guard lock(device_->mutex);
        return timeline_->open.size();
    }

    /// Reaches the oldest open point. Its device time is that of the previous point plus the length
    /// of the work in between. False if no point is open.
    bool reach_next(gpushare::errc status = gpushare::errc::none) {
        const std::lock_guard lock(device_->mutex);
        if (timeline_->open.empty()) return false;
        return reach_front(timeline_->now + timeline_->open.front()->length, status);
    }
    /// Reaches the oldest open point at this device time.
    bool reach_next_at(gpushare::instant at, gpushare::errc status = gpushare::errc::none) {
        const std::lock_guard lock(device_->mutex);
        return !timeline_->open.empty() && reach_front(at, status);
    }
    /// Reaches `p`, after the points before it.
    void reach(const point& p) {
        while (!p.reached() && reach_next()) {
        }
    }
    void reach_all() {
        while (reach_next()) {
        }
    }

    /// Called on the waiting thread by every wait for a point of the device that isn't reached yet.
    /// A test can let time pass there.
    void on_wait(std::function<void()> hook) {
        const std::lock_guard lock(device_->mutex);
        device_->on_wait = std::move(hook);
    }

private:
    struct timeline {  // under the device's mutex
        std::deque<std::shared_ptr<detail::mark>> open;
        gpushare::ns enqueued{};
        gpushare::instant now{};
        bool fail_record = false;
    };

    manual_stream(std::shared_ptr<detail::manual_device> device, gpushare::priority level)
        : device_(std::move(device)), timeline_(std::make_shared<timeline>()), level_(level) {}

    bool reach_front(gpushare::instant at, gpushare::errc status) {
        auto& m = *timeline_->open.front();
        m.at = timeline_->now = at;
        m.status = status;
        m.reached.store(true, std::memory_order_release);
        timeline_->open.pop_front();
        device_->changed.notify_all();
        return true;
    }

    std::shared_ptr<detail::manual_device> device_;
    std::shared_ptr<timeline> timeline_;
    gpushare::priority level_;
};
static_assert(gpushare::queue<manual_stream>);

}  // namespace support
