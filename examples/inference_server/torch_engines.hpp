// SPDX-License-Identifier: Apache-2.0
// Models as TorchScript, by libtorch on the host or on CUDA: every FOLDER/NAME.pt is the model NAME.
// FOLDER/NAME.json says what the model takes and gives, as the protocol has it, in the order of
// forward()'s arguments and results:
//
//   {"inputs":  [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
//    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}], "max_batch_size": 8}
//
// Without max_batch_size, or with 0, a request is a call. On the host a model computes on one thread:
// the block of the device that the call runs on. Libtorch allocates weights by itself there, so the
// server measures what a load takes and charges it. On CUDA a tenant's models share a torch_scope:
// weights, inputs and all that a call allocates lie in the tenant's memory, but for the host's pinned
// copies of inputs and outputs. A call that has no room there is refused with 507 and the tenant's
// figures.
#pragma once

#include <string>
#include <vector>

#include "inference_server/engine.hpp"

namespace inference_server {

/// All of that folder, by name. Throws std::runtime_error where the folder can't be read or has no
/// model, and where a model's description is missing or isn't understood. The server reads NAME.pt
/// when it loads the model, and load() says what is wrong with the file. The call sets libtorch's
/// number of threads to one, for the whole process.
[[nodiscard]] std::vector<model_source> torch_models(const std::string& folder);

}  // namespace inference_server
