// SPDX-License-Identifier: Apache-2.0
// Runs a workload on a software node in one of three ways, and measures what each tenant got.
// Device time is measured by the node's own ledger, never by the limiter's account.
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
    unlimited,  // one memory and one set of streams for all tenants, first come, first served
    fair,       // quotas, equal shares
    weighted,   // quotas, configured shares, one tenant of higher priority
};

[[nodiscard]] std::string_view to_string(way w);

struct tenant_outcome {
    std::size_t done = 0, refused = 0, failed = 0;
    // the latencies of finished requests, in the order of completion
    std::vector<double> latency_ms{};
    // when each of these requests finished, since the start of the run
    std::vector<double> finished_s{};
    gpushare::bytes peak{}, quota{};  // over all devices; the quota is 0 if there is none
    // its share among the backlogged tenants, averaged over its windows; 0 if never backlogged
    double configured = 0;
    double achieved = 0;  // the share that it got in these windows
    // seconds of a device in which this tenant and another one were backlogged
    std::size_t windows = 0;
    std::vector<double> busy{};  // device time in each bin of `bin`, as a fraction of all devices
};

struct outcome {
    way how = way::unlimited;
    std::vector<tenant_outcome> tenants{};  // as in workload::tenants
    // the largest |achieved - configured| of any tenant in any window
    double share_error_pp = 0;
    double share_error_percent = 0;  // the same, relative to the configured share
    // how long at least three tenants were backlogged on one device
    double together_s = 0;
    double length_s = 0;  // until the last job was done
    gpushare::ns bin{};
    std::vector<std::uint64_t> results{};  // a checksum of each job; 0 if the job wasn't done
};

/// Takes about o.seconds times the load. In that time, runs the node's SMs and a dispatcher for
/// each device. Throws std::runtime_error if the ledger isn't complete. Draws the limiters' work in
/// `timeline`, if the way has limiters.
[[nodiscard]] outcome replay(const workload& w, const options& o, way how,
                             gpushare::timeline_trace* timeline = nullptr);

}  // namespace trace_replay
