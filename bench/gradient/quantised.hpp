// SPDX-License-Identifier: Apache-2.0
// A quantised all-reduce: its bytes, and how far it is off.
//
//   if (asked.wants("quantised")) bench::quantised_all_reduces(r);
#pragma once

#include "harness.hpp"

namespace bench {

void quantised_all_reduces(report& r);

}  // namespace bench
