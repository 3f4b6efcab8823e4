// SPDX-License-Identifier: Apache-2.0
// The mutation test: each instruction of the jobs' kernels that orders something is weakened in turn, and the jobs that run it are
// run again, until one of them notices.
//
//   jobs::campaign all;
//   all.run({.one_in = 50, .seed = 7});
//   all.killed(), all.tried(), all.survivors()
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "gpu/job_rig.hpp"
#include "support/ptx/mutants.hpp"

namespace jobs {

struct sample {
    std::uint32_t one_in = 1;
    std::uint64_t seed = 1;
    std::uint32_t kinds_from = 0, kinds_to = kinds;
};

class campaign {
public:
    /// Throws std::logic_error if something is wrong before anything was weakened.
    void run(const sample& s);

    [[nodiscard]] std::size_t found() const { return found_; }  // mutants of what ran
    [[nodiscard]] std::size_t tried() const { return tried_; }
    [[nodiscard]] std::size_t killed() const { return tried_ - survivors_.size(); }
    [[nodiscard]] const std::vector<std::string>& survivors() const { return survivors_; }

private:
    std::size_t found_ = 0, tried_ = 0;
    std::vector<std::string> survivors_{};
    std::set<std::uint32_t> seen_{};  // instructions
};

}  // namespace jobs
