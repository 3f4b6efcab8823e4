// SPDX-License-Identifier: Apache-2.0
// Gradients on devices of the host backend. Measures the exactness of the results, not the speed.
//
//   if (asked.wants("devices")) bench::gradients_on_devices(r);
#pragma once

#include "harness.hpp"

namespace bench {

void gradients_on_devices(report& r);

}  // namespace bench
