// SPDX-License-Identifier: Apache-2.0
// The workload of a replay: a window of a trace, with its groups as tenants, its models as memory,
// and its requests as jobs whose arrivals and lengths are scaled to a given load.
//
//   const auto w = trace_replay::make_workload(trace, options);
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gpushare/units.hpp>

#include "trace_replay/options.hpp"
#include "trace_replay/trace.hpp"

namespace trace_replay {

/// A request, in the time of the replay.
struct job {
    gpushare::ns arrival{};  // since the start of a run
    std::size_t tenant = 0;  // index into workload::tenants
    std::size_t model = 0;   // index into workload::models
    std::uint32_t loras = 0;
    std::uint32_t steps = 0;
    std::uint32_t kernels = 0;   // kernels in a step, of equal length
    gpushare::ns kernel_time{};  // the time of a kernel that has the device to itself
};

struct model {
    std::string name;
    gpushare::bytes size;
};

struct tenant_profile {
    std::string name;
    std::size_t requests = 0;
    double demand = 0;           // requested device time, as a fraction of the total request
    gpushare::share fair{};      // equal for all tenants
    gpushare::share weighted{};  // the configured share of the weighted run
    bool urgent = false;         // whether it goes first in the weighted run
    gpushare::bytes quota{};     // over all devices
};

struct workload {
    std::vector<job> jobs;  // in the order of arrival
    std::vector<model> models;
    std::vector<tenant_profile> tenants;  // the biggest groups by device time, then "others"
    std::string window;                   // a description of the part of the trace
    // seconds of work in the trace that become one second of device time
    double speedup = 0;
    double arrival_speedup = 0;  // seconds between arrivals in the trace that become one second
    // the device time requested while requests arrive, relative to the available device time
    double load = 0;
    gpushare::ns arrivals{};  // how long requests arrive
};

inline constexpr gpushare::bytes lora_size{150ULL << 20};

/// Throws usage_error if the trace has too few usable requests or groups for the options.
[[nodiscard]] workload make_workload(const trace& t, const options& o);

}  // namespace trace_replay
