// SPDX-License-Identifier: Apache-2.0
// The algorithms of a plain all-reduce, as one body that rank threads, blocks of the host backend
// and blocks of a device run.
//
//   all_reduce_body<float, sum>{in, out, n, {}, {algorithm::one_shot}}(session, blocks)
//
// If the elements don't fit the plan's algorithm, the body falls back to an algorithm that always
// works. The ring is in ring.hpp.
//
// Faster device kernels use some techniques that these algorithms don't use, for these reasons:
//  - Data with a flag in each word (NCCL's LL) saves one shot its wait, about 1.3 us on one device,
//    but halves the bandwidth.
//  - Sums in the switch (NVLink SHARP, multimem) leave the order of the ranks to the switch, so
//    results change from run to run.
//  - Fused kernels could know R when they are compiled, but then each pipeline would be compiled
//    four times. They keep the addresses of up to eight inputs in registers, and four loads under
//    way; eight loads would take 20 more registers.
//  - Kernels for a known R of 3, 5 to 7 and 16 would need another loop in each kernel for each
//    number, and machines have 2, 4 or 8 devices.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/ring.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A rank's part in an all-reduce, block by block: the same body for a thread, a block of the host
/// and a block of a device.
template <class T, class Op>
struct all_reduce_body {
    const T* in;
    T* out;
    std::size_t count;
    Op op;
    all_reduce_plan plan;

    static constexpr auto kind = collective_kind::all_reduce;
    // the elements go through slots, for ranks that don't reach each other's buffers
    static constexpr bool through_slots = true;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        const element_range mine = shard_of(count, t.block(), blocks, vector_grain);
        switch (plan.how) {
            case algorithm::one_shot:
                if (mine.size() * sizeof(T) > t.view().slot) break;
                return one_shot(t, blocks, mine);
            case algorithm::ring:
                if (t.view().slot < smallest_ring_slot) break;
                return by_ring(t, signature(blocks), in + mine.begin, out + mine.begin, mine.size(), op);
            case algorithm::two_shot: break;
        }
        if (!t.view().direct) return by_ring(t, signature(blocks), in + mine.begin, out + mine.begin, mine.size(), op);
        return two_shot(t, blocks, mine);
    }

    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t signature(std::uint32_t blocks) const {
        return call_signature(kind, type_id<T>(), op_id<Op>(), count, blocks);
    }

private:
    /// The one-shot. The elements of all ranks are in the slots, so there is one wait, and no rank
    /// reads another rank's user buffers.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault one_shot(session<Context>& t, std::uint32_t blocks, element_range mine) const {
        T* const slot = reinterpret_cast<T*>(t.slot_of(t.rank()));
        copy_elements(t.context(), slot, in + mine.begin, mine.size());
        if (!t.meet(signature(blocks))) return t.fault();
        reduce_elements<T>(
            t.context(), op, t.ranks(), {0, mine.size()},
            [&](std::uint32_t r) { return reinterpret_cast<const T*>(t.slot_of(r)); },
            single_output<T>{out + mine.begin});
        return t.leave();
    }

    /// The two-shot. Combines a part of the elements straight from all inputs to all outputs, with
    /// the least possible traffic, 2RS bytes. The part stays within the block's own elements,
    /// because other blocks may use another algorithm.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault two_shot(session<Context>& t, std::uint32_t blocks, element_range of_block) const {
        if (!t.meet(signature(blocks), in, out)) return t.fault();
        // All ranks cut at the cache lines of rank 0's output, so that no two ranks write to the
        // same line. In most cases, the other outputs have their lines at the same places.
        constexpr std::size_t grain = cache_line_bytes / sizeof(T);
        const std::size_t first = reinterpret_cast<std::uintptr_t>(t.signal_from(0).out) / sizeof(T) + of_block.begin;
        const element_range part = shard_of_shifted(of_block.size(), first % grain, t.rank(), t.ranks(), grain);
        return reduce_to_all<T>(t, op, {of_block.begin + part.begin, of_block.begin + part.end}, plan);
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
