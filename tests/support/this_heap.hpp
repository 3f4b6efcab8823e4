// SPDX-License-Identifier: Apache-2.0
// A thread's allocations, and which of them fails. For all files of a program one of which includes
// failing_new.hpp.
//
//   support::this_heap = {.good = 3, .recovers = true};  // the fourth throws, and no other
//   ...
//   const bool failed = support::this_heap.failed;
//   support::this_heap = {};
#pragma once

#include <cstddef>
#include <cstdint>

namespace support {

struct heap {
    std::size_t allocations = 0;
    std::size_t good = SIZE_MAX;  // how many further allocations succeed
    bool recovers = false;        // whether allocations succeed again after one failure
    bool failed = false;          // whether one has failed
    std::size_t least = 0;        // smaller allocations always succeed
};
inline thread_local heap this_heap;

}  // namespace support
