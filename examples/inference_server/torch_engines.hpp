// SPDX-License-Identifier: Apache-2.0
// Models by libtorch, on the host or on CUDA. Every FOLDER/NAME.pt is the model NAME as
// TorchScript, and every FOLDER/NAME.pt2 is a model as a package of AOTInductor. FOLDER/NAME.json
// states the model's inputs and outputs, as in the protocol, in the order of forward()'s arguments
// and results:
//
//   {"inputs":  [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
//    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}], "max_batch_size": 8}
//
// Without max_batch_size, or with 0, each request is a call. Otherwise the first extent of every
// tensor is that of the batch, -1, and each result has as many rows as the call. On the host a
// model computes on one thread: the block of the device on which the call runs. There libtorch
// allocates weights itself, so the server measures and charges the memory of a load.
//
// On CUDA a tenant's models share a torch_scope: weights, inputs and all allocations of a call lie
// in the tenant's memory, except for the host's pinned copies of inputs and outputs. If a call
// doesn't find room there, it is refused with 507 and the tenant's figures.
//
// A package is machine code, so don't serve a package that you don't trust. It is compiled for one
// kind of device; docs/serving.md explains how. torch_package.hpp lists what a package must keep
// to.
#pragma once

#include <string>
#include <vector>

#include "inference_server/engine.hpp"

namespace inference_server {

/// All models of that folder, by name. Throws std::runtime_error if the folder can't be read, has
/// no model, or has two models of one name, and if a model's description is missing or invalid.
/// Throws unknown_engine if the folder has a package and this program's libtorch can't load
/// packages. The server reads the model's file when it loads the model, and load() reports errors
/// in the file.
///
/// The call sets libtorch's number of threads to one, and AOTI_RUNTIME_CHECK_INPUTS to 1 unless the
/// environment sets it, both for the whole process. So call it before other threads start.
[[nodiscard]] std::vector<model_source> torch_models(const std::string& folder);

}  // namespace inference_server
