// SPDX-License-Identifier: Apache-2.0
// must fail: required for the satisfaction of 'memory_resource<Upstream>' \[with Upstream = no_memory\]
// Statistics are of an allocator.
#include <gpushare/memory/statistics_resource.hpp>

struct no_memory {};

void make(no_memory& upstream) { gpushare::statistics_resource<no_memory> counted{upstream}; }
