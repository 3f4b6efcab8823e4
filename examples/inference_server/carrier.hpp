// SPDX-License-Identifier: Apache-2.0
// A thread that carries bytes of many connections. A protocol has two: one accepts strangers and
// has them until they show a key, the other one has them from then on. So a storm of strangers
// fills no queue in which a tenant's request stands, and the system prefers the tenants' thread.
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

/// A socket between two threads.
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

    /// An exception of a function's is printed on standard error with `protocol`, and harms nobody
    /// else.
    void start(std::string protocol) {
        protocol_ = std::move(protocol);
        thread_ = std::thread([this] {
            if (rank_ == rank::strangers) step_back();
            // Until end(): a connection may still move in where there is none just now.
            const auto stays = boost::asio::make_work_guard(io_);
            (void)run([this] { return io_.run(); });
        });
    }

    /// Runs `f` on the thread, soon. From any thread. Nothing is left to do where there is no
    /// memory for that, or no such thread any more.
    template <class F>
    void later(F f) noexcept try {
        const std::lock_guard lock(mutex_);
        if (!over_) boost::asio::post(io_, std::move(f));
    } catch (...) {
    }

    [[nodiscard]] bool runs() const noexcept { return thread_.joinable(); }
    /// Runs `last` as the last function of the thread, ends the thread, and runs what is left here,
    /// so that no connection stays which was on its way. Not from the thread itself.
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
    /// connections, which keep this carrier, for ever: run_rest() runs them.
    void refuse_more() {
        const std::lock_guard lock(mutex_);
        over_ = true;
    }
    /// After end(). False: there was nothing.
    bool run_rest() {
        io_.restart();
        return run([this] { return io_.poll(); }) != 0;
    }

private:
    template <class F>
    std::size_t run(F f) noexcept {
        for (;;) try {
                return f();
            } catch (const std::exception& e) {  // of memory, as a rule: its connection is closed
                std::fprintf(stderr, "inference_server: %s: %s\n", protocol_.c_str(), e.what());
            }
    }
    /// Strangers wait rather than requests where both want a processor. They still have a quarter
    /// of one beside a thread that always works, since every tenant begins as a stranger.
    static void step_back() noexcept {
        constexpr int a_quarter = 5;
        (void)::setpriority(PRIO_PROCESS, 0, a_quarter);  // of this thread alone, on Linux
    }

    boost::asio::io_context io_{1};
    const rank rank_;
    std::string protocol_;
    std::mutex mutex_;
    bool over_ = false;  // under it
    std::thread thread_;
};

}  // namespace inference_server
