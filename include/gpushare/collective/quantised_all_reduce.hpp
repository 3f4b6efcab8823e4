// SPDX-License-Identifier: Apache-2.0
// An all-reduce that sends 8 bits for each element: sums and averages of float, float16 and
// bfloat16. It suits programs that give up some exactness for a quarter of the traffic. Each rank
// sends its elements as e4m3 codes, with one scale for each block of 32 or 128 codes. Sums are
// computed in float, in the order of ranks, and are sent in the same form. (all_reduce() in
// collectives.hpp is exact.)
//
//   const std::span<float> x(array);       // `me` is this rank: see communicator.hpp
//   gpushare::quantised_all_reduce(me, x, x);                      // a sum, in place
//   gpushare::quantised_all_reduce<32>(me, x, x, gpushare::average{}, deadline);  // a scale for 32
//
// A scale is a byte b for 2^(b - 127), as in the MX formats: the smallest power of two that brings
// the block's largest finite magnitude to at most 448. So a block of 128 elements takes 129 bytes
// where floats take 512, and a block of 32 elements takes 33 bytes where floats take 128.
//
// All ranks get the same bits. The bits depend only on the elements, the operator and the size of a
// block. They don't depend on the number of thread blocks, on slots or on the machine.
//
// Special values:
//  - An infinity or a NaN of any rank, and an infinite sum, becomes NaN at its element. The other
//    elements of the block aren't affected.
//  - Zeros stay zeros.
//  - Small elements alongside large elements of their block lose bits. Near 2^-18 of the largest
//    element they lose all bits: see quantised_error_bound. Floats below 2^-132 lose bits as well.
//  - The last block is filled up with zeros, which no rank gets.
//
// On the devices' streams, quantised collectives are launched as the exact collectives are
// (submit.hpp). They yield the same bits as between rank threads.
//
//   auto code = gpushare::submit_quantised_all_reduce<float>(node.gangs(), devices,
//                                                            std::span(streams), members, ins, outs, n);
//   streams[0].record().wait(gpushare::never);   auto fault = gpushare::fault_of(members[0]);
//
// With error feedback, a rank adds to its next elements the part of its finite elements that the
// codes couldn't carry.
//
//   gpushare::feed_back_quantised(x, x, residual);    // as many floats, zero at first
//   gpushare::quantised_all_reduce(me, x, x, gpushare::average{});
//
// All elements go through the communicator's slots, chunk by chunk. There are two waits for each
// chunk, and most of them are over as soon as they begin. Between two ranks, a slot of 32 KiB holds
// three chunks of about 7000 elements; larger slots mean fewer chunks. Ranks needn't reach each
// other's buffers, so `workspaces::on_host` suffices.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/fp8_feedback.hpp>
#include <gpushare/collective/detail/quantised.hpp>
#include <gpushare/collective/detail/submit.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The element types of a quantised all-reduce: float, float16 and bfloat16.
template <class T>
concept quantisable = std::same_as<T, float> || detail::is_half<T>;
/// The operators of a quantised all-reduce: the sum or the average of the ranks' elements.
template <class Op>
concept quantised_operator = std::same_as<Op, sum> || std::same_as<Op, average>;
/// The number of elements that share a scale: 32 or 128.
template <std::uint32_t Block>
concept quantised_block = Block == 32 || Block == 128;

/// The largest difference between an element of a quantised sum and the exact sum of the ranks'
/// elements. `magnitudes` is the sum of the ranks' magnitudes for this element. `largest` is the
/// sum over the ranks of the largest magnitude in the element's block. An average differs by at
/// most this bound divided by the number of ranks, plus `quantised_floor`. Results in float16 or
/// bfloat16 are also rounded to that type. The bound holds for finite elements and sums.
///
/// Where the bound comes from: a code has four significant bits, so rounding changes a number x by
/// at most |x| / 16. Below 2^-6 of its scale a code is a multiple of 2^-9 of the scale, which is
/// below 1/224 of the block's largest magnitude A. Rounding changes such a number by at most 2^-10
/// A / 224, or by the floor, 2^-136, where the scale is the smallest there is. The ranks' elements
/// are rounded once, which changes their sum by at most S / 16 + P / 229376. Their sum is rounded
/// once more, by a sixteenth of at most 17/16 S. Together that is 33/256 S. The terms in A of both
/// steps sum to less than P / 107942; P / 65536 is promised. Adding up in float is off by less than
/// 2^-22 S for each rank.
[[nodiscard]] constexpr double quantised_error_bound(double magnitudes, double largest, std::uint32_t ranks) noexcept {
    constexpr double of_float = 1.0 / (1 << 22);
    return (33.0 / 256 + ranks * of_float) * magnitudes + largest / 65536 + (ranks + 1.0) * 0x1p-136;
}
/// The largest change by rounding with the smallest scale, whatever the elements are.
inline constexpr double quantised_floor = 0x1p-136;

/// The bytes that are sent for `count` elements, with a scale for each `block` elements. The last
/// block counts as a whole block.
[[nodiscard]] constexpr std::size_t quantised_bytes(std::size_t count, std::size_t block = 128) noexcept {
    return (count + block - 1) / block * (block + 1);
}

/// Combines the `in` of all ranks into the `out` of every rank, with a scale for each `Block`
/// elements that are sent. `in` and `out` have the same size on all ranks. A rank's `in` and `out`
/// are the same memory or don't overlap. They may have any length and any alignment that T allows.
/// One thread per rank calls try_quantised_all_reduce. Waits for the other ranks until `deadline`
/// (of the steady clock). Returns the fault, if any, which is the same on every rank that was in
/// the collective. After a fault the contents of `out` are unspecified. Returns errc::mismatch
/// immediately if the spans differ in size, and errc::invalid_specification if a slot of the
/// communicator is too small for one block for each rank and one more.
template <std::uint32_t Block = 128, quantisable T, quantised_operator Op = sum>
requires quantised_block<Block>
[[nodiscard]] collective_fault try_quantised_all_reduce(const member& me, std::span<const std::type_identity_t<T>> in,
                                                        std::span<T> out, Op op = {}, instant deadline = never) {
    if (in.size() != out.size()) return {errc::mismatch, collective_kind::all_reduce, me.rank(), 0};
    if (me.view().slot < detail::chunk_layout::least_slot(me.size(), Block))
        return {errc::invalid_specification, collective_kind::all_reduce, me.rank(), 0};
    return detail::run_in_thread(me, detail::quantised_body<T, Op, Block>{in.data(), out.data(), in.size(), op},
                                 deadline);
}

/// try_quantised_all_reduce, but throws operation_error with the fault's code. The error's `asked`
/// is the epoch, and `left` is the rank.
template <std::uint32_t Block = 128, quantisable T, quantised_operator Op = sum>
requires quantised_block<Block>
void quantised_all_reduce(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out, Op op = {},
                          instant deadline = never) {
    raise_fault(try_quantised_all_reduce<Block>(me, in, out, op, deadline));
}

/// Error feedback, to be called before a quantised all-reduce of `to` with blocks of the same size.
/// `to` becomes `from` plus `residual`, and `residual` becomes the part of that sum that the codes
/// of `to` don't carry. So over many calls, the sum of a rank's contributions stays within one
/// call's rounding of the sum of its `from`, except for the rounding of the additions in float. The
/// feedback doesn't include the loss by the codes of the ranks' sum. All three arrays have one
/// size; `to` may be `from`. Elements that aren't finite leave no residual. Any thread may call
/// this.
template <std::uint32_t Block = 128>
requires quantised_block<Block>
void feed_back_quantised(std::span<const float> from, std::span<float> to, std::span<float> residual) noexcept {
    struct one_thread {
        GPUSHARE_HD static constexpr std::uint32_t thread_rank() noexcept { return 0; }
        GPUSHARE_HD static constexpr std::uint32_t num_threads() noexcept { return 1; }
        GPUSHARE_HD static constexpr std::uint32_t block_rank() noexcept { return 0; }
        GPUSHARE_HD static constexpr std::uint32_t num_blocks() noexcept { return 1; }
    } alone;
    detail::owing_blocks<Block>{from.data(), to.data(), residual.data(), residual.data(), from.size()}(alone);
}

/// Error feedback in a device's memory, enqueued on `stream`, with the same bits. The kernel adds
/// `owed`, and `left` becomes the part that the codes don't carry. `owed` and `left` may be the
/// same array. Each array has `count` floats.
template <std::uint32_t Block = 128, launcher Stream>
requires quantised_block<Block>
void submit_feed_back_quantised(Stream& stream, const float* from, float* to, const float* owed, float* left,
                                std::size_t count) {
    const detail::owing_blocks<Block> kernel{from, to, owed, left, count};
    stream.launch(kernel.shape(), kernel);
}

namespace detail {

/// Hands `submit` a function that makes each rank's body, and the table's number of blocks.
template <std::uint32_t Block, class T, class Op, class Submit>
[[nodiscard]] errc submit_quantised(std::span<const member> members, std::span<const T* const> ins,
                                    std::span<T* const> outs, std::size_t count, Op op, const Submit& submit) {
    if (members.empty() || ins.size() != members.size() || outs.size() != members.size())
        return errc::invalid_specification;
    const auto ranks = static_cast<std::uint32_t>(members.size());
    if (members[0].view().slot < chunk_layout::least_slot(ranks, Block)) return errc::invalid_specification;
    const std::uint32_t blocks = members[0].tuning().plan(ranks, count * sizeof(T)).blocks;
    return submit([&](std::size_t r) { return quantised_body<T, Op, Block>{ins[r], outs[r], count, op}; }, blocks);
}

}  // namespace detail

/// A quantised all-reduce of `count` elements from ins[r] to outs[r] on every device, with a scale
/// for each `Block` elements. Works as submit(), with one more error:
///   invalid_specification   a slot of the communicator has no room for one block for each rank
///                           and one more
template <quantisable T, std::uint32_t Block = 128, gang_order Gangs, launcher Stream, quantised_operator Op = sum>
requires quantised_block<Block>
[[nodiscard]] errc submit_quantised_all_reduce(Gangs& gangs, std::span<const device_id> devices,
                                               std::span<Stream> streams, std::span<const member> members,
                                               std::span<const T* const> ins, std::span<T* const> outs,
                                               std::size_t count, Op op = {}, const launch_options& options = {}) {
    return detail::submit_quantised<Block>(
        members, ins, outs, count, op, [&](const auto& body_of, std::uint32_t blocks) {
            return detail::submit_each(gangs, devices, streams, members, body_of, options, blocks);
        });
}

/// The same for ranks that share `device`, in one launch on `stream`. Otherwise as submit_shared().
template <quantisable T, std::uint32_t Block = 128, gang_order Gangs, launcher Stream, quantised_operator Op = sum>
requires quantised_block<Block>
[[nodiscard]] errc submit_shared_quantised_all_reduce(Gangs& gangs, device_id device, Stream& stream,
                                                      std::span<const member> members, std::span<const T* const> ins,
                                                      std::span<T* const> outs, std::size_t count, Op op = {},
                                                      const launch_options& options = {}) {
    return detail::submit_quantised<Block>(
        members, ins, outs, count, op, [&](const auto& body_of, std::uint32_t blocks) {
            return detail::submit_shared_each(gangs, device, stream, members, body_of, options, blocks);
        });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
