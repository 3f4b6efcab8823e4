// SPDX-License-Identifier: Apache-2.0
// A small device in real time. One thread takes the work of all streams in the order of enqueuing,
// and takes each work's length for it. For tests of waiting and waking between threads; times
// aren't precise.
//
//   support::timed_device device;   support::timed_device::stream s(device);
//   s.enqueue(50us);   auto p = s.record();   p.wait(support::steady().now() + 1s);
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#include "support/unique_name.hpp"

namespace support {

/// The machine's steady clock.
struct steady {
    [[nodiscard]] static gpushare::instant now() noexcept {
        return gpushare::instant{std::chrono::steady_clock::now().time_since_epoch()};
    }
};
static_assert(gpushare::clock<steady>);

/// A deadline by which everything that should happen soon has happened.
[[nodiscard]] inline gpushare::instant in_good_time() { return steady::now() + std::chrono::minutes(5); }

/// Whether the condition holds within that time.
template <class F>
[[nodiscard]] bool becomes(F what) {
    for (const auto end = in_good_time(); !what();) {
        if (steady::now() >= end) return false;
        std::this_thread::yield();
    }
    return true;
}

class timed_device {
    struct mark {
        gpushare::instant at{};
        std::atomic<bool> reached{false};  // stored with release after `at`
    };
    struct shared {
        std::mutex mutex;
        std::condition_variable reached;
    };

public:
    /// Copies are the same point. A default-constructed one is reached.
    class point {
    public:
        point() = default;
        [[nodiscard]] bool reached() const noexcept { return !mark_ || mark_->reached.load(std::memory_order_acquire); }
        bool wait(gpushare::instant deadline) const { return wait_any(std::span(this, 1), deadline); }
        static bool wait_any(std::span<const point> points, gpushare::instant deadline) {
            const auto any = [&] { return std::ranges::any_of(points, &point::reached); };
            if (points.empty() || any()) return !points.empty();
            auto& device = *points.front().device_;
            std::unique_lock lock(device.mutex);
            return device.reached.wait_until(lock, std::chrono::steady_clock::time_point(deadline.time_since_epoch()),
                                             any);
        }
        [[nodiscard]] static gpushare::errc status() noexcept { return gpushare::errc::none; }
        friend gpushare::ns elapsed(const point& a, const point& b) noexcept { return b.at() - a.at(); }

    private:
        friend timed_device;
        point(std::shared_ptr<shared> device, std::shared_ptr<mark> m) noexcept
            : device_(std::move(device)), mark_(std::move(m)) {}
        [[nodiscard]] gpushare::instant at() const noexcept { return mark_ ? mark_->at : gpushare::instant{}; }

        std::shared_ptr<shared> device_;
        std::shared_ptr<mark> mark_;
    };

    /// Safe from any thread. Must not be used once the device is gone.
    class stream {
    public:
        using point = timed_device::point;

        explicit stream(timed_device& device) noexcept : device_(&device) {}
        void enqueue(gpushare::ns length) { device_->push({.length = length}); }
        [[nodiscard]] point record() {
            point p(device_->shared_, std::make_shared<mark>());
            device_->push({.reach = p.mark_});
            return p;
        }
        [[nodiscard]] static gpushare::priority level() noexcept { return {}; }

    private:
        timed_device* device_;
    };

    /// A stream whose timeline outlives it, so that short submissions share points on it as on
    /// CUDA.
    class sharing_stream : public stream {
    public:
        class handle {
        public:
            handle() = default;
            explicit operator bool() const noexcept { return device_ != nullptr; }
            [[nodiscard]] point record() const { return stream(*device_).record(); }

        private:
            friend sharing_stream;
            handle(timed_device* device, std::shared_ptr<const std::uint64_t> name) noexcept
                : device_(device), name_(std::move(name)) {}
            timed_device* device_ = nullptr;
            std::shared_ptr<const std::uint64_t> name_;
        };

        explicit sharing_stream(timed_device& device) : stream(device), on_(&device) {}
        [[nodiscard]] handle share() const noexcept { return {on_, name_}; }
        [[nodiscard]] std::uint64_t timeline() const noexcept { return *name_; }

    private:
        timed_device* on_;
        std::shared_ptr<const std::uint64_t> name_ = std::make_shared<const std::uint64_t>(unique_name());
    };

    timed_device() = default;
    timed_device(const timed_device&) = delete;
    timed_device& operator=(const timed_device&) = delete;

private:
    struct item {
        gpushare::ns length{};
        std::shared_ptr<mark> reach{};  // set for a point; null for work
    };

    void push(item i) {
        const std::lock_guard lock(mutex_);
        items_.push_back(std::move(i));
        pushed_.notify_one();
    }

    void work(const std::stop_token& stop) {
        while (!stop.stop_requested()) {
            std::unique_lock lock(mutex_);
            if (!pushed_.wait(lock, stop, [&] { return !items_.empty(); })) return;
            const auto next = std::move(items_.front());
            items_.pop_front();
            lock.unlock();
            if (next.reach) {
                next.reach->at = steady::now();
                const std::lock_guard reaching(shared_->mutex);
                next.reach->reached.store(true, std::memory_order_release);
                shared_->reached.notify_all();
            } else if (next.length > gpushare::ns{0}) {
                std::this_thread::sleep_for(next.length);
            }
        }
    }

    std::shared_ptr<shared> shared_ = std::make_shared<shared>();
    std::mutex mutex_;
    std::condition_variable_any pushed_;
    std::deque<item> items_;
    std::jthread thread_{[this](const std::stop_token& stop) { work(stop); }};  // last: it uses the other members
};
static_assert(gpushare::queue<timed_device::stream>);
static_assert(gpushare::shared_timeline<timed_device::sharing_stream>);

}  // namespace support
