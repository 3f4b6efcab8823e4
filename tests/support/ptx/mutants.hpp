// SPDX-License-Identifier: Apache-2.0
// Kernels with one instruction that orders less than the compiler meant it to: what a test must notice.
//
//   for (const ptx::mutant& m : ptx::mutants_of(program)) {         // of what ran
//       const ptx::mutation broken(m);                              // until it goes
//       ... run something ...
//   }
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "support/ptx/program.hpp"

namespace ptx {

struct mutant {
    const program* of = nullptr;
    function* in = nullptr;
    std::size_t at = 0;  // in its code
    instruction instead{};
    std::string what{};  // "acquire to relaxed"

    [[nodiscard]] std::string describe() const;
};

/// Of each instruction that orders something and that ran: each way to weaken it by one step, or to leave it out. A scope becomes the
/// widest that is narrower than `needed`: where all who talk are on one device, .gpu is as good as .sys.
[[nodiscard]] std::vector<mutant> mutants_of(const program& p, scope needed = scope::sys);

/// Nothing ran yet.
void forget_what_ran(const program& p);

class mutation {
public:
    explicit mutation(const mutant& m) : at_(m.in->code[m.at]), before_(at_) { at_ = m.instead; }
    mutation(const mutation&) = delete;
    mutation& operator=(const mutation&) = delete;
    ~mutation() { at_ = before_; }

private:
    instruction& at_;
    const instruction before_;
};

}  // namespace ptx
