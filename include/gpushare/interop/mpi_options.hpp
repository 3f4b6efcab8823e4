// SPDX-License-Identifier: Apache-2.0
// Options of a transport over an MPI (mpi.hpp).
//
//   gpushare::mpi_transport net(MPI_COMM_WORLD, {.threads = MPI_THREAD_MULTIPLE});
#pragma once

#if __has_include(<mpi.h>)

#include <mpi.h>

#include <chrono>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How messages are cut.
struct mpi_options {
    /// The bytes of one message, for an array that goes to a process in several. MPIs send so much
    /// without asking first: a question and its answer would wait behind other arrays' bytes, and
    /// the link would idle.
    bytes message{56 << 10};
    std::uint32_t depth = 16;                   ///< messages of one array under way to each process
    bytes one_shot{4096};                       ///< up to here all send all to all: one wait in place of two
    ns grace = std::chrono::milliseconds(200);  ///< how long who gives up waits for what others say
    /// The thread level for which the MPI must have been initialised. MPI_THREAD_SERIALIZED: one
    /// thread at a time calls it, which is up to the embedder. MPI_THREAD_MULTIPLE: several at
    /// once. MPI_THREAD_FUNNELED: the main thread alone, which also makes the transport.
    int threads = MPI_THREAD_SERIALIZED;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#endif
