// SPDX-License-Identifier: Apache-2.0
// The figures of a quota, as of one moment.
//
//   const gpushare::quota_usage u{.current = 3_GiB, .peak = 5_GiB};      // usage() of a quota returns one
#pragma once

#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A reading of a quota. Bytes are consistent with each other; counts are exact while no call is under way and
/// may lag by some dozens otherwise.
struct quota_usage {
    bytes guaranteed{};          ///< set aside
    bytes burst{};               ///< lent by the parent, at most
    bytes current{};             ///< charged now; above guaranteed + burst only after a resize below it
    bytes peak{};                ///< the most that was ever charged
    bytes borrowed{};            ///< held from the parent beyond the guarantee
    std::uint64_t charges = 0;   ///< calls; children's loans count too
    std::uint64_t releases = 0;  ///< calls; children's returns count too
    std::uint64_t refusals = 0;  ///< of charges, new tries for waiters included
    std::uint32_t waiting = 0;   ///< requests that wait, in the whole tree

    /// The most that may be charged.
    [[nodiscard]] constexpr bytes limit() const noexcept { return guaranteed + burst; }
};

/// How a wait for bytes of a quota stands.
enum class claim_state : std::uint8_t {
    waiting,  ///< in the queue
    granted,  ///< the bytes are charged
    refused   ///< no release could make it fit: its quota or one above is smaller than that
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
