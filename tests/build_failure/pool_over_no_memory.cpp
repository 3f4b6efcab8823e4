// SPDX-License-Identifier: Apache-2.0
// must fail: required for the satisfaction of 'memory_resource<Upstream>' \[with Upstream = no_memory\]
// A pool takes its memory from an allocator.
#include <gpushare/memory/pool_resource.hpp>

struct no_memory {};

void make(no_memory& upstream) { gpushare::pool_resource<no_memory> pool{upstream}; }
