// SPDX-License-Identifier: Apache-2.0
// What std::movable, std::copyable and std::default_initializable ask for, said directly. Those go through dozens of class
// templates for each type (common references, swaps, traits), here for each model of each concept: a tenth of the time that
// a file with <gpushare/gpushare.hpp> takes to compile.
//
//   template <class H> concept handle = gpushare::detail::copyable<H>;
#pragma once

#include <concepts>

#include <gpushare/config.hpp>

namespace gpushare::inline GPUSHARE_ABI::detail {

// Version 14 would break the compound requirements apart:
// clang-format off

template <class T>
concept movable = !std::same_as<T, T&> && !std::same_as<T, T&&> && requires(T& to, T&& from) {
    T(static_cast<T&&>(from));
    { to = static_cast<T&&>(from) } -> std::same_as<T&>;
};

template <class T>
concept copyable = movable<T> && requires(T& to, const T& from) {
    T(from);
    { to = from } -> std::same_as<T&>;
};

template <class T>
concept default_initializable = requires { T(); };

// clang-format on

}  // namespace gpushare::inline GPUSHARE_ABI::detail
