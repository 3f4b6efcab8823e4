// SPDX-License-Identifier: Apache-2.0
// Runs a workload on a software node in one of three ways, and measures what each tenant got. The
// truth about device time is the node's own ledger, never the limiter's account.
//
//   const auto r = trace_replay::replay(workload, options, trace_replay::way::weighted);
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include <gpushare/observe/timeline_trace.hpp>
#include <gpushare/units.hpp>

#include "trace_replay/options.hpp"
#include "trace_replay/workload.hpp"

namespace trace_replay {

enum class way : std::uint8_t {
    unlimited,  // one memory and one set of streams for all, first come, first served
    fair,       // quotas, equal shares
    weighted,   // quotas, configured shares, one tenant of higher priority
};

[[nodiscard]] std::string_view to_string(way w);

struct tenant_outcome {
    std::size_t done = 0, refused = 0, failed = 0;
    std::vector<double> latency_ms{};  // of the requests done, by completion
    std::vector<double> finished_s{};  // when each of them was, since the start of the run
    gpushare::bytes peak{}, quota{};   // over all devices; no quota: zero
    // its share among the backlogged ones, mean over its windows; 0: never backlogged
    double configured = 0;
    double achieved = 0;  // what it got there
    // seconds of a device in which it was backlogged beside another tenant
    std::size_t windows = 0;
    std::vector<double> busy{};  // device time per bin of `bin`, as a fraction of all devices
};

struct outcome {
    way how = way::unlimited;
    std::vector<tenant_outcome> tenants{};  // as in workload::tenants
    // largest |achieved - configured| of any tenant in any window
    double share_error_pp = 0;
    double share_error_percent = 0;  // the same relative to what is configured
    // how long at least three tenants were backlogged on one device
    double together_s = 0;
    double length_s = 0;  // until the last job was done
    gpushare::ns bin{};
    std::vector<std::uint64_t> results{};  // a checksum per job, 0 if it wasn't done
};

/// Takes about o.seconds times the load, and runs the node's SMs and a dispatcher per device
/// meanwhile. Throws std::runtime_error if the ledger isn't complete. Draws the limiters' work in
/// `timeline`, if the way has limiters.
[[nodiscard]] outcome replay(const workload& w, const options& o, way how,
                             gpushare::timeline_trace* timeline = nullptr);

}  // namespace trace_replay
