// SPDX-License-Identifier: Apache-2.0
// Timeline points of a host node's streams, which `record()` returns. A point stays valid when its
// stream and its node are gone.
//
//   gpushare::host::point done = stream.record();
//   if (!done.wait(clock.now() + 5ms)) ...          // false at the deadline
//   if (done.status() == gpushare::errc::kernel_failed) std::rethrow_exception(done.exception());
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/backend/host/detail/wakeup.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/detail/counted_ref.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

class point;

namespace detail {

struct stream_state;
struct point_hub;

/// The outcome of a piece of work on one stream; see stream::own_work. Everything but `references`
/// is written under the hub's mutex. Once a point after the work is reached, `status` and
/// `exception` don't change any more and are read without the mutex.
struct outcome_state {
    outcome_state* next = nullptr;
    std::atomic<std::uint32_t> references{0};
    std::thread::id by{};             // the thread that began the work
    outcome_state* beside = nullptr;  // earlier work under way on the stream; owns a reference
    errc status = errc::none;         // the code of the first kernel that failed
    std::exception_ptr exception;
    std::shared_ptr<point_hub> hub;  // keeps alive the pool that contains this state
};

/// A waiting thread, and its places in the queues of the points for which it waits.
struct waiter;
struct waiter_link {
    waiter_link* next = nullptr;
    waiter* thread = nullptr;
};
struct waiter {
    waiter* next = nullptr;  // the next waiter to wake
    std::span<const point> points;
    std::span<waiter_link> links;  // the places in the queues, one for each point
    wakeup& woken;

    /// Removes the waiter from all queues.
    inline void leave() noexcept;
};

/// The state that the copies of a point share. Everything but the two atomics is written under the
/// hub's mutex; once `reached` is set, nothing changes any more and the rest is read without the
/// mutex.
struct point_state {
    point_state* next = nullptr;
    std::atomic<std::uint32_t> references{0};
    std::atomic<bool> reached{false};
    errc status = errc::none;
    instant recorded{}, when{};
    ns used{};  // the stream's use until then: SM time over the stream's SMs
    // The same, with each kernel's time multiplied by the part of the SMs that it could fill.
    double wide = 0;
    std::exception_ptr exception;
    // Until the point is reached: the work on which it reports; owns a reference.
    outcome_state* within = nullptr;
    gpushare::detail::fifo<waiter_link> waiters;
    gpushare::detail::fifo<stream_state> streams;  // streams that wait for the point
    std::shared_ptr<point_hub> hub;                // keeps alive the pool that contains this state
};

/// Owns the points of a node, and the node's lock. There is one lock for all devices, so that a
/// thread or a stream can wait for points of several devices.
struct point_hub {
    std::mutex mutex;
    gpushare::detail::pool<point_state> points;
    gpushare::detail::pool<outcome_state> outcomes;
};

/// Drops a reference, with the hub unlocked.
inline void drop(point_state& p) noexcept {
    // acq_rel: the thread that frees the point has seen every other thread's last use.
    if (p.references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const std::shared_ptr<point_hub> hub = std::move(p.hub);
    p.exception = nullptr;  // runs a user's destructor, so before the lock
    const std::lock_guard lock{hub->mutex};
    hub->points.release(p);
}
inline void drop(outcome_state& o) noexcept {
    for (outcome_state* last = &o; last != nullptr;) {
        // acq_rel: as above.
        if (last->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        const std::shared_ptr<point_hub> hub = std::move(last->hub);
        last->exception = nullptr;
        outcome_state* const beside = std::exchange(last->beside, nullptr);
        const std::lock_guard lock{hub->mutex};
        hub->outcomes.release(*std::exchange(last, beside));
    }
}

}  // namespace detail

/// The outcome of a piece of work, which any thread may query any number of times; see
/// stream::own_work. Copies report on the same work. A default-constructed outcome belongs to no
/// work, and is a success. Safe from any thread, as a shared_ptr is.
class outcome {
public:
    outcome() noexcept = default;

    /// The code of the work: errc::none, or a code as of point::status(). Valid once a point after
    /// the work is reached.
    [[nodiscard]] errc status() const noexcept { return state_ ? state_->status : errc::none; }
    /// The exception of the first kernel that failed; null if none threw. Valid at the same time.
    [[nodiscard]] std::exception_ptr exception() const noexcept { return state_ ? state_->exception : nullptr; }

    /// For the engine: shares `state`.
    explicit outcome(detail::outcome_state& state) noexcept : state_(reference::share(state)) {}
    /// For the engine.
    [[nodiscard]] detail::outcome_state* state() const noexcept { return state_.get(); }

private:
    using reference = gpushare::detail::counted_ref<detail::outcome_state>;

    reference state_;
};

/// A point of a host stream. Models timeline_point; see there. Waits are on `steady_clock`. Safe
/// from any thread, as a shared_ptr is.
class point {
public:
    point() noexcept = default;

    /// Whether the point is reached. Never blocks.
    [[nodiscard]] bool reached() const noexcept;
    /// Waits for the point; false at the deadline, by steady_clock.
    bool wait(instant deadline) const { return wait_any({this, 1}, deadline); }

    /// Waits until one of the points is reached. False immediately if `points` is empty. The points
    /// may belong to several devices of one node. Throws operation_error: errc::different_nodes.
    static bool wait_any(std::span<const point> points, instant deadline);

    /// Ends another thread's wait for points.
    class interrupt {
    public:
        /// Ends the wait that has this interrupt, or the next wait that gets it.
        void raise() noexcept { woken_.interrupt(); }

    private:
        friend point;
        detail::wakeup woken_;
    };
    /// The same; also false if `by` was raised before a point was reached. Use an interrupt for one
    /// wait.
    static bool wait_any(std::span<const point> points, instant deadline, interrupt& by);

    /// errc::kernel_failed if a kernel threw (the first one counts), errc::device_lost; errc::none
    /// before it is reached. A point recorded within a stream::own_work reports on all of that work
    /// before the point. Any other point reports on the work since the last such point; two such
    /// points without work in between report the same. Points that other threads record or query
    /// don't change the report of an own_work.
    [[nodiscard]] errc status() const noexcept { return done() ? state_->status : errc::none; }
    /// The exception that the kernel threw; null if none did.
    [[nodiscard]] std::exception_ptr exception() const noexcept { return done() ? state_->exception : nullptr; }
    /// When the point was reached, on the device's timeline. The clock's epoch before that, and for
    /// a default-constructed point.
    [[nodiscard]] instant when() const noexcept { return done() ? state_->when : instant{}; }

    /// Device time from `a` to `b`.
    friend ns elapsed(const point& a, const point& b) noexcept {
        return a.done() && b.done() ? b.state_->when - a.state_->when : ns{0};
    }

    /// When the point was reached, by steady_clock; before that, instant{}.
    friend instant reached_at(const point& p) noexcept { return p.done() ? p.state_->when : instant{}; }

    /// The device use of both points' stream from `a` to `b`.
    friend sm_use used_between(const point& a, const point& b) noexcept {
        if (!a.done() || !b.done()) return {};
        const ns time = b.state_->used - a.state_->used;
        if (time <= ns{0}) return {};
        return {time, sm_width((b.state_->wide - a.state_->wide) / static_cast<double>(time.count()))};
    }

    /// For the engine: shares `state`.
    explicit point(detail::point_state& state) noexcept : state_(reference::share(state)) {}
    /// For the engine.
    [[nodiscard]] detail::point_state* state() const noexcept { return state_.get(); }

private:
    using reference = gpushare::detail::counted_ref<detail::point_state>;

    static bool wait_any(std::span<const point> points, instant deadline, detail::wakeup& woken);

    [[nodiscard]] bool done() const noexcept { return state_ && reached(); }

    reference state_;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE bool point::reached() const noexcept {
    // acquire: once the point is reached, the writes of the work and the point's own fields are
    // visible.
    return !state_ || state_->reached.load(std::memory_order_acquire);
}

GPUSHARE_INLINE bool point::wait_any(std::span<const point> points, instant deadline) {
    detail::wakeup woken;
    return wait_any(points, deadline, woken);
}

GPUSHARE_INLINE bool point::wait_any(std::span<const point> points, instant deadline, interrupt& by) {
    return wait_any(points, deadline, by.woken_);
}

#endif  // GPUSHARE_BODIES

inline bool point::wait_any(std::span<const point> points, instant deadline, detail::wakeup& woken) {
    const auto is_reached = [](const point& p) { return p.reached(); };
    if (gpushare::detail::any_where(points, is_reached)) return true;
    if (points.empty() || (deadline != never && deadline <= steady_clock::now())) return false;

    detail::point_hub& hub = *points.front().state_->hub;
    if (!gpushare::detail::all_where(points, [&](const point& p) { return p.state_->hub.get() == &hub; }))
        throw operation_error(errc::different_nodes, {}, "waiting for points of several host nodes at once");

    std::array<detail::waiter_link, 16> few;
    std::vector<detail::waiter_link> many(points.size() > few.size() ? points.size() : 0);
    const std::span<detail::waiter_link> links = many.empty() ? std::span{few}.first(points.size()) : std::span{many};

    detail::waiter self{.points = points, .links = links, .woken = woken};
    {
        const std::lock_guard lock{hub.mutex};
        // Checked under the lock that reaching a point takes: from here on, any point that is
        // reached wakes this thread.
        if (gpushare::detail::any_where(points, is_reached)) return true;
        for (std::size_t i = 0; i < points.size(); ++i) {
            links[i].thread = &self;
            points[i].state_->waiters.push(links[i]);
        }
    }
    // The thread that reached the point has removed this waiter from the queues.
    if (woken.wait(deadline)) return true;
    const std::lock_guard lock{hub.mutex};
    if (woken.raised()) return true;
    self.leave();
    return false;
}

inline void detail::waiter::leave() noexcept {
    for (std::size_t i = 0; i < points.size(); ++i) points[i].state()->waiters.remove(links[i]);
}
static_assert(timeline_point<point> && interruptible_point<point>);

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
