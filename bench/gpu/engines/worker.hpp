// SPDX-License-Identifier: Apache-2.0
// A thread that lives as long as its tenant. libtorch and cuDNN remember for each thread how to run
// a layer, and forget their choice when the thread ends.
//
//   worker w;
//   w.begin([&] { serve(requests); });
//   w.wait();                                   // throws what the task threw
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

namespace gpu_engines {

class worker {
public:
    worker() : thread_([this](const std::stop_token& stop) { run(stop); }) {}
    worker(const worker&) = delete;
    worker& operator=(const worker&) = delete;

    /// Starts a task. Only one task may run at a time.
    void begin(std::function<void()> task) {
        const std::lock_guard lock(mutex_);
        task_ = std::move(task);
        busy_ = true;
        changed_.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !busy_; });
        if (const auto why = std::exchange(failed_, nullptr)) std::rethrow_exception(why);
    }

private:
    void run(const std::stop_token& stop) {
        std::unique_lock lock(mutex_);
        while (changed_.wait(lock, stop, [&] { return busy_; })) {
            lock.unlock();
            std::exception_ptr why;
            try {
                task_();
            } catch (...) {
                why = std::current_exception();
            }
            lock.lock();
            task_ = nullptr;
            failed_ = why;
            busy_ = false;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable_any changed_;
    std::function<void()> task_;
    std::exception_ptr failed_;
    bool busy_ = false;
    std::jthread thread_;  // last, because the thread uses the other members
};

}  // namespace gpu_engines
