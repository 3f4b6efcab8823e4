// SPDX-License-Identifier: Apache-2.0
// Runs jobs on the executor and on the host backend, and compares them.
//
//   const auto j = jobs::random_job(any);
//   // empty: the same bytes, and nothing was found
//   jobs::trouble(j, {.who = ptx::turns::adversarial, .seed = 7})
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gpu/jobs.hpp"
#include "standins/cuda/standin.hpp"
#include "standins/ptx/machine.hpp"

namespace jobs {

/// In which order threads run, and how memory behaves.
struct setting {
    ptx::turns who = ptx::turns::fair;
    std::uint64_t seed = 1;
    bool weak_memory = false;
};

/// For what else is in the program, and knows of no stand-in: as many devices and as much memory as
/// the suites ask for.
extern const standin::options roomy;

/// Everything that a job depends on but the setting, at random; of one kind, or of any.
[[nodiscard]] job random_job(std::mt19937_64& any);
[[nodiscard]] job random_job(std::mt19937_64& any, std::uint32_t which);
/// Layer norms add up numbers that floats don't hold exactly, in the order of a block's threads: of
/// such a job there is one.
[[nodiscard]] bool in_order_of_threads(const job& j);
[[nodiscard]] bool is_by_rows(const job& j);
/// Rounds of several kinds, one after the other on the same streams, without the host between.
[[nodiscard]] job random_medley(std::mt19937_64& any);
[[nodiscard]] std::string to_string(const job& j);

/// The elements whose bytes a job leaves, on all ranks.
[[nodiscard]] std::size_t elements(const job& j);

/// What the arenas hold before a job, rank after rank.
[[nodiscard]] std::vector<std::byte> contents(const job& j, std::uint64_t seed);
/// Into what rank 0 brings, if its type has any and no number that isn't one comes of it: whose
/// bits differ (but for bfloat16's).
void bring_infinities(const job& j, std::span<std::byte> arenas);
/// What the host's backend makes of them.
[[nodiscard]] std::vector<std::byte> on_host(const job& j, std::vector<std::byte> arenas);
/// What the compiled kernels make of them; `wrong` gets what failed or was found.
[[nodiscard]] std::vector<std::byte> on_devices(const job& j, const std::vector<std::byte>& arenas, const setting& s,
                                                std::string& wrong);

/// Everything that is wrong with a job: other bytes, errors, and what the executor and the stand-in
/// found.
[[nodiscard]] std::string trouble(const job& j, const setting& s);
/// The same, where `expected` is already known for the contents that belong to `s.seed`.
[[nodiscard]] std::string trouble(const job& j, const setting& s, const std::vector<std::byte>& before,
                                  const std::vector<std::byte>& expected);

/// What is wrong with kernels of CUDA's own, launched in every form and by a graph.
[[nodiscard]] std::string trouble_of_forms();

/// What `body` finds wrong on a machine of its own, on which a kernel that never ends is a finding.
[[nodiscard]] std::string on_bounded_machine(const std::function<std::string()>& body);

/// What differs between a device's conversions of numbers and the host's, which tests/numbers
/// checks against their definitions: every pattern of each format, and every float at which
/// rounding is decided.
[[nodiscard]] std::string trouble_of_conversions();

/// The cost of each element, of which `many` works on so many `more` than `few`.
[[nodiscard]] cost cost_of_more(std::string name, double more, double least_bytes, const std::function<void()>& few,
                                const std::function<void()>& many);
/// See cost.
[[nodiscard]] std::vector<cost> costs();

/// How a collective can fail.
///   late           a rank, the last or the first, begins when the others have given up; these go
///                  on without it
///   aborted        the host sees who is late, and ends it
///   mismatched     a rank calls for fewer elements
///   racing         nobody waits long: ranks give up while others enter. All succeed or none, and
///                  buffers are used again at once
///   asked_before   the host has ended the group already
///   ended_midway   the host ends it while ranks work and leave; buffers are used again at once
///   crossing       a rank enters in the very moment in which the others give up; buffers are used
///                  again at once
///   stuck          a rank stands still when it is about to say why it gives up: the others go
///                  after a while, and say that it is there
enum class failure : std::uint8_t { late, aborted, mismatched, racing, asked_before, ended_midway, crossing, stuck };
inline constexpr std::uint32_t failures = 8;

/// What goes wrong in a job that fails so: not the right fault, not the same on all ranks, and what
/// is found.
[[nodiscard]] std::string trouble_when(failure how, const job& j, const setting& s);

}  // namespace jobs
