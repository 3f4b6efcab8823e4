// SPDX-License-Identifier: Apache-2.0
// One worker's cache of a pool: freed blocks, sorted into bins by size class. The next allocation
// of the same class takes such a block without asking the pool. The pool can empty the bins at any
// time, also while the worker sleeps.
//
//   gpushare::detail::pool_bins mine;
//   if (gpushare::detail::pool_block* b = mine.take(granules, alignment, size)) return b->begin;
//   // back to the pool
//   if (auto freed = mine.put(index, p, size, alignment); freed.homeless != nullptr) ...;
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/pool_block.hpp>
#include <gpushare/memory/detail/pool_index.hpp>
#include <gpushare/memory/detail/size_classes.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

struct bin_sizes {
    using classes = size_classes<3>;  // a block is at most an eighth larger than requested
    // granules; bigger blocks aren't kept
    static constexpr std::uint64_t largest = (8 << 20) / pool_granule;
    static constexpr std::uint32_t bins = classes::of(largest) + 1;

    /// The bin for a block of that many granules; `bins` for sizes that have none.
    [[nodiscard]] static constexpr std::uint32_t of(std::uint64_t granules) noexcept {
        return std::min(classes::of(granules), bins);
    }

    /// Blocks in a bin: 256 KiB, but at least 16 blocks and at most 256. Programs free small blocks
    /// by the hundred. A block without room here costs the pool's lock, and has to be cut out again
    /// later.
    [[nodiscard]] static constexpr std::uint32_t depth_of(std::uint32_t bin) noexcept {
        const auto size = std::max<std::uint64_t>(classes::smallest(bin), 1) * pool_granule;
        return static_cast<std::uint32_t>(std::clamp<std::uint64_t>((256 << 10) / size, 16, 256));
    }
};

struct bin_layout : detail::bin_sizes {
    /// Where each bin begins, of places for blocks that are side by side; the last entry is how
    /// many there are.
    static constexpr std::array<std::uint32_t, bins + 1> places = [] {
        std::array<std::uint32_t, bins + 1> begins{};
        for (std::uint32_t s = 0; s < bins; ++s) begins[s + 1] = begins[s] + depth_of(s);
        return begins;
    }();
};
static_assert(bin_layout::places.back() * sizeof(void*) <= (36 << 10), "what a worker costs the host");

/// Tries for about as long as a short critical section takes. Sleeping and waking up would cost a
/// hundred times as much.
template <std::predicate F>
[[nodiscard]] bool soon(F try_it) noexcept {
    for (unsigned tries = 0; tries < 200; ++tries)
        if (try_it()) return true;
    return false;
}

[[nodiscard]] inline std::unique_lock<std::mutex> lock_soon(std::mutex& mutex) noexcept {
    std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock && !soon([&] { return lock.try_lock(); })) lock.lock();
    return lock;
}

/// A lock for a handful of instructions that two threads rarely need at once. Without contention it
/// costs half of a mutex. On contention a thread yields its core, in the end by sleeping, so that a
/// holder of a lower priority can continue.
class brief_lock {
public:
    void lock() noexcept {
        if (!try_lock()) [[unlikely]]
            give_way();
    }
    void unlock() noexcept { held_.store(false, std::memory_order_release); }

private:
    // Acquire and release, as for any lock: what the last holder did is seen by the next.
    [[nodiscard]] bool try_lock() noexcept { return !held_.exchange(true, std::memory_order_acquire); }

    [[gnu::noinline]] void give_way() noexcept {
        const auto try_it = [this] { return !held_.load(std::memory_order_relaxed) && try_lock(); };
        for (unsigned rounds = 0; !soon(try_it); ++rounds) {
            if (rounds < 100)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(std::chrono::microseconds{50});
        }
    }

    std::atomic<bool> held_{false};
};

/// Counts of allocations and frees, and their bytes as requested.
struct pool_traffic {
    std::uint64_t allocations = 0, allocated = 0, frees = 0, freed = 0;

    void out(std::uint64_t size) noexcept {
        ++allocations;
        allocated += size;
    }
    void back(std::uint64_t size) noexcept {
        ++frees;
        freed += size;
    }
    pool_traffic& operator+=(const pool_traffic& more) noexcept {
        allocations += more.allocations;
        allocated += more.allocated;
        frees += more.frees;
        freed += more.freed;
        return *this;
    }
    /// Allocated bytes. Never below 0, although a call in progress may be counted only in part.
    [[nodiscard]] std::uint64_t requested() const noexcept { return allocated - std::min(allocated, freed); }
};

/// Counts calls and their bytes, if each call is for less than 16 MiB. Counting a call costs one
/// addition.
class call_count {
public:
    void add(std::uint64_t size) noexcept {
        recent_ += one_call + size;
        if (recent_calls() >= most_recent) [[unlikely]] {
            calls_ += recent_calls();
            bytes_ += recent_bytes();
            recent_ = 0;
        }
    }
    [[nodiscard]] std::uint64_t calls() const noexcept { return calls_ + recent_calls(); }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_ + recent_bytes(); }

private:
    // in `recent_`: above its bytes
    static constexpr std::uint64_t one_call = std::uint64_t{1} << 40;
    // calls, whose bytes are less than one_call
    static constexpr std::uint64_t most_recent = std::uint64_t{1} << 16;

    [[nodiscard]] std::uint64_t recent_calls() const noexcept { return recent_ / one_call; }
    [[nodiscard]] std::uint64_t recent_bytes() const noexcept { return recent_ % one_call; }

    std::uint64_t recent_ = 0;  // the recent calls and their bytes, in one word
    std::uint64_t calls_ = 0, bytes_ = 0;
};

/// Which of the bins 0 to `Bins` - 1 hold something: a bit each. A value.
template <std::uint32_t Bins>
class filled_bins {
public:
    void insert(std::uint32_t bin) noexcept { words_[bin / word] |= std::uint64_t{1} << bin % word; }
    /// Removes `bin`, which is in the set, if it is `empty`. Without a branch, because no processor
    /// could predict it.
    void erase_if(bool empty, std::uint32_t bin) noexcept {
        words_[bin / word] ^= static_cast<std::uint64_t>(empty) << bin % word;
    }
    /// The first member at or after `from`, among `window` < 64 bins; `Bins` if there is none.
    [[nodiscard]] std::uint32_t first(std::uint32_t from, std::uint32_t window) const noexcept {
        const auto filled = starting_at(from) & ((std::uint64_t{1} << window) - 1);
        return filled == 0 ? Bins : from + static_cast<std::uint32_t>(std::countr_zero(filled));
    }

private:
    static constexpr std::uint32_t word = 64;

    // Bit i: whether bin `from` + i holds something. The upper bits are the lower ones of the next
    // word. These are shifted twice, since they may have to go by the whole width of a word.
    [[nodiscard]] std::uint64_t starting_at(std::uint32_t from) const noexcept {
        const auto at = from % word;
        return words_[from / word] >> at | words_[from / word + 1] << 1 << (word - 1 - at);
    }

    std::array<std::uint64_t, Bins / word + 2> words_{};  // one extra for starting_at()
};

/// Bins of one worker. All members may be called from any thread. Blocks in a bin aren't allocated
/// (their tags are 0), nor are they free for the pool.
class pool_bins {
public:
    using layout = bin_layout;
    using classes = layout::classes;
    static constexpr std::uint64_t largest = layout::largest;
    static constexpr std::uint32_t bins = layout::bins;
    // how many bins a request looks at; the block that it gets wastes less than half of the size
    static constexpr std::uint32_t window = 4;

    /// Throws std::bad_alloc.
    pool_bins() : kept_(std::make_unique_for_overwrite<pool_block*[]>(layout::places[bins])) {}

    /// A block of `granules` <= largest, for a request of `size` bytes: the last one put into the
    /// first bin that has one. Null if no bin has a block, or if that block doesn't begin at a
    /// multiple of `alignment`.
    [[nodiscard]] pool_block* take(std::uint64_t granules, std::size_t alignment, std::size_t size) noexcept;

    /// The same, but a block of exactly `least` to `most` bytes: the last one put into the first
    /// bin for these sizes whose last block fits.
    [[nodiscard]] pool_block* take_exact(std::uint64_t least, std::uint64_t most, std::size_t alignment,
                                         std::size_t size) noexcept;

    /// As take, but never a block from a segment of large blocks. Looks at the latest block of each
    /// bin.
    [[nodiscard]] pool_block* take_shared(std::uint64_t granules, std::size_t alignment, std::size_t size) noexcept;

    struct freed {
        errc why = errc::none;
        // claimed, but its bin is full or missing: the caller keeps the block
        pool_block* homeless = nullptr;
        std::uint32_t bin = 0;
    };

    /// Claims a block and keeps it. Reads the index under the lock, and so not while pass()
    /// returns.
    [[nodiscard]] freed put(const pool_index& index, void* p, std::size_t size, std::size_t alignment) noexcept;

    /// Keeps a block that was never allocated. Returns false if its bin is full or missing: the
    /// caller keeps the block.
    [[nodiscard]] bool stock(pool_block& block) noexcept;

    /// Passes some blocks for such requests on to `other`, from which no blocks are ever passed on.
    /// Each block is always in one of the two.
    void share(std::uint64_t granules, pool_bins& other) noexcept;

    /// Keeps as many of `blocks` as there is room for, but none from a segment of large blocks.
    /// Returns the others.
    [[nodiscard]] pool_chain stock(pool_chain blocks) noexcept;

    /// Whether blocks are kept from now on. If not, no bin has room; blocks in the bins stay.
    void keep(bool more) noexcept;

    /// Returns once every thread that was inside a member function at the call has left it.
    void pass() noexcept { const std::lock_guard lock(lock_); }

    /// Takes out the smallest block of at least that many granules that may be cut, or null.
    [[nodiscard]] pool_block* take_bigger(std::uint64_t granules) noexcept;
    /// Takes out a block of `least` to `most` bytes at a multiple of `alignment`; null if there is
    /// none.
    [[nodiscard]] pool_block* take_within(std::uint64_t least, std::uint64_t most, std::size_t alignment) noexcept;

    /// Removes blocks: all of them, or half of one bin's, those that have lain there longest.
    /// `receive` gets each one, under the lock.
    template <std::invocable<pool_block&> F>
    void take_all(F receive) noexcept {
        const std::lock_guard lock(lock_);
        for (std::uint32_t s = 0; s < bins; ++s) take_oldest(s, counts_[s], receive);
        if (latest_ != nullptr) receive(*std::exchange(latest_, nullptr));
    }
    template <std::invocable<pool_block&> F>
    void take_half(std::uint32_t bin, F receive) noexcept {
        const std::lock_guard lock(lock_);
        take_oldest(bin, (counts_[bin] + 1U) / 2, receive);
    }
    /// Calls `look` for every block, under the lock.
    template <std::invocable<pool_block&> F>
    void for_each(F look) const noexcept {
        const std::lock_guard lock(lock_);
        for (std::uint32_t s = 0; s < bins; ++s)
            for (std::uint32_t i = 0; i < counts_[s]; ++i) look(*on(s)[i]);
        if (latest_ != nullptr) look(*latest_);
    }

    /// Bytes kept, each block counted as the smallest of its bin.
    [[nodiscard]] bytes kept() const noexcept;
    /// The traffic through this cache. More bytes may have come back than were handed out, if a
    /// worker frees other workers' blocks.
    [[nodiscard]] pool_traffic traffic() const noexcept;

private:
    [[nodiscard]] pool_block** on(std::uint32_t bin) const noexcept { return kept_.get() + layout::places[bin]; }
    [[nodiscard]] static std::uint32_t depth_of(std::uint32_t bin) noexcept;
    [[nodiscard]] bool full(std::uint32_t bin) const noexcept { return !open_ || counts_[bin] == depth_of(bin); }

    void lay(pool_block& block, std::uint32_t bin) noexcept;

    // The first bin with a block of `granules` among the bins that such a request looks at; `bins`
    // if there is none.
    [[nodiscard]] std::uint32_t first_with(std::uint64_t granules) const noexcept;
    [[nodiscard]] pool_block* last_on(std::uint32_t bin) const noexcept { return on(bin)[counts_[bin] - 1U]; }
    void drop_last(std::uint32_t bin) noexcept { filled_.erase_if(--counts_[bin] == 0, bin); }

    pool_block* take_at(std::uint32_t s, std::uint32_t i) noexcept;
    template <class F>
    void take_oldest(std::uint32_t s, std::uint32_t n, F&& receive) noexcept {
        if (n == 0) return;
        pool_block** const kept = on(s);
        for (std::uint32_t i = 0; i < n; ++i) receive(*kept[i]);
        std::copy(kept + n, kept + counts_[s], kept);
        counts_[s] = static_cast<std::uint16_t>(counts_[s] - n);
        filled_.erase_if(counts_[s] == 0, s);
    }

    // On cache lines of its own: workers' bins don't share any.
    alignas(64) mutable detail::brief_lock lock_;
    bool open_ = true;              // false: no bin has room
    std::uint32_t latest_bin_ = 0;  // of latest_
    pool_block* latest_ = nullptr;  // a block freed while there was none here; in no bin
    call_count out_, back_;
    std::unique_ptr<pool_block*[]> kept_;  // see bin_layout::places
    filled_bins<bins> filled_;
    std::array<std::uint16_t, bins> counts_{};
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE auto pool_bins::take(std::uint64_t granules, std::size_t alignment, std::size_t size) noexcept
    -> pool_block* {
    const std::lock_guard lock(lock_);
    // Many programs free one block and then request it again: that case needs no look-up.
    if (latest_ != nullptr && latest_bin_ - classes::covering(granules) < window && alignment <= pool_granule) {
        out_.add(size);
        return std::exchange(latest_, nullptr);
    }
    const auto bin = first_with(granules);
    if (bin == bins) return nullptr;
    pool_block* const block = last_on(bin);
    // Read only if necessary: the block may be far away, and other threads may wait for the lock.
    if (alignment > pool_granule && (reinterpret_cast<std::uintptr_t>(block->begin) & (alignment - 1)) != 0)
        return nullptr;
    drop_last(bin);
    out_.add(size);
    return block;
}

GPUSHARE_INLINE auto pool_bins::take_exact(std::uint64_t least, std::uint64_t most, std::size_t alignment,
                                           std::size_t size) noexcept -> pool_block* {
    const auto fits = [&](const pool_block& b) { return b.size >= least && b.size <= most && b.is_aligned(alignment); };
    const std::lock_guard lock(lock_);
    pool_block* found = nullptr;
    if (latest_ != nullptr && fits(*latest_)) found = std::exchange(latest_, nullptr);
    const auto last = std::min(layout::of(most / pool_granule), bins - 1);
    for (auto bin = layout::of(least / pool_granule); found == nullptr && bin <= last; ++bin) {
        if (counts_[bin] == 0 || !fits(*last_on(bin))) continue;
        found = last_on(bin);
        drop_last(bin);
    }
    if (found != nullptr) out_.add(size);
    return found;
}

GPUSHARE_INLINE auto pool_bins::take_shared(std::uint64_t granules, std::size_t alignment, std::size_t size) noexcept
    -> pool_block* {
    const auto fits = [&](const pool_block& b) { return !b.own && b.is_aligned(alignment); };
    const auto first = classes::covering(granules);
    const std::lock_guard lock(lock_);
    pool_block* found = nullptr;
    if (latest_ != nullptr && latest_bin_ - first < window && fits(*latest_)) found = std::exchange(latest_, nullptr);
    const auto end = std::min(first + window, bins);
    for (auto bin = first; found == nullptr && bin < end; ++bin) {
        if (counts_[bin] == 0 || !fits(*last_on(bin))) continue;
        found = last_on(bin);
        drop_last(bin);
    }
    if (found != nullptr) out_.add(size);
    return found;
}

GPUSHARE_INLINE auto pool_bins::put(const pool_index& index, void* p, std::size_t size, std::size_t alignment) noexcept
    -> freed {
    const std::lock_guard lock(lock_);
    const auto [why, block, bin] = index.claim(p, size, alignment);
    if (why != errc::none) [[unlikely]]
        return {.why = why};
    if (latest_ == nullptr && bin < bins && open_) {
        latest_ = block;
        latest_bin_ = bin;
    } else {
        if (bin == bins || full(bin)) [[unlikely]]
            return {.homeless = block, .bin = bin};
        lay(*block, bin);
    }
    back_.add(size);
    return {};
}

GPUSHARE_INLINE bool pool_bins::stock(pool_block& block) noexcept {
    const auto bin = layout::of(block.size / pool_granule);
    const std::lock_guard lock(lock_);
    if (bin == bins || full(bin)) return false;
    lay(block, bin);
    return true;
}

GPUSHARE_INLINE void pool_bins::share(std::uint64_t granules, pool_bins& other) noexcept {
    const std::lock_guard lock(lock_);
    for (auto more = std::max(3U, depth_of(std::min(classes::covering(granules), bins - 1)) / 16); more > 0; --more) {
        const auto bin = first_with(granules);
        if (bin == bins || !other.stock(*last_on(bin))) return;
        drop_last(bin);
    }
}

GPUSHARE_INLINE auto pool_bins::stock(pool_chain blocks) noexcept -> pool_chain {
    pool_chain homeless;
    const std::lock_guard lock(lock_);
    while (!blocks.empty()) {
        pool_block& b = blocks.pop();
        const auto bin = layout::of(b.size / pool_granule);
        if (b.own || bin == bins || full(bin))
            homeless.push(b);
        else
            lay(b, bin);
    }
    return homeless;
}

GPUSHARE_INLINE void pool_bins::keep(bool more) noexcept {
    const std::lock_guard lock(lock_);
    open_ = more;
}

GPUSHARE_INLINE auto pool_bins::take_bigger(std::uint64_t granules) noexcept -> pool_block* {
    if (granules > largest) return nullptr;
    const std::lock_guard lock(lock_);
    if (latest_ != nullptr && !latest_->own && latest_->size >= granules * pool_granule)
        return std::exchange(latest_, nullptr);
    for (auto s = classes::covering(granules); s < bins; ++s)
        if (counts_[s] != 0 && !on(s)[0]->own) return take_at(s, 0);
    return nullptr;
}

GPUSHARE_INLINE auto pool_bins::take_within(std::uint64_t least, std::uint64_t most, std::size_t alignment) noexcept
    -> pool_block* {
    const auto fits = [&](const pool_block& b) { return b.size >= least && b.size <= most && b.is_aligned(alignment); };
    const std::lock_guard lock(lock_);
    if (latest_ != nullptr && fits(*latest_)) return std::exchange(latest_, nullptr);
    const auto last = std::min(layout::of(most / pool_granule), bins - 1);
    for (auto s = layout::of(least / pool_granule); s <= last; ++s)
        for (std::uint32_t i = 0; i < counts_[s]; ++i)
            if (fits(*on(s)[i])) return take_at(s, i);
    return nullptr;
}

GPUSHARE_INLINE bytes pool_bins::kept() const noexcept {
    const std::lock_guard lock(lock_);
    std::uint64_t granules = latest_ == nullptr ? 0 : classes::smallest(latest_bin_);
    for (std::uint32_t s = 0; s < bins; ++s) granules += counts_[s] * classes::smallest(s);
    return bytes{granules * pool_granule};
}

GPUSHARE_INLINE auto pool_bins::traffic() const noexcept -> pool_traffic {
    const std::lock_guard lock(lock_);
    return {out_.calls(), out_.bytes(), back_.calls(), back_.bytes()};
}

GPUSHARE_INLINE std::uint32_t pool_bins::depth_of(std::uint32_t bin) noexcept {
    return layout::places[bin + 1] - layout::places[bin];
}

GPUSHARE_INLINE void pool_bins::lay(pool_block& block, std::uint32_t bin) noexcept {
    on(bin)[counts_[bin]++] = &block;
    filled_.insert(bin);
}

GPUSHARE_INLINE std::uint32_t pool_bins::first_with(std::uint64_t granules) const noexcept {
    return filled_.first(classes::covering(granules), window);
}

GPUSHARE_INLINE auto pool_bins::take_at(std::uint32_t s, std::uint32_t i) noexcept -> pool_block* {
    pool_block** const kept = on(s);
    pool_block* const taken = kept[i];
    std::copy(kept + i + 1, kept + counts_[s], kept + i);
    drop_last(s);
    return taken;
}

#endif  // GPUSHARE_BODIES

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
