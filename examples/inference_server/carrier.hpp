// SPDX-License-Identifier: Apache-2.0
// A thread that carries the bytes of many connections. A protocol has two of them: one accepts
// strangers and serves them until they show a key, and the other serves them from then on. So a
// storm of strangers can't fill a queue in which a tenant's request waits, and the system prefers
// the tenants' thread.
//
//   carrier strangers(carrier::rank::strangers), tenants(carrier::rank::tenants);
//   strangers.start("HTTP");
//   tenants.later([] { ... });                 // from any thread
//   strangers.end([] { close_what_is_left(); });
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

namespace inference_server {

/// A socket on its way from one thread to the other.
struct descriptor {
    explicit descriptor(int of) noexcept : fd(of) {}
    descriptor(const descriptor&) = delete;
    descriptor& operator=(const descriptor&) = delete;
    ~descriptor() {
        if (fd >= 0) ::close(fd);
    }
    int fd;
};

class carrier {
public:
    enum class rank { tenants, strangers };  ///< whose connections it carries

    explicit carrier(rank r) : rank_(r) {}
    carrier(const carrier&) = delete;
    carrier& operator=(const carrier&) = delete;

    /// For sockets and timers. One thread runs it.
    [[nodiscard]] boost::asio::io_context& io() noexcept { return io_; }

    /// If a function throws, the exception is printed on standard error with `protocol`; other
    /// functions aren't affected.
    void start(std::string protocol) {
        protocol_ = std::move(protocol);
        thread_ = std::thread([this] {
            if (rank_ == rank::strangers) step_back();
            // Runs until end(), because a connection may move in even when there is none at the
            // moment.
            const auto stays = boost::asio::make_work_guard(io_);
            (void)run([this] { return io_.run(); });
        });
    }

    /// Runs `f` on the thread, soon. Any thread may call it. Without memory for the call, or once
    /// the thread has ended, `f` is dropped.
    template <class F>
    void later(F f) noexcept try {
        const std::lock_guard lock(mutex_);
        if (!over_) boost::asio::post(io_, std::move(f));
    } catch (...) {
    }

    [[nodiscard]] bool runs() const noexcept { return thread_.joinable(); }
    /// Runs `last` as the last function of the thread, ends the thread, and runs the remaining
    /// functions here, so that no connection on its way to the thread is left. Don't call it from
    /// the thread itself.
    template <class F>
    void end(F last) {
        if (!runs()) return;
        boost::asio::post(io_, [this, last] {
            last();
            io_.stop();
        });
        thread_.join();
        (void)run_rest();
    }
    /// Drops functions that are posted from now on. Functions posted before would keep their
    /// connections forever, and the connections keep this carrier; run_rest() runs these functions.
    void refuse_more() {
        const std::lock_guard lock(mutex_);
        over_ = true;
    }
    /// Call this after end(). Returns false if there was no function to run.
    bool run_rest() {
        io_.restart();
        return run([this] { return io_.poll(); }) != 0;
    }

private:
    template <class F>
    std::size_t run(F f) noexcept {
        for (;;) try {
                return f();
                // usually for lack of memory; its connection is closed
            } catch (const std::exception& e) {
                std::fprintf(stderr, "inference_server: %s: %s\n", protocol_.c_str(), e.what());
            }
    }
    /// If both want a processor, strangers wait rather than requests. Beside a thread that always
    /// works, they still get a quarter of a processor, since every tenant begins as a stranger.
    static void step_back() noexcept {
        constexpr int a_quarter = 5;
        (void)::setpriority(PRIO_PROCESS, 0, a_quarter);  // only for this thread, on Linux
    }

    boost::asio::io_context io_{1};
    const rank rank_;
    std::string protocol_;
    std::mutex mutex_;
    bool over_ = false;  // guarded by mutex_
    std::thread thread_;
};

}  // namespace inference_server
