// SPDX-License-Identifier: Apache-2.0
// Kernels in which one place of the source orders less than its author wrote. A test must notice
// each such mutant.
//
//   for (const ptx::mutant& m : ptx::mutants_of(programs)) {
//       const ptx::mutation broken(m);                              // in force while it exists
//       ... run something ...
//   }
//
// A mutant changes one order, fence, barrier or scope as it is written in the source: the line that
// calls the primitive, in all kernels and in all copies that the compiler made by inlining and
// unrolling. Mutants of single copies would be misleading, since most copies are never needed
// alone. For example, if a flag is read before a loop and inside it, either read may find the flag
// raised.
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

/// For each place that orders something: each way to weaken it by one step, or to leave it out.
[[nodiscard]] std::vector<mutant> mutants_of(std::span<const program* const> all);
/// The same for bounds in the source: each integer comparison that can end or skip work, moved by
/// one in either direction.
[[nodiscard]] std::vector<mutant> bounds_of(std::span<const program* const> all);

/// Forgets which instructions have run.
void forget_what_ran(const program& p);
/// Whether any of the mutant's instructions ran.
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
