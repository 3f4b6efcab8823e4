// SPDX-License-Identifier: Apache-2.0
// Records the allocated blocks with their sizes and alignments, which CUDA doesn't report. The
// registry finds wrong frees before CUDA sees them. A part of the backend's allocators.
//
//   detail::block_registry blocks;   blocks.add(p, {.size = 64, .alignment = 256, .base = p});
//   // errc::none, and b.base is what CUDA gave
//   detail::block b;                 blocks.remove(p, 64, 256, b);
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>

#include <gpushare/config.hpp>
#include <gpushare/detail/pointer_table.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

struct block {
    std::size_t size = 0, alignment = 0;  // as requested
    void* base = nullptr;                 // the address that CUDA knows
    bytes charge{};
};

/// How many bytes to request from a CUDA allocator, so that a block of `size` bytes at `alignment`
/// fits. The allocator itself aligns to `natural`. 0 if no device has that much memory.
[[nodiscard]] constexpr std::uint64_t padded(std::size_t size, std::size_t alignment, std::size_t natural) noexcept {
    constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max() / 4;
    const std::uint64_t slack = alignment > natural ? alignment - natural : 0;
    if (size > largest || slack > largest) return 0;
    return std::max<std::uint64_t>(size, 1) + slack;
}

[[nodiscard]] inline void* aligned(void* base, std::size_t alignment) noexcept {
    const auto at = reinterpret_cast<std::uintptr_t>(base);
    return static_cast<std::byte*>(base) + ((alignment - at % alignment) & (alignment - 1));
}

/// Safe from any thread.
class block_registry {
public:
    /// False if the host has no memory for the entry.
    [[nodiscard]] bool add(void* p, const block& b) noexcept {
        try {
            const std::lock_guard lock(mutex_);
            blocks_.insert(p, b);
        } catch (const std::bad_alloc&) {
            return false;
        }
        charged_.fetch_add(b.charge.count(), std::memory_order_relaxed);
        entered_.fetch_add(b.charge.count(), std::memory_order_release);
        return true;
    }

    /// Removes the block if it was allocated with this size and alignment. Otherwise returns
    /// errc::unknown_block or wrong_size, and nothing changes. The block stays charged until
    /// `release`.
    [[nodiscard]] errc remove(void* p, std::size_t size, std::size_t alignment, block& b) noexcept {
        const std::lock_guard lock(mutex_);
        const block* const found = blocks_.find(p);
        if (found == nullptr) return errc::unknown_block;
        if (found->size != size || found->alignment != alignment) return errc::wrong_size;
        b = *found;
        blocks_.erase(p);
        left_.fetch_add(b.charge.count(), std::memory_order_release);
        return errc::none;
    }
    void release(const block& b) noexcept { charged_.fetch_sub(b.charge.count(), std::memory_order_relaxed); }

    /// The bytes of all allocated blocks. Relaxed: a figure of one moment, from which nothing else
    /// is inferred.
    [[nodiscard]] bytes charged() const noexcept { return bytes{charged_.load(std::memory_order_relaxed)}; }

    /// The bytes entered so far. Read this count before the device's free memory, and then call
    /// out_since() with the count.
    [[nodiscard]] std::uint64_t entered() const noexcept { return entered_.load(std::memory_order_acquire); }
    /// A lower bound on the bytes that were allocated when the free memory was read, even if blocks
    /// came or went meanwhile. `entered` is the result of entered() before that reading. A block
    /// enters after the device gave it, and leaves before the device gets it back.
    [[nodiscard]] bytes out_since(std::uint64_t entered) const noexcept {
        return bytes{entered} - bytes{left_.load(std::memory_order_acquire)};
    }

    /// Calls f(const block&) for each allocated block. Don't call while other threads use the
    /// registry.
    template <class F>
    void for_each(F f) {
        blocks_.for_each(f);
    }

private:
    std::mutex mutex_;
    gpushare::detail::pointer_table<block> blocks_;
    std::atomic<std::uint64_t> charged_{0};
    std::atomic<std::uint64_t> entered_{0}, left_{0};  // bytes since the beginning
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
