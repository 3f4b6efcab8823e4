// SPDX-License-Identifier: Apache-2.0
// Options and figures of a page store (page_store.hpp).
//
//   gpushare::page_options small{.lanes = 36, .token = 512_B, .tokens = 64, .pages = 4096};      // 4,096 pages of 64 tokens
#pragma once

#include <cstdint>
#include <functional>

#include <gpushare/config.hpp>
#include <gpushare/memory/quota_hook.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The layout of pages, and limits on their number.
struct page_options {
    std::uint32_t lanes = 1;    ///< parts of a page: keys and values of each layer
    bytes token{};              ///< of one token in one lane
    std::uint32_t tokens = 64;  ///< of a page
    std::uint32_t pages = 0;    ///< the most there may be: addresses are reserved for so many
    std::uint32_t floor = 0;    ///< of memory for so many pages, what is there stays, used or not
    /// Asked where somebody lacks memory, and nothing here is without a page: to free pages that
    /// can be done without (of cached prefixes, of idle sequences), at most so many, now or by the
    /// request's deadline. A hook: see quota_hook.hpp.
    std::function<void(const reclaim_request&, std::uint32_t pages)> evict{};
};

/// A reading of a page_store.
struct page_usage {
    std::uint32_t out = 0;      ///< pages that are allocated
    std::uint32_t pending = 0;  ///< freed, and their stream isn't there yet
    std::uint32_t free = 0;     ///< with memory, for the next allocation
    bytes committed{};          ///< charged to the quota
    bytes given_back{};         ///< to others or by trim(), so far
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
