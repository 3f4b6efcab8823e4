// SPDX-License-Identifier: Apache-2.0
// Takes gRPC's messages out of the bytes of a call. Each message has a prefix of five bytes: a flag
// and the message's length. A compressed message is refused before a byte of it is kept, since a
// megabyte could expand to a gigabyte.
//
//   message_reader in(4096);
//   while (!bytes.empty()) {
//       bytes.remove_prefix(in.take(bytes));                            // throws refused
//       if (in.is_complete()) use(in.message());
//   }
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "inference_server/protocol.hpp"

namespace inference_server {

class message_reader {
public:
    static constexpr std::size_t prefix_size = 5;  ///< bytes before each message

    explicit message_reader(std::size_t most) : most_(most) {}

    /// Returns how many bytes it took: none while a message is complete. Throws refused: 413 for a
    /// message that announces more than the allowed length, 501 for a compressed message.
    std::size_t take(std::string_view bytes) {
        std::size_t taken = 0;
        while (prefix_ < bytes_.size() && taken < bytes.size()) {
            bytes_[prefix_++] = static_cast<unsigned char>(bytes[taken++]);
            if (prefix_ == bytes_.size()) begin();
        }
        if (prefix_ < bytes_.size()) return taken;
        const auto some = bytes.substr(taken, size_ - message_.size());
        // Reserves memory for the bytes that have come, not for the announced length.
        if (message_.capacity() < message_.size() + some.size())
            message_.reserve(std::min(size_, std::max(message_.size() + some.size(), 2 * message_.size())));
        message_.append(some);
        return taken + some.size();
    }
    [[nodiscard]] bool is_complete() const noexcept { return prefix_ == bytes_.size() && message_.size() == size_; }
    /// Whether a part of a message has come.
    [[nodiscard]] bool has_begun() const noexcept { return prefix_ != 0; }
    /// The length that the message announces.
    [[nodiscard]] std::size_t announced() const noexcept { return size_; }
    /// The complete message. Afterwards the next message may come.
    [[nodiscard]] std::string message() {
        prefix_ = 0;
        size_ = 0;
        return std::exchange(message_, {});
    }

private:
    void begin() {
        const auto& p = bytes_;
        if (p[0] != 0) throw refused(501, "compressed messages aren't read");
        size_ = std::size_t{p[1]} << 24U | std::size_t{p[2]} << 16U | std::size_t{p[3]} << 8U | p[4];
        if (size_ > most_) throw refused(413, "the message is too large");
    }

    std::size_t most_, prefix_ = 0, size_ = 0;
    std::array<unsigned char, prefix_size> bytes_{};
    std::string message_;
};

}  // namespace inference_server
