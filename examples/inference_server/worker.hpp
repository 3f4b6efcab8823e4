// SPDX-License-Identifier: Apache-2.0
// A thread for slow work. It runs functions that other code leaves to it, one at a time. The owners
// of functions take turns, so that no owner waits for more than one function of each other owner.
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
    /// Runs `f` soon, after earlier functions of the same `whose`, and drops its exceptions.
    /// Functions that come after stop() never run. Any thread may call later(). Throws
    /// std::bad_alloc.
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

    /// Returns when all functions left to the worker have run, including functions that those have
    /// added. Don't call it from the worker's thread.
    void stop() { (void)stop(gpushare::never, {}); }
    /// Like stop(), until `deadline` of the steady clock, or until `hurry` is requested. Returns
    /// false if a function still runs then. The thread continues with it, and a later call waits
    /// for it again.
    bool stop(gpushare::instant deadline, const std::stop_token& hurry) {
        thread_.request_stop();
        {
            const std::chrono::time_point<std::chrono::steady_clock, gpushare::ns> by{deadline.time_since_epoch()};
            std::unique_lock lock(mutex_);
            if (!comes_.wait_until(lock, hurry, by, [this] { return ended_; })) return false;
        }
        if (thread_.joinable()) thread_.join();
        // functions that came as the thread ended; they are destroyed last, and without the lock
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
            } catch (...) {  // usually for lack of the host's memory: the other functions still run
            }
            f = {};
            lock.lock();
            // Moves only now, so that owners that came in the meantime go first.
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
    // no line is empty, except perhaps the first while its last function runs
    std::list<line> lines_;
    // whether the thread is done, and whether functions are no longer taken
    bool ended_ = false, over_ = false;
    std::jthread thread_{[this](const std::stop_token& stop) { run(stop); }};
};

}  // namespace inference_server
