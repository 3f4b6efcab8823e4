// SPDX-License-Identifier: Apache-2.0
// Gradients on devices, on the host's backend: what they hold, not how fast they are.
//
//   if (asked.wants("devices")) bench::gradients_on_devices(r);
#pragma once

#include "harness.hpp"

namespace bench {

void gradients_on_devices(report& r);

}  // namespace bench
