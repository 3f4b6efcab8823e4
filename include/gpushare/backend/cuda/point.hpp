// SPDX-License-Identifier: Apache-2.0
// Timeline points of CUDA streams, which `record()` returns. A point is an event from a pool; it
// stays valid when its stream and its node are gone.
//
//   gpushare::cuda::point done = stream.record();
//   if (!done.wait(clock.now() + 5ms)) ...          // false at the deadline
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/counted_ref.hpp>
#include <gpushare/detail/steady_clock.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

namespace detail {

/// Queries the event, unless the answer is known. A known answer doesn't change. Call with a
/// relaxed_capture.
[[nodiscard]] inline bool ask(point_state& p) noexcept {
    // acquire: work that another thread saw done is done for this thread, too.
    if (p.outcome.load(std::memory_order_acquire) != point_state::pending) return true;
    health& fate = p.device->health();
    errc outcome = errc::device_lost;
    if (p.instead != nullptr && !(fate.lost() && p.instead->ends_with_device())) {
        const std::uint8_t now = p.instead->outcome();
        if (now == point_state::pending) return false;
        outcome = static_cast<errc>(now);
    } else if (!fate.lost()) {
        const CUresult code = p.device->api().event_query(p.event);
        // A capture under way in this thread forbids the query, so this isn't an answer. A captured
        // event isn't reached either: it happens when the graph is launched, if ever.
        if (code == CUDA_ERROR_NOT_READY || code == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ||
            code == CUDA_ERROR_CAPTURED_EVENT)
            return false;
        outcome = fate.note(code, "cuEventQuery");
    }
    p.outcome.store(static_cast<std::uint8_t>(outcome), std::memory_order_release);
    return true;
}

/// The driver's answer for the time between two events, which must belong to one device.
[[nodiscard]] inline CUresult time_between(point_state& a, point_state& b, float& ms) noexcept {
    const primary_context& context = a.device->context();
    return in_some_context(context, [&] { return context.api().event_elapsed_time(&ms, a.event, b.event); });
}

/// One turn of waiting. CUDA can wake a thread for one event, but not for any of several, nor at a
/// deadline. So the thread polls, at first without a pause and in the end every 100 us.
inline void pause(std::uint32_t turn, ns left) noexcept {
    constexpr std::uint32_t looks = 32, yields = 64;
    if (turn < looks) return;
    if (turn < looks + yields) return std::this_thread::yield();
    constexpr ns longest = std::chrono::microseconds(100);
    const ns nap = std::min(ns{1000} * (turn - looks - yields + 1), longest);
    std::this_thread::sleep_for(std::min(nap, std::max(left, ns{0})));
}

}  // namespace detail

/// A point of a CUDA stream. Models timeline_point; see there. Waits are on the node's clock_type.
/// Safe from any thread, as a shared_ptr is.
///
/// After an error that makes the device unusable, every point of the device is reached with
/// errc::device_lost: CUDA doesn't tell which work had been done before. `elapsed` has the
/// resolution of events, about 0.5 us, and 24 bits of a ms.
class point {
public:
    /// A point that is reached and belongs to no stream.
    point() noexcept = default;

    /// Whether the work before the point is done, successfully or not. Costs a driver call until it
    /// is done.
    [[nodiscard]] bool reached() const noexcept {
        if (known()) return true;
        const detail::relaxed_capture relaxed(state_->device->api());
        return detail::ask(*state_);
    }
    /// As wait_any() of this point.
    bool wait(instant deadline) const { return wait_any(this, 1, deadline); }

    /// Waits until one of the points is reached; false at the deadline. False immediately if
    /// `points` is empty. The points may belong to any devices and nodes.
    static bool wait_any(std::span<const point> points, instant deadline) {
        return wait_any(points.data(), points.size(), deadline);
    }
    /// The same. Sets `pending_at` to the beginning of the last look that found none reached.
    static bool wait_any(std::span<const point> points, instant deadline, instant& pending_at) {
        return wait_any(points.data(), points.size(), deadline, &pending_at);
    }

    /// errc::device_lost, or another code if the event can't be queried; errc::none before the
    /// point is reached.
    [[nodiscard]] errc status() const noexcept {
        return state_ && reached() ? static_cast<errc>(state_->outcome.load(std::memory_order_relaxed)) : errc::none;
    }

    /// The device time from `a` to `b`, negative if `b` comes first; zero until both are reached.
    /// Zero as well if one of them failed, or if they belong to different devices.
    friend ns elapsed(const point& a, const point& b) noexcept {
        if (a.state_ == b.state_ || !a.reached() || !b.reached()) return ns{0};
        questions ask;
        return ask.between(a, b);
    }
    /// A point that is reached once all of these points are, on any devices. Its status is the
    /// status of the first point that failed. The new point needs neither work nor an event, so it
    /// doesn't wait for other work. Throws std::bad_alloc.
    [[nodiscard]] static point all_of(std::vector<point> points);
    /// Whether the point is the end of a graph, or joins one by all_of(); see stream::last_use.
    [[nodiscard]] bool waits_for_graph() const noexcept {
        return state_ && state_->instead != nullptr && state_->instead->waits_for_graph();
    }
    /// The points that all_of() joined; empty for other points.
    [[nodiscard]] std::span<const point> parts() const noexcept;

    /// Whether both are the same point; two points that are reached at the same time may differ.
    friend bool operator==(const point&, const point&) noexcept = default;

    /// Queries several points with one change of this thread's capture mode. For one thread, within
    /// one function.
    class questions {
    public:
        /// The device time between the two points if `end` is reached; zero if the time isn't
        /// known. `begin` comes before `end`.
        template <class Answer = std::optional<ns>>  // keeps the cost of including this header low
        [[nodiscard]] Answer span(const point& begin, const point& end) noexcept {
            if (end.known()) return elapsed(begin, end);
            detail::point_state& to = *end.state_;
            relaxed_.begin(to.device->api());
            // If both events are reached, this call says so and returns the time between them. If
            // it says that they aren't reached, the event is queried as well, because after a
            // failed kernel the call may say so for ever. (Runtime API: cudaEventQuery returns
            // errors of earlier launches, cudaEventElapsedTime need only return cudaErrorNotReady.)
            const bool comparable = begin.native_handle() != nullptr && end.native_handle() != nullptr &&
                                    begin.state_->device == to.device && !to.device->health().lost();
            float ms = 0;
            if (comparable && detail::time_between(*begin.state_, to, ms) == CUDA_SUCCESS) {
                to.outcome.store(static_cast<std::uint8_t>(errc::none), std::memory_order_release);
                if (!begin.known()) begin.end_as(errc::none);
                return to_ns(ms);
            }
            if (!detail::ask(to)) return std::nullopt;
            return elapsed(begin, end);
        }
        /// As elapsed(), for points that span() has found reached, and for points before these.
        [[nodiscard]] ns between(const point& a, const point& b) noexcept {
            if (a.state_ == b.state_ || !a.known_well() || !b.known_well()) return ns{0};
            if (a.state_->device != b.state_->device) return ns{0};
            relaxed_.begin(a.state_->device->api());
            float ms = 0;
            const CUresult code = detail::time_between(*a.state_, *b.state_, ms);
            if (a.state_->device->health().note(code, "cuEventElapsedTime") != errc::none) return ns{0};
            return to_ns(ms);
        }

    private:
        detail::relaxed_capture relaxed_;
    };

    /// For streams: takes over the reference that `state` was acquired with.
    explicit point(detail::point_state& state) noexcept : state_(reference::adopt(state)) {}
    /// For streams: makes the point reached, with this status.
    void end_as(errc why) const noexcept {
        if (state_) state_->outcome.store(static_cast<std::uint8_t>(why), std::memory_order_release);
    }
    /// The point's event, to make other work wait for it. Null if the point has no event: a
    /// default-constructed point, several points joined by all_of(), and the end of a graph. The
    /// pool owns the event.
    [[nodiscard]] cudaEvent_t native_handle() const noexcept {
        return state_ && state_->instead == nullptr ? state_->event : nullptr;
    }
    /// For the backend: whether the point belongs to a stream of this device.
    [[nodiscard]] bool is_of(const detail::device_state& device) const noexcept {
        return state_ && state_->device.get() == &device;
    }
    /// Whether the point is known to be reached, without a query.
    [[nodiscard]] bool known() const noexcept {
        return !state_ || state_->outcome.load(std::memory_order_acquire) != detail::point_state::pending;
    }

private:
    using reference = gpushare::detail::counted_ref<detail::point_state>;

    [[nodiscard]] static ns to_ns(float ms) noexcept { return ns{static_cast<ns::rep>(static_cast<double>(ms) * 1e6)}; }
    // Whether the point is known to be reached without a failure, without a query.
    [[nodiscard]] bool known_well() const noexcept {
        return native_handle() != nullptr &&
               state_->outcome.load(std::memory_order_acquire) == static_cast<std::uint8_t>(errc::none);
    }

    static bool wait_any(const point* points, std::size_t n, instant deadline, instant* pending_at = nullptr) {
        if (n == 0) return false;
        for (std::uint32_t turn = 0;; ++turn) {
            const instant now =
                deadline == never && pending_at == nullptr ? instant{} : gpushare::detail::steady_clock::now();
            if (any_reached(points, n)) return true;
            if (pending_at != nullptr) *pending_at = now;
            if (now >= deadline) return false;
            detail::pause(turn, deadline == never ? ns::max() : deadline - now);
        }
    }
    static bool any_reached(const point* points, std::size_t n) noexcept {
        for (std::size_t i = 0; i < n; ++i)
            if (points[i].known()) return true;
        const detail::relaxed_capture relaxed(points[0].state_->device->api());
        for (std::size_t i = 0; i < n; ++i)
            if (detail::ask(*points[i].state_)) return true;
        return false;
    }

    reference state_;
};

namespace detail {

class all_points final : public eventless {
public:
    explicit all_points(std::vector<point> points) noexcept : points_(std::move(points)) {}
    [[nodiscard]] std::uint8_t outcome() noexcept override {
        for (const point& p : points_)
            if (!p.reached()) return point_state::pending;
        for (const point& p : points_)
            if (const errc why = p.status(); why != errc::none) return static_cast<std::uint8_t>(why);
        return static_cast<std::uint8_t>(errc::none);
    }
    [[nodiscard]] bool waits_for_graph() const noexcept override {
        return std::any_of(points_.begin(), points_.end(), [](const point& p) { return p.waits_for_graph(); });
    }
    // Each of the points ends with its own device, which may be another one.
    [[nodiscard]] bool ends_with_device() const noexcept override { return false; }
    [[nodiscard]] std::span<const point> points() const noexcept { return points_; }

private:
    const std::vector<point> points_;
};

}  // namespace detail

inline point point::all_of(std::vector<point> points) {
    std::erase_if(points, [](const point& p) { return p.known() && p.status() == errc::none; });
    if (points.empty()) return {};
    if (points.size() == 1) return std::move(points.front());
    const auto home = points.front().state_->device;
    return point(home->acquire(home, std::make_unique<detail::all_points>(std::move(points))));
}

inline std::span<const point> point::parts() const noexcept {
    const auto* const all = state_ ? dynamic_cast<const detail::all_points*>(state_->instead.get()) : nullptr;
    return all != nullptr ? all->points() : std::span<const point>{};
}

static_assert(timeline_point<point>);
static_assert(looking_point<point>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
