// SPDX-License-Identifier: Apache-2.0
// The umbrella header for sharing a node's devices among tenants: tenancy and tenant, and the types
// in their interfaces (quotas, blocks, permits, tickets, splits). It needs nothing but a C++20
// compiler. Each header below also works alone.
//
// To save compile time, this header has nothing else. A program itself includes the other headers
// that it uses: a backend, such as <gpushare/backend/host/host.hpp>; policies besides
// weighted_fair, requests, coroutines, gangs (compute/); pools, arenas, statistics (memory/);
// topologies, data partitions (partition/); placement on many nodes (placement/); collectives
// (collective/); reports and traces (observe/); other libraries (interop/).
//
//   #include <gpushare/gpushare.hpp>
#pragma once

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/block_table.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/partition/reservation.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/tenant/tenant_memory.hpp>
#include <gpushare/units.hpp>
