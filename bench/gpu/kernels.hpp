// SPDX-License-Identifier: Apache-2.0
// Launches the kernels of the experiments on a device. nvcc compiles the kernels (kernels.cu), and
// all other code is plain C++ for g++.
//
//   launch_spin(s, {.blocks = 132, .threads = 1024}, 100us, records);
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace bench {

/// A block's record: when the block ran, by the clock that all SMs share, and on which SM.
struct block_record {
    std::uint64_t begin = 0, end = 0;  // ns
    std::uint32_t sm = 0;
};

/// Ranks that meet at barriers and read each other's words. All arrays lie in device memory and
/// start as zeros.
struct meeting {
    static constexpr std::size_t flag_stride = 32;  // a line of 128 bytes for each flag

    std::uint32_t ranks = 0;
    std::uint32_t rounds = 0;
    std::uint32_t* flags = nullptr;    // ranks * flag_stride
    std::uint32_t* payload = nullptr;  // 2 * ranks
    std::uint32_t* wrong = nullptr;    // counts words that were missing although their flag was set
    std::uint32_t* late = nullptr;     // counts ranks that stopped waiting
    block_record* records = nullptr;   // a record for each rank
};

void launch_empty(gpushare::cuda::stream& s);

/// Runs g.blocks blocks that each take `length`. `records` is device memory for a record of each
/// block, or null.
void launch_spin(gpushare::cuda::stream& s, gpushare::grid g, gpushare::ns length, block_record* records = nullptr);

/// The number of blocks with `threads` threads that launch_spin can have on the device at once.
[[nodiscard]] std::uint32_t max_resident_spins(const gpushare::cuda::stream& s, std::uint32_t threads);

/// Runs all ranks as the blocks of a cooperative launch. Refuses the launch if the blocks can't all
/// be resident.
[[nodiscard]] gpushare::errc launch_meeting(gpushare::cuda::stream& s, const meeting& m);

/// Runs one rank of the meeting, on a stream of its own.
void launch_rank(gpushare::cuda::stream& s, const meeting& m, std::uint32_t rank);

/// Writes to an invalid address. The device's context ends, and this process can't use the device
/// any more.
void launch_illegal_write(gpushare::cuda::stream& s);

}  // namespace bench
