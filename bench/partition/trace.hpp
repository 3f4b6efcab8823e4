// SPDX-License-Identifier: Apache-2.0
// A cluster and the requests that it gets: from the CSV files of Alibaba's cluster-trace-gpu-v2023,
// or from a generator with much the same statistics where the files aren't there.
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
    gpushare::cluster nodes;  // empty
    std::vector<gpushare::placement_request> pods;
};

/// Columns are found by name: cpu_milli, memory_mib, num_gpu, gpu_milli and, where there is one,
/// gpu_spec ("T4|P100") of a pod; cpu_milli, memory_mib, gpu, model of a node. Throws
/// std::runtime_error that names file, line and column.
[[nodiscard]] placement_trace read_trace(const std::filesystem::path& pods, const std::filesystem::path& nodes);

/// The trace's 1,213 nodes, and 8,152 pods drawn from a short table of its commonest kinds.
[[nodiscard]] placement_trace generate_trace(std::uint64_t seed);

}  // namespace bench
