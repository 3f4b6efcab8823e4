// SPDX-License-Identifier: Apache-2.0
// Finds the pool's block that begins at a pointer. Every free looks up its block here, so look-ups
// take no lock.
//
//   gpushare::detail::pool_index index;
//   index.reserve(1);    index.insert(block);
//   // to be freed here
//   if (auto freed = index.claim(p, size, alignment); freed.why == gpushare::errc::none) ...;
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/pool_block.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A hash table: open addressing, linear probing, entries never move. One writer at a time (the
/// holder of the pool's lock) works alongside any number of readers, which find every block that
/// was in before they began and hasn't left. When the table grows, or has gathered too many gaps, a
/// new table takes its place. The old one has to stay until all its readers have gone, which the
/// owner knows: see drop_retired.
class pool_index {
public:
    pool_index() { renew(16); }

    /// Null if no block begins at `p`. Lock-free.
    [[nodiscard]] pool_block* find(const void* p) const noexcept;

    struct claimed {
        errc why = errc::none;
        pool_block* block = nullptr;
        std::uint32_t bin = 0;
    };

    /// Ends the life of a block. If several threads free the same block, however they race, exactly
    /// one gets `none`. Otherwise returns unknown_block or wrong_size, and nothing changes.
    /// Lock-free.
    [[nodiscard]] claimed claim(const void* p, std::size_t size, std::size_t alignment) const noexcept;

    /// Makes room for `more` insertions. Throws std::bad_alloc, and then nothing has changed.
    void reserve(std::size_t more);
    void insert(pool_block& b) noexcept;
    void erase(const pool_block& b) noexcept;

    /// The first block at or after the place `at`; moves `at` past it. Null at the end. Only for
    /// the thread that inserts.
    [[nodiscard]] pool_block* next(std::size_t& at) const noexcept;

    /// Whether there are replaced tables. Once all threads have gone that may have begun to read
    /// before this was true, drop_retired() frees these tables.
    [[nodiscard]] bool has_retired() const noexcept { return retired_ != nullptr; }
    void drop_retired() noexcept { retired_.reset(); }

private:
    static constexpr std::uintptr_t empty = 0, gap = 1;             // no block begins at either
    static constexpr std::uint64_t impossible = ~std::uint64_t{0};  // no block's tag

    struct slot {
        std::atomic<std::uintptr_t> key{empty};
        std::atomic<pool_block*> block{nullptr};
    };
    struct table {
        explicit table(std::size_t size)
            : mask(size - 1), shift(64 - std::countr_zero(size)), slots(std::make_unique<slot[]>(size)) {}

        [[nodiscard]] std::size_t home(std::uintptr_t key) const noexcept {
            // Fibonacci hashing
            return static_cast<std::size_t>(key / pool_granule * golden_ratio >> shift);
        }

        std::size_t mask;
        int shift;
        std::unique_ptr<slot[]> slots;
        std::unique_ptr<table> older;  // the next older retired table
    };

    [[nodiscard]] const table& current() const noexcept { return *owned_; }
    [[nodiscard]] slot& at(std::size_t i) noexcept { return owned_->slots[i & owned_->mask]; }

    // Makes a table of at least `size` slots with all entries.
    void renew(std::size_t size);

    std::atomic<const table*> table_{nullptr};
    std::unique_ptr<table> owned_;
    std::unique_ptr<table> retired_;   // the latest
    std::size_t live_ = 0, used_ = 0;  // used: live, or a gap
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE auto pool_index::find(const void* p) const noexcept -> pool_block* {
    const auto key = reinterpret_cast<std::uintptr_t>(p);
    if (key <= gap) return nullptr;
    // Acquire, twice: a thread that sees a table or a key sees what was stored before it was
    // published.
    const table& t = *table_.load(std::memory_order_acquire);
    for (auto i = t.home(key);; i = (i + 1) & t.mask) {
        const slot& s = t.slots[i];
        const auto there = s.key.load(std::memory_order_acquire);
        if (there == key) [[likely]]
            return s.block.load(std::memory_order_relaxed);
        if (there == empty) return nullptr;
    }
}

GPUSHARE_INLINE auto pool_index::claim(const void* p, std::size_t size, std::size_t alignment) const noexcept
    -> claimed {
    pool_block* const block = find(p);
    if (block == nullptr) [[unlikely]]
        return {.why = errc::unknown_block};
    // The tag isn't read first: another core may have written it, and its line would come twice,
    // once to be read and once to be written. Relaxed: the caller has the pointer from the thread
    // that allocated the block, and with it the tag. The lock of the list that gets the block
    // publishes what the free writes.
    const bool possible = pool_tag::power_of_two(alignment) && size < pool_tag::size_limit;
    auto tag = possible ? pool_tag::live(p, size, alignment) : impossible;
    if (!block->tag.compare_exchange_strong(tag, 0, std::memory_order_relaxed)) [[unlikely]]
        return {.why = tag == 0 ? errc::unknown_block : errc::wrong_size};
    return {.block = block, .bin = block->bin};
}

GPUSHARE_INLINE void pool_index::reserve(std::size_t more) {
    // Three quarters of the slots stay empty, so that nearly every search ends where it begins.
    if (4 * (used_ + more) > current().mask) renew(8 * (live_ + more));
}

GPUSHARE_INLINE void pool_index::insert(pool_block& b) noexcept {
    const auto key = reinterpret_cast<std::uintptr_t>(b.begin);
    auto i = current().home(key);
    while (at(i).key.load(std::memory_order_relaxed) > gap) ++i;
    if (at(i).key.load(std::memory_order_relaxed) == empty) ++used_;
    ++live_;
    at(i).block.store(&b, std::memory_order_relaxed);
    at(i).key.store(key, std::memory_order_release);
}

GPUSHARE_INLINE void pool_index::erase(const pool_block& b) noexcept {
    const auto key = reinterpret_cast<std::uintptr_t>(b.begin);
    auto i = current().home(key);
    while (at(i).key.load(std::memory_order_relaxed) != key) ++i;
    --live_;
    at(i).key.store(gap, std::memory_order_relaxed);
    // Gaps with nothing behind them can be emptied, so that no search passes them.
    if (at(i + 1).key.load(std::memory_order_relaxed) != empty) return;
    for (; at(i).key.load(std::memory_order_relaxed) == gap; --i, --used_)
        at(i).key.store(empty, std::memory_order_relaxed);
}

GPUSHARE_INLINE auto pool_index::next(std::size_t& at) const noexcept -> pool_block* {
    for (; at <= current().mask; ++at)
        if (current().slots[at].key.load(std::memory_order_relaxed) > gap)
            return current().slots[at++].block.load(std::memory_order_relaxed);
    return nullptr;
}

GPUSHARE_INLINE void pool_index::renew(std::size_t size) {
    auto fresh = std::make_unique<table>(std::bit_ceil(size));
    auto old = std::exchange(owned_, std::move(fresh));
    live_ = used_ = 0;
    for (std::size_t i = 0; old != nullptr && i <= old->mask; ++i)
        if (old->slots[i].key.load(std::memory_order_relaxed) > gap)
            insert(*old->slots[i].block.load(std::memory_order_relaxed));
    table_.store(owned_.get(), std::memory_order_release);
    if (old == nullptr) return;
    old->older = std::move(retired_);
    retired_ = std::move(old);
}

#endif  // GPUSHARE_BODIES

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
