// SPDX-License-Identifier: Apache-2.0
// Sends a message to the example server over gRPC. The message may be malformed.
//
//   grpc_client c(server.grpc_port());
//   const auto status = c.infer("key-of-chat", small_row());      // 0 is OK
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace bench::serving {

/// A client with its own connection, for one call at a time.
class grpc_client {
public:
    explicit grpc_client(std::uint16_t port);
    grpc_client(grpc_client&&) noexcept;
    grpc_client& operator=(grpc_client&&) noexcept;
    ~grpc_client();

    /// Calls ModelInfer and returns the gRPC status; 3 is INVALID_ARGUMENT.
    [[nodiscard]] int infer(std::string_view key, const std::string& message);

private:
    struct parts;
    std::unique_ptr<parts> parts_;
};

/// A request to the server's smallest model, which takes almost no time.
[[nodiscard]] std::string small_row();
/// An invalid request of at most `bytes` bytes to the same model. The request contains as many
/// empty texts as fit, so that the server takes long to read the request before refusing it.
[[nodiscard]] std::string many_texts(std::size_t bytes);

}  // namespace bench::serving
