// SPDX-License-Identifier: Apache-2.0
// Streams of simulated devices, and their points. Whoever waits for a point lets the world's events happen until it is
// reached, so that code written for real devices runs unchanged in virtual time.
//
//   gpushare::sim::stream s{world, {0}, gpushare::priority{1}};
//   s.enqueue(200us);    auto done = s.record();    done.wait(gpushare::never);     // 200 us later, at once
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

/// Copies are the same point; a default-constructed one is reached. For the world's thread. A wait that can't end,
/// because nothing is left to happen, is over: false.
class point {
public:
    point() = default;

    [[nodiscard]] bool reached() const noexcept { return !mark_ || mark_->reached; }
    bool wait(instant deadline) const { return wait_any(std::span(this, 1), deadline); }
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
    /// Kernels don't fail here.
    [[nodiscard]] static errc status() noexcept { return errc::none; }
    friend ns elapsed(const point& a, const point& b) noexcept { return b.at() - a.at(); }

private:
    friend stream;
    point(world& w, std::shared_ptr<world::mark> m) noexcept : world_(&w), mark_(std::move(m)) {}
    [[nodiscard]] instant at() const noexcept { return mark_ ? mark_->at : instant{}; }

    world* world_ = nullptr;
    std::shared_ptr<world::mark> mark_;
};
static_assert(timeline_point<point>);

/// A handle; what was enqueued runs though the handle is gone. For the world's thread.
class stream {
public:
    using point = sim::point;

    /// `tag` says in a kernel_span whose stream it is.
    stream(world& w, device_id d, priority level = {}, std::uint32_t tag = 0)
        : world_(&w), index_(w.open_stream(d, level, tag)), level_(level) {}
    stream(stream&&) noexcept = default;
    stream& operator=(stream&&) noexcept = default;

    /// A kernel that takes the whole device for so long. A negative length is none.
    void enqueue(ns length) { world_->push(index_, std::max(length, ns{0}), nullptr, {}); }
    [[nodiscard]] point record() {
        auto m = std::make_shared<world::mark>();
        world_->push(index_, ns{-1}, m, {});
        return {*world_, std::move(m)};
    }
    /// `f()` is called when all before it is done.
    void call(task f) { world_->push(index_, ns{-1}, nullptr, std::move(f)); }

    /// Nothing more of this stream begins until let_go().
    void hold() { world_->hold(index_, true); }
    void let_go() { world_->hold(index_, false); }
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
    using stream = sim::stream;

    device(world& w, device_id d) noexcept : world_(&w), id_(d) {}
    [[nodiscard]] stream make_stream(priority level = {}, std::uint32_t tag = 0) { return {*world_, id_, level, tag}; }

private:
    world* world_;
    device_id id_;
};
static_assert(stream_source<device> && !sm_partitionable<device>);

}  // namespace sim
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
