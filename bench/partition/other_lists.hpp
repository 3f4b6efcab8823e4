// SPDX-License-Identifier: Apache-2.0
// Lists that weren't used to design a policy. One list is a random half of the published list,
// judged on the other half. Other lists change the published list's sizes, cores and gangs. A gain
// on a list that the policy's author has seen proves little.
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
    std::vector<gpushare::placement_request> known;  // the policy learns from these
    placement_trace judged;                          // these pods arrive
};

/// A random half of the pods, chosen by the seed, and the other half.
[[nodiscard]] halved_trace halves(const placement_trace& t, std::uint64_t seed);

/// A way to change a list of pods. The nodes don't change.
struct perturbation {
    std::string_view name;
    placement_trace (*apply)(const placement_trace& t, std::uint64_t seed);
};

/// All changes that the figures use.
[[nodiscard]] std::span<const perturbation> perturbations() noexcept;

}  // namespace bench
