// SPDX-License-Identifier: Apache-2.0
// Plain loops that erase from vectors and plain lists, and that search a range. The standard
// library unrolls its loop four times, so each condition is compiled eight times, and
// std::ranges::any_of takes ten functions. Headers that most programs compile use these loops
// instead.
//
//   std::vector<int> v{1, 2, 3};
//   gpushare::detail::erase_where(v, [](int i) { return i > 1; });      // v is {1}
#pragma once

#include <concepts>
#include <cstddef>
#include <utility>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Removes the elements for which `goes` is true, calling it once for each element, in order.
/// Returns the number of removed elements.
template <class List, std::predicate<const typename List::value_type&> F>
std::size_t erase_where(List& from, F goes) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < from.size(); ++i) {
        if (goes(std::as_const(from[i]))) continue;
        if (kept != i) from[kept] = std::move(from[i]);
        ++kept;
    }
    const std::size_t gone = from.size() - kept;
    while (from.size() > kept) from.pop_back();
    return gone;
}

/// The same for the elements that equal `what`.
template <class List>
std::size_t erase_equal(List& from, const typename List::value_type& what) {
    return erase_where(from, [&](const typename List::value_type& t) { return t == what; });
}

/// Whether `is` is true for one of them; asks in order, up to that one.
template <class Range, class F>
[[nodiscard]] bool any_where(const Range& all, F is) {
    for (const auto& one : all)
        if (is(one)) return true;
    return false;
}

/// Whether `is` is true for each of them; asks in order, up to the first for which it isn't.
template <class Range, class F>
[[nodiscard]] bool all_where(const Range& all, F is) {
    for (const auto& one : all)
        if (!is(one)) return false;
    return true;
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
