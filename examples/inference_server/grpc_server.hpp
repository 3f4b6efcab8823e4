// SPDX-License-Identifier: Apache-2.0
// The service over gRPC (open_inference.proto): HTTP/2 by the distribution's libnghttp2, and
// messages by its Protobuf. It doesn't use the distribution's libgrpc++ 1.51. That library doesn't
// limit what a stranger makes it keep (compressed messages, endless heads), and its listener ends
// permanently if file descriptors run out. A client identifies itself by metadata, `authorization:
// Bearer KEY` or `x-api-key: KEY`, so the client is known before a byte of a message is kept. A
// call's deadline is the request's. There is no TLS, as in http_server.hpp.
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
    std::uint16_t port = 0;  ///< 0 takes any port
    front_door::limits connections{.most = 10'000, .strangers = 1'000};
    std::size_t max_metadata = 8192;                  ///< bytes of a call's metadata
    std::size_t max_message = std::size_t{64} << 20;  ///< bytes of a request
    /// bytes of a request that aren't raw tensors: lists, names, parameters
    std::size_t max_lists = std::size_t{4} << 20;
    /// bytes of all received requests; a tenant may have half of this
    std::size_t max_messages = std::size_t{256} << 20;
    /// Further calls are refused until a call is over.
    std::uint32_t max_calls_of_connection = 100;
    std::size_t max_calls_of_tenant = 4000;
    std::size_t max_streams_of_tenant = 250;  ///< open ModelStreamInfer calls
    std::chrono::milliseconds handshake_timeout{10'000};
    /// for a connection that hasn't shown a key and has no call
    std::chrono::milliseconds stranger_timeout{30'000};
    /// for a connection without calls, and for a stream without a request
    std::chrono::milliseconds idle_timeout{300'000};
    /// Plus a second for each MiB of the message.
    std::chrono::milliseconds message_timeout{10'000};
    /// for a client that doesn't read a byte
    std::chrono::milliseconds write_timeout{30'000};
    /// A client that has been silent for this long gets a ping. After twice this time, the client
    /// counts as gone.
    std::chrono::milliseconds ping_after{30'000};
    /// For a connection that hasn't shown a key: the refusals after which the server closes the
    /// connection.
    std::size_t refusals_of_stranger = 16;
};

class grpc_server {
public:
    /// Throws std::exception if the server can't listen.
    grpc_server(service& s, grpc_options o);
    grpc_server(const grpc_server&) = delete;
    grpc_server& operator=(const grpc_server&) = delete;
    ~grpc_server();

    [[nodiscard]] std::uint16_t port() const noexcept;
    [[nodiscard]] std::size_t connections() const noexcept;
    /// Runs `f` soon, on the thread of tenants' connections or on the thread of strangers'. An
    /// exception of `f` is printed on standard error, and has no other effect.
    void post(std::function<void()> f, bool of_strangers = false);
    /// Takes no new calls, and ends streams without a request. The remaining calls are cancelled
    /// after `patience`.
    void stop(std::chrono::milliseconds patience);
    /// Ends the patience of a stop() that runs in another thread.
    void hurry();

    struct shell;  ///< defined in the source file

private:
    std::shared_ptr<shell> shell_;
};

}  // namespace inference_server
