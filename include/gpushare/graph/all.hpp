// SPDX-License-Identifier: Apache-2.0
// The umbrella header of graph/, the library on top of the core that cuts a model into pieces:
// plans, runs, and engines that are loaded at run time. Each header below also works alone. Link
// with the target gpushare::graph.
//
// Include onnx.hpp yourself: reading models needs ONNX's own library.
//
//   #include <gpushare/graph/all.hpp>
//   gpushare::graph::split_planner planner(g, times, {.limit = 5ms});   // times: of each node of g
#pragma once

#include <gpushare/graph/choice.hpp>
#include <gpushare/graph/cublaslt.hpp>
#include <gpushare/graph/device_chains.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/graph/onnxruntime.hpp>
#include <gpushare/graph/openvino.hpp>
#include <gpushare/graph/plan_text.hpp>
#include <gpushare/graph/run.hpp>
#include <gpushare/graph/split_plan.hpp>
