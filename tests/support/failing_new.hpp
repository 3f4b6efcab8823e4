// SPDX-License-Identifier: Apache-2.0
// Replaces a program's global operator new by one that counts per thread, and fails when a test
// says so (this_heap.hpp). Include it in one file of the program, and not in programs that
// ThreadSanitizer observes (see sanitizers.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "support/this_heap.hpp"

namespace support {

inline void* counted_new(std::size_t size) {
    ++this_heap.allocations;
    if (this_heap.good != SIZE_MAX && size >= this_heap.least && this_heap.good-- == 0) {
        this_heap.good = this_heap.recovers ? SIZE_MAX : 0;
        this_heap.failed = true;
        throw std::bad_alloc();
    }
    if (void* const p = std::malloc(size != 0 ? size : 1)) return p;
    throw std::bad_alloc();
}

}  // namespace support

// Not inlined: compilers that see malloc and free through these functions warn of mismatched calls.
[[gnu::noinline]] void* operator new(std::size_t size) { return support::counted_new(size); }
[[gnu::noinline]] void* operator new[](std::size_t size) { return support::counted_new(size); }
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
[[gnu::noinline]] void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
