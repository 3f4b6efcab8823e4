// SPDX-License-Identifier: Apache-2.0
// The instructions that only use registers, each as a pure function of up to three operands.
//
//   const ptx::pure* add = ptx::find_pure("add.s32");       // null if there is no such opcode
//   add->compute(1, 2, 0);                                  // 3
//
// Registers are 64 bits wide here. A value lies in the low bits. The other bits are undefined, and
// an instruction reads only the bits of its type, as the ISA says. A predicate is 0 or 1.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace ptx {

using word = std::uint64_t;

struct pure {
    word (*compute)(word, word, word) = nullptr;
    std::uint8_t sources = 0;
};

[[nodiscard]] const pure* find_pure(std::string_view opcode);
/// The names of all such opcodes, in alphabetical order.
[[nodiscard]] std::vector<std::string_view> pure_opcodes();

}  // namespace ptx
