// SPDX-License-Identifier: Apache-2.0
// The simulated backend: a world with virtual time, devices and events. The world computes nothing,
// and no thread waits. So simulating a day of a thousand devices takes only as long as processing
// the events, and gives the same result on every run.
//
//   gpushare::sim::world world{{.devices = 8}};
//   world.at(gpushare::instant{} + 1s, [&] { ... });    // something happens at a time
//   // or once this work is done
//   gpushare::sim::stream s{world, {0}};  s.enqueue(200us);  s.call([&] { ... });
//   world.run_until(gpushare::instant{} + 10s);
//
// A device runs one kernel at a time, as if each kernel filled the device. Next is the first kernel
// of the stream with the highest priority; among equal priorities, the stream that became ready
// first. A started kernel runs to its end.
//
// A wait for a point runs the world's events until the point is reached, so that code written for
// real devices runs unchanged in virtual time:
//
//   gpushare::sim::stream urgent{world, {0}, gpushare::priority{1}};
//   urgent.enqueue(200us);    auto done = urgent.record();
//   done.wait(gpushare::never);      // returns immediately, and it is 200 us later in virtual time
//
// Events happen in the order of their times and, at equal times, in the order of arrival. So a
// simulation is the same on every run. The queue also works without a world, for your own
// simulation:
//
//   gpushare::sim::event_queue<int> events;    events.push(t, 7);
//   while (!events.empty()) { const auto now = events.first_time();  handle(now, events.pop()); }
//
// Random numbers for simulations: the same seed gives the same sequence with every compiler and
// library.
//
//   gpushare::sim::random any{42};    gpushare::ns gap = any.exponential(1ms);    gpushare::ns length = any.between(100us, 1ms);
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>
#include <gpushare/detail/inplace_function.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace sim {

/// A generator of 64-bit numbers: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). A value; not
/// thread-safe.
class random {
public:
    /// The same seed gives the same sequence.
    explicit random(std::uint64_t seed = 0) noexcept : state_(seed) {}

    /// A random number of 64 bits.
    [[nodiscard]] std::uint64_t next() noexcept {
        std::uint64_t z = state_ += detail::golden_ratio;
        z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
        z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
        return z ^ (z >> 31U);
    }
    /// A number from 0 to n-1; n > 0. The bias of the remainder is far too small to show in a
    /// simulation.
    [[nodiscard]] std::uint64_t below(std::uint64_t n) noexcept { return next() % n; }
    /// A number in [0, 1).
    [[nodiscard]] double fraction() noexcept { return static_cast<double>(next() >> 11U) * 0x1.0p-53; }
    /// A uniform duration, both ends included. `to` must not be less than `from`.
    [[nodiscard]] ns between(ns from, ns to) noexcept {
        // Unsigned: the distance may not fit into ns.
        const auto first = static_cast<std::uint64_t>(from.count());
        const auto distance = static_cast<std::uint64_t>(to.count()) - first;
        return ns{static_cast<std::int64_t>(first + (distance + 1 == 0 ? next() : below(distance + 1)))};
    }
    /// The time between two arrivals of a Poisson process whose arrivals are `mean` apart on
    /// average; at most ns::max().
    [[nodiscard]] ns exponential(ns mean) noexcept {
        const double drawn = -std::log1p(-fraction()) * static_cast<double>(mean.count());
        return drawn < 0x1p63 ? ns{std::llround(drawn)} : ns::max();
    }

private:
    std::uint64_t state_;
};

}  // namespace sim
namespace sim {

/// A queue of events: the earliest first and, at equal times, the one pushed first. Allocates only
/// if more events wait than ever before. A heap with four children per node, which is half as deep
/// as a binary heap. A value; not thread-safe.
template <class Event>
class event_queue {
public:
    /// Whether no event waits.
    [[nodiscard]] bool empty() const noexcept { return heap_.empty(); }
    /// The number of waiting events.
    [[nodiscard]] std::size_t size() const noexcept { return heap_.size(); }
    /// When the first event happens. The queue must not be empty.
    [[nodiscard]] instant first_time() const noexcept { return heap_.front().time; }

    /// Adds an event. Throws std::bad_alloc.
    void push(instant time, Event event) {
        entry e{time, pushed_++, std::move(event)};
        auto at = heap_.size();
        heap_.push_back(e);
        for (; at > 0 && before(e, heap_[(at - 1) / 4]); at = (at - 1) / 4) heap_[at] = std::move(heap_[(at - 1) / 4]);
        heap_[at] = std::move(e);
    }

    /// Takes out the first event. The queue must not be empty.
    Event pop() {
        Event first = std::move(heap_.front().event);
        entry last = std::move(heap_.back());
        heap_.pop_back();
        if (heap_.empty()) return first;
        std::size_t at = 0;
        for (;;) {
            const auto child = 4 * at + 1;
            if (child >= heap_.size()) break;
            auto next = child;
            const auto end = child + 4 < heap_.size() ? child + 4 : heap_.size();
            for (auto other = child + 1; other < end; ++other)
                if (before(heap_[other], heap_[next])) next = other;
            if (!before(heap_[next], last)) break;
            heap_[at] = std::move(heap_[next]);
            at = next;
        }
        heap_[at] = std::move(last);
        return first;
    }

private:
    struct entry {
        instant time{};
        std::uint64_t number = 0;
        Event event{};
    };

    [[nodiscard]] static bool before(const entry& a, const entry& b) noexcept {
        return a.time != b.time ? a.time < b.time : a.number < b.number;
    }

    std::vector<entry> heap_;
    std::uint64_t pushed_ = 0;
};

}  // namespace sim
namespace sim {

class stream;
class point;

/// An action that happens at a time. A callable of up to 48 bytes.
using task = gpushare::detail::inplace_function<void(), 48>;

/// A kernel that a device has run.
struct kernel_span {
    device_id device{};     ///< the device
    std::uint32_t tag = 0;  ///< the tag of its stream
    instant begin{};        ///< when it started
    instant end{};          ///< when it ended
};

/// Options of a world.
struct world_options {
    std::uint32_t devices = 1;  ///< the number of devices
};

/// Virtual time, devices and the events on them. Time begins at instant{} and passes only within
/// step(), run() and run_until(), or in a wait for a point. A world is for one thread, which steps
/// the world and makes all calls. Neither copied nor moved, since streams and points refer to the
/// world.
class world {
public:
    /// A world at time instant{}. Throws std::bad_alloc.
    explicit world(world_options o = {}) : devices_(o.devices) {}
    world(const world&) = delete;             ///< Not copied.
    world& operator=(const world&) = delete;  ///< Not copied.

    /// The virtual time.
    [[nodiscard]] instant now() const noexcept { return now_; }
    /// The number of devices; ids count from 0.
    [[nodiscard]] std::uint32_t num_devices() const noexcept { return static_cast<std::uint32_t>(devices_.size()); }

    /// Schedules a call of `f()` at `t`, or at the present time if `t` is past. Throws
    /// std::bad_alloc.
    void at(instant t, task f) {
        std::uint32_t slot = 0;
        if (free_tasks_.empty()) {
            slot = static_cast<std::uint32_t>(tasks_.size());
            tasks_.emplace_back();
        } else {
            slot = free_tasks_.back();
            free_tasks_.pop_back();
        }
        tasks_[slot] = std::move(f);
        events_.push(std::max(t, now_), {slot, true});
    }

    /// Runs the next event. False if none is left.
    bool step() {
        if (events_.empty()) return false;
        now_ = events_.first_time();
        const event e = events_.pop();
        if (!e.is_task) {
            finish(e.index);
            return true;
        }
        task f = std::move(tasks_[e.index]);
        free_tasks_.push_back(e.index);
        f();
        return true;
    }

    /// Runs all events until `t`, including those at `t`. Afterwards the time is `t`.
    void run_until(instant t) {
        while (!events_.empty() && events_.first_time() <= t) step();
        now_ = std::max(now_, t);
    }

    /// Runs all events until none is left.
    void run() {
        while (step()) {
        }
    }

    /// Calls `f` with every kernel at its end. Tests check meters against these spans.
    void on_kernel(gpushare::detail::inplace_function<void(const kernel_span&), 48> f) { on_kernel_ = std::move(f); }

    /// The total time of the device's completed kernels.
    [[nodiscard]] ns device_time(device_id d) const noexcept { return devices_[d.index].busy; }

private:
    friend stream;
    friend point;

    struct mark {
        instant at{};
        bool reached = false;
    };
    /// A kernel, a point, or a call.
    struct item {
        item* next = nullptr;
        ns length{-1};  // the length, if this is a kernel
        std::shared_ptr<mark> reach{};
        task call{};
    };
    struct stream_state {
        gpushare::detail::fifo<item> items{};
        device_id device{};
        priority level{};
        std::uint32_t tag = 0;
        bool held = false;
        bool offered = false;  // one of its kernels is ready or runs
    };
    struct ready_kernel {
        std::int32_t level = 0;
        std::uint64_t number = 0;
        std::uint32_t stream = 0;
        // The greatest runs first.
        friend bool operator<(const ready_kernel& a, const ready_kernel& b) noexcept {
            return a.level != b.level ? a.level < b.level : a.number > b.number;
        }
    };
    struct device_state {
        std::vector<ready_kernel> ready{};  // a heap
        std::uint32_t running = 0;          // the stream of the running kernel
        bool runs = false;
        instant began{};
        ns busy{};
    };
    struct event {
        std::uint32_t index = 0;  // the index of a task, or of the device whose kernel ends
        bool is_task = false;
    };

    [[nodiscard]] std::uint32_t open_stream(device_id d, priority level, std::uint32_t tag) {
        auto& s = streams_.emplace_back();
        s.device = d;
        s.level = level;
        s.tag = tag;
        return static_cast<std::uint32_t>(streams_.size() - 1);
    }

    void push(std::uint32_t index, ns length, std::shared_ptr<mark> reach, task call) {
        item& i = items_.acquire();
        i.length = length;
        i.reach = std::move(reach);
        i.call = std::move(call);
        streams_[index].items.push(i);
        go_on(index);
    }

    void hold(std::uint32_t index, bool held) {
        streams_[index].held = held;
        go_on(index);
    }

    // Handles the head of a stream: points and calls happen now, and a kernel is offered to the
    // device.
    void go_on(std::uint32_t index) {
        for (;;) {
            stream_state& s = streams_[index];  // a call may open another stream
            if (s.offered || s.held || s.items.empty()) return;
            item& i = *s.items.front();
            if (i.length >= ns{0}) {
                s.offered = true;
                device_state& d = devices_[s.device.index];
                d.ready.push_back({s.level.level, offered_++, index});
                std::push_heap(d.ready.begin(), d.ready.end());
                start(s.device.index);
                return;
            }
            s.items.pop();
            if (i.reach) {
                i.reach->at = now_;
                i.reach->reached = true;
                i.reach.reset();
            }
            task call = std::move(i.call);
            items_.release(i);
            if (call) call();  // may enqueue, even on this stream
        }
    }

    void start(std::uint32_t index) {
        device_state& d = devices_[index];
        if (d.runs || d.ready.empty()) return;
        std::pop_heap(d.ready.begin(), d.ready.end());
        d.running = d.ready.back().stream;
        d.ready.pop_back();
        d.runs = true;
        d.began = now_;
        events_.push(saturating_add(now_, streams_[d.running].items.front()->length), {index, false});
    }

    // Ends the device's kernel: handles the items behind it in its stream, and starts the best
    // ready kernel.
    void finish(std::uint32_t index) {
        device_state& d = devices_[index];
        const auto stream = d.running;
        stream_state& s = streams_[stream];
        items_.release(*s.items.pop());
        d.busy += now_ - d.began;
        d.runs = false;
        s.offered = false;
        if (on_kernel_) on_kernel_({{index}, s.tag, d.began, now_});
        go_on(stream);
        start(index);
    }

    instant now_{};
    event_queue<event> events_;
    std::vector<task> tasks_;
    std::vector<std::uint32_t> free_tasks_;
    std::vector<device_state> devices_;
    std::vector<stream_state> streams_;  // closed streams are kept
    gpushare::detail::pool<item> items_;
    std::uint64_t offered_ = 0;
    gpushare::detail::inplace_function<void(const kernel_span&), 48> on_kernel_;
};

/// A clock with a world's time. Copies show the same time; the world must outlive them. For the
/// world's thread.
class clock_of {
public:
    static constexpr bool stepped = true;  ///< See stepped_clock.

    /// The clock of this world.
    explicit clock_of(const world& w) noexcept : world_(&w) {}
    /// The virtual time.
    [[nodiscard]] instant now() const noexcept { return world_->now(); }

private:
    const world* world_;
};
static_assert(stepped_clock<clock_of>);

}  // namespace sim
namespace sim {

/// A point on a simulated stream. Copies are the same point; a default-constructed point is
/// reached. For the world's thread. A wait makes the world's events happen; if no event is left, it
/// returns false.
class point {
public:
    point() = default;  ///< A point that is reached.

    /// Whether all work before the point is done.
    [[nodiscard]] bool reached() const noexcept { return !mark_ || mark_->reached; }
    /// Runs events until the point is reached (true) or the time is the deadline (false).
    bool wait(instant deadline) const { return wait_any(std::span(this, 1), deadline); }
    /// The same for several points: until one of them is reached.
    static bool wait_any(std::span<const point> points, instant deadline) {
        const auto any = [&] { return std::any_of(points.begin(), points.end(), [](auto& p) { return p.reached(); }); };
        if (points.empty() || any()) return !points.empty();
        world& w = *points.front().world_;
        while (!w.events_.empty() && w.events_.first_time() <= deadline) {
            w.step();
            if (any()) return true;
        }
        if (deadline != never) w.now_ = std::max(w.now_, deadline);
        return false;
    }
    /// errc::none: simulated kernels don't fail.
    [[nodiscard]] static errc status() noexcept { return errc::none; }
    /// Virtual time from `a` to `b`; both are reached.
    friend ns elapsed(const point& a, const point& b) noexcept { return b.at() - a.at(); }

private:
    friend stream;
    point(world& w, std::shared_ptr<world::mark> m) noexcept : world_(&w), mark_(std::move(m)) {}
    [[nodiscard]] instant at() const noexcept { return mark_ ? mark_->at : instant{}; }

    world* world_ = nullptr;
    std::shared_ptr<world::mark> mark_;
};
static_assert(timeline_point<point>);

/// An in-order stream of a simulated device. A handle: enqueued work runs even after the handle is
/// gone. For the world's thread.
class stream {
public:
    using point = sim::point;  ///< The type that record() returns.

    /// A stream of device `d`, whose kernel_spans have this `tag`. Throws std::bad_alloc.
    stream(world& w, device_id d, priority level = {}, std::uint32_t tag = 0)
        : world_(&w), index_(w.open_stream(d, level, tag)), level_(level) {}
    stream(stream&&) noexcept = default;             ///< Moved.
    stream& operator=(stream&&) noexcept = default;  ///< Moved.

    /// Enqueues a kernel that takes the whole device for `length`; a negative one counts as 0.
    void enqueue(ns length) { world_->push(index_, std::max(length, ns{0}), nullptr, {}); }
    /// A point after all work enqueued so far.
    [[nodiscard]] point record() {
        auto m = std::make_shared<world::mark>();
        world_->push(index_, ns{-1}, m, {});
        return {*world_, std::move(m)};
    }
    /// Calls `f()` when all work enqueued before is done.
    void call(task f) { world_->push(index_, ns{-1}, nullptr, std::move(f)); }

    /// Keeps further work of this stream from beginning until let_go().
    void hold() { world_->hold(index_, true); }
    /// Ends a hold().
    void let_go() { world_->hold(index_, false); }
    /// The stream's priority.
    [[nodiscard]] priority level() const noexcept { return level_; }

private:
    world* world_;
    std::uint32_t index_;
    priority level_;
};
static_assert(queue<stream>);

/// One device of a world, which makes streams. The device has no SMs: a kernel takes the whole
/// device.
class device {
public:
    using stream = sim::stream;  ///< The type that make_stream() returns.

    /// Device `d` of the world, which must outlive it.
    device(world& w, device_id d) noexcept : world_(&w), id_(d) {}
    /// A stream of this device; see sim::stream.
    [[nodiscard]] stream make_stream(priority level = {}, std::uint32_t tag = 0) { return {*world_, id_, level, tag}; }

private:
    world* world_;
    device_id id_;
};
static_assert(stream_source<device> && !sm_partitionable<device>);

}  // namespace sim
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
