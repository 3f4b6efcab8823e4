// SPDX-License-Identifier: Apache-2.0
// The record of an allocation: its address, size, alignment and label; and its caller, where stack
// traces are asked for.
//
//   const gpushare::block kept{p, 4096_B, 256, "kv-cache"};      // see block_table.hpp, statistics_resource.hpp
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Writes the return addresses of its callers, the nearest first, and returns how many.
using trace_function = std::size_t (*)(std::span<void*>) noexcept;

/// One allocation. The label is the caller's text and must outlive the block (a literal, usually).
struct block {
    void* pointer = nullptr;    ///< where it begins
    bytes size{};               ///< as it was asked for
    std::size_t alignment = 0;  ///< as it was asked for, bytes
    std::string_view label{};   ///< what for
};

/// A block that hasn't been freed, and where it came from.
struct leak {
    block what{};                ///< the block
    std::string scope{};         ///< "engine/prefill": empty for the whole, and where there are no scopes
    std::vector<void*> trace{};  ///< return addresses, where they were asked for
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
