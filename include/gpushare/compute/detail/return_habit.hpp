// SPDX-License-Identifier: Apache-2.0
// Whether a client submits again soon after an end: a thread that waits for each call before the next one. Between two of them it
// has nothing waiting, and the device would go to others for a whole call of theirs, whatever the shares. So the device is
// kept for one that is behind its share and lately came back in time (like anticipatory scheduling of disks: Iyer, Druschel,
// SOSP 2001). What that costs is bounded whatever happens: an end is waited after for 1/50 of what ended at most.
//
//   habit.ended(lasted, now);  ... habit.came(now);          // an end that left nothing waiting; the next submission
//   if (habit.is_expected(now, in_flight)) ...               // keep the device for it, if it would go first
#pragma once

#include <algorithm>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A value.
class return_habit {
public:
    /// The device is idle for at most this part of the time that such a client uses: 2 %.
    static constexpr ns::rep part = 50;
    /// After shorter work nobody is back in time.
    static constexpr ns shortest{1'000'000};

    /// Whether the end of what lasts this long is to be told, with the time.
    [[nodiscard]] static constexpr bool is_concerned(ns lasts) noexcept { return lasts >= shortest; }

    /// What lasted this long has ended, and nothing waits. No time: it isn't known.
    void ended(ns lasted, instant now) noexcept {
        if (is_concerned(lasted) && now > instant{}) until_ = saturating_add(now, lasted / part);
    }
    /// Something waits again.
    void came(instant now) noexcept {
        if (until_ == never) return;
        if (now > instant{}) in_time_ = now <= until_ ? std::min(in_time_ + 1, most) : in_time_ / 2;
        until_ = never;
    }
    /// Whether it is known to come back, and is to when what is in flight has ended, or is about to. Nothing waits.
    [[nodiscard]] bool is_expected(instant now, bool in_flight) const noexcept {
        return in_time_ >= enough && is_watched(now, in_flight);
    }
    /// Whether its next submission will tell whether it comes back, or whether it is expected may change.
    [[nodiscard]] bool is_watched(instant now, bool in_flight) const noexcept {
        return until_ == never ? in_flight : now <= until_;
    }
    /// Until when it is expected; `never`: until something has ended.
    [[nodiscard]] instant until() const noexcept { return until_; }

private:
    static constexpr int enough = 2, most = 8;

    instant until_ = never;
    int in_time_ = 0;  // lately
};

/// What is kept for clients that are expected and would go first.
struct kept_for_return {
    bool any = false;       // what fills the device isn't let in ahead of them
    double width = 0;       // nor anything on so much, which is free
    instant until = never;  // of what is free
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
