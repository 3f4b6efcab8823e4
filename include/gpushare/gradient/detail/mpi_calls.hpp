// SPDX-License-Identifier: Apache-2.0
// The parts of an MPI transport other than messages: the number of threads that may call the MPI, a
// communicator without some ranks, and a function that combines received elements.
#pragma once

#if __has_include(<mpi.h>)

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/mpi_transfer.hpp>

/// Exists in MPIs that tolerate faults (ULFM); null in other MPIs.
extern "C" [[gnu::weak]] int MPIX_Comm_shrink(MPI_Comm comm, MPI_Comm* without_failed);

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Throws unless the MPI is initialised for this thread level and accepts calls of this thread.
inline void need_mpi_threads(int needed) {
    int there = 0, level = MPI_THREAD_SINGLE, is_main = 1;
    MPI_Initialized(&there);
    if (there != 0) MPI_Query_thread(&level);
    if (there != 0 && level < MPI_THREAD_SERIALIZED) MPI_Is_thread_main(&is_main);
    if (there == 0 || level < needed || is_main == 0)
        raise({.code = errc::not_supported,
               .asked = static_cast<std::uint64_t>(needed),
               .limit = static_cast<std::uint64_t>(level),
               .because = there == 0     ? reason::no_mpi
                          : is_main == 0 ? reason::main_thread
                                         : reason::mpi_threads},
              {}, "calling MPI");
}

/// The ranks of `all` that aren't in `dead`.
[[nodiscard]] inline MPI_Group mpi_group_without(MPI_Comm all, std::span<const std::uint32_t> dead) noexcept {
    int size = 0;
    MPI_Group living{};
    MPI_Comm_size(all, &size);
    MPI_Comm_group(all, &living);
    // from the last rank on, so that the lower ranks keep their numbers
    for (int r = size - 1; r >= 0; --r) {
        if (std::find(dead.begin(), dead.end(), static_cast<std::uint32_t>(r)) == dead.end()) continue;
        MPI_Group fewer{};
        MPI_Group_excl(living, 1, &r, &fewer);
        MPI_Group_free(&living);
        living = fewer;
    }
    return living;
}

/// A communicator without the ranks in `dead`. All other ranks make this call. If the MPI has seen
/// a rank die, the call also waits for ranks that hang. Allocates nothing itself, since without a
/// communicator a rank that lacks memory can't tell the others, which wait for it.
[[nodiscard]] inline MPI_Comm mpi_without(MPI_Comm all, std::span<const std::uint32_t> dead) {
    MPI_Group living = mpi_group_without(all, dead);
    MPI_Comm made = MPI_COMM_NULL;
    int code = MPI_Comm_create_group(all, living, mpi_transfer::shrink_tag, &made);
    // An MPI that has seen a rank die refuses `all`.
    if (code != MPI_SUCCESS && MPIX_Comm_shrink != nullptr) {
        MPI_Comm alive = MPI_COMM_NULL;
        code = MPIX_Comm_shrink(all, &alive);
        if (code == MPI_SUCCESS) {
            MPI_Comm_set_errhandler(alive, MPI_ERRORS_RETURN);
            code = MPI_Comm_create_group(alive, living, mpi_transfer::shrink_tag, &made);
            MPI_Comm_free(&alive);
        }
    }
    MPI_Group_free(&living);
    if (code != MPI_SUCCESS || made == MPI_COMM_NULL)
        raise({.code = errc::backend_failed}, {}, "shrinking an MPI communicator");
    return made;
}

/// A combiner of mpi_transfer that only concatenates, for an all-gather in one shot.
inline void concatenate_mpi_parts(const std::byte* const* parts, std::uint32_t ranks, std::byte* out,
                                  std::size_t size) {
    for (std::uint32_t r = 0; r < ranks; ++r) std::memcpy(out + r * size, parts[r], size);
}

/// A combiner of mpi_transfer that applies Op.
template <class T, class Op>
void combine_mpi_parts(const std::byte* const* parts, std::uint32_t ranks, std::byte* out, std::size_t size) {
    combine(
        ranks, [=](std::uint32_t r) { return reinterpret_cast<const T*>(parts[r]); },
        std::span(reinterpret_cast<T*>(out), size / sizeof(T)), Op{});
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#endif
