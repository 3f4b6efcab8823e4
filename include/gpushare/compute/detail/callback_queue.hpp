// SPDX-License-Identifier: Apache-2.0
// The submissions that are done and have a callback, in the order of their ends, and the work that
// their callbacks hold up. Used under the limiter's mutex; the callbacks run under no lock.
//
//   detail::callback_queue<stream> told;
//   told.add(submission);                                         // it is done
//   if (told.holds(level)) ...                                    // work of this level waits for callbacks above it
//   if (const decltype(told)::turn turn(told); turn)              // one thread at a time
//       while (!told.empty()) { auto& s = told.next(); ...; told.was_called(s.level); }
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <utility>

#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <timeline Stream>
class callback_queue {
public:
    using submission = detail::submission<Stream>;

    // ---- what is to be called

    [[nodiscard]] bool empty() const noexcept { return done_.empty(); }
    /// `s` is done; its level is that of its client, or of its request.
    void add(submission& s) noexcept {
        highest_ = std::max(highest_, s.level);
        ++num_added_;
        done_.push(s);
    }
    /// The first of all. It counts for any_above() until was_called().
    [[nodiscard]] submission& next() noexcept { return *done_.pop(); }
    /// The callback of one of this level has returned.
    void was_called(priority level) noexcept {
        ++num_called_;
        if (level < highest_) return;
        highest_ = no_priority;
        for (auto* s = done_.front(); s != nullptr && highest_ < level; s = s->next)
            highest_ = std::max(highest_, s->level);
    }

    // ---- who calls: one thread at a time, so that no callback is called from within itself

    /// Converts to true for the thread that calls from now on, until it is destroyed.
    class turn {
    public:
        explicit turn(callback_queue& of) noexcept : of_(of.caller_ == std::thread::id{} ? &of : nullptr) {
            if (of_ != nullptr) of_->caller_ = std::this_thread::get_id();
        }
        turn(const turn&) = delete;
        turn& operator=(const turn&) = delete;
        ~turn() {
            if (of_ != nullptr) of_->caller_ = {};
        }
        [[nodiscard]] explicit operator bool() const noexcept { return of_ != nullptr; }

    private:
        callback_queue* of_;
    };
    [[nodiscard]] bool is_called_here() const noexcept { return caller_ == std::this_thread::get_id(); }

    // ---- whom that holds up

    /// Whether somebody above this level is to be called back yet, or is just being called.
    [[nodiscard]] bool any_above(priority level) const noexcept { return highest_ > level; }
    /// Whether the next submission, of this level, waits until callbacks of higher levels have run,
    /// since these may bring work that goes first. The submission waits only for callbacks that
    /// were due when its wait began, since new callbacks might come without end. The wait is over
    /// when a submission of its level or below goes, or when none is ready to go. The next wait
    /// begins anew, with the callbacks that are due by then.
    [[nodiscard]] bool holds(priority level) noexcept {
        if (!any_above(level)) return false;
        if (held_level_ == no_priority) {
            held_level_ = level;
            held_until_ = num_added_;
        }
        held_up_ |= num_called_ < held_until_;
        return num_called_ < held_until_;
    }
    /// One of this level goes.
    void let_go(priority level) noexcept {
        if (level <= held_level_) held_level_ = no_priority;
    }
    /// Nothing is ready to go.
    void hold_nobody() noexcept { held_level_ = no_priority; }
    /// Whether holds() kept something back since the last call. If a thread calls now, the answer
    /// is left to that thread, which lets it in.
    [[nodiscard]] bool take_held_up() noexcept {
        return caller_ == std::thread::id{} && std::exchange(held_up_, false);
    }

private:
    fifo<submission> done_;
    priority highest_ = no_priority;  // of theirs, and of the one that is just being called
    std::uint64_t num_added_ = 0, num_called_ = 0;
    std::thread::id caller_{};
    priority held_level_ = no_priority;  // of what waits until so many have been called, if something does
    std::uint64_t held_until_ = 0;
    bool held_up_ = false;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
