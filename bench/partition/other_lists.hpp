// SPDX-License-Identifier: Apache-2.0
// Lists that a policy wasn't made on: a random half of the published one, judged on the other half,
// and the published one with its sizes, cores and gangs changed. What a policy gains on a list that
// its author has seen proves little.
//
//   const auto [known, judged] = bench::halves(trace, seed);
//   for (const auto& p : bench::perturbations()) const auto list = p.apply(trace, seed);
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "partition/trace.hpp"

namespace bench {

struct halved_trace {
    std::vector<gpushare::placement_request> known;  // what a policy learns from
    placement_trace judged;                          // what arrives
};

/// A random half of the pods, by the seed, and the rest.
[[nodiscard]] halved_trace halves(const placement_trace& t, std::uint64_t seed);

/// A way to change a list of pods. The nodes stay.
struct perturbation {
    std::string_view name;
    placement_trace (*apply)(const placement_trace& t, std::uint64_t seed);
};

/// All that the figures count.
[[nodiscard]] std::span<const perturbation> perturbations() noexcept;

}  // namespace bench
