// SPDX-License-Identifier: Apache-2.0
// Counts the threads inside an object, so that it can be shut: shut() lets nobody in any more, and returns once those
// inside have left.
//
//   if (const detail::call_gate::pass in(gate_)) ...;     // in, until it is destroyed
//   gate_.shut();
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Thread-safe. A mutex each way: for calls that cost more than that.
class call_gate {
public:
    /// Somebody inside, unless the gate is shut.
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

    /// From now on nobody enters; waits until nobody is inside.
    void shut() noexcept {
        std::unique_lock lock(mutex_);
        shut_ = true;
        left_.wait(lock, [this] { return inside_ == 0; });
    }
    /// The same without the wait: whether nobody is inside.
    [[nodiscard]] bool try_shut() noexcept {
        const std::lock_guard lock(mutex_);
        shut_ = true;
        return inside_ == 0;
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
