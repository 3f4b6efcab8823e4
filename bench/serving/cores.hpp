// SPDX-License-Identifier: Apache-2.0
// Restricts a whole process to a number of cores from its start. An engine's threads choose among
// the cores that the process had when the engine's library was loaded, and undo later restrictions.
#pragma once

#include <cstdint>
#include <string>

namespace bench::serving {

/// The number of cores of this process.
[[nodiscard]] std::uint32_t cores();
/// If this process has more than `n` cores, starts the program again on the first `n` cores. Call
/// this function before anything else.
void begin_on_first_cores(std::uint32_t n, char** argv);
/// Runs a part of this program in a process with one core and returns the results as JSON. The
/// process's output goes to the error stream. `option` is an option for the program, or empty.
[[nodiscard]] std::string on_one_core(const std::string& part, const std::string& option);

}  // namespace bench::serving
