// SPDX-License-Identifier: Apache-2.0
// Measures the example server through its sockets: latency beside other tenants, the cost of the
// protocol, waking, bills, and hostile clients.
#pragma once

#include "harness.hpp"

namespace bench::serving {

/// With `language_model`, the second neighbour runs Gemma; otherwise, the neighbour reads single
/// lines of text.
void through_the_server(report& r, bool language_model);
/// Measures texts that wait for cache memory, with fixed halves of the memory and with lending.
void cache_bursts(report& r);
/// Runs malformed requests, thousands of connections and MLPerf's load generator.
void from_outside(report& r);

}  // namespace bench::serving
