// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Work in a separate process: its result arrives whatever other processes hold and whatever the
// embedder does with SIGCHLD, and no process or descriptor is left over.
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string>

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <unistd.h>

#include <gpushare/graph/detail/apart.hpp>

#include "support/catch.hpp"
#include "support/sanitizers.hpp"

namespace apart_test {

using namespace std::chrono_literals;
using gpushare::graph::detail::run_apart;
using kind = gpushare::graph::detail::apart_result::kind;

namespace {

/// A process id that all processes see.
struct shared_pid {
    shared_pid()
        : at(static_cast<volatile pid_t*>(
              mmap(nullptr, sizeof(pid_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
    shared_pid(const shared_pid&) = delete;
    shared_pid& operator=(const shared_pid&) = delete;
    ~shared_pid() { munmap(const_cast<pid_t*>(at), sizeof(pid_t)); }
    /// Kills it. Requires that there is one: 0 and -1 are whole groups of processes.
    void end() const {
        REQUIRE(*at > 0);
        CHECK(kill(*at, SIGKILL) == 0);
        *at = 0;
    }
    volatile pid_t* at;
};
/// Leaves a process behind that holds all descriptors, as one that another thread forked.
void leave_holder(const shared_pid& pid) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(600);
        for (;;) pause();
    }
    *pid.at = child;
}
std::ptrdiff_t descriptors() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
}
/// Sets a soft limit, until its end.
class limited {
public:
    limited(decltype(RLIMIT_AS) what, rlim_t most) : what_(what) {
        getrlimit(what, &old_);
        const rlimit now{most, old_.rlim_max};
        REQUIRE(setrlimit(what, &now) == 0);
    }
    limited(const limited&) = delete;
    limited& operator=(const limited&) = delete;
    ~limited() { restore(); }
    void restore() const { setrlimit(what_, &old_); }

private:
    decltype(RLIMIT_AS) what_;
    rlimit old_{};
};

}  // namespace

TEST_CASE("work in a process of its own gives its text, or says how it ended", "[graph]") {
    const auto before = descriptors();
    for (const std::size_t size : std::array<std::size_t, 5>{0, 1, 5, 100'000, 1'000'000}) {
        const auto r = run_apart([&] { return std::string(size, 'x'); }, 60s);
        CHECK(r.how == kind::done);
        CHECK(r.text == std::string(size, 'x'));
    }
    const auto threw = run_apart([]() -> std::string { throw std::runtime_error("no"); }, 60s);
    CHECK(threw.how == kind::threw);
    CHECK(threw.text == "no");
    CHECK(run_apart([]() -> std::string { throw 1; }, 60s).how == kind::threw);
    CHECK(run_apart([]() -> std::string { _exit(0); }, 60s).how == kind::crashed);
    CHECK(run_apart(
              []() -> std::string {
                  raise(SIGKILL), pause();
                  return {};
              },
              60s)
              .how == kind::crashed);
    CHECK(run_apart(
              []() -> std::string {
                  for (;;) pause();
              },
              100ms)
              .how == kind::too_slow);
    {
        const limited files(RLIMIT_NOFILE, 3);
        const auto none = run_apart([] { return std::string(); }, 60s);
        CHECK(none.how == kind::no_fork);
        CHECK(none.error == EMFILE);
    }
    CHECK(descriptors() == before);
}

TEST_CASE("a process that holds the pipe open delays nothing", "[graph]") {
    const shared_pid holder;
    const auto fine = run_apart(
        [&] {
            leave_holder(holder);
            return std::string("fine");
        },
        30s);
    CHECK(fine.how == kind::done);
    CHECK(fine.text == "fine");
    holder.end();
    const auto crashed = run_apart(
        [&]() -> std::string {
            leave_holder(holder);
            _exit(1);
        },
        30s);
    CHECK(crashed.how == kind::crashed);
    holder.end();
}

TEST_CASE("a crash is a crash where the embedder ignores SIGCHLD", "[graph]") {
    auto* const old = std::signal(SIGCHLD, SIG_IGN);
    CHECK(run_apart([] { return std::string("fine"); }, 60s).text == "fine");
    CHECK(run_apart([]() -> std::string { _exit(1); }, 60s).how == kind::crashed);
    const int first = dup(1), second = dup(1);  // where the ends of the next pipe are
    close(first), close(second);
    const auto half = run_apart(
        [&]() -> std::string {
            gpushare::graph::detail::write_all(second, "dhalf", 5);
            raise(SIGKILL), pause();
            return {};
        },
        60s);
    CHECK(half.how == kind::crashed);
    CHECK(half.text.empty());
    std::signal(SIGCHLD, old);
}

#ifndef SUPPORT_SANITIZED
TEST_CASE("a text that this process has no memory for leaves nothing behind", "[graph]") {
    const auto before = descriptors();
    const shared_pid child;
    {
        std::size_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        const limited memory(RLIMIT_AS,
                             pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + (std::size_t{32} << 20));
        const auto large = [&] {
            memory.restore();
            *child.at = getpid();
            return std::string(std::size_t{96} << 20, 'x');
        };
        CHECK_THROWS_AS(run_apart(large, 60s), std::bad_alloc);
    }
    CHECK(descriptors() == before);
    REQUIRE(*child.at > 0);
    CHECK(kill(*child.at, 0) == -1);
}
#endif

}  // namespace apart_test
