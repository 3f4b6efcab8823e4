// SPDX-License-Identifier: Apache-2.0
// The experiments that need a device. Each experiment is a process: `gpu_figures NAME`. An
// experiment prints lines `figure gpu.NAME VALUE UNIT`. A yes-or-no result is a figure of 0 or 1
// with the unit "seen", and an answer from CUDA is a figure with the unit "cudaError".
#pragma once

#include <array>
#include <type_traits>

#include "harness.hpp"

namespace bench {

// launch.cpp
void launch_cost(report& r);
void event_cost(report& r);
void graph_replay(report& r);
// waits.cpp
void waits_on_8_connections(report& r);
void waits_on_32_connections(report& r);
// sharing.cpp
void stream_priority(report& r);
void share_accuracy(report& r);
void limiter_latency(report& r);
void limiter_width(report& r);
void gangs(report& r);
void ranks_on_one_device(report& r);
// memory.cpp
void malloc_granularity(report& r);
void pool_rounding(report& r);
void pool_reuse(report& r);
void copy_bandwidth(report& r);
// partitions.cpp
void partition_sizes(report& r);
void partition_isolation(report& r);
// collectives.cpp
void collective_sums(report& r);
void collective_speed(report& r);
void collective_quantised(report& r);
void collective_fused(report& r);
void gradients(report& r);
// faults.cpp
void fault_in_primary_context(report& r);
void fault_in_partition(report& r);
void fault_beside_other_context(report& r);
void fault_and_reset(report& r);
void fault_beside_other_process(report& r);
void healthy_process(report& r);

/// Set by --small: sizes and times for a machine without a device; the figures then mean nothing.
inline bool small_form = false;
/// The normal value of a parameter, or its small form.
template <class T>
[[nodiscard]] T sized(T whole, std::type_identity_t<T> small) noexcept {
    return small_form ? small : whole;
}

struct experiment {
    const char* name;
    int limit_s;  // the runner ends the experiment after this time
    void (*run)(report&);
    // CUDA_DEVICE_MAX_CONNECTIONS, for experiments that depend on hardware queues.
    const char* connections = nullptr;
};

inline constexpr std::array experiments{
    experiment{"launch_cost", 30, launch_cost},
    experiment{"event_cost", 30, event_cost},
    experiment{"graph_replay", 30, graph_replay},
    experiment{"stream_priority", 30, stream_priority},
    experiment{"share_accuracy", 40, share_accuracy},
    experiment{"limiter_latency", 20, limiter_latency},
    experiment{"limiter_width", 20, limiter_width},
    experiment{"gangs", 20, gangs},
    experiment{"ranks_on_one_device", 30, ranks_on_one_device},
    experiment{"collective_sums", 40, collective_sums},
    experiment{"collective_speed", 60, collective_speed},
    experiment{"collective_quantised", 30, collective_quantised},
    experiment{"collective_fused", 40, collective_fused},
    experiment{"gradients", 110, gradients},
    experiment{"malloc_granularity", 30, malloc_granularity},
    experiment{"pool_rounding", 30, pool_rounding},
    experiment{"pool_reuse", 30, pool_reuse},
    experiment{"copy_bandwidth", 30, copy_bandwidth},
    experiment{"partition_sizes", 30, partition_sizes},
    experiment{"partition_isolation", 30, partition_isolation},
    experiment{"waits_on_8_connections", 20, waits_on_8_connections, "8"},
    experiment{"waits_on_32_connections", 20, waits_on_32_connections, "32"},
    experiment{"fault_in_primary_context", 20, fault_in_primary_context},
    experiment{"fault_in_partition", 20, fault_in_partition},
    experiment{"fault_beside_other_context", 20, fault_beside_other_context},
    experiment{"fault_and_reset", 20, fault_and_reset},
    experiment{"fault_beside_other_process", 20, fault_beside_other_process},
    experiment{"healthy_process", 20, healthy_process},
};

}  // namespace bench
