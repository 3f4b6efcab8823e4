// SPDX-License-Identifier: Apache-2.0
// std::exchange for pointers and flags. That one asks fifty traits of every type, of everybody who includes it.
//
//   T* const first = detail::exchange(first_, first_->next);
#pragma once

#include <type_traits>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <class T>
[[nodiscard]] constexpr T* exchange(T*& p, std::type_identity_t<T>* to) noexcept {
    T* const was = p;
    p = to;
    return was;
}

[[nodiscard]] constexpr bool exchange(bool& b, bool to) noexcept {
    const bool was = b;
    b = to;
    return was;
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
