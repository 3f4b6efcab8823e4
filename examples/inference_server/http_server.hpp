// SPDX-License-Identifier: Apache-2.0
// The service over HTTP/1.1, by the distribution's Boost.Beast, whose parser is fuzzed upstream and
// limits everything that a client sends. One thread serves thousands of connections, and another
// thread serves the connections that haven't shown a key yet. There is no TLS: put a proxy in front
// for that. A second address is for operators: metrics, a status page, a timeline.
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
    std::uint16_t port = 0;  ///< 0 takes any port
    std::string admin_address = "127.0.0.1";
    std::uint16_t admin_port = 0;
    front_door::limits connections{};
    std::size_t max_header = 8192;  ///< bytes of a request's header
    /// bytes of JSON: a body, or the part before binary tensors
    std::size_t max_json = std::size_t{4} << 20;
    std::size_t max_body = std::size_t{64} << 20;  ///< bytes of a body with binary tensors
    /// bytes of all bodies that are being received or served; a tenant may have half of this
    std::size_t max_bodies = std::size_t{256} << 20;
    std::chrono::milliseconds header_timeout{30'000};  ///< between requests, and for a header
    std::chrono::milliseconds body_timeout{10'000};    ///< plus a second for each MiB of the body
    std::chrono::milliseconds write_timeout{30'000};   ///< for an answer, or a part of a stream
};

class http_server {
public:
    /// Throws std::exception if the server can't listen.
    http_server(service& s, http_options o);
    http_server(const http_server&) = delete;
    http_server& operator=(const http_server&) = delete;
    ~http_server();

    [[nodiscard]] std::uint16_t port() const noexcept;
    [[nodiscard]] std::uint16_t admin_port() const noexcept;
    [[nodiscard]] std::size_t connections() const noexcept;
    /// Runs `f` soon, on the thread of tenants' connections or on the thread of strangers'. An
    /// exception of `f` is printed on standard error, and has no other effect.
    void post(std::function<void()> f, bool of_strangers = false);
    /// Takes no new connections. Existing connections are closed when they have their answer, and
    /// all of them after `patience`.
    void stop(std::chrono::milliseconds patience);
    /// Ends the patience of a stop() that runs in another thread.
    void hurry();

    struct shell;  ///< defined in the source file

private:
    std::shared_ptr<shell> shell_;
};

}  // namespace inference_server
