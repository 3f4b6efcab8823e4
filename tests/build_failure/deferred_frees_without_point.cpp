// SPDX-License-Identifier: Apache-2.0
// must fail: required for the satisfaction of 'timeline_point<Point>' \[with Point = int\]
// A free waits for a point on a timeline.
#include <memory_resource>

#include <gpushare/memory/deferred_frees.hpp>

void make(std::pmr::memory_resource& r) { gpushare::deferred_frees<int, std::pmr::memory_resource> frees{r}; }
