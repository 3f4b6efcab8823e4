// SPDX-License-Identifier: Apache-2.0
// Runs a library on hostile data in a process of its own, so that a crash is an ordinary error.
//
//   const apart_result r = run_apart([&] { return library.digest(data); }, 30s);
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <concepts>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include <fcntl.h>
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
        done,  ///< `text` is what the work returned
        /// `text` is the exception's message; empty if the exception isn't a std::exception.
        threw,
        crashed,   ///< the work crashed or was killed
        too_slow,  ///< the work was stopped at the deadline
        no_fork,   ///< pipe2() or fork() failed with `error`, so nothing ran
    };
    kind how = kind::no_fork;
    std::string text{};
    int error = 0;  ///< errno
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

/// The child's message: how the work ended, the size of the text, and the text. The parent knows by
/// the size when it has the whole message. The end of the pipe wouldn't tell, because a process
/// that another thread forked in the meantime may hold the pipe open.
struct apart_message {
    static constexpr std::size_t header = 1 + sizeof(std::uint64_t);

    static void write(int to, char how, std::string_view text) noexcept {
        char head[header] = {how};
        const std::uint64_t size = text.size();
        std::memcpy(head + 1, &size, sizeof size);
        write_all(to, head, header);
        write_all(to, text.data(), text.size());
    }
    [[nodiscard]] static bool whole(std::string_view all) noexcept {
        std::uint64_t size = 0;
        if (all.size() < header) return false;
        std::memcpy(&size, all.data() + 1, sizeof size);
        return all.size() - header >= size;
    }
};

/// The child process: runs the work, writes its result and exits.
template <std::invocable F>
[[noreturn]] void live_apart(int to, F& work) noexcept {
    for (const int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
        // with the parent's handlers, a crash would be reported as the parent's
        ::signal(s, SIG_DFL);
    const rlimit no_core{0, 0};
    (void)::setrlimit(RLIMIT_CORE, &no_core);
    try {
        apart_message::write(to, 'd', work());
    } catch (const std::exception& e) {
        apart_message::write(to, 't', e.what());
    } catch (...) {
        apart_message::write(to, 't', {});
    }
    ::_exit(0);
}

/// A descriptor, closed at the end.
struct apart_end {
    explicit apart_end(int d) noexcept : descriptor(d) {}
    apart_end(const apart_end&) = delete;
    apart_end& operator=(const apart_end&) = delete;
    ~apart_end() { close(); }
    void close() noexcept {
        if (descriptor >= 0) ::close(std::exchange(descriptor, -1));
    }
    int descriptor;
};

/// A child process, killed and waited for at the end.
class apart_child {
public:
    explicit apart_child(pid_t child) noexcept : child_(child) {}
    apart_child(const apart_child&) = delete;
    apart_child& operator=(const apart_child&) = delete;
    ~apart_child() {
        if (ended(WNOHANG)) return;
        ::kill(child_, SIGKILL);
        (void)ended(0);
    }
    /// Whether the process has ended. Its status isn't used, because there is no status if the
    /// embedder ignores SIGCHLD or waits for every child itself.
    bool ended(int options = WNOHANG) noexcept {
        while (!gone_) {
            const pid_t found = ::waitpid(child_, nullptr, options);
            if (found == 0) return false;
            gone_ = found > 0 || errno != EINTR;
        }
        return true;
    }

private:
    pid_t child_;
    bool gone_ = false;
};

/// Reads until the message is whole, the other end is closed or the child has ended. Returns false
/// at the deadline.
[[nodiscard]] inline bool read_message(int from, apart_child& child, std::string& all,
                                       std::chrono::steady_clock::time_point deadline) {
    constexpr std::chrono::milliseconds most(100);  // the longest time between looks at the child
    char buffer[1 << 16];
    for (bool last = false; !apart_message::whole(all);) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
        if (left.count() <= 0) return false;
        pollfd ready{.fd = from, .events = POLLIN, .revents = 0};
        const auto wait = last ? std::chrono::milliseconds{} : std::min(left, most);
        const int found = ::poll(&ready, 1, static_cast<int>(wait.count()));
        if (found == 0 && last) return true;
        // reads once more, for what the child wrote before its end
        if (found == 0) last = child.ended();
        if (found <= 0) continue;
        const ssize_t n = ::read(from, buffer, sizeof buffer);
        if (n > 0) all.append(buffer, static_cast<std::size_t>(n));
        if (n == 0 || (n < 0 && errno != EINTR)) return true;
    }
    return true;
}

/// Runs `work`, which returns a std::string, in a fork of this process. The fork has only this
/// thread, so the work must not wait for other threads. Throws std::bad_alloc.
template <std::invocable F>
[[nodiscard]] apart_result run_apart(F work, std::chrono::milliseconds limit) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return {.error = errno};
    apart_end from(ends[0]), to(ends[1]);
    const auto deadline = std::chrono::steady_clock::now() + limit;
    const pid_t forked = ::fork();
    if (forked < 0) return {.error = errno};
    if (forked == 0) {
        from.close();
        live_apart(to.descriptor, work);
    }
    apart_child child(forked);
    to.close();
    std::string all;
    if (!read_message(from.descriptor, child, all, deadline)) return {apart_result::kind::too_slow};
    if (!apart_message::whole(all)) return {apart_result::kind::crashed};
    return {all.front() == 'd' ? apart_result::kind::done : apart_result::kind::threw,
            all.substr(apart_message::header)};
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
