// SPDX-License-Identifier: Apache-2.0
// The contributions of ranks that have joined, and the average of the others
// (gradient/horovod_devices.hpp), compiled by nvcc, against the host's results.
//
//   CHECK(jobs::trouble_of_joined(seed) == "");
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include <gpushare/backend/cuda/stream.hpp>

#include "gpu/jobs.hpp"

namespace jobs {

/// In what a device divides a number of this type.
template <class T>
using divided_in = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// By the kernels in jobs.cu, of each type that device_ranks combine: all elements become `value`.
template <class T>
void fill_on_device(gpushare::cuda::stream& s, T* data, std::size_t count, T value);
/// The same: each element is divided.
template <class T>
void divide_on_device(gpushare::cuda::stream& s, T* data, std::size_t count, divided_in<T> by);

/// What is wrong with arrays of a random length that are filled and divided: other bits than the
/// host's, of these elements or of those around them, and what the executor finds.
[[nodiscard]] std::string trouble_of_joined(std::uint64_t seed);

/// What these kernels cost for each element.
[[nodiscard]] std::vector<cost> costs_of_joined();

}  // namespace jobs
