// SPDX-License-Identifier: Apache-2.0
// Which streams stand still beside a stream that waits: how long to look, and what was seen.
// Nothing here needs a device.
//
//   closed_word closed(word, 2s);    // a stream waits for this word; opened after 2 s at the latest
//   patience looks(5ms, 200);
//   while (looks.go_on(any_news, now)) ...
//   const queue_sharing found = compare(seen_beside_closed, seen_beside_open);
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <thread>

namespace bench {

/// Decides how long to look for ends. Gives up after a quiet time, and never before so many looks:
/// a host that stood still meanwhile has seen no stream stand still.
class patience {
public:
    using clock = std::chrono::steady_clock;

    patience(clock::duration quiet, int looks) noexcept : quiet_(quiet), most_(looks) {}

    /// `news`: the last look saw an end.
    [[nodiscard]] bool go_on(bool news, clock::time_point now) noexcept {
        if (news || looks_ == 0) {
            since_ = now;
            looks_ = 0;
        }
        return ++looks_ <= most_ || now - since_ < quiet_;
    }

private:
    clock::duration quiet_;
    int most_, looks_ = 0;
    clock::time_point since_;
};

/// Closes a word for which a stream waits. Opens it when it goes, or when the time is over, by a
/// thread of its own: the caller may be inside a call that comes back only then.
class closed_word {
public:
    closed_word(std::uint64_t& word, std::chrono::milliseconds longest) : word_(&word) {
        set(1);
        guard_ = std::jthread([this, longest](const std::stop_token& stop) { guard(stop, longest); });
    }
    closed_word(const closed_word&) = delete;
    closed_word& operator=(const closed_word&) = delete;
    ~closed_word() {
        guard_.request_stop();
        guard_.join();
        set(0);
    }
    /// Whether the time is over. True before the word is open.
    [[nodiscard]] bool forced() const noexcept { return forced_.load(std::memory_order_acquire); }

private:
    void set(std::uint64_t value) noexcept { std::atomic_ref(*word_).store(value, std::memory_order_release); }
    void guard(const std::stop_token& stop, std::chrono::milliseconds longest) {
        std::unique_lock lock(mutex_);
        (void)wake_.wait_for(lock, stop, longest, [] { return false; });
        if (stop.stop_requested()) return;
        forced_.store(true, std::memory_order_release);
        set(0);
    }

    std::uint64_t* word_;
    std::atomic<bool> forced_ = false;
    std::mutex mutex_;
    std::condition_variable_any wake_;
    std::jthread guard_;  // the last: it uses the others
};

/// A stream beside the one that waits.
struct stream_beside {
    std::uint32_t group = 0;       ///< 0: as the one that waits, by priority or partition; or 1
    std::optional<double> end_us;  ///< when its kernel was seen to be over; none where the word was opened first
};

/// The effect of a closed wait on the streams beside it.
struct queue_sharing {
    std::array<std::uint32_t, 2> blocked{};  ///< of each group
    /// Until the last of the others was over, over the same streams' time beside an open wait; none
    /// if all were blocked.
    std::optional<double> slowdown;
};

/// Of the same streams in the same order. Throws std::runtime_error if one wasn't over beside an
/// open wait: then something else stops it.
[[nodiscard]] inline queue_sharing compare(std::span<const stream_beside> closed, std::span<const stream_beside> open) {
    queue_sharing found;
    double last = 0, last_beside_open = 0;
    for (std::size_t i = 0; i < closed.size(); ++i) {
        if (!open[i].end_us) throw std::runtime_error("a stream stands still, and none waits");
        if (!closed[i].end_us) {
            ++found.blocked[closed[i].group];
            continue;
        }
        last = std::max(last, *closed[i].end_us);
        last_beside_open = std::max(last_beside_open, *open[i].end_us);
    }
    if (last_beside_open > 0) found.slowdown = last / last_beside_open;
    return found;
}

}  // namespace bench
