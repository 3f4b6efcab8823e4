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
/// other threads. The first turns are always granted, since a call takes microseconds. `in_hook`:
/// the thread is in a hook of the embedder's and may be waiting for itself, so it gives up soon.
template <clock Clock>
class turns {
public:
    explicit turns(const patience<Clock>& until, bool in_hook = false)
        : time_(until.time),
          stop_(until.stop),
          by_(in_hook ? std::min(until.deadline, saturating_add(time_.now(), patience_in_hook)) : until.deadline) {}

    /// Waits between two looks. Returns false once the wait has been long enough.
    [[nodiscard]] bool again() {
        if (++taken_ <= granted) {
            std::this_thread::yield();
            return true;
        }
        if (stop_.stop_requested() || time_.now() >= by_) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(100));  // lets other threads run
        return true;
    }

private:
    static constexpr std::uint32_t granted = 1'000;
    static constexpr ns patience_in_hook = std::chrono::milliseconds(20);

    Clock time_;
    std::stop_token stop_;
    instant by_;
    std::uint32_t taken_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
