// SPDX-License-Identifier: Apache-2.0
// A tenant's view of its devices and memory, as nvidia-smi shows a whole machine: the tenant's own
// part is the whole.
//
//   std::fputs(gpushare::tenant_table(chat).c_str(), stdout);
//
//  chat: 60 % of 2 devices, level 1, 3 in flight, 0 waiting, 12.3 s of device time
//  device  memory used  of          free       kept idle  largest free
//  ------  -----------  ----------  ---------  ---------  ------------
//       0      512 MiB  24576 MiB  24064 MiB    128 MiB     24064 MiB
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/observe/table.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A line for the tenant and a row for each of its devices, as of now. Throws std::bad_alloc, and
/// operation_error (closed) as tenant::memory() does. Not for a hot path: looking for the largest
/// free block takes locks.
template <class Tenant>
[[nodiscard]] std::string tenant_table(Tenant& of) {
    const auto tenths = [](std::uint64_t n) { return std::to_string(n / 10) + '.' + std::to_string(n % 10); };
    const auto mib = [](bytes b) { return std::to_string(b.count() >> 20) + " MiB"; };
    const auto spec = of.spec();
    const auto usage = of.usage();
    std::string text = detail::printable(of.name()) + ": " + tenths(spec.compute.permille()) + " % of " +
                       std::to_string(spec.on.size()) + (spec.on.size() == 1 ? " device" : " devices") + ", level " +
                       std::to_string(spec.level.level) + ", " + std::to_string(usage.in_flight) + " in flight, " +
                       std::to_string(usage.waiting) + " waiting, " +
                       tenths(static_cast<std::uint64_t>(usage.device_time.count()) / 100000000) +
                       " s of device time\n";
    using enum align;
    table rows{{"device", right}, {"memory used", right}, {"of", right},
               {"free", right},   {"kept idle", right},   {"largest free", right}};
    for (std::size_t part = 0; part < spec.on.size(); ++part) {
        auto& memory = of.memory(part);
        rows.add_row({std::to_string(spec.on[part].index), mib(memory.limit().usage().current), mib(memory.capacity()),
                      mib(memory.free()), mib(memory.idle()), mib(memory.largest_free())});
    }
    return text += rows.str();
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
