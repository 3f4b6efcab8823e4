// SPDX-License-Identifier: Apache-2.0
// The all-reduce for the smallest sizes: each four bytes of data share a word with the epoch, so a reader that sees the epoch
// has the data. One trip between cores instead of two. (The "LL" protocol of NCCL.)
//
// Orders: a word is written and read in one piece, so relaxed suffices for the data. The first word of a call is released and
// acquired: it says that its writer has read everything of the epochs before, and hands over the slots to whatever algorithm
// writes them next. Epochs are compared as bits, never as numbers in the data's type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <gpushare/atomic_ref.hpp>
#include <gpushare/collective/detail/bundle.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/team.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Elements that are written and read together, and the words they take.
template <class T, class Context>
inline constexpr std::size_t flagged_width = bundle_width<Context, T>();
template <class T, class Context>
inline constexpr std::size_t flagged_words = flagged_width<T, Context> * sizeof(T) / 4;

/// Whether n elements fit, besides the word that tells the call. And whether the words can be trusted: a word that was
/// written 2^32 epochs ago would look new, so twice in 2^30 epochs they are wiped and the data goes another way.
GPUSHARE_EXEC_CHECK_DISABLE
template <class T, class Context>
[[nodiscard]] GPUSHARE_HD bool fits_flagged_words(const team<Context>& t, std::size_t n) noexcept {
    constexpr std::size_t width = flagged_width<T, Context>;
    const std::size_t room = channel_view::words_bytes(t.view().slot) / 8;
    if ((t.epoch() & 0x3fff'ffffU) < 2) {
        // Nobody reads them any more: all ranks have been through the epoch before.
        std::uint64_t* const words = t.view().words_of(t.rank(), t.lane(), t.epoch());
        for (std::size_t i = t.context().thread_rank(); i < room; i += t.context().num_threads())
            atomic_ref{words[i]}.store_relaxed(0);
        return false;
    }
    return (n + width - 1) / width * flagged_words<T, Context> + 1 <= room;
}

GPUSHARE_EXEC_CHECK_DISABLE
template <class T, class Context, class Op>
GPUSHARE_HD collective_fault by_flagged_words(team<Context>& t, std::uint32_t signature, const T* in, T* out,
                                              std::size_t n, const Op& op) noexcept {
    using A = accumulator_t<T, Op>;
    constexpr std::size_t width = flagged_width<T, Context>, words = flagged_words<T, Context>;
    using values = bundle<A, width>;
    Context& ctx = t.context();
    const std::uint64_t tag = std::uint64_t{t.epoch()} << 32;
    std::uint64_t* const mine = t.view().words_of(t.rank(), t.lane(), t.epoch());

    // Behind `enter`, which is a barrier: what the whole block has read before is released with it.
    if (ctx.thread_rank() == 0) atomic_ref{mine[0]}.store_release(tag | signature);
    for (std::size_t i = ctx.thread_rank() * width; i < n; i += ctx.num_threads() * width) {
        std::uint32_t piece[words] = {};
        if (i + width <= n) {
            std::memcpy(piece, in + i, sizeof piece);
        } else {
            T elements[width];
            for (std::size_t j = 0; j < width; ++j) elements[j] = i + j < n ? in[i + j] : T{};
            std::memcpy(piece, static_cast<const void*>(elements), sizeof piece);
        }
        std::uint64_t* const to = mine + 1 + i / width * words;
        for (std::size_t w = 0; w < words; ++w) atomic_ref{to[w]}.store_relaxed(tag | piece[w]);
    }
    t.report_waiting();

    constexpr std::uint32_t none = ~0U, differs = 1U << 31;
    std::uint32_t bad = none;
    for (std::uint32_t r = ctx.thread_rank(); r < t.ranks(); r += ctx.num_threads()) {
        std::uint64_t& first = t.view().words_of(r, t.lane(), t.epoch())[0];
        std::uint64_t told = 0;
        const bool came = t.wait_until([&] {
            told = atomic_ref{first}.load_relaxed();
            return told >> 32 == t.epoch();
        });
        if (!came)
            bad = r;
        else if (static_cast<std::uint32_t>(told) != signature && bad == none)
            bad = r | differs;
        // Of the same: nobody writes there until this rank has been at the next epoch.
        (void)atomic_ref{first}.load_acquire();
    }
    for (std::size_t i = ctx.thread_rank() * width; i < n && bad == none; i += ctx.num_threads() * width) {
        const auto take = [&](std::uint32_t r) {
            std::uint64_t* const from = t.view().words_of(r, t.lane(), t.epoch()) + 1 + i / width * words;
            alignas(16) std::uint32_t piece[words];
            // All at once: one wait for as many words as a thread takes, not one for each.
            const bool came = t.wait_until([&] {
                std::uint64_t others = 0;
                for (std::size_t w = 0; w < words; ++w) {
                    const std::uint64_t seen = atomic_ref{from[w]}.load_relaxed();
                    others |= seen ^ tag;
                    piece[w] = static_cast<std::uint32_t>(seen);
                }
                return others >> 32 == 0;
            });
            if (!came) bad = r;
            alignas(16) T elements[width];
            std::memcpy(static_cast<void*>(elements), piece, sizeof piece);
            return values::load(elements);
        };
        values x = take(0);
        for (std::uint32_t r = 1; r < t.ranks(); ++r) x.combine(op, take(r));
        x.finish(op, t.ranks());
        if (i + width <= n) {
            x.store(out + i);
        } else {
            alignas(16) T elements[width];
            x.store(elements);
            for (std::size_t j = 0; j < width; ++j)
                if (i + j < n) out[i + j] = elements[j];
        }
    }
    bad = ctx.reduce(bad, smaller_word{});
    if (bad != none) {
        t.fail((bad & differs) != 0 ? errc::mismatch : errc::deadline_exceeded, bad & ~differs);
        return t.fault();
    }
    return t.leave();
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
