// SPDX-License-Identifier: Apache-2.0
// Counts the threads inside an object, so that it can be shut: shut() admits no more threads, and
// waits for those inside until a deadline.
//
//   if (const detail::call_gate::pass in(gate_)) ...;     // in, until it is destroyed
//   if (gate_.shut(deadline)) ...;
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

#include <gpushare/closing.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Thread-safe. Entering and leaving each take a mutex, so use a gate for calls that cost more than
/// that.
class call_gate {
public:
    /// A thread inside the gate, unless the gate is shut.
    class [[nodiscard]] pass {
    public:
        explicit pass(call_gate& gate) noexcept : gate_(&gate), in_(gate.enter()) {}
        pass(const pass&) = delete;
        pass& operator=(const pass&) = delete;
        ~pass() {
            if (in_) gate_->leave();
        }
        [[nodiscard]] explicit operator bool() const noexcept { return in_; }

    private:
        call_gate* gate_;
        bool in_;
    };

    /// From now on no thread enters. Returns true once no thread is inside, and false if one still
    /// is at the deadline.
    [[nodiscard]] bool shut(instant deadline) noexcept {
        std::unique_lock lock(mutex_);
        shut_ = true;
        while (inside_ != 0)
            if (!wait_until(left_, lock, deadline)) return false;
        return true;
    }

private:
    bool enter() noexcept {
        const std::lock_guard lock(mutex_);
        if (!shut_) ++inside_;
        return !shut_;
    }
    void leave() noexcept {
        const std::lock_guard lock(mutex_);
        if (--inside_ == 0) left_.notify_all();
    }

    std::mutex mutex_;
    std::condition_variable left_;
    std::size_t inside_ = 0;
    bool shut_ = false;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
