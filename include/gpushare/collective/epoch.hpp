// SPDX-License-Identifier: Apache-2.0
// How ranks count collectives: a 32-bit epoch that only rises and is never reset, so that no flag has to be cleared
// while a fast peer may already be one collective ahead. And how they divide elements.
//
//   if (gpushare::epoch_reached(flag.load_acquire(), epoch)) ...     // also after the count has wrapped around
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Whether `flag` is at `epoch` or beyond. Ranks are at most two epochs apart, so the sign of the difference decides
/// even where the count has wrapped around.
[[nodiscard]] GPUSHARE_HD constexpr bool epoch_reached(std::uint32_t flag, std::uint32_t epoch) noexcept {
    return static_cast<std::int32_t>(flag - epoch) >= 0;
}

/// Elements [begin, end).
struct element_range {
    std::size_t begin = 0, end = 0;
    [[nodiscard]] GPUSHARE_HD constexpr std::size_t size() const noexcept { return end - begin; }
};

/// The elements that part `part` of `parts` works on: consecutive, and cut at multiples of `grain`, so that two parts
/// never write to one cache line and vectors stay whole. The last parts may be empty.
[[nodiscard]] GPUSHARE_HD constexpr element_range part_of(std::size_t count, std::uint32_t part, std::uint32_t parts,
                                                          std::size_t grain = 64) noexcept {
    const std::size_t grains = count / grain + (count % grain != 0 ? 1 : 0);
    const std::size_t each = grains / parts, rest = grains % parts;
    const std::size_t first = part * each + (part < rest ? part : rest);
    const std::size_t begin = first * grain;
    const std::size_t end = begin + (each + (part < rest ? 1 : 0)) * grain;
    return {begin < count ? begin : count, end < count ? end : count};
}

/// The same where element 0 lies `lead` elements behind a place at which may be cut: where ranks write to each other's
/// buffers, that is a cache line's begin, and few buffers begin there.
[[nodiscard]] GPUSHARE_HD constexpr element_range part_of_shifted(std::size_t count, std::size_t lead,
                                                                  std::uint32_t part, std::uint32_t parts,
                                                                  std::size_t grain) noexcept {
    const element_range r = part_of(count + lead, part, parts, grain);
    return {r.begin > lead ? r.begin - lead : 0, r.end > lead ? r.end - lead : 0};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
