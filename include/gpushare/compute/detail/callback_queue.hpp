// SPDX-License-Identifier: Apache-2.0
// Completed submissions whose callbacks are due, in the order of their ends; and the work that
// these callbacks hold up. Used under the limiter's mutex; the callbacks run under no lock.
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
    /// Queues `s`, which is done. Its level is its client's or its request's.
    void add(submission& s) noexcept {
        highest_ = std::max(highest_, s.level);
        ++num_added_;
        done_.push(s);
    }
    /// Takes the first submission. any_above() still counts it until was_called().
    [[nodiscard]] submission& next() noexcept { return *done_.pop(); }
    /// A callback of this level has returned.
    void was_called(priority level) noexcept {
        ++num_called_;
        if (level < highest_) return;
        highest_ = no_priority;
        for (auto* s = done_.front(); s != nullptr && highest_ < level; s = s->next)
            highest_ = std::max(highest_, s->level);
    }

    // ---- the calling thread: one at a time, so that no callback is called from within itself

    /// The right to call callbacks, until it is destroyed. Converts to true if this thread got the
    /// right.
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

    // ---- work that callbacks hold up

    /// Whether a callback above this level is due or running.
    [[nodiscard]] bool any_above(priority level) const noexcept { return highest_ > level; }
    /// Whether the next submission, which has this level, must wait for callbacks of higher levels,
    /// since these callbacks may submit work that goes first. The submission waits only for
    /// callbacks that were due when its wait began, since new callbacks might come without end. The
    /// wait is over when a submission of its level or below goes, or when none is ready to go. The
    /// next wait starts over, with the callbacks that are due by then.
    [[nodiscard]] bool holds(priority level) noexcept {
        if (!any_above(level)) return false;
        if (held_level_ == no_priority) {
            held_level_ = level;
            held_until_ = num_added_;
        }
        held_up_ |= num_called_ < held_until_;
        return num_called_ < held_until_;
    }
    /// A submission of this level goes.
    void let_go(priority level) noexcept {
        if (level <= held_level_) held_level_ = no_priority;
    }
    /// No submission is ready to go.
    void hold_nobody() noexcept { held_level_ = no_priority; }
    /// Whether holds() held a submission back since the last call. While a thread calls callbacks,
    /// the answer is false and is kept for that thread, which then admits the submission.
    [[nodiscard]] bool take_held_up() noexcept {
        return caller_ == std::thread::id{} && std::exchange(held_up_, false);
    }

private:
    fifo<submission> done_;
    // The highest level among the queued callbacks and the running one.
    priority highest_ = no_priority;
    std::uint64_t num_added_ = 0, num_called_ = 0;
    std::thread::id caller_{};
    // The level of the held submission, if there is one; `held_until_`: how many callbacks must
    // have returned.
    priority held_level_ = no_priority;
    std::uint64_t held_until_ = 0;
    bool held_up_ = false;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
