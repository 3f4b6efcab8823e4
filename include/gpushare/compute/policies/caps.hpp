// SPDX-License-Identifier: Apache-2.0
// The policies that are nothing but caps, checked at admission: what is promised on a level never sums over the whole,
// and who would exceed it is refused with errc::share_exceeded.
//
//   gpushare::fixed policy;          // a client has its weight of the device's time, and never more
//   gpushare::soft policy;           // its weight, and more where nobody else wants it
//   gpushare::fair_share policy{8};  // 1/8 each, and never more
#pragma once

#include <algorithm>
#include <cstdint>

#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/compute/policies/preemptive_fair.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The weight is the cap, and a promise.
template <bool Soft>
struct cap_by_weight {
    [[nodiscard]] cap_terms operator()(const client_settings& s) const noexcept {
        return {.per_million = s.weight.permille() * std::int64_t{1000}, .soft = Soft, .promised = true};
    }
};

/// The same part for everybody, for as many as it was made for.
struct equal_cap {
    std::uint32_t most = 1;  // clients of a level

    [[nodiscard]] cap_terms operator()(const client_settings&) const noexcept {
        return {.per_million = 1'000'000 / std::max(most, 1U), .promised = true};
    }
};

/// Each client has a fixed part of the device's time: its weight.
using fixed = capped<weighted_fair, cap_by_weight<false>>;
static_assert(compute_policy<fixed>);

/// Each client is held to its weight while others have work within theirs, and to nothing otherwise.
using soft = capped<weighted_fair, cap_by_weight<true>>;
static_assert(compute_policy<soft>);

/// Each client of a level has 1/`most` of the device's time, were it alone or not; one more than `most` is refused.
/// Weights don't count.
class fair_share : public capped<preemptive_fair, equal_cap> {
public:
    fair_share() : fair_share(8) {}
    explicit fair_share(std::uint32_t most) : capped(preemptive_fair{}, equal_cap{most}) {}
};
static_assert(compute_policy<fair_share>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
