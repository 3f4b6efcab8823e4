// SPDX-License-Identifier: Apache-2.0
// Kernels in which one place of the source orders less than it was written to: what a test must
// notice.
//
//   for (const ptx::mutant& m : ptx::mutants_of(programs)) {
//       const ptx::mutation broken(m);                              // until it goes
//       ... run something ...
//   }
//
// A mutant is one order, fence, barrier or scope as somebody wrote it: the line that calls the
// primitive, in all kernels and in all copies that the compiler made by inlining and unrolling. A
// single copy is the compiler's business, and most are never needed alone: of the look at a flag
// before a loop and the one inside it, either may be the one that finds it raised.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "program.hpp"

namespace ptx {

struct mutant {
    struct change {
        function* in = nullptr;
        std::size_t at = 0;  // in its code
        instruction instead{};
    };
    std::string
        place{};  // "FILE, FUNCTION: the line", of a text with -lineinfo; else the kernel and the line of its PTX
    std::string what{};  // "load, acquire to relaxed"
    std::vector<change> changes{};

    [[nodiscard]] std::string describe() const { return place + ": " + what; }
};

/// Of each place that orders something: each way to weaken it by one step, or to leave it out.
[[nodiscard]] std::vector<mutant> mutants_of(std::span<const program* const> all);
/// The same of bounds in the source: each comparison of integers by which something is left or
/// skipped, one too far or too near.
[[nodiscard]] std::vector<mutant> bounds_of(std::span<const program* const> all);

/// Nothing ran yet.
void forget_what_ran(const program& p);
/// Whether any of its instructions ran.
[[nodiscard]] bool ran(const mutant& m);

class mutation {
public:
    explicit mutation(const mutant& m) : of_(m) {
        for (const auto& c : of_.changes) before_.push_back(std::exchange(c.in->code[c.at], c.instead));
    }
    mutation(const mutation&) = delete;
    mutation& operator=(const mutation&) = delete;
    ~mutation() {
        for (std::size_t c = 0; c < before_.size(); ++c) of_.changes[c].in->code[of_.changes[c].at] = before_[c];
    }

private:
    const mutant& of_;
    std::vector<instruction> before_{};
};

}  // namespace ptx
