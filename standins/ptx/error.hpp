// SPDX-License-Identifier: Apache-2.0
// What can be wrong with PTX text. Nothing is guessed: what the executor doesn't know it refuses,
// with the line.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace ptx {

enum class problem : std::uint8_t {
    syntax,               // not PTX as we read it
    unknown_directive,    // .tex, .branchtargets, ...
    unknown_instruction,  // an opcode, or a modifier of one
    unknown_name,         // a register, label, variable or special register
    unsupported_operand,  // an operand of a kind that the instruction can't have here
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
