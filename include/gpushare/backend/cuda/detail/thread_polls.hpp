// SPDX-License-Identifier: Apache-2.0
// The work on the device that a thread polls, and the time since the first answer "not yet". A part
// of the launch hub.
//
//   thread_polls& mine = thread_polls::of_thread();
//   polled_work& w = mine.of(event);          // cuEventQuery said "not ready"
//   mine.over(event);                         // it said "ready"
//   while (auto w = mine.over()) ...          // the thread launched something: it doesn't wait
//
// A thread that launches between two polls runs ahead and doesn't wait for the polled work.
// PyTorch's allocator polls its events in this way.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <optional>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// A stream or an event that a thread polls.
struct polled_work {
    const void* what = nullptr;
    std::chrono::steady_clock::time_point told{};  // when gates were last told of the poll
    // Since when closed waits may prevent the end, on a gate's clock.
    std::optional<instant> since{};
    bool opened = false;  // a gate keeps its waits open for this poll
};

/// The polls of one thread.
class thread_polls {
public:
    [[nodiscard]] static thread_polls& of_thread() noexcept {
        constinit thread_local thread_polls mine;
        return mine;
    }
    /// How many gates may have closed waits. At 0, polls aren't counted.
    [[nodiscard]] static std::atomic<int>& closing_gates() noexcept {
        constinit static std::atomic<int> all{0};
        return all;
    }

    [[nodiscard]] bool any() const noexcept { return count_ != 0; }
    /// The entry for this stream or event. If there is no room, the new poll takes the place of
    /// another poll and keeps that poll's times, since a thread that polls many events at once has
    /// been waiting since then.
    [[nodiscard]] polled_work& of(const void* what) noexcept {
        const auto there =
            std::find_if(all_.begin(), all_.begin() + count_, [what](const polled_work& w) { return w.what == what; });
        if (there != all_.begin() + count_) return *there;
        polled_work& w = static_cast<std::size_t>(count_) < all_.size() ? all_[static_cast<std::size_t>(count_++)]
                                                                        : all_[next_++ % all_.size()];
        w.what = what;
        return w;
    }
    /// Removes the poll, since the polled work is over; none if it wasn't polled.
    [[nodiscard]] std::optional<polled_work> over(const void* what) noexcept {
        for (std::ptrdiff_t i = 0; i < count_; ++i) {
            polled_work& w = all_[static_cast<std::size_t>(i)];
            if (w.what != what) continue;
            const polled_work was = w;
            --count_;
            w = all_[static_cast<std::size_t>(count_)];
            all_[static_cast<std::size_t>(count_)] = {};
            return was;
        }
        return std::nullopt;
    }
    /// Removes any one poll; none if none is left.
    [[nodiscard]] std::optional<polled_work> over() noexcept {
        return count_ != 0 ? over(all_[static_cast<std::size_t>(count_) - 1].what) : std::nullopt;
    }

private:
    std::array<polled_work, 8> all_{};
    std::ptrdiff_t count_ = 0;
    std::size_t next_ = 0;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
