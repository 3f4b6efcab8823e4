// SPDX-License-Identifier: Apache-2.0
// A thread that may take its time: functions that others leave to it, one after the other. Those
// for whom they are take turns, so that nobody waits for more than one of each other's.
//
//   worker loads;    loads.later([] { ... });                  loads.stop();
//   worker reads;    reads.later([] { ... }, &tenant);
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/units.hpp>

namespace inference_server {

class worker {
public:
    /// Runs `f` soon, after what was left to it of the same `whose`, and drops what it throws;
    /// never, once stop() is over. From any thread. Throws std::bad_alloc.
    void later(std::function<void()> f, const void* whose = nullptr) {
        {
            const std::lock_guard lock(mutex_);
            if (over_) return;
            const auto mine = std::ranges::find(lines_, whose, &line::whose);
            if (mine != lines_.end()) {
                mine->waiting.push_back(std::move(f));
            } else {
                decltype(lines_) last;
                last.emplace_back(whose).waiting.push_back(std::move(f));
                lines_.splice(lines_.end(), last);
            }
        }
        comes_.notify_one();
    }

    /// Returns when all that was left to the worker has run, and what that added. Not from the
    /// thread itself.
    void stop() { (void)stop(gpushare::never, {}); }
    /// The same until `deadline`, by the steady clock, or until `hurry` is requested: false if
    /// something still runs then. The thread goes on with it, and a later call waits for it again.
    bool stop(gpushare::instant deadline, const std::stop_token& hurry) {
        thread_.request_stop();
        {
            const std::chrono::time_point<std::chrono::steady_clock, gpushare::ns> by{deadline.time_since_epoch()};
            std::unique_lock lock(mutex_);
            if (!comes_.wait_until(lock, hurry, by, [this] { return ended_; })) return false;
        }
        if (thread_.joinable()) thread_.join();
        // what came as the thread ended: this may go with the last of it, so not under the lock
        decltype(lines_) dropped;
        const std::lock_guard lock(mutex_);
        over_ = true;
        dropped.swap(lines_);
        return true;
    }

private:
    void run(const std::stop_token& stop) {
        std::unique_lock lock(mutex_);
        while (comes_.wait(lock, stop, [this] { return !lines_.empty(); })) {
            auto f = std::move(lines_.front().waiting.front());
            lines_.front().waiting.pop_front();
            lock.unlock();
            try {
                f();
            } catch (...) {  // of the host's memory, as a rule: the others are run all the same
            }
            f = {};
            lock.lock();
            // Only now, so that who came meanwhile is before it.
            if (lines_.front().waiting.empty())
                lines_.pop_front();
            else
                lines_.splice(lines_.end(), lines_, lines_.begin());
        }
        ended_ = true;
        comes_.notify_all();
    }

    struct line {
        explicit line(const void* of) : whose(of) {}
        const void* whose;
        std::deque<std::function<void()>> waiting;
    };

    std::mutex mutex_;
    std::condition_variable_any comes_;
    // none is empty, but perhaps the first while its last function runs
    std::list<line> lines_;
    bool ended_ = false, over_ = false;  // the thread is done; nothing is taken any more
    std::jthread thread_{[this](const std::stop_token& stop) { run(stop); }};
};

}  // namespace inference_server
