// SPDX-License-Identifier: Apache-2.0
#include <gpushare/compute/policies/any_policy.hpp>
#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/compute/policies/earliest_deadline.hpp>
#include <gpushare/compute/policies/fifo.hpp>
#include <gpushare/compute/policies/policy_tree.hpp>
#include <gpushare/compute/policies/shortest_remaining.hpp>
#include <gpushare/compute/policies/strict_priority.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>

#include "conformance/compute_policy_suite.hpp"
#include "support/catch.hpp"

using namespace gpushare;

TEMPLATE_TEST_CASE("every policy serves who waits, and nobody else", "[policy][conformance]", fifo, fair, weighted_fair,
                   capped<weighted_fair>, capped<earliest_deadline>, hard_share, soft_share, equal_share,
                   strict_priority<>, strict_priority<capped<weighted_fair>>, earliest_deadline, shortest_remaining,
                   any_policy, (policy_tree<weighted_fair, fair>), (policy_tree<earliest_deadline, soft_share>),
                   (policy_tree<capped<weighted_fair>, hard_share>), (policy_tree<any_policy, any_policy>)) {
    conformance::compute_policy_suite<TestType>();
}
