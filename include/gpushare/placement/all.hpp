// SPDX-License-Identifier: Apache-2.0
// The umbrella header of placement/, the library on top of the core that chooses nodes and devices
// of a cluster for requests. Each header below also works alone. Link with the target
// gpushare::placement.
//
//   #include <gpushare/placement/all.hpp>
//   auto p = gpushare::choose(gpushare::best_fit{}, cluster, request);
#pragma once

#include <gpushare/placement/admission_queue.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/defragment.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/tenant_planner.hpp>
#include <gpushare/placement/value_descent.hpp>
