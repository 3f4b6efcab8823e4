// SPDX-License-Identifier: Apache-2.0
// The floor below an all-reduce of large data: a copy of as many bytes past the caches, in every
// way that may be the fastest on this machine.
#pragma once

#include <cstddef>
#include <span>

namespace bench {

/// Copies n floats, a multiple of 64; `from` and `to` begin at cache lines.
struct copy {
    const char* name;
    void (*call)(float* to, const float* from, std::size_t n);
};

/// Those that this processor can do: vectors of 16, 32 and 64 bytes, from one, two and four places
/// at once, and memcpy.
std::span<const copy> copies();

}  // namespace bench
