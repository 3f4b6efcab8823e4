// SPDX-License-Identifier: Apache-2.0
// Collectives whose parts differ in length, as bodies that rank threads, blocks of the host backend
// and blocks of a device run. The lengths are in memory that the rank reads when the body runs, so
// a captured launch takes the current lengths.
//
//   all_gatherv_body<float>{in, in_room, out, out_room, counts}(session, blocks)
//
// If a rank's own lengths don't fit, the rank ends the collective before it touches any buffer,
// with errc::mismatch and its own number. If two ranks have different lengths, they notice when
// they meet.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The parts of all ranks, one after the other.
struct unequal_parts {
    const std::uint64_t* counts;  // the numbers of elements
    std::uint32_t ranks;

    /// Where the part of a rank begins.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::size_t begin(std::uint32_t rank) const noexcept {
        std::size_t sum = 0;
        for (std::uint32_t r = 0; r < rank; ++r) sum += counts[r];
        return sum;
    }
    /// Whether `room` elements hold all parts; false also if the sum of the parts doesn't fit into
    /// 64 bits.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool fit(std::size_t room) const noexcept {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            if (counts[r] > room) return false;
            room -= counts[r];
        }
        return true;
    }
    /// A hash of the counts, for a call's signature.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::size_t layout() const noexcept {
        std::uint64_t mix = ranks;
        for (std::uint32_t r = 0; r < ranks; ++r) {
            mix = (mix ^ counts[r]) * 0x9e37'79b9'7f4a'7c15U;
            mix ^= mix >> 29;
        }
        return mix;
    }
};

/// Tells these calls apart from calls with equal parts.
template <class T>
[[nodiscard]] GPUSHARE_HD constexpr std::uint32_t unequal_type() noexcept {
    return type_id<T>() | 512U;
}

/// Ends the collective before any buffer is touched, because this rank's lengths don't fit into its
/// arrays.
GPUSHARE_EXEC_CHECK_DISABLE
template <class Context>
GPUSHARE_HD collective_fault refuse(session<Context>& t, std::uint32_t who) noexcept {
    t.fail(errc::mismatch, who);
    return t.fault();
}

/// After `meet`: reads this block's shard of each rank's part to its place in `out`.
GPUSHARE_EXEC_CHECK_DISABLE
template <class T, class Context>
GPUSHARE_HD void gather_unequal(session<Context>& t, T* out, const unequal_parts& parts,
                                std::uint32_t blocks) noexcept {
    std::size_t at = parts.begin(t.rank());
    for (std::uint32_t i = 0; i < t.ranks(); ++i) {
        const std::uint32_t r = (t.rank() + i) % t.ranks();  // each rank begins at a different rank
        if (r == 0) at = 0;
        const element_range mine = shard_of(parts.counts[r], t.block(), blocks, vector_grain);
        copy_elements<4>(t.context(), out + at + mine.begin, static_cast<const T*>(t.signal_from(r).in) + mine.begin,
                         mine.size());
        at += parts.counts[r];
    }
}

/// `counts` has the lengths of all ranks' inputs, with the same numbers on every rank.
template <class T>
struct all_gatherv_body {
    const T* in;
    std::size_t in_room;
    T* out;
    std::size_t out_room;
    const std::uint64_t* counts;
    static constexpr auto kind = collective_kind::all_gather;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        const unequal_parts parts{counts, t.ranks()};
        if (counts[t.rank()] > in_room || !parts.fit(out_room)) return refuse(t, t.rank());
        if (!t.meet(call_signature(kind, unequal_type<T>(), 0, parts.layout(), blocks), in)) return t.fault();
        gather_unequal(t, out, parts, blocks);
        return t.finish();
    }
};

/// `counts` has the lengths of all ranks' outputs, with the same numbers on every rank.
template <class T, class Op>
struct reduce_scatterv_body {
    const T* in;
    std::size_t in_room;
    T* out;
    std::size_t out_room;
    const std::uint64_t* counts;
    Op op;
    static constexpr auto kind = collective_kind::reduce_scatter;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        const unequal_parts parts{counts, t.ranks()};
        const std::size_t mine = counts[t.rank()];
        if (mine > out_room || !parts.fit(in_room)) return refuse(t, t.rank());
        if (!t.meet(call_signature(kind, unequal_type<T>(), op_id<Op>(), parts.layout(), blocks), in)) return t.fault();
        reduce_to_one<T>(t, op, parts.begin(t.rank()), shard_of(mine, t.block(), blocks, vector_grain), out);
        return t.finish();
    }
};

/// A rank sends `sends[q]` elements to rank q and gets `receives[q]` elements from rank q. Each
/// pair of ranks must agree.
template <class T>
struct all_to_allv_body {
    const T* in;
    std::size_t in_room;
    T* out;
    std::size_t out_room;
    const std::uint64_t* sends;
    const std::uint64_t* receives;
    static constexpr auto kind = collective_kind::all_to_all;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        const unequal_parts to_others{sends, t.ranks()}, from_others{receives, t.ranks()};
        if (!to_others.fit(in_room) || !from_others.fit(out_room)) return refuse(t, t.rank());
        if (!t.meet_telling(call_signature(kind, unequal_type<T>(), 0, 0, blocks), [&](peer_signal& mine, auto to) {
                mine.in = in + to_others.begin(to);
                mine.length = sends[to];
            }))
            return t.fault();
        // All threads of all blocks get the same result, so no thread is left waiting at a barrier.
        for (std::uint32_t r = 0; r < t.ranks(); ++r)
            if (t.signal_from(r).length != receives[r]) return refuse(t, r);
        gather_unequal(t, out, from_others, blocks);
        return t.finish();
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
