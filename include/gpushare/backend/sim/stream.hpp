// SPDX-License-Identifier: Apache-2.0
// Streams of simulated devices, and their points. A wait for a point runs the world's events until the point is
// reached, so that code written for real devices runs unchanged in virtual time.
//
//   gpushare::sim::world world{{.devices = 1}};
//   gpushare::sim::stream s{world, {0}, gpushare::priority{1}};
//   s.enqueue(200us);    auto done = s.record();
//   done.wait(gpushare::never);      // returns at once, and it is 200 us later in virtual time
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include <gpushare/backend/sim/world.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace sim {

/// A point on a simulated stream. Copies are the same point; a default-constructed one is reached.
/// For the world's thread. A wait lets the world's events happen; where nothing is left to happen
/// it returns false.
class point {
public:
    point() = default;  ///< Reached.

    /// Whether all before it is done.
    [[nodiscard]] bool reached() const noexcept { return !mark_ || mark_->reached; }
    /// True once it is reached; false at the deadline, which it is then.
    bool wait(instant deadline) const { return wait_any(std::span(this, 1), deadline); }
    /// The same for the first of several.
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
    /// errc::none: kernels don't fail here.
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

/// An in-order stream of a simulated device. A handle: what was enqueued runs though the handle is
/// gone. For the world's thread.
class stream {
public:
    using point = sim::point;  ///< The type that record() returns.

    /// A stream of device `d`; `tag` says in a kernel_span whose it is. Throws std::bad_alloc.
    stream(world& w, device_id d, priority level = {}, std::uint32_t tag = 0)
        : world_(&w), index_(w.open_stream(d, level, tag)), level_(level) {}
    stream(stream&&) noexcept = default;             ///< Moved.
    stream& operator=(stream&&) noexcept = default;  ///< Moved.

    /// Enqueues a kernel that takes the whole device for `length`; a negative one counts as 0.
    void enqueue(ns length) { world_->push(index_, std::max(length, ns{0}), nullptr, {}); }
    /// A point behind what was enqueued so far.
    [[nodiscard]] point record() {
        auto m = std::make_shared<world::mark>();
        world_->push(index_, ns{-1}, m, {});
        return {*world_, std::move(m)};
    }
    /// `f()` is called when all before it is done.
    void call(task f) { world_->push(index_, ns{-1}, nullptr, std::move(f)); }

    /// Nothing more of this stream begins until let_go().
    void hold() { world_->hold(index_, true); }
    /// Ends a hold().
    void let_go() { world_->hold(index_, false); }
    /// Its priority.
    [[nodiscard]] priority level() const noexcept { return level_; }

private:
    world* world_;
    std::uint32_t index_;
    priority level_;
};
static_assert(queue<stream>);

/// One device of a world, as a place where streams come from. It has no SMs: a kernel takes all of it.
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
