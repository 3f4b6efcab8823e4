// SPDX-License-Identifier: Apache-2.0
// What is replayed: a window of a trace, its groups turned into tenants, its models into memory,
// its requests into jobs whose arrivals and lengths are scaled to a stated load.
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
    std::uint32_t kernels = 0;   // of a step, of equal length
    gpushare::ns kernel_time{};  // of a kernel that has the device for itself
};

struct model {
    std::string name;
    gpushare::bytes size;
};

struct tenant_profile {
    std::string name;
    std::size_t requests = 0;
    double demand = 0;           // device time asked for, as a fraction of all that is asked for
    gpushare::share fair{};      // equal for all
    gpushare::share weighted{};  // the configured share of the weighted run
    bool urgent = false;         // goes first in the weighted run
    gpushare::bytes quota{};     // over all devices
};

struct workload {
    std::vector<job> jobs;  // by arrival
    std::vector<model> models;
    std::vector<tenant_profile> tenants;  // the biggest groups by device time, then "others"
    std::string window;                   // which part of the trace, in words
    // trace seconds of work that become one second of device time
    double speedup = 0;
    double arrival_speedup = 0;  // trace seconds between arrivals that become one second
    // device time asked for while requests arrive, over what there is
    double load = 0;
    gpushare::ns arrivals{};  // how long requests arrive
};

inline constexpr gpushare::bytes lora_size{150ULL << 20};

/// Throws usage_error if the trace has too few usable requests or groups for the options.
[[nodiscard]] workload make_workload(const trace& t, const options& o);

}  // namespace trace_replay
