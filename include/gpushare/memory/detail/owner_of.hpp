// SPDX-License-Identifier: Apache-2.0
// Whose memory a resource is, and how much of it could be had in one piece: asked through whatever stands on it.
//
//   gpushare::pool_resource pool{tenant.memory()};    gpushare::statistics_resource booked{pool};
//   gpushare::owner_of(booked);                       // "chat"
//   gpushare::largest_free_in(booked);                // bytes
#pragma once

#include <concepts>
#include <string_view>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The name of the tenant that the memory is charged to; empty where nobody says. Valid as long as that resource.
template <class Resource>
[[nodiscard]] constexpr std::string_view owner_of(const Resource& r) noexcept {
    // clang-format off
    if constexpr (requires { { r.owner() } -> std::convertible_to<std::string_view>; })  // clang-format on
        return r.owner();
    else if constexpr (requires { r.upstream(); })
        return owner_of(r.upstream());
    else
        return {};
}

/// The largest block that could be had now at a multiple of 256 bytes. bytes::max() of memory that doesn't say.
template <class Resource>
[[nodiscard]] constexpr bytes largest_free_in(const Resource& r) noexcept {
    if constexpr (requires { r.largest_free(); })
        return r.largest_free();
    else if constexpr (requires { r.upstream(); })
        return largest_free_in(r.upstream());
    else
        return bytes::max();
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
