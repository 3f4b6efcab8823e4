// SPDX-License-Identifier: Apache-2.0
// What goes through the example server, from its sockets on: latency beside others, what the
// protocol costs, waking, bills, and those who mean no good.
#pragma once

#include "harness.hpp"

namespace bench::serving {

/// With `language_model` Gemma is the second neighbour; else single lines of text are read.
void through_the_server(report& r, bool language_model);
/// Texts whose caches wait for memory: halves of it, or lent.
void cache_bursts(report& r);
/// Malformed requests, thousands of connections, MLPerf's load generator.
void from_outside(report& r);

}  // namespace bench::serving
