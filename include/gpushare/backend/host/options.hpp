// SPDX-License-Identifier: Apache-2.0
// The options of a host node: how many devices, their memory and SMs, and how long a block of a kernel takes: as long as
// it computes (timing::real, the default), or as long as its launch says (timing::modelled).
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
///   modelled   its grid's `hold`, or as long as it computes if that is longer (`hold` says how long it *would* take
///              on the device). The SM is held without burning CPU, so eight devices behave like eight on two cores.
/// Opaque work (`stream::enqueue`) takes the length it is given under both.
enum class timing : std::uint8_t {
    real,      ///< a block takes as long as it computes
    modelled,  ///< a block holds its SM for grid::hold, without computing for it
};

/// All devices of a node are alike.
struct node_options {
    std::uint32_t devices = 1;                 ///< of the node
    bytes memory = 1_GiB;                      ///< per device
    std::uint32_t sms = 4;                     ///< per device; as many threads are started
    std::uint32_t sm_unit = 1;                 ///< of partitions: see node.hpp
    host::timing timing = host::timing::real;  ///< how long a block takes
    bool guarded = false;    ///< device memory can't be touched from outside kernels; see device_memory
    bool stale = false;      ///< new blocks hold what isn't zero, as a device's do; see device_memory
    bytes taken{};           ///< of each device's memory, what others have
    bytes granularity{512};  ///< of allocations
    std::size_t ledger_capacity = std::size_t{1} << 20;  ///< blocks per device that the ledger keeps until it is read
};

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
