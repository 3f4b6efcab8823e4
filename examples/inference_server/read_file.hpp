// SPDX-License-Identifier: Apache-2.0
// A file that others write while it is read: what it looks like, and what is in it.
//
//   const auto [text, look] = read_file(path);                       // throws unreadable
//   if (look_at(path) != look) read it again;
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace inference_server {

/// Two files, or two states of one, look different: another file in its place has another number,
/// and no writer sets when it changed.
struct file_look {
    std::uint64_t device = 0, number = 0, size = 0;
    std::int64_t written = 0, changed = 0;  ///< ns
    friend bool operator==(const file_look&, const file_look&) = default;
};
/// All zero: there is none.
[[nodiscard]] file_look look_at(const std::string& path) noexcept;

/// It can't be read now, which says nothing of what is in it.
struct unreadable : std::runtime_error {
    using std::runtime_error::runtime_error;
};
/// Throws unreadable: for what is no regular file, too, is larger than `most` bytes, or changes
/// meanwhile.
[[nodiscard]] std::pair<std::string, file_look> read_file(const std::string& path,
                                                          std::size_t most = std::size_t{16} << 20);

}  // namespace inference_server
