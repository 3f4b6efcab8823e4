// SPDX-License-Identifier: Apache-2.0
// A client of the server for tests, benchmarks and the demonstration: one connection over loopback,
// controlled step by step.
//
//   connection c(port);
//   c.ask("POST", "/v2/models/mlp/infer", key, body).status;
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace inference_server {

struct reply {
    int status = 0;
    std::string head, body;
    [[nodiscard]] std::string header(const std::string& name) const {
        const auto at = head.find("\r\n" + name + ": ");
        if (at == std::string::npos) return {};
        const auto begin = at + name.size() + 4;
        return head.substr(begin, head.find("\r\n", begin) - begin);
    }
};

/// A connection that the caller controls step by step.
class connection {
public:
    explicit connection(std::uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        ::sockaddr_in to{};
        to.sin_family = AF_INET;
        to.sin_port = htons(port);
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const int at_once = 1;
        (void)::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
        if (::connect(fd_, reinterpret_cast<const ::sockaddr*>(&to), sizeof to) == 0) return;
        ::close(fd_);
        throw std::runtime_error("no connection");
    }
    connection(connection&& other) noexcept : fd_(std::exchange(other.fd_, -1)), read_(std::move(other.read_)) {}
    connection& operator=(connection&&) = delete;
    ~connection() {
        if (fd_ >= 0) ::close(fd_);
    }

    void send(std::string_view text) const {
        while (!text.empty()) {
            const auto n = ::send(fd_, text.data(), text.size(), MSG_NOSIGNAL);
            if (n <= 0) return;  // closed: the answer says why
            text.remove_prefix(static_cast<std::size_t>(n));
        }
    }
    /// Returns false at the end.
    bool receive() {
        char some[4096];
        ::pollfd p{fd_, POLLIN, 0};
        if (::poll(&p, 1, 60'000) != 1) throw std::runtime_error("no answer within a minute");
        const auto n = ::recv(fd_, some, sizeof some, 0);
        if (n > 0) read_.append(some, static_cast<std::size_t>(n));
        return n > 0;
    }
    /// Receives the next bytes into `room`; empty at the end.
    template <std::size_t N>
    std::string_view receive_some(char (&room)[N]) const {
        ::pollfd p{fd_, POLLIN, 0};
        if (::poll(&p, 1, 60'000) != 1) throw std::runtime_error("no answer within a minute");
        const auto n = ::recv(fd_, room, N, 0);
        return {room, n > 0 ? static_cast<std::size_t>(n) : 0};
    }
    /// Ends the requests; answers can still be read.
    void end_of_requests() const { (void)::shutdown(fd_, SHUT_WR); }
    /// Makes the connection end by a reset. Otherwise its port would stay taken for a minute.
    void reset_at_end() const {
        const ::linger none{1, 0};
        (void)::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    }
    /// Whether there are bytes to read now.
    [[nodiscard]] bool has_some() const {
        ::pollfd p{fd_, POLLIN, 0};
        return !read_.empty() || ::poll(&p, 1, 0) == 1;
    }
    /// Waits until the server closes the connection.
    bool ends() {
        while (receive()) {
        }
        return true;
    }
    std::string until(std::string_view mark) {
        std::size_t at;
        while ((at = read_.find(mark)) == std::string::npos)
            if (!receive()) return {};
        auto text = read_.substr(0, at + mark.size());
        read_.erase(0, at + mark.size());
        return text;
    }
    reply answer() {
        reply r;
        r.head = until("\r\n\r\n");
        if (r.head.size() < 12) return r;
        r.status = std::stoi(r.head.substr(9, 3));
        const auto size = r.header("Content-Length").empty() ? 0 : std::stoul(r.header("Content-Length"));
        while (read_.size() < size && receive()) {
        }
        r.body = read_.substr(0, size);
        read_.erase(0, size);
        return r;
    }
    void send_request(std::string_view method, std::string_view path, std::string_view key = {},
                      std::string_view body = {}, std::string_view more = {}) const {
        std::string head(method);
        head.append(" ")
            .append(path)
            .append(" HTTP/1.1\r\nHost: localhost\r\nContent-Length: ")
            .append(std::to_string(body.size()))
            .append("\r\n");
        if (!key.empty()) head.append("Authorization: Bearer ").append(key).append("\r\n");
        send(head.append(more).append("\r\n").append(body));
    }
    reply ask(std::string_view method, std::string_view path, std::string_view key = {}, std::string_view body = {},
              std::string_view more = {}) {
        send_request(method, path, key, body, more);
        return answer();
    }

private:
    int fd_;
    std::string read_;
};

}  // namespace inference_server
