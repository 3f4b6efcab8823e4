// SPDX-License-Identifier: Apache-2.0
// Parts of a server, measured without a server: pages of KV caches in bursts, sleeping and waking,
// and bills.
#pragma once

#include "harness.hpp"

namespace bench::serving {

/// Needs no engine. The first and the last part use virtual or modelled time.
void parts(report& r);

}  // namespace bench::serving
