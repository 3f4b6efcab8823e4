// SPDX-License-Identifier: Apache-2.0
// The executor behind the stand-in for the CUDA runtime: a program of nvcc's objects, linked with
// both instead of libcudart, runs its kernels as they were compiled.
//
//   // cmake: gpushare_run_as_compiled()
//   extern const char* const ptx_files[] = {"kernels.compute_90.ptx", nullptr};
//   ptx::runtime::options().seed = 7;  // for what starts after the next reset
//   standin::session gpu{{.devices = 2}};
//
// What the executor finds (races, unknown contents, divergent barriers) are findings of the
// stand-in, which fail the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "machine.hpp"

/// The PTX of the objects in the program; null behind the last. Each program defines it.
extern const char* const ptx_files[];

namespace ptx::runtime {

/// For the next machine, which a reset of the stand-in makes, and for no later one. blocks_per_sm
/// and native_atomics are the stand-in's.
[[nodiscard]] machine_options& options();

/// Since the program began, over all machines.
struct tally {
    work_done work{};
    std::set<std::string> compiled{}, executed{};         // kernels, by name
    std::uint64_t launches = 0, findings = 0, races = 0;  // races are findings, too
    double seconds = 0;                                   // of processor time, inside the executor
};
[[nodiscard]] tally total();

/// Some instructions of whatever runs, by turns of single threads: for tests that do something at a
/// certain moment.
void go_on(std::uint64_t instructions);
/// See machine::freeze.
void freeze(int device);
void let_go(int device);

/// See memory::polled_by_host. Until the area is freed.
void polled_by_host(const void* begin, std::size_t size);

/// The decoded files, for tests that break kernels on purpose: see mutants.hpp.
[[nodiscard]] std::vector<const program*> programs();

/// What the decoder doesn't know of these files, or of others: see unknown_in.
[[nodiscard]] std::set<std::string> unknown_in(const char* const* paths);

/// Another text for this file from the next launch on, for tests that break kernels on purpose.
void replace(std::size_t file, std::string text);

}  // namespace ptx::runtime
