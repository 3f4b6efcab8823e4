// SPDX-License-Identifier: Apache-2.0
// A pool's record of one block of device memory. The record is in host memory, since the host can't
// read device memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A pool's unit: the size of every block is a multiple of it, and every block begins at a multiple
/// of it. Device allocators have this alignment.
inline constexpr std::size_t pool_granule = 256;

/// `size` rounded up to granules; at least one, so that blocks of 0 bytes have addresses of their
/// own.
[[nodiscard]] constexpr std::uint64_t whole_granules(std::uint64_t size) noexcept {
    return (std::max<std::uint64_t>(size, 1) + pool_granule - 1) & ~std::uint64_t{pool_granule - 1};
}

/// An allocated block, in one word: the requested size and alignment, and the block's address. 0 if
/// the block isn't allocated. From bit 56 down: 1 bit live, 6 log2(alignment), 50 size xor address.
/// The record of a block may be used for another one while a wrong free looks at it, and must not
/// match then. The word holds nothing else, so that a thread that frees a block knows the whole
/// word.
struct pool_tag {
    static constexpr unsigned size_bits = 50;
    static constexpr std::uint64_t size_limit = std::uint64_t{1} << size_bits;

    /// Why no pool has such a block: size_overflow from 512 TiB on, bad_alignment; errc::none
    /// otherwise.
    [[nodiscard]] static constexpr errc check(std::uint64_t size, std::size_t alignment) noexcept {
        if (!power_of_two(alignment)) return errc::bad_alignment;
        return std::max<std::uint64_t>(size, alignment) >= size_limit / 2 ? errc::size_overflow : errc::none;
    }
    /// The full reason for a refusal by check().
    [[nodiscard]] static constexpr failure why(std::uint64_t size, std::size_t alignment) noexcept {
        return impossible_block(size, alignment, size_limit / 4);
    }
    // std::has_single_bit counts all bits, which is a function call on machines that may lack the
    // instruction.
    [[nodiscard]] static constexpr bool power_of_two(std::size_t n) noexcept { return n != 0 && (n & (n - 1)) == 0; }

    /// `size` < size_limit, `alignment` a power of two.
    [[nodiscard]] static std::uint64_t live(const void* p, std::uint64_t size, std::size_t alignment) noexcept {
        const auto log = static_cast<std::uint64_t>(std::countr_zero(alignment));
        const auto address = std::uint64_t{reinterpret_cast<std::uintptr_t>(p)} / pool_granule % size_limit;
        return (1 << 6 | log) << size_bits | (size ^ address);
    }
    /// Decodes the tag of the block at `p`: the request as it was made.
    struct request {
        std::uint64_t size;
        std::size_t alignment;
    };
    [[nodiscard]] static request asked(std::uint64_t tag, const void* p) noexcept {
        const auto address = std::uint64_t{reinterpret_cast<std::uintptr_t>(p)} / pool_granule % size_limit;
        return {(tag % size_limit) ^ address, std::size_t{1} << (tag >> size_bits & 0x3f)};
    }
};

/// A part of a range that the pool holds: free, in a worker's bin, on its way through a stream, or
/// allocated. It has a cache line of its own, because workers on different cores free each other's
/// blocks.
struct alignas(64) pool_block {
    std::byte* begin = nullptr;
    std::atomic<std::uint64_t> tag{0};  // see pool_tag
    std::uint32_t label_size = 0;       // of `label`
    std::uint8_t bin = 0;               // the cache's bin for it; fixed while the block isn't free

    // Under the lock of the pool.
    bool free = false;
    bool own = false;  // in a segment of large blocks: all of it, or a part
    // of the range, in its first block: as the upstream was asked for it
    std::uint8_t log_alignment = 0;
    // bytes, whole granules; fixed while the block isn't free
    std::uint64_t size = 0;
    pool_block *before = nullptr, *after = nullptr;  // neighbours in the range
    pool_block* next = nullptr;                      // in a list of free blocks, or in a pool_chain
    union {
        pool_block* previous = nullptr;  // in a list of free blocks
        const char* label;               // while it is allocated: its holder writes it, before the tag
    };

    [[nodiscard]] bool whole_range() const noexcept { return before == nullptr && after == nullptr; }
    [[nodiscard]] bool is_aligned(std::size_t alignment) const noexcept {
        return (reinterpret_cast<std::uintptr_t>(begin) & (alignment - 1)) == 0;
    }

    /// Marks the block as allocated, for its new owner. Release: a thread that takes back allocated
    /// blocks (pool_store::take_back) reads the label after the tag. The thread that frees a block
    /// got its pointer from here.
    [[nodiscard]] void* hand_out(std::uint64_t asked, std::size_t alignment, std::string_view text) noexcept {
        label = text.data();
        label_size = static_cast<std::uint32_t>(std::min<std::size_t>(text.size(), ~std::uint32_t{0}));
        tag.store(pool_tag::live(begin, asked, alignment), std::memory_order_release);
        return begin;
    }
};
static_assert(sizeof(pool_block) == 64);

struct pool_request;

/// A stack of blocks that are in no list of free blocks, linked through their `next`.
class pool_chain {
public:
    [[nodiscard]] bool empty() const noexcept { return first_ == nullptr; }
    void push(pool_block& b) noexcept { b.next = std::exchange(first_, &b); }
    [[nodiscard]] pool_block& pop() noexcept { return *std::exchange(first_, first_->next); }
    void append(pool_chain& other) noexcept {
        while (!other.empty()) push(other.pop());
    }
    [[nodiscard]] pool_chain take_all() noexcept { return std::exchange(*this, {}); }

    /// The first one that serves the request as it is, or null. Linear.
    [[nodiscard]] pool_block* take(const pool_request& r) noexcept;
    [[nodiscard]] std::uint64_t bytes() const noexcept {
        std::uint64_t total = 0;
        for (const auto* b = first_; b != nullptr; b = b->next) total += b->size;
        return total;
    }

private:
    pool_block* first_ = nullptr;
};

/// In an exact pool, blocks that are larger than necessary waste at most 1/pool_waste of all memory
/// that the pool may hold.
inline constexpr std::uint64_t pool_waste = 64;

/// A request in whole granules; `least` bytes suffice, and `asked` is the caller's size. All in
/// bytes.
struct pool_request {
    std::uint64_t size = 0, least = 0;
    std::size_t alignment = 1, asked = 0;
    bool own = false;        // large: not from a segment of small blocks
    std::uint64_t most = 0;  // the largest block that may be used uncut
    bool cut = false;        // large, and may be cut from another large block's segment

    /// Whether the whole block may be handed out for the request. A small request gets no block
    /// from a segment of large blocks.
    [[nodiscard]] bool is_served_by(const pool_block& b) const noexcept {
        return b.size >= least && b.size <= most && b.is_aligned(alignment) && (own || !b.own);
    }
};

inline pool_block* pool_chain::take(const pool_request& r) noexcept {
    for (pool_block** at = &first_; *at != nullptr; at = &(*at)->next)
        if (r.is_served_by(**at)) return std::exchange(*at, (*at)->next);
    return nullptr;
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
