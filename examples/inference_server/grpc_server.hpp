// SPDX-License-Identifier: Apache-2.0
// The service over gRPC (open_inference.proto), by the distribution's libgrpc++ and its callbacks: no thread waits for an engine.
// Who asks says so by metadata, `authorization: Bearer KEY` or `x-api-key: KEY`. A call's deadline is the request's. Without TLS, as
// http_server.hpp.
//
//   grpc_server grpc(service, {.port = 8001});
//   grpc.stop(deadline);      // answers what was asked, then cancels
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "inference_server/service.hpp"

namespace inference_server {

/// What isn't bounded is the number of connections: this gRPC (1.51) has no such setting. One that says nothing is closed.
struct grpc_options {
    std::string address = "127.0.0.1";
    std::uint16_t port = 0;                           ///< 0: any
    std::size_t max_metadata = 8192;                  ///< bytes of a call's metadata
    std::size_t max_message = std::size_t{64} << 20;  ///< bytes of a request
    std::size_t max_lists = std::size_t{4} << 20;  ///< bytes of one that aren't raw tensors: lists, names, parameters
    std::size_t max_messages = std::size_t{256}
                               << 20;  ///< bytes of all requests that are being served; a tenant's: half of it
    std::size_t max_buffers = std::size_t{512}
                              << 20;    ///< bytes that gRPC takes for its own before it slows its clients down
    int max_calls_of_connection = 100;  ///< more wait until one is over
    std::size_t max_streams = 1000;     ///< open ModelStreamInfer calls
    std::chrono::milliseconds handshake_timeout{10'000};
    std::chrono::milliseconds idle_timeout{300'000};  ///< a connection without calls is closed
};

class grpc_server {
public:
    /// Throws std::exception where it can't listen.
    grpc_server(service& s, grpc_options o);
    grpc_server(const grpc_server&) = delete;
    grpc_server& operator=(const grpc_server&) = delete;
    ~grpc_server();

    [[nodiscard]] std::uint16_t port() const noexcept;
    /// Takes no new calls; those that are there are cancelled after `patience`.
    void stop(std::chrono::milliseconds patience);

    struct shell;  ///< of the source file

private:
    std::shared_ptr<shell> shell_;
};

}  // namespace inference_server
