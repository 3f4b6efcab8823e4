// SPDX-License-Identifier: Apache-2.0
// PTX text as statements: the declarations, and the instructions with their operands, without their
// meaning.
//
//   const ptx::text::module m = ptx::text::parse(whole_file);
//   for (const auto& f : m.functions) ...
//
// The string views in a module point into the text, which must outlive the module. PTX ISA 9.0,
// chapter 4.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"

namespace ptx::text {

struct operand {
    enum class shape : std::uint8_t {
        name,      // %r1, a label, a variable, a special register; in %r1|%p1 the second is a part
        integer,   // 42
        real32,    // 0f3F800000: `value` has the bits
        real64,    // 0d...
        address,   // [name + value] or [value]
        elements,  // {%f1, %f2}, or the (...) of a call
    };
    shape what = shape::name;
    std::string_view name{};
    std::int64_t value = 0;
    std::vector<operand> parts{};
    bool negated = false;  // !%p1
};

/// The place in the source, from `.loc`, if the text was compiled with -lineinfo.
struct location {
    struct point {
        std::uint32_t file = 0, line = 0;
        friend auto operator<=>(const point&, const point&) = default;
    };
    std::uint32_t file = 0, line = 0;
    std::array<point, 7> callers{};  // the place where it was inlined, and where that place was inlined
};

struct statement {
    std::uint32_t line = 0;
    location source{};
    std::string_view guard{};  // the predicate's name
    bool negated = false;
    std::string_view opcode{};  // with its modifiers
    std::vector<operand> operands{};
};

/// A variable, or an argument of a function.
struct variable {
    std::uint32_t line = 0;
    std::string_view name{}, space{};  // ".shared"
    std::uint32_t alignment = 1;
    std::uint64_t bytes = 0;
    std::vector<std::uint64_t> initial{};  // the values of elements of `element` bytes
    std::uint32_t element = 1;
};

/// Registers `%r0` to `%rN-1`, or one by its name.
struct registers {
    std::string_view name{};
    std::uint32_t count = 1;
    bool numbered = false;
};

struct label {
    std::string_view name{};
    std::size_t statement = 0;  // the statement that follows it
};

struct function {
    std::uint32_t line = 0;
    std::string_view name{};
    bool entry = false, declared_only = false;
    std::uint32_t most_threads = 0;  // .maxntid; 0 if it isn't given
    std::vector<variable> results{}, arguments{}, variables{};
    std::vector<registers> declared{};
    std::vector<statement> statements{};
    std::vector<label> labels{};
};

struct module {
    std::string target{};
    std::vector<std::string> files{};  // by the number of `.file`
    std::vector<variable> variables{};
    std::vector<function> functions{};
};

/// Throws ptx::error.
[[nodiscard]] module parse(std::string_view text);

}  // namespace ptx::text
