// SPDX-License-Identifier: Apache-2.0
// The bodies of all collectives but the all-reduce. Rank threads, blocks of the host backend and
// blocks of a device run the same bodies: all ranks meet, each rank moves its part straight from
// the senders' buffers to the receivers', and all ranks finish.
//
//   broadcast_body<float>{data, n, root}(session, blocks)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

struct barrier_body {
    static constexpr auto kind = collective_kind::barrier;
    static constexpr bool through_slots = true;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        if (!t.meet(call_signature(kind, 0, 0, 0, blocks))) return t.fault();
        return t.leave();
    }
};

template <class T, class Op>
struct reduce_scatter_body {
    const T* in;
    T* out;
    std::size_t count;  // elements of a part
    Op op;
    static constexpr auto kind = collective_kind::reduce_scatter;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        if (!t.meet(call_signature(kind, type_id<T>(), op_id<Op>(), count, blocks), in)) return t.fault();
        reduce_to_one<T>(t, op, t.rank() * count, shard_of(count, t.block(), blocks, vector_grain), out);
        return t.finish();
    }
};

/// After `meet`: reads this block's shard of `count` elements from each rank, beginning `skip`
/// elements after the signalled address, into `out`, rank after rank. Each rank reads the other
/// ranks' data, because writing would need one more wait if outputs are inputs.
GPUSHARE_EXEC_CHECK_DISABLE
template <class T, class Context>
GPUSHARE_HD void gather_parts(session<Context>& t, T* out, std::size_t count, std::size_t skip,
                              std::uint32_t blocks) noexcept {
    const element_range mine = shard_of(count, t.block(), blocks, vector_grain);
    for (std::uint32_t i = 0; i < t.ranks(); ++i) {
        const std::uint32_t r = (t.rank() + i) % t.ranks();  // each rank begins at a different rank
        const T* const from = static_cast<const T*>(t.signal_from(r).in) + skip;
        copy_elements<4>(t.context(), out + r * count + mine.begin, from + mine.begin, mine.size());
    }
}

template <class T>
struct all_gather_body {
    const T* in;
    T* out;
    std::size_t count;
    static constexpr auto kind = collective_kind::all_gather;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        if (!t.meet(call_signature(kind, type_id<T>(), 0, count, blocks), in)) return t.fault();
        gather_parts(t, out, count, 0, blocks);
        return t.finish();
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
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        if (!t.meet(call_signature(kind, type_id<T>(), 0, count, blocks, root), data)) return t.fault();
        const element_range mine = shard_of(count, t.block(), blocks, vector_grain);
        if (t.rank() != root)
            copy_elements<4>(t.context(), data + mine.begin, static_cast<const T*>(t.signal_from(root).in) + mine.begin,
                             mine.size());
        return t.finish();
    }
};

/// Every rank combines a part of the root's result.
template <class T, class Op>
struct reduce_body {
    const T* in;
    T* out;  // the root's output
    std::size_t count;
    Op op;
    std::uint32_t root;
    static constexpr auto kind = collective_kind::reduce;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        if (!t.meet(call_signature(kind, type_id<T>(), op_id<Op>(), count, blocks, root), in, out)) return t.fault();
        reduce_to_one<T>(t, op, 0, shard_of(count, t.rank() * blocks + t.block(), t.ranks() * blocks, vector_grain),
                         static_cast<T*>(t.signal_from(root).out));
        return t.finish();
    }
};

/// The threads of the context exchange n elements of two arrays that don't overlap.
GPUSHARE_EXEC_CHECK_DISABLE
template <class Context, class T>
GPUSHARE_HD void swap_elements(Context& ctx, T* a, T* b, std::size_t n) noexcept {
    if constexpr (is_one_thread<Context>) {
        constexpr std::size_t most = 4096;
        std::byte held[most];
        auto* const x = reinterpret_cast<std::byte*>(a);
        auto* const y = reinterpret_cast<std::byte*>(b);
        for (std::size_t at = 0; at < n * sizeof(T); at += most) {
            const std::size_t size = n * sizeof(T) - at < most ? n * sizeof(T) - at : most;
            std::memcpy(held, x + at, size);
            std::memcpy(x + at, y + at, size);
            std::memcpy(y + at, held, size);
        }
    } else {
        constexpr std::size_t width = packed<T>::width;
        const std::size_t whole = n / width * width;
        for (std::size_t i = ctx.thread_rank() * width; i < whole; i += ctx.num_threads() * width) {
            const packed<T> x = load_packed(a + i), y = load_packed(b + i);
            store_packed(a + i, y);
            store_packed(b + i, x);
        }
        for (std::size_t i = whole + ctx.thread_rank(); i < n; i += ctx.num_threads()) {
            const T x = a[i];
            a[i] = b[i];
            b[i] = x;
        }
    }
}

/// All ranks are in place, with `in` equal to `out`, or none is.
template <class T>
struct all_to_all_body {
    const T* in;
    T* out;
    std::size_t count;  // elements from one rank to another
    static constexpr auto kind = collective_kind::all_to_all;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        const bool in_place = in == out && count != 0;
        if (!t.meet(call_signature(kind, type_id<T>(), 0, count, blocks, in_place ? 1 : 0), in, out)) return t.fault();
        if (in_place)
            swap_parts(t, blocks);
        else
            gather_parts(t, out, count, t.rank() * count, blocks);
        return t.finish();
    }

private:
    /// Exchanges the data that two ranks have for each other. One rank moves the first half and the
    /// other rank moves the rest, so the two ranks never touch the same element.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD void swap_parts(session<Context>& t, std::uint32_t blocks) const noexcept {
        for (std::uint32_t i = 1; i < t.ranks(); ++i) {
            const std::uint32_t r = (t.rank() + i) % t.ranks();
            const element_range half = shard_of(count, t.rank() < r ? 0 : 1, 2, vector_grain);
            const element_range mine = shard_of(half.size(), t.block(), blocks, vector_grain);
            const std::size_t first = half.begin + mine.begin;
            swap_elements(t.context(), out + r * count + first,
                          static_cast<T*>(t.signal_from(r).out) + t.rank() * count + first, mine.size());
        }
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
