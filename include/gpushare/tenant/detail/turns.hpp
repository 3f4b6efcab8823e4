// SPDX-License-Identifier: Apache-2.0
// The turns of a thread that waits for other threads' calls to end. No call reports its end, so the
// thread looks repeatedly.
//
//   for (detail::turns turn(until, in_hook); !all_are_back();) if (!turn.again()) return false;
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <stop_token>
#include <thread>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Until the deadline or stop request of a patience, however slow the driver is that serves the
/// other threads. The first turns are always granted, since a call takes microseconds: as many as
/// an idle machine makes in a millisecond. On a busy machine a turn may last for several
/// milliseconds, in which the other threads run, so fewer turns are granted. `in_hook`: the thread
/// is in a hook of the embedder's and may be waiting for itself, so it gives up soon.
template <clock Clock>
class turns {
public:
    explicit turns(const patience<Clock>& until, bool in_hook = false)
        : time_(until.time),
          stop_(until.stop),
          by_(in_hook ? std::min(until.deadline, saturating_add(time_.now(), patience_in_hook)) : until.deadline) {}

    /// Waits between two looks. Returns false once the wait has been long enough.
    [[nodiscard]] bool again() {
        const auto now = time_.now();
        const bool granted = taken_ < least || (taken_ < most && waited_ < grace);
        if (!granted && (stop_.stop_requested() || now >= by_)) return false;
        if (granted) {
            ++taken_;
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(100));  // lets other threads run
        }
        waited_ += time_.now() - now;
        return true;
    }

private:
    static constexpr std::uint32_t least = 16, most = 1'000;  // granted turns
    static constexpr ns grace = std::chrono::milliseconds(10);
    static constexpr ns patience_in_hook = std::chrono::milliseconds(20);

    Clock time_;
    std::stop_token stop_;
    instant by_;
    std::uint32_t taken_ = 0;  // granted so far
    ns waited_{};              // in all turns
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
