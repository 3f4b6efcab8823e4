// SPDX-License-Identifier: Apache-2.0
// A function that a test wants to run within a driver call, on the calling thread.
//
//   support::interruption calls;     calls.before_next([&] { ... });      // the test
//   calls.strike();  // the driver, under no lock of its own
#pragma once

#include <functional>
#include <mutex>
#include <utility>

namespace support {

/// Thread-safe.
class interruption {
public:
    void before_next(std::function<void()> what) {
        const std::lock_guard lock(mutex_);
        what_ = std::move(what);
    }
    void strike() {
        std::function<void()> now;
        {
            const std::lock_guard lock(mutex_);
            now = std::exchange(what_, nullptr);
        }
        if (now) now();
    }

private:
    std::mutex mutex_;
    std::function<void()> what_;
};

}  // namespace support
