// SPDX-License-Identifier: Apache-2.0
#include "inference_server/read_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace inference_server {

namespace {

std::int64_t ns_of(const ::timespec& t) noexcept { return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec; }

file_look look_of(const struct ::stat& s) noexcept {
    return {s.st_dev, s.st_ino, static_cast<std::uint64_t>(s.st_size), ns_of(s.st_mtim), ns_of(s.st_ctim)};
}

struct opened {
    // O_NONBLOCK, because opening a pipe would wait for a writer
    explicit opened(const std::string& path) : fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
    opened(const opened&) = delete;
    opened& operator=(const opened&) = delete;
    ~opened() {
        if (fd >= 0) (void)::close(fd);
    }
    const int fd;
};

[[noreturn]] void fail(const std::string& path, const char* why) {
    throw unreadable("cannot read " + path + ": " + why);
}

}  // namespace

file_look look_at(const std::string& path) noexcept {
    struct ::stat s {};
    return ::stat(path.c_str(), &s) == 0 ? look_of(s) : file_look{};
}

std::pair<std::string, file_look> read_file(const std::string& path, std::size_t most) {
    const opened file(path);
    struct ::stat before {
    }, after{};
    if (file.fd < 0 || ::fstat(file.fd, &before) != 0) fail(path, std::strerror(errno));
    if (!S_ISREG(before.st_mode)) fail(path, "it is no regular file");
    std::string text;
    for (char some[4096];;) {
        const auto n = ::read(file.fd, some, sizeof some);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail(path, std::strerror(errno));
        if (n == 0) break;
        text.append(some, static_cast<std::size_t>(n));
        if (text.size() > most) fail(path, "it is too large");
    }
    if (::fstat(file.fd, &after) != 0) fail(path, std::strerror(errno));
    if (after.st_size != before.st_size || ns_of(after.st_mtim) != ns_of(before.st_mtim))
        fail(path, "it is being written");
    return {std::move(text), look_of(after)};
}

}  // namespace inference_server
