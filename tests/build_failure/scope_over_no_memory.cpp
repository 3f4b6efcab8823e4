// SPDX-License-Identifier: Apache-2.0
// must fail: required for the satisfaction of 'memory_resource<Upstream>' \[with Upstream = no_memory\]
// Books are kept for an allocator.
#include <gpushare/memory/statistics_resource.hpp>

struct no_memory {};

void make(no_memory& upstream) { gpushare::statistics_resource<no_memory> booked{upstream}; }
