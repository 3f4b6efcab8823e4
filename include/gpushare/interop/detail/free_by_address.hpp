// SPDX-License-Identifier: Apache-2.0
// Frees for libraries that pass different sizes to the free and to the allocation, as PyTorch does.
// The caller may free the block, and a refusal would keep it charged as long as the tenant exists.
// So the block goes back as it was allocated, and the memory's event reports the wrong size.
//
//   return detail::free_by_address(memory, p, size, 256);
#pragma once

#include <concepts>
#include <cstddef>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Returns the answer of `free(size, alignment)`. On wrong_size, if the memory can look the block
/// up (`find`), frees again with the size and alignment of the allocation.
template <class Memory, std::invocable<std::size_t, std::size_t> Free>
errc free_by_address(Memory& memory, const void* p, std::size_t size, std::size_t alignment, Free free) {
    const errc why = free(size, alignment);
    if constexpr (requires { memory.find(p)->size; })
        if (why == errc::wrong_size)
            if (const auto there = memory.find(p))
                return free(static_cast<std::size_t>(there->size.count()), there->alignment);
    return why;
}
/// The same for a block that no work uses any more.
template <class Memory>
errc free_by_address(Memory& memory, void* p, std::size_t size, std::size_t alignment) {
    return free_by_address(memory, p, size, alignment, [&](std::size_t n, std::size_t align) {
        return as_upstream(memory).deallocate(p, n, align);
    });
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
