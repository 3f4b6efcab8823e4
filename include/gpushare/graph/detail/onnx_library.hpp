// SPDX-License-Identifier: Apache-2.0
// Includes ONNX's headers. One of them has an enumerator that <sys/mman.h> defines as a macro.
#pragma once

#pragma push_macro("MAP_TYPE")
#undef MAP_TYPE
#include <onnx/checker.h>
#include <onnx/defs/schema.h>
#include <onnx/onnx_pb.h>
#include <onnx/shape_inference/implementation.h>
#pragma pop_macro("MAP_TYPE")
