// SPDX-License-Identifier: Apache-2.0
// Packs arrays that are anywhere on a device into one flat array, and unpacks them, in one pass. If
// the two sides have different types, elements are converted. The list of arrays is an argument of
// the launch. This header also has the other kernels of gradients on devices.
//
//   packing<float, bfloat16, true> k{flat, {}};   k.list.add({data, n});   stream.launch(k.shape(), k);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/atomic_ref.hpp>
#include <gpushare/detail/device_work.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The most arrays of a launch. A kernel's arguments take at most 4 KiB. The list of arrays takes 2
/// KiB, or 3 KiB with error feedback.
inline constexpr std::uint32_t most_pieces = 128;
inline constexpr std::size_t packing_grain = 64;  // the unit of blocks' parts: vectors stay whole

/// The number of the listed array that has element `at` of the flat array. Sets `begin` to where
/// the listed array begins in the flat array.
template <class Piece>
[[nodiscard]] GPUSHARE_HD std::uint32_t first_piece(const Piece* pieces, std::uint32_t count, std::size_t at,
                                                    std::size_t& begin) noexcept {
    std::uint32_t low = 0, high = count;
    while (low < high) {
        const std::uint32_t middle = (low + high) / 2;
        if (pieces[middle].end <= at)
            low = middle + 1;
        else
            high = middle;
    }
    begin = low == 0 ? 0 : pieces[low - 1].end;
    return low;
}

/// The list of a launch's arrays. `end` of a piece is one past the array's last element, in the
/// flat array.
template <class Piece>
struct piece_list {
    Piece pieces[most_pieces];
    std::uint32_t count;

    /// Adds an array of p.end elements. Returns false if the list is full.
    [[nodiscard]] bool add(Piece p) noexcept {
        if (count == most_pieces) return false;
        p.end += elements();
        pieces[count++] = p;
        return true;
    }
    [[nodiscard]] GPUSHARE_HD std::size_t elements() const noexcept { return count == 0 ? 0 : pieces[count - 1].end; }

    /// Calls f(array, its beginning in the flat array, its part of the flat array) for each array
    /// with elements in this block's part.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C, class F>
    GPUSHARE_HD void each_part(const C& ctx, const F& f) const {
        const element_range mine = shard_of(elements(), ctx.block_rank(), ctx.num_blocks(), packing_grain);
        std::size_t begin = 0;
        for (std::uint32_t k = first_piece(pieces, count, mine.begin, begin); k < count && begin < mine.end; ++k) {
            const std::size_t end = pieces[k].end;
            const element_range part{begin < mine.begin ? mine.begin : begin, end < mine.end ? end : mine.end};
            f(pieces[k], begin, part);
            begin = end;
        }
    }
};

/// Calls f(i) in this block's threads for the elements i of the block's part of `count` elements.
GPUSHARE_EXEC_CHECK_DISABLE
template <class C, class F>
GPUSHARE_HD void each_of_block(const C& ctx, std::size_t count, const F& f) {
    const element_range mine = shard_of(count, ctx.block_rank(), ctx.num_blocks(), packing_grain);
    for (std::size_t i = mine.begin + ctx.thread_rank(); i < mine.end; i += ctx.num_threads()) f(i);
}

/// Copies the arrays to the flat array if `Packs`, or else back.
template <class T, class Wire, bool Packs>
struct packing {
    struct piece {
        T* data;
        std::size_t end;
    };

    Wire* flat;
    piece_list<piece> list;

    [[nodiscard]] grid shape() const noexcept { return grid_of(list.elements()); }

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        list.each_part(ctx, [&](const piece& p, std::size_t begin, const element_range& part) {
            move(ctx, p.data + (part.begin - begin), flat + part.begin, part.size());
        });
    }

private:
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD static void move(C& ctx, T* data, Wire* wire, std::size_t n) noexcept {
        if constexpr (Packs)
            convert(ctx, static_cast<const T*>(data), wire, n);
        else
            convert(ctx, static_cast<const Wire*>(wire), data, n);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C, class From, class To>
    GPUSHARE_HD static void convert(C& ctx, const From* from, To* to, std::size_t n) noexcept {
        constexpr std::uint32_t width = std::is_same_v<From, To> ? packed<To>::width : floats<8>::lanes;
        const std::size_t whole = n / width * width;
        for (std::size_t i = ctx.thread_rank() * width; i < whole; i += ctx.num_threads() * width) {
            if constexpr (std::is_same_v<From, To>)
                store_packed(to + i, load_packed(from + i));
            else
                store_floats(to + i, load_floats<floats<8>>(from + i));
        }
        for (std::size_t i = whole + ctx.thread_rank(); i < n; i += ctx.num_threads()) {
            if constexpr (std::is_same_v<From, To>)
                to[i] = from[i];
            else
                to[i] = static_cast<To>(static_cast<float>(from[i]));
        }
    }
};

/// Whether a float is neither infinite nor NaN, by its bits: the same on host and device.
[[nodiscard]] GPUSHARE_HD constexpr bool is_finite(float x) noexcept {
    return (__builtin_bit_cast(std::uint32_t, x) & 0x7f80'0000U) != 0x7f80'0000U;
}

/// Packs floats into 16 bits with error feedback, as to_wire (gradient/wire.hpp) does. Adds each
/// element's residual, rounds, and keeps the new residual `next` elements further on, so that a
/// step can be packed again, or forgotten.
template <class Wire>
struct packing_owing {
    struct piece {
        const float* data;
        float* owed;
        std::size_t end;
    };

    Wire* flat;
    std::ptrdiff_t next;
    piece_list<piece> list;

    [[nodiscard]] grid shape() const noexcept { return grid_of(list.elements()); }

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        list.each_part(ctx, [&](const piece& p, std::size_t begin, const element_range& part) {
            for (std::size_t i = part.begin + ctx.thread_rank(); i < part.end; i += ctx.num_threads()) {
                float* const owed = p.owed + (i - begin);
                const float x = p.data[i - begin] + *owed;
                flat[i] = static_cast<Wire>(x);
                const float rest = x - static_cast<float>(flat[i]);
                owed[next] = is_finite(rest) ? rest : 0.0F;
            }
        });
    }
};

/// Raises a flag if an element is infinite or NaN.
template <class T>
struct finite_look {
    const T* data;
    std::size_t count;
    std::uint32_t* flag;
    [[nodiscard]] grid shape() const noexcept { return grid_of(count); }

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        bool found = false;
        each_of_block(ctx, count, [&](std::size_t i) {
            if constexpr (std::is_same_v<T, double>)
                found = found || (__builtin_bit_cast(std::uint64_t, data[i]) >> 52 & 0x7ffU) == 0x7ffU;
            else
                found = found || !is_finite(static_cast<float>(data[i]));
        });
        if (found) atomic_ref{*flag}.store_relaxed(1U);  // all threads store the same
    }
};

/// Sets all elements.
template <class T>
struct fill_elements {
    T* data;
    std::size_t count;
    T value;
    [[nodiscard]] grid shape() const noexcept { return grid_of(count); }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        each_of_block(ctx, count, [&](std::size_t i) { data[i] = value; });
    }
};

/// Divides all elements, computing in double for doubles and in float for other types.
template <class T>
struct divide_elements {
    using wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    T* data;
    std::size_t count;
    wide by;
    [[nodiscard]] grid shape() const noexcept { return grid_of(count); }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        each_of_block(ctx, count, [&](std::size_t i) { data[i] = static_cast<T>(static_cast<wide>(data[i]) / by); });
    }
};

/// Adds one rank's choice of top-k. Each rank's choice has a launch of its own, in the order of
/// ranks, between zeros and the division. A rank's places are all different, so the order within a
/// launch doesn't matter.
struct add_chosen {
    float* data;
    std::size_t count;
    const std::uint32_t* places;
    const float* values;
    std::size_t chosen;
    [[nodiscard]] grid shape() const noexcept { return grid_of(chosen); }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        each_of_block(ctx, chosen, [&](std::size_t j) {
            if (places[j] < count) data[places[j]] += values[j];
        });
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
