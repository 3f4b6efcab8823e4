// SPDX-License-Identifier: Apache-2.0
// All-reduce: every rank gets the combination of all ranks' elements, with the same bits on every rank, at every run, by
// every algorithm, because the ranks of an element are always combined in their order, in float or wider.
//
//   gpushare::all_reduce(me, std::span<const float>(in), std::span(out));                 // a sum, out of place
//   gpushare::all_reduce(me, in, in, gpushare::average{}, deadline);                      // in place
//
// Called by one thread per rank. Any length, any alignment that T allows, any number of ranks from 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/atomic_ref.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/bundle.hpp>
#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/ring.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/team.hpp>
#include <gpushare/collective/thread_context.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// One rank's part of an all-reduce, lane by lane: the same body for a thread, a block of the host, a block of a device.
template <class T, class Op>
struct all_reduce_body {
    const T* in;
    T* out;
    std::size_t count;
    Op op;
    all_reduce_plan plan;

    static constexpr auto kind = collective_kind::all_reduce;
    static constexpr bool through_slots = true;  // where ranks don't reach each other's buffers

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(team<Context>& t, std::uint32_t lanes) const {
        const element_range mine = part_of(count, t.lane(), lanes);
        switch (plan.how) {
            case algorithm::one_shot:
                if (mine.size() * sizeof(T) > t.view().slot) break;
                return one_shot(t, lanes, mine);
            case algorithm::ring:
                if (t.view().slot < smallest_ring_slot) break;
                return by_ring(t, signature(lanes), in + mine.begin, out + mine.begin, mine.size(), op);
            case algorithm::two_shot: break;
        }
        if (!t.view().direct) return by_ring(t, signature(lanes), in + mine.begin, out + mine.begin, mine.size(), op);
        return two_shot(t, lanes, mine);
    }

    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t signature(std::uint32_t lanes) const {
        return call_signature(kind, type_id<T>(), op_id<Op>(), count, lanes);
    }

private:
    /// Everybody's elements are in the slots: one wait, and nobody reads a user's buffer but its own rank.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault one_shot(team<Context>& t, std::uint32_t lanes, element_range mine) const {
        T* const slot = reinterpret_cast<T*>(t.slot_of(t.rank()));
        copy_elements(t.context(), slot, in + mine.begin, mine.size());
        if (!t.meet(signature(lanes))) return t.fault();
        reduce_elements<T>(
            t.context(), op, t.ranks(), {0, mine.size()},
            [&](std::uint32_t r) { return reinterpret_cast<const T*>(t.slot_of(r)); },
            single_output<T>{out + mine.begin});
        return t.leave();
    }

    /// A part of the elements straight from all inputs to all outputs: the least traffic there is, 2RS bytes. Within the
    /// lane's own elements, because other lanes may go another way.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault two_shot(team<Context>& t, std::uint32_t lanes, element_range of_lane) const {
        if (!t.meet(signature(lanes), in, out)) return t.fault();
        // All ranks cut at the cache lines of rank 0's output, which are mostly those of the others' too: nobody writes to a
        // line that another rank writes to.
        constexpr std::size_t grain = cache_line / sizeof(T);
        const std::size_t first = reinterpret_cast<std::uintptr_t>(t.told_by(0).out) / sizeof(T) + of_lane.begin;
        const element_range part = part_of_shifted(of_lane.size(), first % grain, t.rank(), t.ranks(), grain);
        return reduce_to_all<T>(t, op, {of_lane.begin + part.begin, of_lane.begin + part.end}, plan);
    }
};

/// Calls a body in the calling thread.
template <class Body>
collective_fault call(const member& me, const Body& body, instant deadline) {
    thread_context ctx{me.view().busy_turns};
    team<thread_context> t(ctx, me.view(), me.rank(), 0, Body::kind, deadline.time_since_epoch().count());
    if (!t.enter()) return t.fault();
    return body(t, 1);
}

}  // namespace detail

/// Combines `in` of all ranks into `out` of all ranks, which have the same size everywhere and are the same memory or don't
/// overlap. Waits for the other ranks until `deadline` (of the steady clock). The fault, if any, is the same on every rank
/// that was in the collective; what `out` holds then is unspecified.
/// Throws operation_error (errc::mismatch) if the spans differ in size.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_all_reduce(const member& me, std::span<const std::type_identity_t<T>> in,
                                              std::span<T> out, Op op = {}, instant deadline = never) {
    if (in.size() != out.size()) return {errc::mismatch, collective_kind::all_reduce, me.rank(), 0};
    const all_reduce_plan plan = me.tuning().plan(me.size(), in.size_bytes());
    return detail::call(me, detail::all_reduce_body<T, Op>{in.data(), out.data(), in.size(), op, plan}, deadline);
}

/// The same, but throws operation_error.
template <reducible T, class Op = sum>
void all_reduce(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out, Op op = {},
                instant deadline = never) {
    raise_fault(try_all_reduce(me, in, out, op, deadline));
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
