// SPDX-License-Identifier: Apache-2.0
// What a submission took whose thread was held up while it enqueued: between the point in front of the work and the work
// itself a host thread may lose its core for milliseconds, the device stands idle, and the points tell nothing of that.
//
//   detail::enqueuing usual;                                       // of one client
//   cost = usual.without_gap(span, predicted, {.took = 3ms, .idle = 2ms});
//
// Where enqueuing took far longer than it usually does, the work took the span less what the device may have been idle, at
// least, and the span at most: in between, what was predicted. Where it always takes long, as with an engine's call of
// hundreds of launches, the span is all that is known, and the device was kept for the client meanwhile.
#pragma once

#include <algorithm>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// How long it took to enqueue a submission, and how much of that the device may have waited for it. 0: not known.
struct enqueue_time {
    ns took{}, idle{};

    /// From the begin of enqueuing to its end. `in_front`: what the device had to do until it got to that work, as predicted.
    [[nodiscard]] static constexpr enqueue_time between(instant begin, instant end, ns in_front) noexcept {
        if (end <= begin) return {};
        return {end - begin, std::max(end - begin - in_front, ns{0})};
    }
};

/// A value; not thread-safe.
class enqueuing {
public:
    /// Whether a thread was held up: `t.took` is far longer than usual, and the device may have been idle. Learns what is usual.
    [[nodiscard]] bool is_held_up(const enqueue_time& t) noexcept {
        if (t.took <= ns{0}) return false;
        if (usual_ <= ns{0}) usual_ = t.took;
        const ns most = 4 * usual_ + allowance;
        usual_ += (std::min(t.took, most) - usual_) / 8;  // what is always long becomes usual
        return t.took > most && t.idle > ns{0};
    }
    /// What work took for which is_held_up() was true.
    [[nodiscard]] static constexpr ns without_gap(ns span, ns predicted, const enqueue_time& t) noexcept {
        return std::max(std::min(span, predicted), span - t.idle);
    }

private:
    static constexpr ns allowance{20'000};  // launches and points alone take some microseconds

    ns usual_{};  // smoothed; 0: none was seen
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
