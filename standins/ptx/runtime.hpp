// SPDX-License-Identifier: Apache-2.0
// Connects the executor to the stand-in for the CUDA runtime. A program of nvcc's objects, linked
// with both instead of libcudart, runs its kernels as nvcc compiled them.
//
//   // cmake: gpushare_run_as_compiled()
//   extern const char* const ptx_files[] = {"kernels.compute_90.ptx", nullptr};
//   ptx::runtime::options().seed = 7;  // for what starts after the next reset
//   standin::session gpu{{.devices = 2}};
//
// The executor's findings (races, unknown contents, divergent barriers) become findings of the
// stand-in, which fail the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "machine.hpp"

/// The PTX files of the program's objects, followed by null. Each program defines this array.
extern const char* const ptx_files[];

namespace ptx::runtime {

/// Options for the next machine, which a reset of the stand-in makes, and for no later machine. The
/// stand-in sets blocks_per_sm and native_atomics.
[[nodiscard]] machine_options& options();

/// Counts over all machines since the program began.
struct tally {
    work_done work{};
    std::set<std::string> compiled{}, executed{};         // kernels, by name
    std::uint64_t launches = 0, findings = 0, races = 0;  // races are findings, too
    double seconds = 0;                                   // processor time inside the executor
};
[[nodiscard]] tally total();

/// Runs some instructions of the resident blocks, in turns of single threads. For tests that act at
/// a certain moment.
void go_on(std::uint64_t instructions);
/// See machine::freeze.
void freeze(int device);
void let_go(int device);

/// See memory::polled_by_host. Holds until the area is freed.
void polled_by_host(const void* begin, std::size_t size);

/// The decoded files, for tests that break kernels on purpose: see mutants.hpp.
[[nodiscard]] std::vector<const program*> programs();

/// The parts of these files that the decoder doesn't know; see ptx::unknown_in.
[[nodiscard]] std::set<std::string> unknown_in(const char* const* paths);

/// Replaces the text of this file from the next launch on, for tests that break kernels on purpose.
void replace(std::size_t file, std::string text);

}  // namespace ptx::runtime
