// SPDX-License-Identifier: Apache-2.0
// The only file of tests/ that includes Catch2's header, since version 3 splits that header. This
// file is precompiled once for all tests.
//
//   #include "support/catch.hpp"
//   TEST_CASE("what holds", "[area]") { CHECK(1 + 1 == 2); }
#pragma once

#include <catch2/catch.hpp>
