// SPDX-License-Identifier: Apache-2.0
// So many cores for a whole process, from its beginning: an engine's threads choose among the cores
// that the process had when the engine's library looked, and undo what is chosen for them later.
#pragma once

#include <cstdint>
#include <string>

namespace bench::serving {

/// How many cores this process has.
[[nodiscard]] std::uint32_t cores();
/// If this process has more than `n`, it begins anew with the first `n`. To be called before
/// anything else.
void begin_on_first_cores(std::uint32_t n, char** argv);
/// Runs a part of this program in a process that has one core: its results, as JSON. What it prints
/// goes to the error stream. `option`: of the program; empty: none.
[[nodiscard]] std::string on_one_core(const std::string& part, const std::string& option);

}  // namespace bench::serving
