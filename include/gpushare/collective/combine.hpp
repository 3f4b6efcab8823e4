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
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// out[i] = op of from(0)[i], from(1)[i], ... up to from(parts - 1), in this order, computed in float or wider and rounded once.
/// from(r) points to as many elements as `out` has, and may be `out` itself. There is at least one part.
template <reducible T, class From, class Op = sum>
requires std::is_invocable_r_v<const T*, const From&, std::uint32_t>
void combine(std::uint32_t parts, const From& from, std::span<T> out, const Op& op = {}) noexcept {
    detail::thread_context ctx;
    detail::reduce_elements<T>(ctx, op, parts, {0, out.size()}, from, detail::single_output<T>{out.data()});
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
