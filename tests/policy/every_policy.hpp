// SPDX-License-Identifier: Apache-2.0
// The policies that the tests are put to: the one list to which a new policy is added, and which of
// the general promises each of them makes.
#pragma once

#include <tuple>

#include <gpushare/compute/policies/any_policy.hpp>
#include <gpushare/compute/policies/by_order.hpp>
#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/compute/policies/policy_tree.hpp>
#include <gpushare/compute/policies/strict_priority.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>

namespace policies {

using namespace gpushare;

/// Whatever a policy is after, it keeps the contract of compute_policy.
using all = std::tuple<fifo, fair, weighted_fair, hard_share, soft_share, equal_share, capped<weighted_fair>,
                       capped<earliest_deadline>, strict_priority<>, strict_priority<capped<weighted_fair>>,
                       earliest_deadline, shortest_remaining, any_policy, policy_tree<weighted_fair, fair>,
                       policy_tree<earliest_deadline, soft_share>, policy_tree<capped<weighted_fair>, hard_share>,
                       policy_tree<any_policy, any_policy>, policy_tree<policy_tree<fair, any_policy>, fair>>;

/// Nobody starves, whatever the neighbours do.
using starving_nobody = std::tuple<fifo, fair, weighted_fair, hard_share, soft_share, capped<weighted_fair>,
                                   capped<fair>, earliest_deadline, shortest_remaining, any_policy,
                                   policy_tree<weighted_fair, fair>, policy_tree<weighted_fair, earliest_deadline>>;

/// The device never idles while somebody waits.
using work_conserving =
    std::tuple<fifo, fair, weighted_fair, soft_share, strict_priority<>, earliest_deadline, shortest_remaining,
               policy_tree<weighted_fair, fair>, policy_tree<weighted_fair, soft_share>>;

/// Clients with work always have device time in proportion to their weights, between any two
/// moments.
using proportional = std::tuple<weighted_fair, any_policy>;

/// A change of weights is in force within 100 ms.
using converging = std::tuple<weighted_fair, capped<weighted_fair>, any_policy>;

/// A client that wakes up isn't owed the time in which it wanted nothing.
using owing_nothing = std::tuple<weighted_fair, fair, hard_share, soft_share, capped<weighted_fair>, shortest_remaining,
                                 policy_tree<weighted_fair, fair>>;

}  // namespace policies
