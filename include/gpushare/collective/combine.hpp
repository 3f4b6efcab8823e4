// SPDX-License-Identifier: Apache-2.0
// Combines arrays that are all here, as a collective combines those of its ranks: to the same bits. For who brings other ranks'
// elements by means of its own, over a network say.
//
//   gpushare::combine(3, [&](std::uint32_t r) { return parts[r].data(); }, std::span(out), gpushare::average{});
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/detail/workspace.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/shard.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// out[i] = op of from(0)[i], from(1)[i], ... up to from(parts - 1), in this order, computed in float or wider and rounded once.
/// from(r) points to as many elements as `out` has, and may be `out` itself. There is at least one part.
template <reducible T, class From, class Op = sum>
requires std::is_invocable_r_v<const T*, const From&, std::uint32_t>
void combine(std::uint32_t parts, const From& from, std::span<T> out, const Op& op = {}) noexcept {
    detail::thread_context ctx;
    const auto one_by_one = [&](element_range some) {
        detail::reduce_elements<T>(ctx, op, parts, some, from, detail::single_output<T>{out.data()});
    };
    if constexpr (detail::combines_lines<T, Op>) {
        constexpr std::uint32_t most = 16;
        const element_range lines = detail::whole_lines<T>(out.data(), {0, out.size()});
        if (lines.size() != 0 && parts <= most && detail::lines_pay<T, Op>(parts)) {
            detail::peer_signal arrays[most];
            for (std::uint32_t r = 0; r < parts; ++r) arrays[r].in = from(r);
            one_by_one({0, lines.begin});
            detail::combine_lines_to_one<T>(op, arrays, parts, 0, lines, out.data());
            return one_by_one({lines.end, out.size()});
        }
    }
    one_by_one({0, out.size()});
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
