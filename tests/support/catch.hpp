// SPDX-License-Identifier: Apache-2.0
// The one place of tests/ that names Catch2's header: version 3 splits it. It is precompiled once
// for all tests.
//
//   #include "support/catch.hpp"
//   TEST_CASE("what holds", "[area]") { CHECK(1 + 1 == 2); }
#pragma once

#include <catch2/catch.hpp>
