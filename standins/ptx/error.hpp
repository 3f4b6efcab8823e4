// SPDX-License-Identifier: Apache-2.0
// The errors in PTX text. The executor doesn't guess: it refuses text that it doesn't know, and
// names the line.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace ptx {

enum class problem : std::uint8_t {
    syntax,               // text that the parser can't read as PTX
    unknown_directive,    // .tex, .branchtargets, ...
    unknown_instruction,  // an opcode, or a modifier of an opcode
    unknown_name,         // a register, label, variable or special register
    unsupported_operand,  // a kind of operand that the executor doesn't support for this instruction
};

class error : public std::runtime_error {
public:
    error(problem what, std::uint32_t line, std::string_view kernel, std::string_view detail)
        : std::runtime_error("PTX line " + std::to_string(line) + (kernel.empty() ? "" : " in " + std::string(kernel)) +
                             ": " + std::string(detail)),
          what_(what),
          line_(line),
          kernel_(kernel),
          detail_(detail) {}

    [[nodiscard]] problem code() const noexcept { return what_; }
    [[nodiscard]] std::uint32_t line() const noexcept { return line_; }
    [[nodiscard]] const std::string& kernel() const noexcept { return kernel_; }
    [[nodiscard]] const std::string& detail() const noexcept { return detail_; }

private:
    problem what_;
    std::uint32_t line_;
    std::string kernel_, detail_;
};

}  // namespace ptx
