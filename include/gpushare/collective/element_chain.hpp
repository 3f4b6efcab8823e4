// SPDX-License-Identifier: Apache-2.0
// Element-wise operations one after the other in one pass over memory, by the stages that follow an all-reduce, without one: what
// stands between two engines' calls.
//
//   auto chain = gpushare::elements(x, width) | gpushare::bias(b) | gpushare::silu() | gpushare::into(y);
//   stream.launch({.blocks = 4, .threads = 256}, chain);                // a kernel, on any launcher: host and device run the same code
//
// Stages that look at rows first (rms_norm) need scratch: apply_rows in epilogue_apply.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epilogue_apply.hpp>
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

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
