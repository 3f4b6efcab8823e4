// SPDX-License-Identifier: Apache-2.0
// The other collectives: reduce_scatter, all_gather, broadcast, reduce, all_to_all, barrier. Data goes straight from the
// senders' buffers to the receivers', once: all ranks meet, each does its part, all part.
//
//   gpushare::reduce_scatter(me, in, out);         // in: size() * out.size() elements; rank r gets part r
//   gpushare::all_gather(me, in, out);             // out: size() * in.size() elements
//   gpushare::broadcast(me, data, 0);
//
// All take a deadline, return the fault (`try_` calls) or throw it, and combine as deterministically as all_reduce.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/all_reduce.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/team.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

struct barrier_body {
    static constexpr auto kind = collective_kind::barrier;
    static constexpr bool through_slots = true;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(team<Context>& t, std::uint32_t lanes) const {
        if (!t.meet(call_signature(kind, 0, 0, 0, lanes))) return t.fault();
        return t.leave();
    }
};

template <class T, class Op>
struct reduce_scatter_body {
    const T* in;
    T* out;
    std::size_t count;  // of one part
    Op op;
    static constexpr auto kind = collective_kind::reduce_scatter;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(team<Context>& t, std::uint32_t lanes) const {
        if (!t.meet(call_signature(kind, type_id<T>(), op_id<Op>(), count, lanes), in)) return t.fault();
        reduce_to_one<T>(t, op, t.rank() * count, part_of(count, t.lane(), lanes), out);
        return t.part();
    }
};

/// Everyone reads what the others have: writing would need a wait more where outputs are inputs.
template <class T>
struct all_gather_body {
    const T* in;
    T* out;
    std::size_t count;
    static constexpr auto kind = collective_kind::all_gather;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(team<Context>& t, std::uint32_t lanes) const {
        if (!t.meet(call_signature(kind, type_id<T>(), 0, count, lanes), in)) return t.fault();
        const element_range mine = part_of(count, t.lane(), lanes);
        for (std::uint32_t i = 0; i < t.ranks(); ++i) {
            const std::uint32_t r = (t.rank() + i) % t.ranks();  // not all at the same rank's
            copy_elements(t.context(), out + r * count + mine.begin,
                          static_cast<const T*>(t.told_by(r).in) + mine.begin, mine.size());
        }
        return t.part();
    }
};

template <class T>
struct broadcast_body {
    T* data;
    std::size_t count;
    std::uint32_t root;
    static constexpr auto kind = collective_kind::broadcast;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(team<Context>& t, std::uint32_t lanes) const {
        if (!t.meet(call_signature(kind, type_id<T>(), 0, count, lanes, root), data)) return t.fault();
        const element_range mine = part_of(count, t.lane(), lanes);
        if (t.rank() != root)
            copy_elements(t.context(), data + mine.begin, static_cast<const T*>(t.told_by(root).in) + mine.begin,
                          mine.size());
        return t.part();
    }
};

/// All ranks work, each on a part of the root's result.
template <class T, class Op>
struct reduce_body {
    const T* in;
    T* out;  // of the root
    std::size_t count;
    Op op;
    std::uint32_t root;
    static constexpr auto kind = collective_kind::reduce;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(team<Context>& t, std::uint32_t lanes) const {
        if (!t.meet(call_signature(kind, type_id<T>(), op_id<Op>(), count, lanes, root), in, out)) return t.fault();
        reduce_to_one<T>(t, op, 0, part_of(count, t.rank() * lanes + t.lane(), t.ranks() * lanes),
                         static_cast<T*>(t.told_by(root).out));
        return t.part();
    }
};

template <class T>
struct all_to_all_body {
    const T* in;
    T* out;
    std::size_t count;  // from one rank to one rank
    static constexpr auto kind = collective_kind::all_to_all;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(team<Context>& t, std::uint32_t lanes) const {
        if (!t.meet(call_signature(kind, type_id<T>(), 0, count, lanes), in)) return t.fault();
        const element_range mine = part_of(count, t.lane(), lanes);
        for (std::uint32_t i = 0; i < t.ranks(); ++i) {
            const std::uint32_t r = (t.rank() + i) % t.ranks();
            const T* const from = static_cast<const T*>(t.told_by(r).in) + t.rank() * count;
            copy_elements(t.context(), out + r * count + mine.begin, from + mine.begin, mine.size());
        }
        return t.part();
    }
};

[[nodiscard]] inline collective_fault wrong_sizes(const member& me, collective_kind what) noexcept {
    return {errc::mismatch, what, me.rank(), 0};
}

}  // namespace detail

/// Returns when all ranks have called it.
[[nodiscard]] inline collective_fault try_barrier(const member& me, instant deadline = never) {
    return detail::call(me, detail::barrier_body{}, deadline);
}

/// Rank r gets the combination of part r of all inputs. `out` may be that part of `in`.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_reduce_scatter(const member& me, std::span<const std::type_identity_t<T>> in,
                                                  std::span<T> out, Op op = {}, instant deadline = never) {
    if (in.size() != out.size() * me.size()) return detail::wrong_sizes(me, collective_kind::reduce_scatter);
    return detail::call(me, detail::reduce_scatter_body<T, Op>{in.data(), out.data(), out.size(), op}, deadline);
}

/// Every rank gets all inputs, in the order of the ranks. `in` may be this rank's part of `out`.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_all_gather(const member& me, std::span<const std::type_identity_t<T>> in,
                                              std::span<T> out, instant deadline = never) {
    if (out.size() != in.size() * me.size()) return detail::wrong_sizes(me, collective_kind::all_gather);
    return detail::call(me, detail::all_gather_body<T>{in.data(), out.data(), in.size()}, deadline);
}

/// Every rank gets what `root` has.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_broadcast(const member& me, std::span<T> data, std::uint32_t root,
                                             instant deadline = never) {
    if (root >= me.size()) return detail::wrong_sizes(me, collective_kind::broadcast);
    return detail::call(me, detail::broadcast_body<T>{data.data(), data.size(), root}, deadline);
}

/// `root` gets the combination of all inputs in its `out`, which may be its `in`; nobody else's `out` is used.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_reduce(const member& me, std::span<const std::type_identity_t<T>> in,
                                          std::span<T> out, std::uint32_t root, Op op = {}, instant deadline = never) {
    if (root >= me.size() || (me.rank() == root && in.size() != out.size()))
        return detail::wrong_sizes(me, collective_kind::reduce);
    return detail::call(me, detail::reduce_body<T, Op>{in.data(), out.data(), in.size(), op, root}, deadline);
}

/// Part q of rank r's input becomes part r of rank q's output. Not in place.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_all_to_all(const member& me, std::span<const std::type_identity_t<T>> in,
                                              std::span<T> out, instant deadline = never) {
    if (in.size() != out.size() || in.size() % me.size() != 0 || (in.data() == out.data() && !in.empty()))
        return detail::wrong_sizes(me, collective_kind::all_to_all);
    return detail::call(me, detail::all_to_all_body<T>{in.data(), out.data(), in.size() / me.size()}, deadline);
}

// The same, but throwing operation_error.

inline void barrier(const member& me, instant deadline = never) { raise_fault(try_barrier(me, deadline)); }

template <reducible T, class Op = sum>
void reduce_scatter(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out, Op op = {},
                    instant deadline = never) {
    raise_fault(try_reduce_scatter(me, in, out, op, deadline));
}
template <class T>
void all_gather(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out,
                instant deadline = never) {
    raise_fault(try_all_gather(me, in, out, deadline));
}
template <class T>
void broadcast(const member& me, std::span<T> data, std::uint32_t root, instant deadline = never) {
    raise_fault(try_broadcast(me, data, root, deadline));
}
template <reducible T, class Op = sum>
void reduce(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out, std::uint32_t root,
            Op op = {}, instant deadline = never) {
    raise_fault(try_reduce(me, in, out, root, op, deadline));
}
template <class T>
void all_to_all(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out,
                instant deadline = never) {
    raise_fault(try_all_to_all(me, in, out, deadline));
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
