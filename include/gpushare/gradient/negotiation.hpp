// SPDX-License-Identifier: Apache-2.0
// Lets ranks agree on which gradients to combine next, although each rank computes the gradients in
// an order of its own. Online, all ranks combine bit vectors by AND now and then. Offline, they
// record the order of the first steps, agree on one order, and send nothing afterwards.
//
//   gpushare::ready_bits mine(gradients);                      // online
//   mine.mark(g);                                              // as gradient g becomes ready
//   auto fault = gpushare::negotiate(net, mine, next, why);    // appends to `next`
//
//   gpushare::recorded_order order(gradients);                 // offline
//   order.mark(g);  order.end_step();
//   if (order.ready_to_agree()) fault = gpushare::agree(net, order);
//
// Threads of a process don't wait for each other: each rank marks its gradients on a board that all
// ranks see. On the board, each rank reads which gradients became ready on all ranks, in one common
// order.
//
//   gpushare::ready_board board(gradients, ranks);    // one for all ranks
//   board.mark(r, g);                                 // by rank r, as its gradient g becomes ready
//   board.take(r, next);                              // appends gradients ready on all ranks
//   if (board.complete(r)) board.end_step(r);
//
// The parts that decide need no transport: a simulation of hundreds of ranks runs them as they are.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/bucket_plan.hpp>
#include <gpushare/gradient/detail/lent_arrays.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Combines bit vectors: keeps the bits that all ranks have set.
struct bitwise_and {
    static constexpr std::uint32_t id = 6;  ///< tells calls with different operators apart
    /// Combines `b` into `a`.
    template <class A>
    [[gnu::always_inline]] GPUSHARE_HD static constexpr void into(A& a, const A& b) noexcept {
        a = a & b;
    }
    /// Returns the combined bits.
    template <class A>
    GPUSHARE_HD constexpr A operator()(const A& a, const A& b) const noexcept {
        return a & b;
    }
};

/// A gradient that is late, and the rank that delays it.
struct stall {
    std::uint32_t gradient = 0;  ///< the first gradient that only some ranks have
    std::uint32_t rank = 0;      ///< the first rank without that gradient
    friend constexpr bool operator==(const stall&, const stall&) = default;
};

/// One rank's ready gradients, and the gradients known to be ready on all ranks. A plain value.
class ready_bits {
public:
    /// For this many gradients.
    explicit ready_bits(std::uint32_t gradients)
        : gradients_(gradients), mine_((gradients + 1 + 63) / 64), agreed_(mine_.size()) {
        calm();
    }

    /// The number of gradients.
    [[nodiscard]] std::uint32_t size() const noexcept { return gradients_; }
    /// Marks gradient g as ready here. Returns errc::mismatch if g was marked or doesn't exist.
    errc mark(std::uint32_t g) noexcept {
        if (g >= gradients_ || bit(mine_, g)) return errc::mismatch;
        mine_[g / 64] |= mask(g);
        return errc::none;
    }
    /// Whether gradient g is ready here.
    [[nodiscard]] bool is_marked(std::uint32_t g) const noexcept { return bit(mine_, g); }
    /// Whether this rank has ready gradients that aren't agreed yet.
    [[nodiscard]] bool is_waiting() const noexcept {
        for (std::uint32_t w = 0; w < mine_.size(); ++w)
            if ((mine_[w] & ~agreed_[w] & ~mask_of_alarm(w)) != 0) return true;
        return false;
    }
    /// Whether all gradients are agreed: the step is over.
    [[nodiscard]] bool complete() const noexcept {
        for (std::uint32_t g = 0; g < gradients_; ++g)
            if (!bit(agreed_, g)) return false;
        return true;
    }

    /// The words for the other ranks: a bit for each gradient, and an alarm bit that a rank clears
    /// when it has waited for too long.
    [[nodiscard]] std::span<const std::uint64_t> words() const noexcept { return mine_; }
    /// Asks all ranks to find out, in the next exchange, which rank delays the others.
    void raise_alarm() noexcept { mine_[gradients_ / 64] &= ~mask(gradients_); }

    /// Takes the AND of all ranks' words. Appends to `next` the gradients that became ready on all
    /// ranks since the last call. Returns whether a rank has raised the alarm. In that case all
    /// ranks gather their words, and stalled() names the rank that delays the others.
    bool take(std::span<const std::uint64_t> all, std::vector<std::uint32_t>& next) {
        for (std::uint32_t w = 0; w < agreed_.size(); ++w) {
            std::uint64_t fresh = all[w] & ~agreed_[w] & ~mask_of_alarm(w);
            agreed_[w] |= fresh;
            for (; fresh != 0; fresh &= fresh - 1)
                next.push_back(w * 64 + static_cast<std::uint32_t>(std::countr_zero(fresh)));
        }
        calm();
        return (all[gradients_ / 64] & mask(gradients_)) == 0;
    }
    /// The first gradient that some ranks have and others don't. `of_ranks` has the words of all
    /// ranks, one rank after the other.
    [[nodiscard]] std::optional<stall> stalled(std::span<const std::uint64_t> of_ranks) const noexcept {
        const std::size_t words = mine_.size(), ranks = of_ranks.size() / words;
        for (std::uint32_t g = 0; g < gradients_; ++g) {
            std::optional<std::uint32_t> missing;
            bool some = false;
            for (std::uint32_t r = 0; r < ranks; ++r) {
                if (bit(of_ranks.subspan(r * words, words), g))
                    some = true;
                else if (!missing)
                    missing = r;
            }
            if (some && missing) return stall{g, *missing};
        }
        return std::nullopt;
    }

    /// Begins the next step.
    void end_step() noexcept {
        std::fill(mine_.begin(), mine_.end(), 0);
        std::fill(agreed_.begin(), agreed_.end(), 0);
        calm();
    }

private:
    [[nodiscard]] static std::uint64_t mask(std::uint32_t g) noexcept { return std::uint64_t{1} << (g % 64); }
    [[nodiscard]] static bool bit(std::span<const std::uint64_t> words, std::uint32_t g) noexcept {
        return (words[g / 64] & mask(g)) != 0;
    }
    [[nodiscard]] std::uint64_t mask_of_alarm(std::uint32_t w) const noexcept {
        return w == gradients_ / 64 ? mask(gradients_) : 0;
    }
    void calm() noexcept { mine_[gradients_ / 64] |= mask(gradients_); }

    std::uint32_t gradients_;
    std::vector<std::uint64_t> mine_, agreed_;
};

/// Makes one exchange between ranks. All ranks call negotiate() equally often, at least once in a
/// step. Appends to `next` the gradients that became ready on all ranks. If a rank has raised the
/// alarm, `why` names the rank that delays the others, the same rank everywhere.
template <host_transport Net>
[[nodiscard]] collective_fault negotiate(Net& net, ready_bits& mine, std::vector<std::uint32_t>& next,
                                         std::optional<stall>& why, instant deadline = never) {
    why.reset();
    const std::span<const std::uint64_t> own = mine.words();
    // Works in a copy, so that the transport touches no memory of `mine`. The copy isn't on the
    // stack, because after a fault the transport may still touch it.
    std::vector<std::uint64_t> all(own.begin(), own.end()), of_ranks;
    detail::lent_arrays memory(all, of_ranks);
    if (const auto f = memory.to([&] {
            return net.all_reduce(std::span<const std::uint64_t>(all), std::span(all), bitwise_and{}, deadline);
        }))
        return f;
    if (!mine.take(all, next)) return {};
    of_ranks.resize(own.size() * net.size());
    const std::span<std::uint64_t> here = std::span(of_ranks).subspan(net.rank() * own.size(), own.size());
    std::copy(own.begin(), own.end(), here.begin());
    if (const auto f = memory.to(
            [&] { return net.all_gather(std::span<const std::uint64_t>(here), std::span(of_ranks), deadline); }))
        return f;
    why = mine.stalled(of_ranks);
    return {};
}

/// The reason why a step doesn't have each gradient exactly once.
struct divergence {
    /// The kind of error.
    enum class kind : std::uint8_t {
        twice,    ///< the gradient came a second time
        missing,  ///< the gradient didn't come
        unknown,  ///< there is no such gradient
    };
    kind what = kind::twice;     ///< what happened
    std::uint32_t gradient = 0;  ///< which gradient it happened to
    friend constexpr bool operator==(const divergence&, const divergence&) = default;
};

/// The order in which gradients become ready, recorded over a few steps. Once the ranks have agreed
/// on the order, they exchange nothing more. A gradient may come earlier or later than recorded,
/// but the class notices a step that has a gradient twice, or lacks one. A plain value.
class recorded_order {
public:
    /// For this many gradients, and this many steps to record.
    explicit recorded_order(std::uint32_t gradients, std::uint32_t steps = 2)
        : steps_(steps), places_(gradients), is_here_(gradients) {}

    /// Records that gradient g is ready. Returns a divergence if g was ready already or doesn't
    /// exist.
    std::optional<divergence> mark(std::uint32_t g) {
        if (g >= is_here_.size()) return divergence{divergence::kind::unknown, g};
        if (is_here_[g]) return divergence{divergence::kind::twice, g};
        is_here_[g] = true;
        if (is_recording()) places_[g] += here_;
        ++here_;
        return std::nullopt;
    }
    /// Ends the step, and returns the first missing gradient. Missing gradients are recorded as the
    /// last gradients, so that all ranks record the same number of steps.
    std::optional<divergence> end_step() {
        std::optional<divergence> lacks;
        for (std::uint32_t g = 0; g < is_here_.size(); ++g)
            if (!is_here_[g]) {
                if (is_recording()) places_[g] += here_;
                if (!lacks) lacks = divergence{divergence::kind::missing, g};
            }
        if (is_recording()) ++recorded_;
        std::fill(is_here_.begin(), is_here_.end(), false);
        here_ = 0;
        return lacks;
    }
    /// Whether it is time to call agree(): enough steps are recorded, but no order is agreed. All
    /// ranks get the same answer.
    [[nodiscard]] bool ready_to_agree() const noexcept {
        return recorded_ == steps_ && order_.empty() && !places_.empty();
    }
    /// This rank's order: gradients by their places in the recorded steps, the earliest gradient
    /// first.
    [[nodiscard]] std::vector<std::uint32_t> proposal() const {
        std::vector<std::uint32_t> order(places_.size());
        for (std::uint32_t g = 0; g < order.size(); ++g) order[g] = g;
        std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return places_[a] < places_[b]; });
        return order;
    }
    /// Takes the order that all ranks agreed on.
    void adopt(std::span<const std::uint32_t> order) { order_.assign(order.begin(), order.end()); }
    /// The agreed order; empty until the ranks have agreed.
    [[nodiscard]] std::span<const std::uint32_t> order() const noexcept { return order_; }
    /// Forgets the order and records a new one. Call this on all ranks, after a divergence that
    /// persists.
    void restart() {
        order_.clear();
        recorded_ = 0;
        std::fill(places_.begin(), places_.end(), 0);
    }

private:
    [[nodiscard]] bool is_recording() const noexcept { return recorded_ < steps_; }

    std::uint32_t steps_, recorded_ = 0;
    std::uint64_t here_ = 0;             // the number of gradients in this step so far
    std::vector<std::uint64_t> places_;  // the place of each gradient, summed over recorded steps
    std::vector<bool> is_here_;
    std::vector<std::uint32_t> order_;
};

/// All ranks adopt rank 0's order. This is the only message that a recorded order needs.
template <host_transport Net>
[[nodiscard]] collective_fault agree(Net& net, recorded_order& order, instant deadline = never) {
    std::vector<std::uint32_t> all = order.proposal();
    detail::lent_arrays memory(all);
    const auto f = memory.to([&] { return net.broadcast(std::span(all), 0, deadline); });
    if (!f) order.adopt(all);
    return f;
}

/// The gradients that each rank has ready in a step. Each rank's calls come from one thread at a
/// time. Every rank marks every gradient in each step. A rank may be one step ahead of other ranks,
/// but never two. Only the constructor allocates.
class ready_board {
public:
    /// For this many gradients on each of this many ranks.
    ready_board(std::uint32_t gradients, std::uint32_t ranks)
        : gradients_(gradients),
          words_((gradients + 63) / 64),
          ranks_(ranks),
          marks_(std::size_t{2} * ranks * stride()),
          taken_(std::size_t{2} * words_),
          entries_(gradients) {}

    /// Marks gradient g as ready on rank r. Returns errc::mismatch if g was marked or doesn't
    /// exist.
    errc mark(std::uint32_t r, std::uint32_t g) noexcept {
        if (g >= gradients_) return errc::mismatch;
        std::atomic<std::uint64_t>& word = mark_of(r, ranks_[r].step, g / 64);
        // relaxed: only this rank writes to the word. release: a thread that finds the mark sees
        // everything that this rank wrote before the mark, such as the gradient.
        const std::uint64_t had = word.load(std::memory_order_relaxed), bit = std::uint64_t{1} << (g % 64);
        if ((had & bit) != 0) return errc::mismatch;
        word.store(had | bit, std::memory_order_release);
        return errc::none;
    }
    /// Appends to `next` the gradients that became ready on all ranks since rank r's last call. All
    /// ranks see the same sequence, each at its own pace. If two ranks mark a gradient at the same
    /// moment, the gradient may come one call later.
    void take(std::uint32_t r, std::vector<std::uint32_t>& next) {
        rank_state& me = ranks_[r];
        for (std::uint32_t w = 0; w < words_; ++w) write_down(me.step, w);
        // acquire: shows the entry's bits, and what all ranks wrote before they marked these
        // gradients.
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
    /// Whether rank r has taken all gradients of the step.
    [[nodiscard]] bool complete(std::uint32_t r) const noexcept { return ranks_[r].taken == gradients_; }
    /// Rank r begins the next step. Returns errc::in_flight and does nothing unless complete(r).
    errc end_step(std::uint32_t r) noexcept {
        if (!complete(r)) return errc::in_flight;
        rank_state& me = ranks_[r];
        // All of this rank's marks have an entry, so a thread that still looks at them finds
        // nothing to do. taken_ and ends_ of the next step still have the contents of the previous
        // step. All ranks have ended the previous step, since they have marked gradients in the
        // current step. Every rank clears both before its first mark of the next step, and so
        // before any thread makes an entry of that step. relaxed: that mark is the release.
        for (std::uint32_t w = 0; w < words_; ++w) {
            mark_of(r, me.step, w).store(0, std::memory_order_relaxed);
            taken_of(me.step + 1, w).store(0, std::memory_order_relaxed);
        }
        ends_[(me.step + 1) % 2].store(0, std::memory_order_relaxed);
        ++me.step;
        me.read = me.taken = 0;
        return errc::none;
    }
    /// A gradient that some ranks have in rank r's step and another rank lacks. While another rank
    /// is a step ahead, the answer is meaningless.
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
    // bytes; two cache lines, because caches load lines in pairs
    static constexpr std::size_t apart = 128;

    /// Gradients of one word that became ready together.
    struct entry {
        std::atomic<std::uint64_t> head{0};  // the step in the upper half, the word's number below
        std::atomic<std::uint64_t> bits{0};
    };
    struct alignas(apart) rank_state {
        std::uint32_t step = 1;  // 0 is the step of entries that were never written
        std::uint32_t read = 0, taken = 0;
    };

    /// The words for a rank's marks in a step, padded so that no two ranks share a cache line.
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
    /// Makes an entry of the word's gradients that all ranks have and that aren't in an entry yet.
    /// The thread that sets a gradient's bit in taken_ makes its entry.
    void write_down(std::uint32_t step, std::uint32_t w) noexcept {
        std::uint64_t all = ~std::uint64_t{0};
        for (std::uint32_t q = 0; q < ranks_.size() && all != 0; ++q)
            all &= mark_of(q, step, w).load(std::memory_order_acquire);
        std::atomic<std::uint64_t>& taken = taken_of(step, w);
        all &= ~taken.load(std::memory_order_relaxed);
        if (all == 0) return;
        // relaxed: the reads of marks above acquire earlier writes; the entry below releases them.
        const std::uint64_t mine = all & ~taken.fetch_or(all, std::memory_order_relaxed);
        if (mine == 0) return;
        entry& e = entries_[ends_[step % 2].fetch_add(1, std::memory_order_relaxed)];
        e.bits.store(mine, std::memory_order_relaxed);
        e.head.store(std::uint64_t{step} << 32 | w, std::memory_order_release);
    }

    std::uint32_t gradients_, words_;
    std::vector<rank_state> ranks_;
    std::vector<std::atomic<std::uint64_t>> marks_;  // for each rank, of two steps in turn
    // gradients with an entry, of two steps in turn
    std::vector<std::atomic<std::uint64_t>> taken_;
    std::vector<entry> entries_;            // in the common order
    std::atomic<std::uint32_t> ends_[2]{};  // the number of entries in each of the two steps
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
