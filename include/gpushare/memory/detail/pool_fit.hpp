// SPDX-License-Identifier: Apache-2.0
// Cuts blocks out of ranges of memory and joins them again, in a bounded number of steps: a pool without its locks,
// caches and upstream. It never touches the memory. pool_segments, below, knows which ranges are empty and could go
// back to the upstream.
//
//   gpushare::detail::pool_fit fit;
//   fit.add(begin, 64 << 20);
//   gpushare::detail::pool_block* b = fit.take(4096, 256);   // b->begin, b->size; null if nothing fits
//   fit.give(*b);
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/memory/detail/pool_block.hpp>
#include <gpushare/memory/detail/pool_index.hpp>
#include <gpushare/memory/detail/size_classes.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Two-level segregated fit (Masmano et al., ECRTS 2004): free lists by class, a bitmap of those that aren't empty. Not
/// thread-safe, but for the index's readers. Begins, sizes and alignments are in bytes.
class pool_fit {
public:
    pool_fit() = default;
    pool_fit(const pool_fit&) = delete;
    pool_fit& operator=(const pool_fit&) = delete;

    /// Takes in a range of whole granules, beginning at one. Throws std::bad_alloc, and then nothing has changed.
    pool_block& add(std::byte* begin, std::uint64_t size) {
        index_.reserve(1);
        pool_block& b = fresh(begin, size);
        insert(b);
        return b;
    }

    /// Forgets a range that is free as a whole.
    void remove(pool_block& whole) noexcept {
        unlink(whole);
        forget(whole);
    }

    /// A block of `size` whole granules at a multiple of `alignment`, or null. Takes the first that surely fits, which
    /// wastes nothing but may overlook some that are not even one class (3%) bigger than needed.
    /// Throws std::bad_alloc if the host has no memory for the bookkeeping, and then nothing has changed.
    [[nodiscard]] pool_block* take(std::uint64_t size, std::size_t alignment) {
        const auto slack = alignment > pool_granule ? alignment - pool_granule : 0;
        pool_block* const b = first_from(classes::covering((size + slack) / pool_granule));
        return b == nullptr ? nullptr : &carve(*b, size, alignment);
    }

    /// As take, but overlooks nothing: steps in proportion to the number of free blocks. For before a refusal.
    [[nodiscard]] pool_block* take_any(std::uint64_t size, std::size_t alignment) {
        for (auto c = classes::of(size / pool_granule); (c = occupied_from(c)) < lists; ++c)
            for (auto* b = heads_[c]; b != nullptr; b = b->next)
                if (gap(*b, alignment) + size <= b->size) return &carve(*b, size, alignment);
        return nullptr;
    }

    /// Cuts `size` bytes out of a free block in which they fit.
    [[nodiscard]] pool_block& carve(pool_block& b, std::uint64_t size, std::size_t alignment) {
        const auto front = gap(b, alignment), rest = b.size - front - size;
        // All that can fail comes first.
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

    /// Back, and joined with free neighbours. The first block of a range stays the same object for as long as the range.
    void give(pool_block& b) noexcept {
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

    /// Of all blocks, free or not.
    [[nodiscard]] pool_index& index() noexcept { return index_; }
    [[nodiscard]] const pool_index& index() const noexcept { return index_; }
    [[nodiscard]] std::uint64_t free_bytes() const noexcept { return free_; }
    /// Steps in proportion to the number of blocks in the highest class.
    [[nodiscard]] std::uint64_t largest_free() const noexcept {
        std::uint64_t largest = 0;
        for (std::uint32_t c = 0; (c = occupied_from(c)) < lists; ++c) {
            largest = 0;
            for (auto* b = heads_[c]; b != nullptr; b = b->next) largest = std::max(largest, b->size);
        }
        return largest;
    }

private:
    using classes = size_classes<5>;
    static constexpr std::uint32_t lists = classes::of(pool_tag::size_limit / pool_granule) + 1;

    [[nodiscard]] static std::uint64_t gap(const pool_block& b, std::size_t alignment) noexcept {
        return -reinterpret_cast<std::uintptr_t>(b.begin) & (std::max(alignment, pool_granule) - 1);
    }

    pool_block& fresh(std::byte* begin, std::uint64_t size) {
        pool_block& b = blocks_.acquire();
        b.begin = begin;
        b.size = size;
        b.before = b.after = nullptr;
        index_.insert(b);
        return b;
    }
    void forget(pool_block& b) noexcept {
        index_.erase(b);
        blocks_.release(b);
    }

    static void link_behind(pool_block& b, pool_block& next) noexcept {
        next.before = &b;
        next.after = b.after;
        if (b.after != nullptr) b.after->before = &next;
        b.after = &next;
    }
    void absorb_next(pool_block& b) noexcept {
        pool_block& gone = *b.after;
        b.size += gone.size;
        b.after = gone.after;
        if (b.after != nullptr) b.after->before = &b;
        forget(gone);
    }

    void insert(pool_block& b) noexcept {
        const auto c = classes::of(b.size / pool_granule);
        b.free = true;
        b.previous = nullptr;
        b.next = heads_[c];
        if (b.next != nullptr) b.next->previous = &b;
        heads_[c] = &b;
        words_[c / 64] |= std::uint64_t{1} << c % 64;
        summary_ |= std::uint64_t{1} << c / 64;
        free_ += b.size;
    }
    void unlink(pool_block& b) noexcept {
        const auto c = classes::of(b.size / pool_granule);
        (b.previous != nullptr ? b.previous->next : heads_[c]) = b.next;
        if (b.next != nullptr) b.next->previous = b.previous;
        if (heads_[c] == nullptr) {
            words_[c / 64] &= ~(std::uint64_t{1} << c % 64);
            if (words_[c / 64] == 0) summary_ &= ~(std::uint64_t{1} << c / 64);
        }
        b.free = false;
        free_ -= b.size;
    }

    // The first class from `c` on with a free block, or `lists`.
    [[nodiscard]] std::uint32_t occupied_from(std::uint32_t c) const noexcept {
        if (c >= lists) return lists;
        auto word = c / 64;
        if (const auto here = words_[word] >> c % 64; here != 0)
            return c + static_cast<std::uint32_t>(std::countr_zero(here));
        const auto later = summary_ & ~std::uint64_t{0} << word << 1;
        if (later == 0) return lists;
        word = static_cast<std::uint32_t>(std::countr_zero(later));
        return word * 64 + static_cast<std::uint32_t>(std::countr_zero(words_[word]));
    }
    [[nodiscard]] pool_block* first_from(std::uint32_t c) const noexcept {
        c = occupied_from(c);
        return c < lists ? heads_[c] : nullptr;
    }

    pool_index index_;
    detail::pool<pool_block> blocks_;
    std::array<pool_block*, lists> heads_{};
    std::array<std::uint64_t, (lists + 63) / 64> words_{};
    static_assert((lists + 63) / 64 <= 64, "the summary is one word");
    std::uint64_t summary_ = 0;  // which words aren't 0
    std::uint64_t free_ = 0;     // bytes
};

/// The block that `take_one` gets. No memory for what is known of a block is no memory for the block: null then.
template <std::invocable F>
[[nodiscard]] pool_block* quietly(F take_one) noexcept {
    try {
        return take_one();
    } catch (...) {
        return nullptr;
    }
}

/// As the upstream knows it.
struct pool_segment {
    std::byte* begin = nullptr;
    std::uint64_t size = 0;
    std::size_t alignment = 0;
};

/// Not thread-safe. Sizes are bytes.
class pool_segments {
public:
    /// Throws std::bad_alloc, and then nothing has changed.
    pool_block& add(pool_fit& fit, const pool_segment& s) {
        all_.push_back({s, nullptr});
        try {
            all_.back().first = &fit.add(s.begin, s.size);
        } catch (...) {
            all_.pop_back();
            throw;
        }
        held_ += s.size;
        peak_ = std::max(peak_, held_);
        return *all_.back().first;
    }

    /// One in which nothing is, if more than `target` bytes are held. Steps in proportion to the number of segments.
    [[nodiscard]] pool_segment remove_empty(pool_fit& fit, std::uint64_t target) noexcept {
        if (held_ <= target) return {};
        for (entry& e : all_)
            if (e.first->free && e.first->whole_range()) return remove(fit, e);
        return {};
    }
    /// One that is free as a whole, by its first block.
    pool_segment remove(pool_fit& fit, pool_block& whole) noexcept {
        std::size_t at = 0;
        while (all_[at].first != &whole) ++at;
        return remove(fit, all_[at]);
    }
    /// Any, whatever is in it: for the end.
    [[nodiscard]] pool_segment remove_any() noexcept { return all_.empty() ? pool_segment{} : drop(all_.back()); }

    /// Of the largest one. Steps in proportion to the number of segments.
    [[nodiscard]] std::uint64_t largest() const noexcept {
        std::uint64_t most = 0;
        for (const entry& e : all_) most = std::max(most, e.segment.size);
        return most;
    }
    /// In those in which nothing is.
    [[nodiscard]] std::uint64_t empty_bytes() const noexcept {
        std::uint64_t empty = 0;
        for (const entry& e : all_)
            if (e.first->free && e.first->whole_range()) empty += e.segment.size;
        return empty;
    }
    /// Calls `look` for every block of all ranges, free or not.
    template <std::invocable<pool_block&> F>
    void for_each_block(F look) const noexcept(noexcept(look(std::declval<pool_block&>()))) {
        for (const entry& e : all_)
            for (pool_block* b = e.first; b != nullptr; b = b->after) look(*b);
    }
    [[nodiscard]] std::uint64_t held() const noexcept { return held_; }
    [[nodiscard]] std::uint64_t peak() const noexcept { return peak_; }
    [[nodiscard]] std::size_t count() const noexcept { return all_.size(); }

private:
    struct entry {
        pool_segment segment;
        pool_block* first = nullptr;
    };

    pool_segment remove(pool_fit& fit, entry& e) noexcept {
        fit.remove(*e.first);
        return drop(e);
    }
    pool_segment drop(entry& e) noexcept {
        const pool_segment dropped = std::exchange(e, all_.back()).segment;
        all_.pop_back();
        held_ -= dropped.size;
        return dropped;
    }

    std::vector<entry> all_;
    std::uint64_t held_ = 0, peak_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
