// SPDX-License-Identifier: Apache-2.0
// Models by libtorch, on the host or on CUDA: every FOLDER/NAME.pt is the model NAME as
// TorchScript, every FOLDER/NAME.pt2 is one as a package of AOTInductor. FOLDER/NAME.json says what
// the model takes and gives, as the protocol has it, in the order of forward()'s arguments and
// results:
//
//   {"inputs":  [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
//    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}], "max_batch_size": 8}
//
// Without max_batch_size, or with 0, a request is a call. On the host a model computes on one
// thread: the block of the device that the call runs on. Libtorch allocates weights by itself
// there, so the server measures what a load takes and charges it. On CUDA a tenant's models share a
// torch_scope: weights, inputs and all that a call allocates lie in the tenant's memory, but for
// the host's pinned copies of inputs and outputs. A call that has no room there is refused with 507
// and the tenant's figures.
//
// A package is machine code: serve none that you don't trust. It is for one kind of device, which
// docs/serving.md says how to compile it for. torch_package.hpp has what a package must keep to.
#pragma once

#include <string>
#include <vector>

#include "inference_server/engine.hpp"

namespace inference_server {

/// All of that folder, by name. Throws std::runtime_error where the folder can't be read or has no
/// model or two of a name, and where a model's description is missing or isn't understood;
/// unknown_engine where it has a package, and this program's libtorch loads none. The server reads
/// the model's file when it loads the model, and load() says what is wrong with the file. The call
/// sets libtorch's number of threads to one, and AOTI_RUNTIME_CHECK_INPUTS to 1 where the
/// environment doesn't say otherwise, both for the whole process: call it before other threads.
[[nodiscard]] std::vector<model_source> torch_models(const std::string& folder);

}  // namespace inference_server
