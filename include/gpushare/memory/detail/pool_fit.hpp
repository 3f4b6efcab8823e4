// SPDX-License-Identifier: Apache-2.0
// Cuts blocks out of ranges of memory and joins them again, in a bounded number of steps: a pool
// without locks, caches and upstream. It never touches the memory. A range holds small blocks that
// are cut out of it, or large blocks: one that fills the range, or several if the pool lets them
// share it. pool_segments, below, gives empty ranges back to the upstream.
//
//   gpushare::detail::pool_fit fit;
//   fit.add(begin, 64 << 20);
//   // b->begin, b->size; null if nothing fits
//   gpushare::detail::pool_block* b = fit.take(4096, 256);
//   fit.give(*b);
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/memory/detail/pool_block.hpp>
#include <gpushare/memory/detail/pool_index.hpp>
#include <gpushare/memory/detail/size_classes.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Two-level segregated fit (Masmano et al., ECRTS 2004): free lists by class, and a bitmap of the
/// non-empty ones. There is one set of lists for parts of ranges in use, one for empty ranges, and
/// two for ranges of large blocks. Not thread-safe, except for the index's readers.
/// Begins, sizes and alignments are in bytes.
class pool_fit {
public:
    pool_fit() = default;
    pool_fit(const pool_fit&) = delete;
    pool_fit& operator=(const pool_fit&) = delete;

    /// Adds a range of whole granules that begins at a granule. The range is to be cut, or is one
    /// large block's `own`. Throws std::bad_alloc, and then nothing has changed.
    pool_block& add(std::byte* begin, std::uint64_t size, std::size_t alignment = pool_granule, bool own = false);

    /// Forgets a range that is free as a whole.
    void remove(pool_block& whole) noexcept;

    /// A block of `size` whole granules at a multiple of `alignment`, or null. Takes the first that
    /// surely fits, which wastes no memory but may overlook blocks that are less than one class
    /// (3%) bigger than needed. Throws std::bad_alloc if the host has no memory for the
    /// bookkeeping, and then nothing has changed.
    [[nodiscard]] pool_block* take(std::uint64_t size, std::size_t alignment);

    /// A block of `size` to `most` bytes that has a range of its own, uncut, and nearly the
    /// smallest such block. Otherwise an empty range of such a size, which then becomes the block's
    /// own. Null if there is neither.
    [[nodiscard]] pool_block* take_own(std::uint64_t size, std::uint64_t most, std::size_t alignment) noexcept;

    /// As take, out of a range of large blocks.
    [[nodiscard]] pool_block* cut_own(std::uint64_t size, std::size_t alignment);

    /// As take, but overlooks no block: steps in proportion to the number of free blocks. For the
    /// last attempt before a refusal. `everywhere`: in ranges of large blocks as well.
    [[nodiscard]] pool_block* take_any(std::uint64_t size, std::size_t alignment, bool everywhere = false);
    /// A range that is free as a whole, as one block.
    [[nodiscard]] pool_block& take_whole(pool_block& whole) noexcept;
    /// An empty range: one of the smallest that are sure to have `wanted` bytes, or otherwise one
    /// of the largest. Null if no range is empty.
    [[nodiscard]] pool_block* empty_range(std::uint64_t wanted) const noexcept;

    /// Cuts `size` bytes out of a free block in which they fit.
    [[nodiscard]] pool_block& carve(pool_block& b, std::uint64_t size, std::size_t alignment);

    /// Takes a block back and joins it with its free neighbours. The first block of a range stays
    /// the same object for as long as the range exists.
    void give(pool_block& b) noexcept;

    /// The index of all blocks, free or not.
    [[nodiscard]] pool_index& index() noexcept { return index_; }
    [[nodiscard]] const pool_index& index() const noexcept { return index_; }
    [[nodiscard]] std::uint64_t free_bytes() const noexcept;
    /// The bytes of empty ranges.
    [[nodiscard]] std::uint64_t empty_bytes() const noexcept { return lists_[wholes].bytes + lists_[owns].bytes; }
    /// Steps in proportion to the number of blocks in the highest class.
    [[nodiscard]] std::uint64_t largest_free() const noexcept;

private:
    using classes = size_classes<5>;
    static constexpr std::uint32_t lists = classes::of(pool_tag::size_limit / pool_granule) + 1;

    [[nodiscard]] static std::uint64_t gap(const pool_block& b, std::size_t alignment) noexcept;

    pool_block& fresh(std::byte* begin, std::uint64_t size);
    void forget(pool_block& b) noexcept;

    static void link_behind(pool_block& b, pool_block& next) noexcept;
    void absorb_next(pool_block& b) noexcept;

    void insert(pool_block& b) noexcept;
    void unlink(pool_block& b) noexcept;

    enum set : std::uint8_t { parts, wholes, own_parts, owns, sets };
    // As long as a block is free, its neighbours stay what they are.
    [[nodiscard]] static set set_of(const pool_block& b) noexcept;

    // Ranges in use fill up before an empty one is cut.
    [[nodiscard]] pool_block* take_from(set in_use, set empty, std::uint64_t size, std::size_t alignment);

    // Free blocks by class.
    struct free_lists {
        std::array<pool_block*, lists> heads{};
        std::array<std::uint64_t, (lists + 63) / 64> words{};
        static_assert((lists + 63) / 64 <= 64, "the summary is one word");
        std::uint64_t summary = 0;  // the words that aren't 0
        std::uint64_t bytes = 0;

        void push(pool_block& b, std::uint32_t c) noexcept {
            b.previous = nullptr;
            b.next = heads[c];
            if (b.next != nullptr) b.next->previous = &b;
            heads[c] = &b;
            words[c / 64] |= std::uint64_t{1} << c % 64;
            summary |= std::uint64_t{1} << c / 64;
            bytes += b.size;
        }
        void remove(pool_block& b, std::uint32_t c) noexcept {
            (b.previous != nullptr ? b.previous->next : heads[c]) = b.next;
            if (b.next != nullptr) b.next->previous = b.previous;
            if (heads[c] == nullptr) {
                words[c / 64] &= ~(std::uint64_t{1} << c % 64);
                if (words[c / 64] == 0) summary &= ~(std::uint64_t{1} << c / 64);
            }
            bytes -= b.size;
        }
        // The first class from `c` on with a free block, or `lists`.
        [[nodiscard]] std::uint32_t occupied_from(std::uint32_t c) const noexcept {
            if (c >= lists) return lists;
            auto word = c / 64;
            if (const auto here = words[word] >> c % 64; here != 0)
                return c + static_cast<std::uint32_t>(std::countr_zero(here));
            const auto later = summary & ~std::uint64_t{0} << word << 1;
            if (later == 0) return lists;
            word = static_cast<std::uint32_t>(std::countr_zero(later));
            return word * 64 + static_cast<std::uint32_t>(std::countr_zero(words[word]));
        }
        [[nodiscard]] pool_block* first_from(std::uint32_t c) const noexcept {
            c = occupied_from(c);
            return c < lists ? heads[c] : nullptr;
        }
        // The first block of the highest class; null if there is none.
        [[nodiscard]] pool_block* last() const noexcept {
            if (summary == 0) return nullptr;
            const auto word = static_cast<std::uint32_t>(std::bit_width(summary)) - 1;
            return heads[word * 64 + static_cast<std::uint32_t>(std::bit_width(words[word])) - 1];
        }
    };

    pool_index index_;
    detail::pool<pool_block> blocks_;
    std::array<free_lists, sets> lists_{};
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE auto pool_fit::add(std::byte* begin, std::uint64_t size, std::size_t alignment, bool own)
    -> pool_block& {
    index_.reserve(1);
    pool_block& b = fresh(begin, size);
    b.own = own;
    b.log_alignment = static_cast<std::uint8_t>(std::countr_zero(alignment));
    insert(b);
    return b;
}

GPUSHARE_INLINE void pool_fit::remove(pool_block& whole) noexcept {
    unlink(whole);
    forget(whole);
}

GPUSHARE_INLINE auto pool_fit::take(std::uint64_t size, std::size_t alignment) -> pool_block* {
    return take_from(parts, wholes, size, alignment);
}

GPUSHARE_INLINE auto pool_fit::take_own(std::uint64_t size, std::uint64_t most, std::size_t alignment) noexcept
    -> pool_block* {
    const auto last = classes::of(std::min(most, pool_tag::size_limit) / pool_granule);
    for (const auto part : {owns, wholes})
        for (auto c = classes::of(size / pool_granule); (c = lists_[part].occupied_from(c)) <= last; ++c)
            for (auto* b = lists_[part].heads[c]; b != nullptr; b = b->next)
                if (b->size >= size && b->size <= most && b->is_aligned(alignment)) {
                    unlink(*b);
                    b->own = true;
                    return b;
                }
    return nullptr;
}

GPUSHARE_INLINE auto pool_fit::cut_own(std::uint64_t size, std::size_t alignment) -> pool_block* {
    return take_from(own_parts, owns, size, alignment);
}

GPUSHARE_INLINE auto pool_fit::take_any(std::uint64_t size, std::size_t alignment, bool everywhere) -> pool_block* {
    for (const auto part : {parts, wholes, own_parts}) {
        if (part == own_parts && !everywhere) break;
        for (auto c = classes::of(size / pool_granule); (c = lists_[part].occupied_from(c)) < lists; ++c)
            for (auto* b = lists_[part].heads[c]; b != nullptr; b = b->next)
                if (gap(*b, alignment) + size <= b->size) return &carve(*b, size, alignment);
    }
    return nullptr;
}

GPUSHARE_INLINE auto pool_fit::take_whole(pool_block& whole) noexcept -> pool_block& {
    unlink(whole);
    return whole;
}

GPUSHARE_INLINE auto pool_fit::empty_range(std::uint64_t wanted) const noexcept -> pool_block* {
    const auto from = classes::covering(std::min(wanted, pool_tag::size_limit / 2) / pool_granule);
    pool_block *whole = lists_[wholes].first_from(from), *own = lists_[owns].first_from(from);
    if (whole != nullptr || own != nullptr)
        return whole == nullptr || (own != nullptr && own->size <= whole->size) ? own : whole;
    whole = lists_[wholes].last();
    own = lists_[owns].last();
    return whole == nullptr || (own != nullptr && own->size >= whole->size) ? own : whole;
}

GPUSHARE_INLINE auto pool_fit::carve(pool_block& b, std::uint64_t size, std::size_t alignment) -> pool_block& {
    const auto front = gap(b, alignment), rest = b.size - front - size;
    // The calls that can fail come first.
    index_.reserve(2);
    pool_block* const behind = rest == 0 ? nullptr : &fresh(b.begin + front + size, rest);
    pool_block* taken = &b;
    if (front != 0) {
        try {
            taken = &fresh(b.begin + front, size);
        } catch (...) {
            if (behind != nullptr) forget(*behind);
            throw;
        }
    }
    unlink(b);
    taken->own = b.own;
    if (behind != nullptr) behind->own = b.own;
    if (front != 0) {
        b.size = front;
        link_behind(b, *taken);
        insert(b);
    }
    taken->size = size;
    if (behind != nullptr) {
        link_behind(*taken, *behind);
        insert(*behind);
    }
    return *taken;
}

GPUSHARE_INLINE void pool_fit::give(pool_block& b) noexcept {
    pool_block* joined = &b;
    if (b.before != nullptr && b.before->free) {
        joined = b.before;
        unlink(*joined);
        absorb_next(*joined);
    }
    if (joined->after != nullptr && joined->after->free) {
        unlink(*joined->after);
        absorb_next(*joined);
    }
    insert(*joined);
}

GPUSHARE_INLINE std::uint64_t pool_fit::free_bytes() const noexcept {
    return lists_[parts].bytes + lists_[wholes].bytes + lists_[own_parts].bytes + lists_[owns].bytes;
}

GPUSHARE_INLINE std::uint64_t pool_fit::largest_free() const noexcept {
    std::uint64_t largest = 0;
    for (const auto& all : lists_)
        for (const auto* b = all.last(); b != nullptr; b = b->next) largest = std::max(largest, b->size);
    return largest;
}

GPUSHARE_INLINE std::uint64_t pool_fit::gap(const pool_block& b, std::size_t alignment) noexcept {
    return -reinterpret_cast<std::uintptr_t>(b.begin) & (std::max(alignment, pool_granule) - 1);
}

GPUSHARE_INLINE auto pool_fit::fresh(std::byte* begin, std::uint64_t size) -> pool_block& {
    pool_block& b = blocks_.acquire();
    b.begin = begin;
    b.size = size;
    b.before = b.after = nullptr;
    b.own = false;
    index_.insert(b);
    return b;
}

GPUSHARE_INLINE void pool_fit::forget(pool_block& b) noexcept {
    index_.erase(b);
    blocks_.release(b);
}

GPUSHARE_INLINE void pool_fit::link_behind(pool_block& b, pool_block& next) noexcept {
    next.before = &b;
    next.after = b.after;
    if (b.after != nullptr) b.after->before = &next;
    b.after = &next;
}

GPUSHARE_INLINE void pool_fit::absorb_next(pool_block& b) noexcept {
    pool_block& gone = *b.after;
    b.size += gone.size;
    b.after = gone.after;
    if (b.after != nullptr) b.after->before = &b;
    forget(gone);
}

GPUSHARE_INLINE void pool_fit::insert(pool_block& b) noexcept {
    const auto c = classes::of(b.size / pool_granule);
    b.free = true;
    lists_[set_of(b)].push(b, c);
}

GPUSHARE_INLINE void pool_fit::unlink(pool_block& b) noexcept {
    lists_[set_of(b)].remove(b, classes::of(b.size / pool_granule));
    b.free = false;
}

GPUSHARE_INLINE auto pool_fit::set_of(const pool_block& b) noexcept -> set {
    return b.own ? (b.whole_range() ? owns : own_parts) : b.whole_range() ? wholes : parts;
}

GPUSHARE_INLINE auto pool_fit::take_from(set in_use, set empty, std::uint64_t size, std::size_t alignment)
    -> pool_block* {
    const auto slack = alignment > pool_granule ? alignment - pool_granule : 0;
    const auto from = classes::covering((size + slack) / pool_granule);
    pool_block* b = lists_[in_use].first_from(from);
    if (b == nullptr) b = lists_[empty].first_from(from);
    return b == nullptr ? nullptr : &carve(*b, size, alignment);
}

#endif  // GPUSHARE_BODIES

/// The block that `take_one` returns. Null also if the host has no memory for the block's record.
template <std::invocable F>
[[nodiscard]] pool_block* quietly(F take_one) noexcept {
    try {
        return take_one();
    } catch (...) {
        return nullptr;
    }
}

/// A range as the upstream knows it.
struct pool_segment {
    std::byte* begin = nullptr;
    std::uint64_t size = 0;
    std::size_t alignment = 0;
    bool own = false;  // whether it had large blocks when it was given back
};

/// The ranges of a fit, as the upstream knows them. The first block of a range has its begin
/// and alignment. Not thread-safe. Sizes are bytes.
class pool_segments {
public:
    /// Throws std::bad_alloc, and then nothing has changed.
    pool_block& add(pool_fit& fit, const pool_segment& s, bool own);

    /// Removes one empty range if more than `target` bytes are held, chosen so that few ranges have
    /// to go.
    [[nodiscard]] pool_segment remove_empty(pool_fit& fit, std::uint64_t target) noexcept;
    /// Removes a range that is free as a whole, named by its block.
    pool_segment remove(pool_fit& fit, pool_block& whole) noexcept;
    /// Removes any range, whatever is in it. For the time when only the fit's index is still used,
    /// which keeps the blocks.
    [[nodiscard]] pool_segment remove_any(pool_fit& fit) noexcept;

    /// The size of the largest range. Linear in the number of blocks.
    [[nodiscard]] static std::uint64_t largest(const pool_fit& fit) noexcept;
    /// Calls `look` for every block of all ranges, free or not.
    template <std::invocable<pool_block&> F>
    static void for_each_block(const pool_fit& fit, F look) noexcept(noexcept(look(std::declval<pool_block&>()))) {
        std::size_t at = 0;
        while (pool_block* const b = fit.index().next(at)) look(*b);
    }
    [[nodiscard]] std::uint64_t held() const noexcept { return held_; }
    [[nodiscard]] std::uint64_t peak() const noexcept { return peak_; }
    [[nodiscard]] std::size_t count() const noexcept { return count_; }

private:
    pool_segment drop(const pool_block& first, std::uint64_t size) noexcept;

    std::uint64_t held_ = 0, peak_ = 0;
    std::size_t count_ = 0, cursor_ = 0;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE auto pool_segments::add(pool_fit& fit, const pool_segment& s, bool own) -> pool_block& {
    pool_block& whole = fit.add(s.begin, s.size, s.alignment, own);
    held_ += s.size;
    peak_ = std::max(peak_, held_);
    ++count_;
    return whole;
}

GPUSHARE_INLINE auto pool_segments::remove_empty(pool_fit& fit, std::uint64_t target) noexcept -> pool_segment {
    if (held_ <= target) return {};
    pool_block* const empty = fit.empty_range(held_ - target);
    return empty == nullptr ? pool_segment{} : remove(fit, *empty);
}

GPUSHARE_INLINE auto pool_segments::remove(pool_fit& fit, pool_block& whole) noexcept -> pool_segment {
    const auto gone = drop(whole, whole.size);
    fit.remove(whole);
    return gone;
}

GPUSHARE_INLINE auto pool_segments::remove_any(pool_fit& fit) noexcept -> pool_segment {
    for (pool_block* b = fit.index().next(cursor_); b != nullptr; b = fit.index().next(cursor_)) {
        if (b->before != nullptr) continue;
        std::uint64_t size = 0;
        for (const pool_block* part = b; part != nullptr; part = part->after) size += part->size;
        return drop(*b, size);
    }
    return {};
}

GPUSHARE_INLINE std::uint64_t pool_segments::largest(const pool_fit& fit) noexcept {
    std::uint64_t most = 0;
    for_each_block(fit, [&](const pool_block& b) {
        std::uint64_t size = 0;
        for (const auto* part = b.before == nullptr ? &b : nullptr; part != nullptr; part = part->after)
            size += part->size;
        most = std::max(most, size);
    });
    return most;
}

GPUSHARE_INLINE auto pool_segments::drop(const pool_block& first, std::uint64_t size) noexcept -> pool_segment {
    held_ -= size;
    --count_;
    return {first.begin, size, std::size_t{1} << first.log_alignment, first.own};
}

#endif  // GPUSHARE_BODIES

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
