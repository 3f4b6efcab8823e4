// SPDX-License-Identifier: Apache-2.0
// A cluster and its requests, from the CSV files of Alibaba's cluster-trace-gpu-v2023. Without the
// files, a generator makes requests with similar statistics.
//
//   const bench::placement_trace t = bench::read_trace("pods.csv", "nodes.csv");
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>

namespace bench {

struct placement_trace {
    std::string name;
    gpushare::cluster nodes;  // without placed requests
    std::vector<gpushare::placement_request> pods;
};

/// Finds columns by name. A pod has cpu_milli, memory_mib, num_gpu, gpu_milli and optionally
/// gpu_spec ("T4|P100"). A node has cpu_milli, memory_mib, gpu and model. Throws a
/// std::runtime_error that names the file, line and column.
[[nodiscard]] placement_trace read_trace(const std::filesystem::path& pods, const std::filesystem::path& nodes);

/// The trace's 1,213 nodes, and 8,152 pods from a short table of the trace's most common kinds.
[[nodiscard]] placement_trace generate_trace(std::uint64_t seed);

}  // namespace bench
