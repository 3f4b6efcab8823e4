// SPDX-License-Identifier: Apache-2.0
// What a thread polls on the device, and for how long it has got no other answer than "not yet". A
// part of the launch hub.
//
//   thread_polls& mine = thread_polls::of_thread();
//   polled_work& w = mine.of(event);          // cuEventQuery said "not ready"
//   mine.over(event);                         // it said "ready"
//   while (auto w = mine.over()) ...          // the thread launched something: it doesn't wait
//
// A thread that launches between two polls runs ahead and doesn't wait for what it polls: that is
// how torch's allocator asks for its events.
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
    std::chrono::steady_clock::time_point told{};  // when gates heard of it, last
    std::optional<instant> since{};                // by a gate's clock: since when closed waits may prevent the end
    bool opened = false;                           // a gate keeps its waits open for it
};

/// Of one thread.
class thread_polls {
public:
    [[nodiscard]] static thread_polls& of_thread() noexcept {
        constinit thread_local thread_polls mine;
        return mine;
    }
    /// How many gates may have closed waits: without any, nobody counts polls.
    [[nodiscard]] static std::atomic<int>& closing_gates() noexcept {
        constinit static std::atomic<int> all{0};
        return all;
    }

    [[nodiscard]] bool any() const noexcept { return count_ != 0; }
    /// Where there is no room for another one, it takes the place of one of the others and counts
    /// from when that did: a thread that polls many at once has waited since then.
    [[nodiscard]] polled_work& of(const void* what) noexcept {
        const auto there =
            std::find_if(all_.begin(), all_.begin() + count_, [what](const polled_work& w) { return w.what == what; });
        if (there != all_.begin() + count_) return *there;
        polled_work& w = static_cast<std::size_t>(count_) < all_.size() ? all_[static_cast<std::size_t>(count_++)]
                                                                        : all_[next_++ % all_.size()];
        w.what = what;
        return w;
    }
    /// What was polled is over. None if it wasn't.
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
    /// Some other one, or none is left.
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
