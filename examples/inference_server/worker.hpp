// SPDX-License-Identifier: Apache-2.0
// A thread that may take its time: functions that others leave to it, one after the other.
//
//   worker loads;    loads.later([] { ... });    loads.stop();
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

namespace inference_server {

class worker {
public:
    /// Runs `f` soon, and drops what it throws; never, once stop() is over. From any thread. Throws std::bad_alloc.
    void later(std::function<void()> f) {
        {
            const std::lock_guard lock(mutex_);
            if (over_) return;
            waiting_.push_back(std::move(f));
        }
        comes_.notify_one();
    }

    /// Returns when all that was left to it has run, and what that added. Not from the thread itself.
    void stop() {
        thread_.request_stop();
        if (thread_.joinable()) thread_.join();
        decltype(waiting_)
            dropped;  // what came as the thread ended: this may go with the last of it, so not under the lock
        const std::lock_guard lock(mutex_);
        over_ = true;
        dropped.swap(waiting_);
    }

private:
    void run(const std::stop_token& stop) {
        std::unique_lock lock(mutex_);
        while (comes_.wait(lock, stop, [this] { return !waiting_.empty(); })) {
            auto f = std::move(waiting_.front());
            waiting_.pop_front();
            lock.unlock();
            try {
                f();
            } catch (...) {  // of the host's memory, as a rule: the others are run all the same
            }
            f = {};
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable_any comes_;
    std::deque<std::function<void()>> waiting_;
    bool over_ = false;
    std::jthread thread_{[this](const std::stop_token& stop) { run(stop); }};
};

}  // namespace inference_server
