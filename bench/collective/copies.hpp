// SPDX-License-Identifier: Apache-2.0
// The floor for an all-reduce of large data: a copy of the same bytes that bypasses the caches, in
// every way that may be the fastest on this machine.
#pragma once

#include <cstddef>
#include <span>

namespace bench {

/// Copies n floats. `n` is a multiple of 64; `from` and `to` start on cache lines.
struct copy {
    const char* name;
    void (*call)(float* to, const float* from, std::size_t n);
};

/// The copies that this processor supports: memcpy, and vectors of 16, 32 and 64 bytes in one, two
/// or four places at once.
std::span<const copy> copies();

}  // namespace bench
