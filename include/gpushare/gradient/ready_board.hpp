// SPDX-License-Identifier: Apache-2.0
// Negotiation between the threads of a process, where nobody waits: what each rank has stands on a
// board that all see, and each reads there what became ready everywhere, in the one order that
// there is.
//
//   gpushare::ready_board board(gradients, ranks);            // one for all ranks
//   board.mark(r, g);                                         // by rank r, as its gradient g becomes ready
//   board.take(r, next);                                      // appends to `next` the gradients that are ready everywhere, on every rank the same
//   if (board.complete(r)) board.end_step(r);
//
// Between processes: ready_bits and negotiate() in negotiation.hpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/negotiation.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The gradients that each rank has ready in a step. Each rank's calls come from one thread at a
/// time. Every rank marks every gradient in each step; a rank may be one step ahead of others,
/// never two. The constructor allocates, nothing else does.
class ready_board {
public:
    /// So many gradients, on each of so many ranks.
    ready_board(std::uint32_t gradients, std::uint32_t ranks)
        : gradients_(gradients),
          words_((gradients + 63) / 64),
          ranks_(ranks),
          marks_(std::size_t{2} * ranks * stride()),
          taken_(std::size_t{2} * words_),
          entries_(gradients) {}

    /// Gradient g is ready on rank r. errc::mismatch if it was already, or isn't one.
    errc mark(std::uint32_t r, std::uint32_t g) noexcept {
        if (g >= gradients_) return errc::mismatch;
        std::atomic<std::uint64_t>& word = mark_of(r, ranks_[r].step, g / 64);
        // relaxed: no other rank writes to it. release: what this rank did before, the gradient, is
        // seen by who finds it here.
        const std::uint64_t had = word.load(std::memory_order_relaxed), bit = std::uint64_t{1} << (g % 64);
        if ((had & bit) != 0) return errc::mismatch;
        word.store(had | bit, std::memory_order_release);
        return errc::none;
    }
    /// Appends to `next` the gradients that became ready everywhere since rank r last took. All
    /// ranks see the same sequence, each at its own pace. Gradients that two ranks mark at the same
    /// moment may come one call later.
    void take(std::uint32_t r, std::vector<std::uint32_t>& next) {
        rank_state& me = ranks_[r];
        for (std::uint32_t w = 0; w < words_; ++w) write_down(me.step, w);
        // acquire: with an entry comes its word of bits, and what all ranks did before they marked these.
        for (; me.taken < gradients_; ++me.read) {
            const std::uint64_t head = entries_[me.read].head.load(std::memory_order_acquire);
            if (head >> 32 != me.step) return;
            std::uint64_t bits = entries_[me.read].bits.load(std::memory_order_relaxed);
            const auto n = static_cast<std::uint32_t>(std::popcount(bits));
            next.resize(next.size() + n);
            std::uint32_t* to = next.data() + next.size() - n;
            for (; bits != 0; bits &= bits - 1)
                *to++ = static_cast<std::uint32_t>(head) * 64 + static_cast<std::uint32_t>(std::countr_zero(bits));
            me.taken += n;
        }
    }
    /// Whether rank r has taken all of the step.
    [[nodiscard]] bool complete(std::uint32_t r) const noexcept { return ranks_[r].taken == gradients_; }
    /// Rank r begins the next step. errc::in_flight, and nothing happens, unless complete(r).
    errc end_step(std::uint32_t r) noexcept {
        if (!complete(r)) return errc::in_flight;
        rank_state& me = ranks_[r];
        // This rank's marks are all written down: whoever still looks at them finds nothing more to
        // do. The rest is of the step before this one, which all ranks have ended, for they have
        // marked in this one. All clear it, and each before it marks again: so before anybody finds
        // something to write down. relaxed: that mark is the release.
        for (std::uint32_t w = 0; w < words_; ++w) {
            mark_of(r, me.step, w).store(0, std::memory_order_relaxed);
            taken_of(me.step + 1, w).store(0, std::memory_order_relaxed);
        }
        ends_[(me.step + 1) % 2].store(0, std::memory_order_relaxed);
        ++me.step;
        me.read = me.taken = 0;
        return errc::none;
    }
    /// A gradient that some ranks have in rank r's step and one hasn't; not while others are a step ahead.
    [[nodiscard]] std::optional<stall> stalled(std::uint32_t r) const noexcept {
        const std::uint32_t step = ranks_[r].step, n = static_cast<std::uint32_t>(ranks_.size());
        for (std::uint32_t w = 0; w < words_; ++w) {
            std::uint64_t some = 0;
            for (std::uint32_t q = 0; q < n; ++q) some |= mark_of(q, step, w).load(std::memory_order_relaxed);
            std::optional<stall> first;
            for (std::uint32_t q = 0; q < n; ++q) {
                const std::uint64_t lacks = some & ~mark_of(q, step, w).load(std::memory_order_relaxed);
                const std::uint32_t g = w * 64 + static_cast<std::uint32_t>(std::countr_zero(lacks));
                if (lacks != 0 && (!first || g < first->gradient)) first = stall{g, q};
            }
            if (first) return first;
        }
        return std::nullopt;
    }

private:
    static constexpr std::size_t apart = 128;  // bytes between what two threads write: two cache lines come at once

    /// Gradients of one word that became ready together.
    struct entry {
        std::atomic<std::uint64_t> head{0};  // the step, and below it the word's number
        std::atomic<std::uint64_t> bits{0};
    };
    struct alignas(apart) rank_state {
        std::uint32_t step = 1;  // 0 is of entries that were never written
        std::uint32_t read = 0, taken = 0;
    };

    /// Words of a rank, so that two ranks share no cache line.
    [[nodiscard]] std::size_t stride() const noexcept {
        constexpr std::size_t line = apart / sizeof(std::uint64_t);
        return (words_ + line - 1) / line * line + line;
    }
    [[nodiscard]] std::atomic<std::uint64_t>& mark_of(std::uint32_t r, std::uint32_t step, std::uint32_t w) noexcept {
        return marks_[(std::size_t{r} * 2 + step % 2) * stride() + w];
    }
    [[nodiscard]] const std::atomic<std::uint64_t>& mark_of(std::uint32_t r, std::uint32_t step,
                                                            std::uint32_t w) const noexcept {
        return marks_[(std::size_t{r} * 2 + step % 2) * stride() + w];
    }
    [[nodiscard]] std::atomic<std::uint64_t>& taken_of(std::uint32_t step, std::uint32_t w) noexcept {
        return taken_[std::size_t{step % 2} * words_ + w];
    }
    /// Writes down the gradients of a word that all ranks have and that aren't written down yet:
    /// the thread that sets a bit does it.
    void write_down(std::uint32_t step, std::uint32_t w) noexcept {
        std::uint64_t all = ~std::uint64_t{0};
        for (std::uint32_t q = 0; q < ranks_.size() && all != 0; ++q)
            all &= mark_of(q, step, w).load(std::memory_order_acquire);
        std::atomic<std::uint64_t>& taken = taken_of(step, w);
        all &= ~taken.load(std::memory_order_relaxed);
        if (all == 0) return;
        // relaxed: the marks that were read above order all that came before; the entry below is the release.
        const std::uint64_t mine = all & ~taken.fetch_or(all, std::memory_order_relaxed);
        if (mine == 0) return;
        entry& e = entries_[ends_[step % 2].fetch_add(1, std::memory_order_relaxed)];
        e.bits.store(mine, std::memory_order_relaxed);
        e.head.store(std::uint64_t{step} << 32 | w, std::memory_order_release);
    }

    std::uint32_t gradients_, words_;
    std::vector<rank_state> ranks_;
    std::vector<std::atomic<std::uint64_t>> marks_;  // of each rank, of two steps by turns
    std::vector<std::atomic<std::uint64_t>> taken_;  // what has an entry, of two steps by turns
    std::vector<entry> entries_;                     // in the one order
    std::atomic<std::uint32_t> ends_[2]{};           // entries of a step
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
