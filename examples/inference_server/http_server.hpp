// SPDX-License-Identifier: Apache-2.0
// The service over HTTP/1.1, by Boost.Beast of the distribution: its parser is fuzzed upstream and
// has limits for all that a client sends, and one thread serves thousands of connections. Another
// one has those that haven't shown a key yet. Without TLS: put a proxy in front for that. A second
// address is for operators: metrics, a status page, a timeline.
//
//   http_server http(service, {.port = 8000, .admin_port = 8002});
//   http.stop(deadline);      // answers what was asked, then closes
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "inference_server/front_door.hpp"
#include "inference_server/service.hpp"

namespace inference_server {

struct http_options {
    std::string address = "127.0.0.1";
    std::uint16_t port = 0;  ///< 0: any
    std::string admin_address = "127.0.0.1";
    std::uint16_t admin_port = 0;
    front_door::limits connections{};
    std::size_t max_header = 8192;  ///< bytes of a request's header
    /// bytes of JSON: a body, or what is in front of binary tensors
    std::size_t max_json = std::size_t{4} << 20;
    std::size_t max_body = std::size_t{64} << 20;  ///< bytes of a body with binary tensors
    /// bytes of all bodies that are being received or served; a tenant's: half of it
    std::size_t max_bodies = std::size_t{256} << 20;
    std::chrono::milliseconds header_timeout{30'000};  ///< between requests, and for a header
    std::chrono::milliseconds body_timeout{10'000};    ///< and a second for each MiB of it
    std::chrono::milliseconds write_timeout{30'000};   ///< for an answer, or a part of a stream
};

class http_server {
public:
    /// Throws std::exception where it can't listen.
    http_server(service& s, http_options o);
    http_server(const http_server&) = delete;
    http_server& operator=(const http_server&) = delete;
    ~http_server();

    [[nodiscard]] std::uint16_t port() const noexcept;
    [[nodiscard]] std::uint16_t admin_port() const noexcept;
    [[nodiscard]] std::size_t connections() const noexcept;
    /// Runs `f` on the thread of tenants' connections, or on that of strangers', soon. An
    /// exception of `f` is printed on standard error, and harms nobody.
    void post(std::function<void()> f, bool of_strangers = false);
    /// Takes no new connections; those that are there are closed when they have their answer, all
    /// of them after `patience`.
    void stop(std::chrono::milliseconds patience);
    /// While another thread is in stop(): its patience is over.
    void hurry();

    struct shell;  ///< of the source file

private:
    std::shared_ptr<shell> shell_;
};

}  // namespace inference_server
