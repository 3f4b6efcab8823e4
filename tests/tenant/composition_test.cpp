// SPDX-License-Identifier: Apache-2.0
// Whatever is stacked keeps the promises of its parts: every stack, on every kind of owner, in every scenario.
#include <cstdio>

#include "support/catch.hpp"
#include "support/composition/host_backend.hpp"
#include "support/composition/matrix.hpp"

namespace composition_matrix_test {

using namespace support::composition;

TEST_CASE("the composition matrix on the host", "[tenant][composition][threads]") {
    const auto all = run_matrix<host_backend>();
    CHECK(all.cells == 1300);  // of 15 stacks, 8 owners and 13 scenarios: those where the scenario is about something
    for (const auto& what : all.wrong) FAIL_CHECK(what);
}

TEST_CASE("a stack that refuses what fits is found by the composition matrix", "[tenant][composition][threads]") {
    const auto all = run_matrix<host_backend>(10, {kind<refusing_stack<host_backend>, host_backend>("refusing")},
                                              "refusing, quota, exactness under attack");
    CHECK(all.cells == 1);
    CHECK(all.failed == 1);
    CHECK(all.false_refusals > 0);
}

}  // namespace composition_matrix_test
