// SPDX-License-Identifier: Apache-2.0
// Asks the example server over gRPC, with the bytes of a message, well formed or not.
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

/// A connection of its own. One call at a time.
class grpc_client {
public:
    explicit grpc_client(std::uint16_t port);
    grpc_client(grpc_client&&) noexcept;
    grpc_client& operator=(grpc_client&&) noexcept;
    ~grpc_client();

    /// Returns gRPC's status when ModelInfer has answered; 3 is INVALID_ARGUMENT.
    [[nodiscard]] int infer(std::string_view key, const std::string& message);

private:
    struct parts;
    std::unique_ptr<parts> parts_;
};

/// A request to the server's smallest model, which costs it nothing.
[[nodiscard]] std::string small_row();
/// One to the same model, of so many bytes at most: as many empty texts as go into it, so that it
/// takes long to read, and is refused.
[[nodiscard]] std::string many_texts(std::size_t bytes);

}  // namespace bench::serving
