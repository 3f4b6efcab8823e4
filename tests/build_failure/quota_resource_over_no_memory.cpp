// SPDX-License-Identifier: Apache-2.0
// must fail: required for the satisfaction of 'memory_resource<Upstream>' \[with Upstream = no_memory\]
// An upstream allocates and deallocates.
#include <gpushare/memory/quota_resource.hpp>

struct no_memory {
    void* allocate(unsigned long);  // but nothing ever comes back
};

void make(gpushare::quota& q, no_memory& upstream) { gpushare::quota_resource<no_memory> mine{q, upstream}; }
