// SPDX-License-Identifier: Apache-2.0
// The memory through which the ranks of a group talk, and its layout: per rank one area, allocated up front, zeroed once
// and never reset. Plain pointers, so that it travels into kernels, and stays the same under graph capture.
//
//   area of a rank = [own line of each lane][flags of each lane from each rank, two by turns]
//                    [slots of each lane, two by turns]
//
// A lane is a block of a kernel, or the one thread of a rank: lane i of all ranks work together and touch nothing of
// other lanes, so each lane counts its own epochs, and the number of lanes may change from one launch to the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// Two cache lines: processors fetch them in pairs.
inline constexpr std::size_t line_bytes = 128;

/// Set in a gate by whoever aborts, and never taken back.
inline constexpr std::uint32_t gate_closed = 1U << 16;

/// Written by the lane itself; others only add to `gate` and write `verdict` when they abort.
struct alignas(line_bytes) own_line {
    std::uint32_t gate;      // 1 while a collective is inside, plus gate_closed
    std::uint32_t epoch;     // of the last collective
    std::uint32_t progress;  // kind and stage, for the watchdog
    std::uint32_t claims;    // of area 0: the first to add here writes the verdict
    std::uint64_t verdict;   // a packed fault
    std::uint32_t chunks;    // that went around the ring so far
};

/// What one rank tells another one in a collective. One writer.
struct alignas(line_bytes) flag_line {
    std::uint32_t ready;      // epoch at which what stands below is valid
    std::uint32_t done;       // epoch at which the writer has left the reader's buffers
    std::uint32_t signature;  // of the call, to notice that ranks disagree
    std::uint32_t unused;
    const void* in;
    void* out;
    void* other[4];  // what an epilogue shares besides
    // Counts of the ring, in the first of the two lines: chunks of partial results and of results that the writer has left
    // in its slot, and chunks that it has taken from the reader's.
    std::uint32_t partial_ready, result_ready, partial_taken, result_taken;
};

/// What the host sees of a rank where it can't read the rank's area, and what it asks for: in memory that both reach, of which
/// each word has one writer, so that no atomic operation has to cross a bus.
struct alignas(line_bytes) report_line {
    std::uint64_t verdict;   // by whoever aborts: a packed fault
    std::uint32_t epoch;     // by the rank's first lane, as is what follows
    std::uint32_t progress;  // kind and stage
    std::uint64_t request;   // of rank 0's line, by the host: a packed fault to abort with
    std::uint32_t claims;    // of rank 0's line, among the host's threads: the first to add here asks
};

}  // namespace detail

/// A group's memory as kernels see it. Copied freely.
struct channel_view {
    std::byte* const* areas = nullptr;  // one of each rank
    std::uint32_t ranks = 0;
    std::uint32_t lanes = 0;
    std::size_t slot = 0;                    // bytes of one slot, a multiple of 4 lines
    std::uint32_t busy_turns = 0;            // how often a waiting thread looks before it yields its core
    bool direct = true;                      // ranks reach each other's buffers, not only each other's areas
    detail::report_line* reports = nullptr;  // one of each rank, where the host can't read the areas

    [[nodiscard]] GPUSHARE_HD static constexpr std::size_t area_bytes(std::uint32_t ranks, std::uint32_t lanes,
                                                                      std::size_t slot) noexcept {
        return lanes * (sizeof(detail::own_line) + 2 * (ranks * sizeof(detail::flag_line) + slot));
    }
    [[nodiscard]] GPUSHARE_HD detail::own_line& own(std::uint32_t rank, std::uint32_t lane) const noexcept {
        return reinterpret_cast<detail::own_line*>(areas[rank])[lane];
    }
    /// What `from` tells `rank` at `epoch`. Two lines by turns, and two slots below: whoever is one epoch ahead doesn't write
    /// to what others still read, and nobody gets two ahead, because every collective waits for all ranks to come.
    [[nodiscard]] GPUSHARE_HD detail::flag_line& flag(std::uint32_t rank, std::uint32_t from, std::uint32_t lane,
                                                      std::uint32_t epoch) const noexcept {
        std::byte* const at = areas[rank] + lanes * sizeof(detail::own_line);
        return reinterpret_cast<detail::flag_line*>(at)[(std::size_t{lane} * 2 + (epoch & 1U)) * ranks + from];
    }
    /// Where `rank` leaves data for the others at `epoch`.
    [[nodiscard]] GPUSHARE_HD std::byte* slot_of(std::uint32_t rank, std::uint32_t lane,
                                                 std::uint32_t epoch) const noexcept {
        std::byte* const at = areas[rank] + lanes * (sizeof(detail::own_line) + 2 * ranks * sizeof(detail::flag_line));
        return at + (std::size_t{lane} * 2 + (epoch & 1U)) * slot;
    }
    /// Makes fresh memory ready; all flags stand at `first_epoch` then. Before anybody uses it.
    void prepare(std::uint32_t first_epoch) const noexcept {
        for (std::uint32_t r = 0; r < ranks; ++r) prepare_rank(r, first_epoch);
    }
    /// The area of one rank; those of all ranks begin alike.
    void prepare_rank(std::uint32_t r, std::uint32_t first_epoch) const noexcept {
        std::memset(areas[r], 0, area_bytes(ranks, lanes, slot));
        for (std::uint32_t l = 0; l < lanes; ++l) {
            own(r, l).epoch = first_epoch;
            for (std::uint32_t from = 0; from < ranks; ++from)
                for (std::uint32_t turn = 0; turn < 2; ++turn) {
                    flag(r, from, l, turn).ready = first_epoch;
                    flag(r, from, l, turn).done = first_epoch;
                }
        }
    }
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
