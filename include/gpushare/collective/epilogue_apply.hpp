// SPDX-License-Identifier: Apache-2.0
// Applies an epilogue to rows of elements, without a collective: by the same code (detail/epilogue_run.hpp) that runs it
// behind an all-reduce.
//
//   const auto finish = gpushare::rms_norm(weight, 1e-6F) | gpushare::cast<gpushare::bfloat16>();
//   float scratch[4096];
//   gpushare::apply_rows(ctx, finish, {.rows = n, .width = 4096}, gpushare::from_rows(sums), scratch);
//
// For a collective of your own, pass a source that reduces the ranks' elements, and a table of the ranks' arrays:
//
//   struct my_source { template <class V> GPUSHARE_HD V load(const gpushare::place& at) const { return V{} + float(at.row); } };
//   const gpushare::shared_outputs outputs{arrays, ranks, finish.sharing};
//   gpushare::apply_rows(ctx, finish, range, my_source{}, scratch, outputs);
//
// It passes over each row once, and once more for each look of a row stage; in between the row lies in `scratch`.
//
// A chain of element-wise stages needs no scratch and is a kernel, for what stands between two engines' calls: one pass
// over memory, on any launcher. Host and device run the same code.
//
//   auto chain = gpushare::elements(x, width) | gpushare::bias(b) | gpushare::silu() | gpushare::into(y);
//   stream.launch({.blocks = 4, .threads = 256}, chain);
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/detail/epilogue_run.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The arrays that sharing stages write to: `of(rank, k)` is that of the kth such stage. A table with a row for each
/// rank, as epilogue::collect fills it; a collective has its own type with the same members.
struct shared_outputs {
    void* const* arrays;      ///< the table
    std::uint32_t of_ranks;   ///< rows of the table
    std::uint32_t of_stages;  ///< arrays in a row

    /// How many ranks have arrays.
    [[nodiscard]] GPUSHARE_HD std::uint32_t ranks() const noexcept { return of_ranks; }
    /// The array of a rank.
    [[nodiscard]] GPUSHARE_HD void* of(std::uint32_t rank, std::uint32_t k) const noexcept {
        return arrays[rank * of_stages + k];
    }
};

/// Elements that lie in memory row by row. `pitch` is the number of elements from one row to the next.
template <movable_number T>
struct row_source {
    const T* data;      ///< row 0
    std::size_t pitch;  ///< 0: the width

    /// The elements of `at`.
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V load(const place& at) const noexcept {
        return load_floats<V>(data + at.row * (pitch == 0 ? at.width : pitch) + at.column, at.count);
    }
};
/// Elements from `data` on.
template <movable_number T>
[[nodiscard]] GPUSHARE_HD constexpr row_source<T> from_rows(const T* data, std::size_t pitch = 0) noexcept {
    return {data, pitch};
}

/// Applies an epilogue to whole rows; called by all threads of a block, which go through the rows together.
///
/// `scratch` belongs to the block: `range.width` floats if there is a row stage, else null. Stores past the caches are
/// ordered before the calling thread's next release.
template <kernel_context Context, class... Stages, class Source, class Outputs = own_outputs>
GPUSHARE_HD void apply_rows(Context& ctx, const epilogue<Stages...>& mine, const row_range& range, const Source& source,
                            float* scratch = nullptr, const Outputs& outputs = {}) noexcept {
    detail::run_rows(ctx, mine, range, source, scratch, outputs);
}

/// Applies an epilogue without row stages to `count` elements from element `first` of the whole result on: they may begin
/// and end within a row. `range.first` and `range.rows` don't matter.
template <kernel_context Context, class... Stages, class Source, class Outputs = own_outputs>
GPUSHARE_HD void apply_elements(Context& ctx, const epilogue<Stages...>& mine, const row_range& range,
                                std::size_t first, std::size_t count, const Source& source,
                                const Outputs& outputs = {}) noexcept {
    static_assert(!epilogue<Stages...>::whole_rows, "a row stage needs whole rows: apply_rows");
    detail::run_widest(ctx, mine, source, nullptr, outputs, [&](auto&& run) {
        place at;
        at.width = range.width;
        at.streams = range.streams;
        if (count != 0) at.row = first / range.width;
        for (at.column = count == 0 ? 0 : first % range.width; count != 0; at.column = 0, ++at.row) {
            const std::size_t here = range.width - at.column < count ? range.width - at.column : count;
            at.shard_row = at.row - range.shard_first;
            run(at, at.column + here);
            count -= here;
        }
    });
    if (range.streams) finish_streaming();
}

/// `count` elements in rows of `width`, and what is done to each. A value that points to its arrays, and the kernel that does it: its
/// blocks have equal parts. The bits are the same for any number of blocks and threads.
template <movable_number T, class... Stages>
struct element_chain {
    const T* in = nullptr;       ///< the elements
    std::size_t count = 0;       ///< how many
    std::size_t width = 1;       ///< of a row, for stages with an element for each column
    epilogue<Stages...> list{};  ///< what is done

    /// Adds stages.
    template <detail::epilogue_part S>
    [[nodiscard]] friend constexpr auto operator|(const element_chain& c, const S& more) {
        const auto with = [&c]<class... All>(const epilogue<All...>& all) {
            return element_chain<T, All...>{c.in, c.count, c.width, all};
        };
        return with(detail::joined(c.list, detail::as_epilogue(more)));
    }

    /// The part of one block; called by all its threads.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context Context>
    GPUSHARE_HD void operator()(Context& ctx) const noexcept {
        constexpr std::size_t line = 64;  // elements: parts begin where a cache line does, if the array does
        const std::size_t lines = (count + line - 1) / line, blocks = ctx.num_blocks();
        const std::size_t each = (lines + blocks - 1) / blocks * line;
        const std::size_t first = ctx.block_rank() * each;
        if (first >= count) return;
        apply_elements(ctx, list, row_range{.rows = 0, .width = width}, first,
                       count - first < each ? count - first : each, from_rows(in));
    }
};

/// The beginning of a chain. `width` of 0: one row.
template <class R>
requires requires(const R& r) { std::span(r); }
[[nodiscard]] constexpr auto elements(const R& in, std::size_t width = 0) {
    using T = std::remove_cvref_t<decltype(*std::data(in))>;
    const std::size_t count = std::size(in);
    return element_chain<T>{std::data(in), count, width == 0 ? (count == 0 ? 1 : count) : width, {}};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
