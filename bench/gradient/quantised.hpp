// SPDX-License-Identifier: Apache-2.0
// Measures a quantised all-reduce: the bytes on the wire and the error.
//
//   if (asked.wants("quantised")) bench::quantised_all_reduces(r);
#pragma once

#include "harness.hpp"

namespace bench {

void quantised_all_reduces(report& r);

}  // namespace bench
