// SPDX-License-Identifier: Apache-2.0
// The memory through which the ranks of a group talk, and its layout. Each rank has a workspace,
// which is allocated up front, zeroed once and never reset. The view holds plain pointers, so a
// kernel can take the view as an argument, and the view stays valid in captured graphs.
//
//   workspace of a rank = [state of each block][signals to each block from each rank, two by turns]
//                         [slots of each block, two by turns]
//
// A block is a thread block of a rank's kernel, or the rank's one thread. The blocks with number i
// of all ranks work together and don't touch other blocks' memory. So each block counts its own
// epochs, and the number of blocks may change between launches.
//
// **No word is changed by read-modify-write across ranks.** Over PCIe, and in pinned memory, such
// an operation of one device isn't atomic for another device. So each word has one writer, or all
// its writers store the same value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>

#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/atomic_ref.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The distance between words of different writers: two cache lines, because processors fetch lines
/// in pairs.
inline constexpr std::size_t interference_bytes = 128;

/// Whether `flag` is at `epoch` or beyond. Epochs are never reset, so no flag has to be cleared
/// while a fast peer is already one collective ahead. Ranks are at most two epochs apart, so the
/// sign of the difference is right even where the count has wrapped around.
[[nodiscard]] GPUSHARE_HD constexpr bool epoch_reached(std::uint32_t flag, std::uint32_t epoch) noexcept {
    return static_cast<std::int32_t>(flag - epoch) >= 0;
}

/// The progress of one block of a rank.
struct alignas(interference_bytes) block_state {
    // Written by the block itself.
    std::uint32_t inside;    // 1 while the block is in a collective
    std::uint32_t epoch;     // of the block's last collective
    std::uint32_t progress;  // kind and stage, for the watchdog
    std::uint32_t chunks;    // chunks that the block has taken around the ring so far
    // the packed fault for which the block has closed the group; 0 if it hasn't
    std::uint64_t proposal;
    // the packed fault that the block took as the group's; 0 until it knew the group's fault
    std::uint64_t verdict;
    std::uint32_t coded;  // chunks of quantised all-reduces that the block has taken so far
    // Set to 1 by the thread that closes the group, and never reset.
    std::uint32_t closed;
    // Used in block 0 of rank 0 only, by the host's threads, where these reach workspaces.
    std::uint32_t host_claims;    // the first thread that adds here proposes a fault
    std::uint64_t host_proposal;  // the packed fault
};

/// One rank's message to another in a collective. Written by the sender.
struct alignas(interference_bytes) peer_signal {
    // The epoch at which the words below are valid. The bits above it hold the call's signature, by
    // which ranks notice that their calls differ.
    std::uint64_t ready;
    std::uint32_t done;    // epoch at which the writer has left the reader's buffers
    std::uint32_t remark;  // a word from the writer for this collective: valid with `done`
    const void* in;
    void* out;
    void* other[4];  // further arrays that an epilogue shares
    // Counts of the ring, kept in the first of the two signals: the chunks of partial results, and
    // the chunks of results, that the writer has left in its slot.
    std::uint32_t partial_ready, result_ready;
    std::uint64_t length;  // elements at `in` for the reader, where each pair of ranks has a length
    // Counts of a quantised all-reduce, kept in the first of the two signals: the chunks that the
    // writer has coded, and the chunks whose part of the result the writer has left in its slot.
    std::uint32_t coded_ready, sums_ready;
};

/// The host's view of a rank whose workspace the host can't read, and the host's request. The
/// report is in memory that the host and the rank both reach.
struct alignas(interference_bytes) host_report {
    std::uint64_t verdict;  // a packed fault, written by the rank before it returns the fault
    // the rank's first block writes its epoch here, with the kind and stage in the lower bits
    std::uint64_t place;
    // the rank writes 1 here once it has closed the group because of the request
    std::uint32_t heeded;
    // in rank 0's report: the host requests an abort by writing a packed fault here
    std::uint64_t request;
    // in rank 0's report: the first of the host's threads that adds here writes the request
    std::uint32_t claims;
};

/// A group's memory as kernels see it. Copied freely.
struct workspace_view {
    std::byte* const* workspaces = nullptr;  // one workspace for each rank
    std::uint32_t ranks = 0;
    std::uint32_t blocks = 0;      // of each rank, at most
    std::size_t slot = 0;          // bytes of one slot, a multiple of 4 * interference_bytes
    std::uint32_t busy_turns = 0;  // how often a waiting thread looks before it yields its core
    // whether ranks reach each other's buffers, and not only each other's workspaces
    bool direct = true;
    // one report for each rank, where the host can't read the workspaces
    host_report* reports = nullptr;
    bool one_device = false;  // whether one device has all ranks and workspaces

    [[nodiscard]] GPUSHARE_HD static constexpr std::size_t bytes_of_rank(std::uint32_t ranks, std::uint32_t blocks,
                                                                         std::size_t slot) noexcept {
        return blocks * (sizeof(block_state) + 2 * (ranks * sizeof(peer_signal) + slot));
    }
    [[nodiscard]] GPUSHARE_HD block_state& state(std::uint32_t rank, std::uint32_t block) const noexcept {
        return reinterpret_cast<block_state*>(workspaces[rank])[block];
    }
    /// The signal of `from` to `rank` at `epoch`. Each pair of ranks has two signals, and each
    /// block has two slots, both used in turn. So a rank that is one epoch ahead doesn't overwrite
    /// data that other ranks still read. No rank gets two epochs ahead, because every collective
    /// waits for all ranks to come.
    [[nodiscard]] GPUSHARE_HD peer_signal& signal(std::uint32_t rank, std::uint32_t from, std::uint32_t block,
                                                  std::uint32_t epoch) const noexcept {
        std::byte* const at = workspaces[rank] + blocks * sizeof(block_state);
        return reinterpret_cast<peer_signal*>(at)[(std::size_t{block} * 2 + (epoch & 1U)) * ranks + from];
    }
    /// The place where `rank` leaves data for other ranks at `epoch`.
    [[nodiscard]] GPUSHARE_HD std::byte* slot_of(std::uint32_t rank, std::uint32_t block,
                                                 std::uint32_t epoch) const noexcept {
        std::byte* const at = workspaces[rank] + blocks * (sizeof(block_state) + 2 * ranks * sizeof(peer_signal));
        return at + (std::size_t{block} * 2 + (epoch & 1U)) * slot;
    }
    /// Initialises fresh memory, with all flags at `first_epoch`. Call this before any rank uses
    /// the memory.
    void prepare(std::uint32_t first_epoch) const noexcept {
        for (std::uint32_t r = 0; r < ranks; ++r) prepare_rank(r, first_epoch);
    }
    /// Initialises the workspace of one rank. The workspaces of all ranks have the same initial
    /// contents.
    void prepare_rank(std::uint32_t r, std::uint32_t first_epoch) const noexcept {
        std::memset(workspaces[r], 0, bytes_of_rank(ranks, blocks, slot));
        for (std::uint32_t b = 0; b < blocks; ++b) {
            state(r, b).epoch = first_epoch;
            for (std::uint32_t from = 0; from < ranks; ++from)
                for (std::uint32_t turn = 0; turn < 2; ++turn) {
                    signal(r, from, b, turn).ready = first_epoch;
                    signal(r, from, b, turn).done = first_epoch;
                }
        }
    }
};

/// The bytes of a slot and of a rank's workspace.
struct workspace_sizes {
    std::size_t slot = 0, of_rank = 0;
};
/// Rounds the slot up. Throws std::bad_alloc if `areas` workspaces take more than a quarter of all
/// addresses, because a sum that wraps around would pass for a small one.
[[nodiscard]] inline workspace_sizes sizes_of_workspaces(std::uint32_t ranks, std::uint32_t blocks, bytes slot,
                                                         std::size_t areas) {
    constexpr std::uint64_t unit = 4 * interference_bytes, most = std::numeric_limits<std::size_t>::max() / 4;
    const bytes rounded{(slot + bytes{unit - 1}).count() / unit * unit};
    const bytes of_block = bytes{sizeof(block_state)} + (bytes{sizeof(peer_signal)} * ranks + rounded) * 2;
    if (of_block * blocks * areas > bytes{most}) throw std::bad_alloc();
    const auto size = static_cast<std::size_t>(rounded.count());
    return {size, workspace_view::bytes_of_rank(ranks, blocks, size)};
}

// ---- how a group ends
//
// A block that gives up while it is inside writes a proposal to a place that only it writes, then
// closes all blocks and leaves. Blocks that find themselves closed leave without a proposal. So
// once no block is inside, no more proposals come, and every rank chooses the same proposal. The
// host's request comes last, because the host may write it at any time.

/// Out of line, also on a device, and with the view by value, because a referenced view would be in
/// local memory. A kernel gives up in many places, and inlined copies of this loop made up a third
/// of the kernel. See session::enter for the order of the accesses.
GPUSHARE_EXEC_CHECK_DISABLE
[[gnu::noinline]] GPUSHARE_HD inline void close_group(workspace_view view) noexcept {
    for (std::uint32_t r = 0; r < view.ranks; ++r)
        for (std::uint32_t b = 0; b < view.blocks; ++b) atomic_ref{view.state(r, b).closed}.store_crossing(1);
}

/// The valid proposal: that of the first rank that has made one, from that rank's first block with
/// a proposal. If no rank has made a proposal, the host's; 0 if there is none. relaxed: each word
/// stands alone, and a rank's proposal is there once the rank has left.
GPUSHARE_EXEC_CHECK_DISABLE
[[nodiscard, gnu::noinline]] GPUSHARE_HD inline std::uint64_t chosen_proposal(workspace_view view) noexcept {
    for (std::uint32_t r = 0; r < view.ranks; ++r)
        for (std::uint32_t b = 0; b < view.blocks; ++b) {
            const std::uint64_t word = atomic_ref{view.state(r, b).proposal}.load_relaxed();
            if (word != 0) return word;
        }
    if (view.reports != nullptr) return atomic_ref{view.reports[0].request}.load_relaxed();
    return atomic_ref{view.state(0, 0).host_proposal}.load_relaxed();
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
