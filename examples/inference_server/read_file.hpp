// SPDX-License-Identifier: Apache-2.0
// Reads a file that other programs may be writing: its identity and state, and its content.
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

/// Identifies a file and its state. Another file in its place has another number, and a writer
/// can't set the time of the last change.
struct file_look {
    std::uint64_t device = 0, number = 0, size = 0;
    std::int64_t written = 0, changed = 0;  ///< ns
    friend bool operator==(const file_look&, const file_look&) = default;
};
/// The look of a file; all members are zero if there is no file.
[[nodiscard]] file_look look_at(const std::string& path) noexcept;

/// Says that the file can't be read now, which doesn't mean that its content is wrong.
struct unreadable : std::runtime_error {
    using std::runtime_error::runtime_error;
};
/// Throws unreadable, also if the path isn't a regular file, is larger than `most` bytes, or
/// changes while it is read.
[[nodiscard]] std::pair<std::string, file_look> read_file(const std::string& path,
                                                          std::size_t most = std::size_t{16} << 20);

}  // namespace inference_server
