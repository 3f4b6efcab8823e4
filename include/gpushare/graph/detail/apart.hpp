// SPDX-License-Identifier: Apache-2.0
// Runs a library on hostile data in a process of its own, where a crash is an ordinary error.
//
//   const apart_result r = run_apart([&] { return library.digest(data); }, 30s);
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <concepts>
#include <csignal>
#include <cstddef>
#include <exception>
#include <string>

#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// The result of work in another process.
struct apart_result {
    /// How the work ended.
    enum class kind {
        done,      ///< `text` is what the work returned
        threw,     ///< `text` is the exception's message; empty unless a std::exception
        crashed,   ///< the work crashed or was killed
        too_slow,  ///< the work was stopped at the deadline
        no_fork,   ///< pipe() or fork() failed: nothing ran
    };
    kind how = kind::no_fork;
    std::string text{};
};

/// Writes all bytes, or ends the process.
inline void write_all(int to, const char* data, std::size_t size) noexcept {
    while (size > 0) {
        const ssize_t n = ::write(to, data, size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) ::_exit(1);
        data += n;
        size -= static_cast<std::size_t>(n);
    }
}

/// The child process: runs the work, writes its result and exits.
template <std::invocable F>
[[noreturn]] void live_apart(int to, F& work) noexcept {
    for (const int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
        ::signal(s, SIG_DFL);  // the parent's handlers would report a crash of the parent
    const rlimit no_core{0, 0};
    (void)::setrlimit(RLIMIT_CORE, &no_core);
    try {
        const std::string text = work();
        write_all(to, "d", 1);
        write_all(to, text.data(), text.size());
    } catch (const std::exception& e) {
        const std::string text = e.what();
        write_all(to, "t", 1);
        write_all(to, text.data(), text.size());
    } catch (...) {
        write_all(to, "t", 1);
    }
    ::_exit(0);
}

/// Reads until every process has closed the other end. False at the deadline.
[[nodiscard]] inline bool read_until_end(int from, std::string& all, std::chrono::steady_clock::time_point deadline) {
    char buffer[1 << 16];
    for (;;) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
        if (left.count() <= 0) return false;
        pollfd ready{.fd = from, .events = POLLIN, .revents = 0};
        if (::poll(&ready, 1, static_cast<int>(std::min<std::chrono::milliseconds::rep>(left.count(), 1000))) <= 0)
            continue;
        const ssize_t n = ::read(from, buffer, sizeof buffer);
        if (n == 0) return true;
        if (n > 0) all.append(buffer, static_cast<std::size_t>(n));
        if (n < 0 && errno != EINTR) return true;
    }
}

/// Runs `work`, which returns a std::string, in a fork of this process. The fork has only this
/// thread, so the work must not wait for other threads.
template <std::invocable F>
[[nodiscard]] apart_result run_apart(F work, std::chrono::milliseconds limit) {
    int ends[2];
    if (::pipe(ends) != 0) return {};
    const auto deadline = std::chrono::steady_clock::now() + limit;
    const pid_t child = ::fork();
    if (child == 0) {
        ::close(ends[0]);
        live_apart(ends[1], work);
    }
    ::close(ends[1]);
    apart_result r;
    if (child > 0) {
        std::string all;
        const bool ended = read_until_end(ends[0], all, deadline);
        if (!ended) ::kill(child, SIGKILL);
        int status = 0;
        while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
        }
        const bool well = WIFEXITED(status) && WEXITSTATUS(status) == 0 && !all.empty();
        r.how = !ended               ? apart_result::kind::too_slow
                : !well              ? apart_result::kind::crashed
                : all.front() == 'd' ? apart_result::kind::done
                                     : apart_result::kind::threw;
        if (well) r.text = all.substr(1);
    }
    ::close(ends[0]);
    return r;
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
