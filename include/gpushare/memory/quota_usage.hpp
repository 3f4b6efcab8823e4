// SPDX-License-Identifier: Apache-2.0
// What a quota says of itself.
//
//   const gpushare::quota_usage u = chat.usage();      // u.current of u.limit(), at most u.peak so far
#pragma once

#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A reading of a quota. Bytes are consistent with each other; counts are exact while no call is under way and
/// may lag by some dozens otherwise.
struct quota_usage {
    bytes guaranteed{}, burst{};
    bytes current{};   // charged now; above guaranteed + burst only after a resize below it
    bytes peak{};      // the most that was ever charged
    bytes borrowed{};  // held from the parent beyond the guarantee
    std::uint64_t charges = 0, releases = 0, refusals = 0;  // calls; children's loans and returns count too
    std::uint32_t waiting = 0;                              // requests that wait, in the whole tree

    [[nodiscard]] constexpr bytes limit() const noexcept { return guaranteed + burst; }
};

/// Of somebody who waits for bytes of a quota. refused: no release could make it fit, as its quota or one above is smaller
/// than that.
enum class claim_state : std::uint8_t { waiting, granted, refused };

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
