// SPDX-License-Identifier: Apache-2.0
// Data partitions as range-v3 views, for host code. nvcc doesn't compile range-v3, so no file for
// nvcc may include this header.
//
//   for (auto rank : gpushare::views::ranks(p))
//       for (auto i : gpushare::views::indices(p, rank)) ...                 // the elements of the rank, ascending
//   for (auto part : gpushare::views::parts(all, rows)) ...                  // a span for each rank
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <range/v3/view/iota.hpp>
#include <range/v3/view/transform.hpp>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/partition/data_partition.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
/// Views of parts, for pipelines of range-v3.
namespace views {

/// The ranks, 0 to p.ranks() - 1.
template <data_partition P>
[[nodiscard]] auto ranks(const P& p) {
    return ::ranges::views::iota(std::uint32_t{0}, p.ranks());
}

/// The global indices of the rank's elements, in local order. The view is random access, and holds
/// a copy of `p`.
template <data_partition P>
[[nodiscard]] auto indices(const P& p, std::uint32_t rank) {
    return ::ranges::views::iota(std::uint64_t{0}, p.extent(rank)) |
           ::ranges::views::transform([p, rank](std::uint64_t j) { return p.global_index(rank, j); });
}

/// The rank's elements of an array, by reference. Throws operation_error (invalid_specification)
/// unless `all` has p.size() elements.
template <class T, data_partition P>
[[nodiscard]] auto elements(std::span<T> all, const P& p, std::uint32_t rank) {
    if (all.size() != p.size())
        raise({errc::invalid_specification, all.size(), 0, p.size(), reason::wrong_count}, {},
              "elements of a data partition");
    return indices(p, rank) |
           ::ranges::views::transform([all](std::uint64_t i) -> T& { return all[static_cast<std::size_t>(i)]; });
}

/// An array cut at the boundaries of ranks: a span for each rank. Otherwise works as elements().
template <class T, run_partition P>
[[nodiscard]] auto parts(std::span<T> all, const P& p) {
    if (all.size() != p.size())
        raise({errc::invalid_specification, all.size(), 0, p.size(), reason::wrong_count}, {},
              "elements of a data partition");
    return ranks(p) | ::ranges::views::transform([all, p](std::uint32_t rank) {
               return all.subspan(static_cast<std::size_t>(p.begin(rank)), static_cast<std::size_t>(p.extent(rank)));
           });
}

}  // namespace views
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
