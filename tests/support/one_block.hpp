// SPDX-License-Identifier: Apache-2.0
// A memory_resource with one block of 64 bytes, which a test can inspect while the block is free.
//
//   support::one_block memory;    void* p = memory.allocate(64, 64);    CHECK(memory.place[0] == std::byte{0});
#pragma once

#include <cstddef>
#include <new>

namespace support {

/// Accepts any size and alignment. Throws std::bad_alloc while the block is allocated. Not
/// thread-safe.
struct one_block {
    alignas(64) std::byte place[64]{};
    bool out = false;
    void* allocate(std::size_t, std::size_t) {
        if (out) throw std::bad_alloc();
        out = true;
        return place;
    }
    void deallocate(void*, std::size_t, std::size_t) noexcept { out = false; }
};

}  // namespace support
