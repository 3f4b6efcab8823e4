// SPDX-License-Identifier: Apache-2.0
// Finds out which streams stand still beside a stream that waits: how long to watch, and how to
// interpret the observations. Nothing here needs a device.
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

/// Decides how long to look for ends. Gives up after a time without news, but never before a number
/// of looks: if the host itself stood still, it hasn't seen any stream stand still.
class patience {
public:
    using clock = std::chrono::steady_clock;

    patience(clock::duration quiet, int looks) noexcept : quiet_(quiet), most_(looks) {}

    /// `news` says that the last look saw an end.
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

/// Closes a word for which a stream waits. The destructor opens the word. When the time is over, a
/// separate thread opens the word, because the caller may be blocked in a call that returns only
/// then.
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
    /// Returns true if the time is over. Already true before the word is open.
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
    std::jthread guard_;  // last, because the thread uses the other members
};

/// A stream beside the stream that waits.
struct stream_beside {
    /// 0: the priority or partition of the stream that waits; 1: another priority or partition.
    std::uint32_t group = 0;
    std::optional<double> end_us;  ///< when the host saw the kernel's end; empty if the word was opened first
};

/// The effect of a closed wait on the streams beside it.
struct queue_sharing {
    std::array<std::uint32_t, 2> blocked{};  ///< number of blocked streams in each group
    /// The time until the last free stream ended, divided by the same streams' time beside an open
    /// wait. Empty if all streams were blocked.
    std::optional<double> slowdown;
};

/// Compares the same streams in the same order. Throws std::runtime_error if a stream didn't finish
/// beside an open wait, because then something else blocks the stream.
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
