// SPDX-License-Identifier: Apache-2.0
// Default answers to the queries of the concept upstream, for upstreams of tests.
//
//   struct granular : support::upstream_answers { ... allocate, try_allocate, deallocate, charged ... };
#pragma once

#include <cstddef>
#include <string_view>

#include <gpushare/closing.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace support {

/// Refuses no request for good, doesn't tell how much is free, has no owner, and never closes.
struct upstream_answers {
    [[nodiscard]] static gpushare::failure refuses(std::size_t, std::size_t) noexcept { return {}; }
    [[nodiscard]] static gpushare::bytes largest_free() noexcept { return gpushare::bytes::max(); }
    [[nodiscard]] static std::string_view owner() noexcept { return {}; }
    [[nodiscard]] static gpushare::close_token closing() noexcept { return {}; }
};

}  // namespace support
