// SPDX-License-Identifier: Apache-2.0
// The options of a host node: the number of devices, their memory and SMs, and the time that a
// block of a kernel takes. With timing::real, the default, a block takes as long as it computes;
// with timing::modelled, as long as its launch says.
//
//   const gpushare::host::node_options options{.devices = 2, .memory = 8_GiB, .sms = 4, .timing = gpushare::host::timing::modelled};
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

/// How long a block takes.
///   real       as long as it computes
///   modelled   its grid's `hold`, or as long as it computes if that is longer (`hold` says how
///              long it *would* take on the device). The SM is held without burning CPU, so eight
///              devices behave like eight on two cores.
/// Opaque work (`stream::enqueue`) takes its given length with both.
enum class timing : std::uint8_t {
    real,      ///< a block takes as long as it computes
    modelled,  ///< a block holds its SM for grid::hold, without computing for it
};

/// Options of a node. All devices of a node are alike.
struct node_options {
    std::uint32_t devices = 1;  ///< the number of devices
    bytes memory = 1_GiB;       ///< memory of each device
    /// SMs of each device; the node starts a thread for each SM.
    std::uint32_t sms = 4;
    std::uint32_t sm_unit = 1;                 ///< SMs of a partition come in multiples of this
    host::timing timing = host::timing::real;  ///< how long a block takes
    /// Device memory can't be touched from outside kernels; see device_memory.
    bool guarded = false;
    bool stale = false;      ///< new blocks aren't zeros, as on a real device; see device_memory
    bytes taken{};           ///< the part of each device's memory that others have
    bytes granularity{512};  ///< allocations are charged in multiples of this
    /// How many blocks of each device the ledger keeps until it is read.
    std::size_t ledger_capacity = std::size_t{1} << 20;
};

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
