// SPDX-License-Identifier: Apache-2.0
// The mutation test. Each place of the source that orders something is weakened in turn, in all
// kernels, and the jobs that reach the place run again until one of them notices.
//
//   jobs::campaign all;
//   all.run({.one_in = 50, .seed = 7});
//   all.killed(), all.tried(), all.survivors()
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu/job_rig.hpp"
#include "standins/ptx/mutants.hpp"

namespace jobs {

enum class mutated : std::uint8_t { orders, bounds };

struct sample {
    std::uint32_t one_in = 1;
    std::uint64_t seed = 1;
    mutated what = mutated::orders;
    std::uint32_t part = 0, parts = 1;  // of all mutants, every so many: for several processes
};

class campaign {
public:
    /// Throws std::logic_error if something is wrong before anything was weakened.
    void run(const sample& s);

    [[nodiscard]] std::size_t found() const { return found_; }  // mutants of what ran
    [[nodiscard]] std::size_t tried() const { return tried_; }
    [[nodiscard]] std::size_t killed() const { return tried_ - survivors_.size(); }
    [[nodiscard]] const std::vector<std::string>& survivors() const { return survivors_; }
    /// Places that no job ever came to.
    [[nodiscard]] const std::vector<std::string>& never_ran() const { return never_ran_; }

private:
    std::size_t found_ = 0, tried_ = 0;
    std::vector<std::string> survivors_{}, never_ran_{};
};

/// Why a survivor isn't needed, as the committed list says; empty if it doesn't.
[[nodiscard]] std::string reason_for(const std::string& survivor);

}  // namespace jobs
