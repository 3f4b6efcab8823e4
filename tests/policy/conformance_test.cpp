// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include "conformance/compute_policy_suite.hpp"
#include "policy/every_policy.hpp"
#include "support/catch.hpp"

namespace conformance_test {

TEMPLATE_LIST_TEST_CASE("every policy serves who waits, and nobody else", "[policy][conformance]", policies::all) {
    conformance::compute_policy_suite<TestType>();
}

}  // namespace conformance_test
