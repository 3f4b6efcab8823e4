// SPDX-License-Identifier: Apache-2.0
// The service over gRPC (open_inference.proto): HTTP/2 by the distribution's libnghttp2, messages
// by its Protobuf. Not by its libgrpc++, whose 1.51 has no bound on what a stranger makes it keep
// (compressed messages, heads without end) and ends its listener for good where descriptors run
// out. A client names itself by metadata, `authorization: Bearer KEY` or `x-api-key: KEY`, so it is
// known before a byte of a message is kept. A call's deadline is the request's. Without TLS, as
// http_server.hpp.
//
//   grpc_server grpc(service, {.port = 8001});
//   grpc.stop(deadline);      // answers what was asked, then cancels
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

struct grpc_options {
    std::string address = "127.0.0.1";
    std::uint16_t port = 0;  ///< 0: any
    front_door::limits connections{.most = 10'000, .strangers = 1'000};
    std::size_t max_metadata = 8192;                  ///< bytes of a call's metadata
    std::size_t max_message = std::size_t{64} << 20;  ///< bytes of a request
    /// bytes of one that aren't raw tensors: lists, names, parameters
    std::size_t max_lists = std::size_t{4} << 20;
    /// bytes of all requests that have come; a tenant's: half of it
    std::size_t max_messages = std::size_t{256} << 20;
    std::uint32_t max_calls_of_connection = 100;  ///< more are refused until one is over
    std::size_t max_calls_of_tenant = 4000;
    std::size_t max_streams_of_tenant = 250;  ///< open ModelStreamInfer calls
    std::chrono::milliseconds handshake_timeout{10'000};
    /// a connection that has shown no key, without a call
    std::chrono::milliseconds stranger_timeout{30'000};
    /// a connection without calls, a stream without a request
    std::chrono::milliseconds idle_timeout{300'000};
    std::chrono::milliseconds message_timeout{10'000};  ///< and a second for each MiB of it
    /// without a byte that the client has read
    std::chrono::milliseconds write_timeout{30'000};
    /// nothing was heard of a client; twice that: it is gone
    std::chrono::milliseconds ping_after{30'000};
    /// of a connection that has shown no key; it is closed then
    std::size_t refusals_of_stranger = 16;
};

class grpc_server {
public:
    /// Throws std::exception where it can't listen.
    grpc_server(service& s, grpc_options o);
    grpc_server(const grpc_server&) = delete;
    grpc_server& operator=(const grpc_server&) = delete;
    ~grpc_server();

    [[nodiscard]] std::uint16_t port() const noexcept;
    [[nodiscard]] std::size_t connections() const noexcept;
    /// Runs `f` on the thread of tenants' connections, or on that of strangers', soon. An
    /// exception of `f` is printed on standard error, and harms nobody.
    void post(std::function<void()> f, bool of_strangers = false);
    /// Takes no new calls, and ends streams without a request; those that are there are cancelled
    /// after `patience`.
    void stop(std::chrono::milliseconds patience);
    /// While another thread is in stop(): its patience is over.
    void hurry();

    struct shell;  ///< of the source file

private:
    std::shared_ptr<shell> shell_;
};

}  // namespace inference_server
