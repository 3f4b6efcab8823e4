// SPDX-License-Identifier: Apache-2.0
// Cut models in the example server: an urgent tenant's sound beside pages, over HTTP.
//
//   bench::graph::over_http(report);
#pragma once

#include "harness.hpp"

namespace bench::graph {

/// The figures are void if the example server was built without ONNX Runtime and gRPC.
void over_http(report& r);

}  // namespace bench::graph
