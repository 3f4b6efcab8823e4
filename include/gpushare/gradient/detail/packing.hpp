// SPDX-License-Identifier: Apache-2.0
// Moves arrays that lie anywhere on a device into one flat array, and back: one pass, in which
// elements change their type if both have different ones. The list of arrays goes with the launch.
//
//   packing<float, bfloat16, true> k{flat, {}, 0};   k.add(data, n);   stream.launch(k.shape(), k);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Most arrays of a launch: their list is 2 KiB of the 4 that a kernel's arguments may have.
inline constexpr std::uint32_t most_pieces = 128;

/// `Packs`: from the arrays to the flat one, else back.
template <class T, class Wire, bool Packs>
struct packing {
    struct piece {
        T* data;
        std::size_t end;  // behind its last element, in the flat array
    };

    Wire* flat;
    piece pieces[most_pieces];
    std::uint32_t count;

    /// False if the list is full.
    [[nodiscard]] bool add(T* data, std::size_t n) noexcept {
        if (count == most_pieces) return false;
        pieces[count] = {data, elements() + n};
        ++count;
        return true;
    }
    [[nodiscard]] GPUSHARE_HD std::size_t elements() const noexcept { return count == 0 ? 0 : pieces[count - 1].end; }
    /// So many blocks that each has some work, and a device some of each kind.
    [[nodiscard]] grid shape() const noexcept {
        constexpr std::size_t of_block = 8192;
        const std::size_t blocks = std::clamp<std::size_t>(elements() / of_block, 1, 256);
        return {.blocks = static_cast<std::uint32_t>(blocks), .threads = 256, .hold = {}};
    }

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        const element_range mine = shard_of(elements(), ctx.block_rank(), ctx.num_blocks(), grain);
        std::size_t begin = 0;
        for (std::uint32_t k = first_of(mine.begin, begin); k < count && begin < mine.end; ++k) {
            const std::size_t from = begin < mine.begin ? mine.begin : begin;
            const std::size_t to = pieces[k].end < mine.end ? pieces[k].end : mine.end;
            move(ctx, pieces[k].data + (from - begin), flat + from, to - from);
            begin = pieces[k].end;
        }
    }

private:
    static constexpr std::size_t grain = 64;  // where blocks are cut, so that vectors stay whole

    /// The array that has element `at` of the flat one, and where it begins there.
    [[nodiscard]] GPUSHARE_HD std::uint32_t first_of(std::size_t at, std::size_t& begin) const noexcept {
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

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
