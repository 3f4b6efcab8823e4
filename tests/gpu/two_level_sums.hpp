// SPDX-License-Identifier: Apache-2.0
// Two levels of ranks with kernels compiled by nvcc (two_level.cu), for two_level_test.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/units.hpp>

namespace two_level {

namespace gs = gpushare;

/// Ranks of a node share a device, or have one each.
enum class layout : std::uint8_t { shared, apart };

/// Of each node.
struct sums {
    std::vector<gs::collective_fault> faults;
    std::vector<std::size_t> wrong;  // elements of all its ranks that aren't the exact sum
    std::vector<gs::bytes> copied;
};
/// n floats of nodes of so many ranks.
[[nodiscard]] sums sums_on_devices(const std::vector<std::uint32_t>& ranks, layout how, std::size_t n);

}  // namespace two_level
