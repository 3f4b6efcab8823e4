// SPDX-License-Identifier: Apache-2.0
// The kernels of the figures that need a device, as functions: nvcc compiles them (kernels.cu), and
// everything else is plain C++ for g++.
//
//   launch_spin(s, {.blocks = 132, .threads = 1024}, 100us, records);
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace bench {

/// What a block leaves behind: when it ran, by the clock that all SMs share, and where.
struct block_record {
    std::uint64_t begin = 0, end = 0;  // ns
    std::uint32_t sm = 0;
};

/// Ranks that meet at barriers and read what the others wrote before. All of it in device memory,
/// zero at first.
struct meeting {
    static constexpr std::size_t flag_stride = 32;  // a line of 128 bytes for each

    std::uint32_t ranks = 0;
    std::uint32_t rounds = 0;
    std::uint32_t* flags = nullptr;    // ranks * flag_stride
    std::uint32_t* payload = nullptr;  // 2 * ranks
    std::uint32_t* wrong = nullptr;    // counts words that weren't there though their flag was
    std::uint32_t* late = nullptr;     // counts ranks that gave up waiting
    block_record* records = nullptr;   // one for each rank
};

void launch_empty(gpushare::cuda::stream& s);

/// Each block takes `length`. `records` is device memory for g.blocks of them, or null.
void launch_spin(gpushare::cuda::stream& s, gpushare::grid g, gpushare::ns length, block_record* records = nullptr);

/// Blocks of `threads` threads that launch_spin can have on the device at once.
[[nodiscard]] std::uint32_t max_resident_spins(const gpushare::cuda::stream& s, std::uint32_t threads);

/// All ranks as the blocks of one cooperative launch, which is refused if they can't all be
/// resident.
[[nodiscard]] gpushare::errc launch_meeting(gpushare::cuda::stream& s, const meeting& m);

/// One rank of it alone, on a stream of its own.
void launch_rank(gpushare::cuda::stream& s, const meeting& m, std::uint32_t rank);

/// Writes where no memory is: ends the device's context, and with it this process's use of the
/// device.
void launch_illegal_write(gpushare::cuda::stream& s);

}  // namespace bench
