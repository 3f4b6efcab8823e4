// SPDX-License-Identifier: Apache-2.0
// A set of small numbers, such as indices of a list's elements. Only reserve() allocates.
//
//   gpushare::detail::index_set late;    late.reserve(100);
//   late.add(7);                         late.erase_if([&](std::uint32_t i) { return is_done(i); });
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/plain_list.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A value. Holds each number at most once.
class index_set {
public:
    /// For numbers below `n`. Throws std::bad_alloc.
    void reserve(std::size_t n);
    /// Does nothing if the number is in the set.
    void add(std::uint32_t index) noexcept;
    [[nodiscard]] bool empty() const noexcept { return indices_.empty(); }
    /// Removes the numbers for which `goes(index)` is true.
    template <std::predicate<std::uint32_t> F>
    void erase_if(F goes) noexcept {
        erase_where(indices_, [&](std::uint32_t i) {
            if (!goes(i)) return false;
            is_there_[i] = false;
            return true;
        });
    }

private:
    plain_list<std::uint32_t> indices_;
    plain_list<bool> is_there_;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE void index_set::reserve(std::size_t n) {
    indices_.reserve(n);
    is_there_.resize(n, false);
}

GPUSHARE_INLINE void index_set::add(std::uint32_t index) noexcept {
    if (is_there_[index]) return;
    is_there_[index] = true;
    indices_.push_back(index);  // within the reserve
}

#endif  // GPUSHARE_BODIES

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
