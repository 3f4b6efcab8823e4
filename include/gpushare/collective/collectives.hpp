// SPDX-License-Identifier: Apache-2.0
// Collectives of threads. Each rank is one thread, and every thread calls the collective with its
// own rank `me` (see communicator.hpp).
//
// All-reduce: every rank gets the combination of all ranks' elements. Each element's values are
// always combined in the order of the ranks: floats in float or wider, integers in integers. So the
// bits are the same on every rank, in every run and with every algorithm. Arrays may have any
// length and any alignment that T allows, and a group may have any number of ranks from 1.
//
//   const std::span<float> gradient(array);
//   gpushare::all_reduce(me, gradient, std::span(out));  // a sum, out of place
//   gpushare::all_reduce(me, gradient, gradient, gpushare::average{}, deadline);    // in place
//
// The other collectives are reduce_scatter, all_gather, broadcast, reduce, all_to_all and barrier.
// Data is copied once, straight from the senders' buffers to the receivers': all ranks meet, each
// rank does its part, and all ranks finish.
//
//   // in, out and data are spans
//   gpushare::reduce_scatter(me, in, out);  // in: size() * out.size() elements; rank r gets part r
//   gpushare::all_gather(me, in, out);             // out: size() * in.size() elements
//   gpushare::broadcast(me, data, 0);
//
// Every collective takes a deadline and combines in rank order, as all_reduce does. The `try_`
// calls return the fault; the other calls throw it.
//
// all_gatherv, reduce_scatterv and all_to_allv take parts that differ in length and may be empty.
// If ranks disagree about a length, all ranks get errc::mismatch, and no rank waits for data that
// can't come:
//
//   const std::uint64_t counts[] = {3, 0, 500};  // of ranks 0, 1 and 2, the same on every rank
//   gpushare::all_gatherv(me, in, out, counts);  // in: counts[rank] elements, out: 503
//
// Collectives of lists work on many arrays at once, in place and without packing the arrays. Ranks
// tell each other where their lists are, and each rank works on its part of all lists. So one call
// combines a thousand small gradients. Each element is combined as all_reduce combines it, so the
// grouping of arrays into lists never changes a bit.
//
//   std::vector<std::span<float>> mine{weights, bias};  // the same sizes on every rank
//   gpushare::all_reduce_list<float>(me, mine, gpushare::average{});
//
// In an exchange, each rank tells the others where its elements are, and reads only its neighbours'
// elements:
//
//   const std::uint32_t beside[] = {left, right};
//   // theirs: left's elements, then right's
//   gpushare::try_exchange(me, std::span<const float>(x), beside, std::span(theirs));
//
// combine() combines arrays that are all in this process, to the same bits as a collective of that
// many ranks. It serves programs that fetch other ranks' elements by their own means, for example
// over a network:
//
//   gpushare::combine(3, [&](std::uint32_t r) { return parts[r].data(); }, std::span(sums), gpushare::average{});
//
// tune() measures which algorithm is fastest for each size, on this machine and with these ranks.
// For collectives on streams, write a function that times a collective and pass the function to
// tune_submitted().
//
//   // every rank's thread:
//   auto table = gpushare::tune(me);
//   // then one of them, when all are done:
//   group.set_tuning(table);                      // and table.save() for the next run
//
// Each size is measured in three ways: repeatedly in the same buffers (warm), in buffers that no
// cache holds (cold), and in place. In each of the three ways, a plan's loss is its time relative
// to the fastest plan's. The table gets the plan whose largest loss is smallest.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/all_reduce.hpp>
#include <gpushare/collective/detail/collectives.hpp>
#include <gpushare/collective/detail/list_bodies.hpp>
#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/detail/tuner.hpp>
#include <gpushare/collective/detail/unequal.hpp>
#include <gpushare/collective/detail/workspace.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

[[nodiscard]] inline collective_fault wrong_sizes(const member& me, collective_kind what) noexcept {
    return {errc::mismatch, what, me.rank(), 0};
}

}  // namespace detail

/// Combines the `in` of all ranks into the `out` of every rank. The arrays have the same size on
/// all ranks. A rank's `in` and `out` are the same memory or don't overlap. Waits for the other
/// ranks until `deadline` (of the steady clock). Returns the fault, if any, which is the same on
/// every rank that was in the collective. After a fault the contents of `out` are unspecified.
/// Returns errc::mismatch immediately if the spans differ in size.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_all_reduce(const member& me, std::span<const std::type_identity_t<T>> in,
                                              std::span<T> out, Op op = {}, instant deadline = never) {
    if (in.size() != out.size()) return {errc::mismatch, collective_kind::all_reduce, me.rank(), 0};
    const all_reduce_plan plan = me.tuning().plan(me.size(), in.size_bytes());
    return detail::run_in_thread(me, detail::all_reduce_body<T, Op>{in.data(), out.data(), in.size(), op, plan},
                                 deadline);
}

/// try_all_reduce, but throws operation_error with the fault's code. The error's `asked` is the
/// epoch, and `left` is the rank.
template <reducible T, class Op = sum>
void all_reduce(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out, Op op = {},
                instant deadline = never) {
    raise_fault(try_all_reduce(me, in, out, op, deadline));
}

/// Returns when all ranks have called try_barrier.
[[nodiscard]] inline collective_fault try_barrier(const member& me, instant deadline = never) {
    return detail::run_in_thread(me, detail::barrier_body{}, deadline);
}

/// Rank r gets the combination of part r of all inputs. `out` may be part r of this rank's `in`.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_reduce_scatter(const member& me, std::span<const std::type_identity_t<T>> in,
                                                  std::span<T> out, Op op = {}, instant deadline = never) {
    if (in.size() != out.size() * me.size()) return detail::wrong_sizes(me, collective_kind::reduce_scatter);
    return detail::run_in_thread(me, detail::reduce_scatter_body<T, Op>{in.data(), out.data(), out.size(), op},
                                 deadline);
}

/// Every rank gets all inputs, in the order of the ranks. `in` may be this rank's part of `out`.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_all_gather(const member& me, std::span<const std::type_identity_t<T>> in,
                                              std::span<T> out, instant deadline = never) {
    if (out.size() != in.size() * me.size()) return detail::wrong_sizes(me, collective_kind::all_gather);
    return detail::run_in_thread(me, detail::all_gather_body<T>{in.data(), out.data(), in.size()}, deadline);
}

/// Every rank gets the elements of `root`.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_broadcast(const member& me, std::span<T> data, std::uint32_t root,
                                             instant deadline = never) {
    if (root >= me.size()) return detail::wrong_sizes(me, collective_kind::broadcast);
    return detail::run_in_thread(me, detail::broadcast_body<T>{data.data(), data.size(), root}, deadline);
}

/// `root` gets the combination of all inputs in its `out`, which may be its `in`; the other ranks'
/// `out` isn't used.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_reduce(const member& me, std::span<const std::type_identity_t<T>> in,
                                          std::span<T> out, std::uint32_t root, Op op = {}, instant deadline = never) {
    if (root >= me.size() || (me.rank() == root && in.size() != out.size()))
        return detail::wrong_sizes(me, collective_kind::reduce);
    return detail::run_in_thread(me, detail::reduce_body<T, Op>{in.data(), out.data(), in.size(), op, root}, deadline);
}

/// Part q of rank r's input becomes part r of rank q's output. `out` may be `in`, on all ranks or
/// on none; otherwise all ranks get errc::mismatch.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_all_to_all(const member& me, std::span<const std::type_identity_t<T>> in,
                                              std::span<T> out, instant deadline = never) {
    if (in.size() != out.size() || in.size() % me.size() != 0)
        return detail::wrong_sizes(me, collective_kind::all_to_all);
    return detail::run_in_thread(me, detail::all_to_all_body<T>{in.data(), out.data(), in.size() / me.size()},
                                 deadline);
}

/// try_barrier, but throws operation_error.
inline void barrier(const member& me, instant deadline = never) { raise_fault(try_barrier(me, deadline)); }

/// try_reduce_scatter, but throws operation_error.
template <reducible T, class Op = sum>
void reduce_scatter(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out, Op op = {},
                    instant deadline = never) {
    raise_fault(try_reduce_scatter(me, in, out, op, deadline));
}
/// try_all_gather, but throws operation_error.
template <class T>
void all_gather(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out,
                instant deadline = never) {
    raise_fault(try_all_gather(me, in, out, deadline));
}
/// try_broadcast, but throws operation_error.
template <class T>
void broadcast(const member& me, std::span<T> data, std::uint32_t root, instant deadline = never) {
    raise_fault(try_broadcast(me, data, root, deadline));
}
/// try_reduce, but throws operation_error.
template <reducible T, class Op = sum>
void reduce(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out, std::uint32_t root,
            Op op = {}, instant deadline = never) {
    raise_fault(try_reduce(me, in, out, root, op, deadline));
}
/// try_all_to_all, but throws operation_error.
template <class T>
void all_to_all(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out,
                instant deadline = never) {
    raise_fault(try_all_to_all(me, in, out, deadline));
}

namespace detail {

/// Makes all ranks fail at once, for arguments that no collective's body accepts.
template <collective_kind Kind>
struct refusing_body {
    static constexpr auto kind = Kind;
    collective_fault operator()(session<thread_context>& t, std::uint32_t) const { return refuse(t, t.rank()); }
};
template <collective_kind Kind>
[[nodiscard]] collective_fault refuse_all(const member& me, instant deadline) {
    return run_in_thread(me, refusing_body<Kind>{}, deadline);
}

}  // namespace detail

/// Every rank gets all inputs, in the order of the ranks: `counts[r]` elements of rank r. `counts`
/// has a number for each rank, the same on all ranks. `in` and `out` are at least as long as the
/// counts require. `in` may be this rank's part of `out`. If the counts differ between ranks or
/// don't fit, all ranks get errc::mismatch without waiting for their deadline.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_all_gatherv(const member& me, std::span<const std::type_identity_t<T>> in,
                                               std::span<T> out, std::span<const std::uint64_t> counts,
                                               instant deadline = never) {
    if (counts.size() != me.size()) return detail::refuse_all<collective_kind::all_gather>(me, deadline);
    return detail::run_in_thread(
        me, detail::all_gatherv_body<T>{in.data(), in.size(), out.data(), out.size(), counts.data()}, deadline);
}

/// Rank r gets the combination of part r of all inputs, `counts[r]` elements. `out` may be part r
/// of this rank's `in`. Otherwise works as try_all_gatherv.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_reduce_scatterv(const member& me, std::span<const std::type_identity_t<T>> in,
                                                   std::span<T> out, std::span<const std::uint64_t> counts, Op op = {},
                                                   instant deadline = never) {
    if (counts.size() != me.size()) return detail::refuse_all<collective_kind::reduce_scatter>(me, deadline);
    return detail::run_in_thread(
        me, detail::reduce_scatterv_body<T, Op>{in.data(), in.size(), out.data(), out.size(), counts.data(), op},
        deadline);
}

/// `in` has a part for each rank, one after the other: sends[q] elements for rank q. `out` gets the
/// ranks' parts for this rank: receives[q] elements from rank q. `in` and `out` must not overlap.
/// Otherwise works as try_all_gatherv. If rank q sends a different number than this rank receives,
/// all ranks get errc::mismatch.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_all_to_allv(const member& me, std::span<const std::type_identity_t<T>> in,
                                               std::span<const std::uint64_t> sends, std::span<T> out,
                                               std::span<const std::uint64_t> receives, instant deadline = never) {
    if (sends.size() != me.size() || receives.size() != me.size() || (in.data() == out.data() && !in.empty()))
        return detail::refuse_all<collective_kind::all_to_all>(me, deadline);
    return detail::run_in_thread(
        me, detail::all_to_allv_body<T>{in.data(), in.size(), out.data(), out.size(), sends.data(), receives.data()},
        deadline);
}

/// try_all_gatherv, but throws operation_error.
template <class T>
void all_gatherv(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out,
                 std::span<const std::uint64_t> counts, instant deadline = never) {
    raise_fault(try_all_gatherv(me, in, out, counts, deadline));
}
/// try_reduce_scatterv, but throws operation_error.
template <reducible T, class Op = sum>
void reduce_scatterv(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out,
                     std::span<const std::uint64_t> counts, Op op = {}, instant deadline = never) {
    raise_fault(try_reduce_scatterv(me, in, out, counts, op, deadline));
}
/// try_all_to_allv, but throws operation_error.
template <class T>
void all_to_allv(const member& me, std::span<const std::type_identity_t<T>> in, std::span<const std::uint64_t> sends,
                 std::span<T> out, std::span<const std::uint64_t> receives, instant deadline = never) {
    raise_fault(try_all_to_allv(me, in, sends, out, receives, deadline));
}

/// out[i] = op of from(0)[i], from(1)[i], ... up to from(parts - 1)[i], in this order. Computes in
/// float or wider, and rounds once. from(r) points to as many elements as `out` has, and may be
/// `out` itself. `parts` is at least 1.
template <reducible T, class From, class Op = sum>
requires std::is_invocable_r_v<const T*, const From&, std::uint32_t>
void combine(std::uint32_t parts, const From& from, std::span<T> out, const Op& op = {}) noexcept {
    detail::thread_context ctx;
    const auto one_by_one = [&](element_range some) {
        detail::reduce_elements<T>(ctx, op, parts, some, from, detail::single_output<T>{out.data()});
    };
    if constexpr (detail::combines_lines<T, Op>) {
        constexpr std::uint32_t most = 16;
        const element_range lines = detail::whole_lines<T>(out.data(), {0, out.size()});
        if (lines.size() != 0 && parts <= most && detail::lines_pay<T, Op>(parts)) {
            detail::peer_signal arrays[most];
            for (std::uint32_t r = 0; r < parts; ++r) arrays[r].in = from(r);
            one_by_one({0, lines.begin});
            detail::combine_lines_to_one<T>(op, arrays, parts, 0, lines, out.data());
            return one_by_one({lines.end, out.size()});
        }
    }
    one_by_one({0, out.size()});
}

/// Combines the arrays of all ranks' lists into the arrays of every rank. A rank's arrays don't
/// overlap each other. Returns errc::mismatch if the lists' sizes differ, and otherwise works as
/// try_all_reduce. If `finite` is given, `*finite` says afterwards whether every combined element
/// is finite, with the same answer on all ranks. Either all ranks pass `finite`, or none does.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_all_reduce_list(const member& me, std::span<const std::span<T>> list, Op op = {},
                                                   instant deadline = never, bool* finite = nullptr) {
    return detail::run_in_thread(me, detail::combine_list_body<collective_kind::all_reduce, T, Op>(list, op, finite),
                                 deadline);
}

/// Like try_all_reduce_list, but rank r gets only its own shard of each array (shard_of), in its
/// own arrays. The other elements stay unchanged.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_reduce_scatter_list(const member& me, std::span<const std::span<T>> list, Op op = {},
                                                       instant deadline = never, bool* finite = nullptr) {
    return detail::run_in_thread(
        me, detail::combine_list_body<collective_kind::reduce_scatter, T, Op>(list, op, finite), deadline);
}

/// The reverse of try_reduce_scatter_list: every rank gets the shards of every other rank.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_all_gather_list(const member& me, std::span<const std::span<T>> list,
                                                   instant deadline = never) {
    return detail::run_in_thread(me, detail::all_gather_list_body<T>(list), deadline);
}

/// try_all_reduce_list, but throws operation_error.
template <reducible T, class Op = sum>
void all_reduce_list(const member& me, std::span<const std::span<T>> list, Op op = {}, instant deadline = never) {
    raise_fault(try_all_reduce_list<T>(me, list, op, deadline));
}
/// try_reduce_scatter_list, but throws operation_error.
template <reducible T, class Op = sum>
void reduce_scatter_list(const member& me, std::span<const std::span<T>> list, Op op = {}, instant deadline = never) {
    raise_fault(try_reduce_scatter_list<T>(me, list, op, deadline));
}
/// try_all_gather_list, but throws operation_error.
template <class T>
void all_gather_list(const member& me, std::span<const std::span<T>> list, instant deadline = never) {
    raise_fault(try_all_gather_list<T>(me, list, deadline));
}

namespace detail {

template <class T>
struct exchange_body {
    std::span<const T> in;
    std::span<const std::uint32_t> neighbours;
    T* out;
    static constexpr auto kind = collective_kind::all_gather;

    collective_fault operator()(session<thread_context>& t, std::uint32_t blocks) const {
        if (!t.meet(call_signature(kind, type_id<T>() | 256U, 0, in.size(), blocks), in.data())) return t.fault();
        for (std::size_t i = 0; i < neighbours.size(); ++i)
            copy_elements(t.context(), out + i * in.size(), static_cast<const T*>(t.signal_from(neighbours[i]).in),
                          in.size());
        return t.finish();
    }
};

}  // namespace detail

/// `out` gets the elements of each neighbour, one array after the other. All ranks call
/// try_exchange with the same number of elements. Each rank has neighbours of its own, perhaps
/// none. Returns errc::mismatch immediately for a neighbour that isn't a rank, or an `out` of
/// another size.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_exchange(const member& me, std::span<const std::type_identity_t<T>> in,
                                            std::span<const std::uint32_t> neighbours, std::span<T> out,
                                            instant deadline = never) {
    bool good = out.size() == in.size() * neighbours.size();
    for (const std::uint32_t q : neighbours) good = good && q < me.size();
    if (!good) return {errc::mismatch, collective_kind::all_gather, me.rank(), 0};
    return detail::run_in_thread(me, detail::exchange_body<T>{in, neighbours, out.data()}, deadline);
}

/// Measures sums of floats and returns a table for groups of this size. Measuring takes a few
/// seconds. Every rank calls tune(), and gets the same table. Throws std::bad_alloc,
/// operation_error (errc::invalid_specification) if the smallest size is less than a float, and the
/// faults of the measured collectives.
[[nodiscard]] inline tuning_table tune(const member& me, const tune_options& options = {}) {
    detail::check_sizes(options);
    detail::tuner measuring(me, options);
    return detail::merged(me.size(), options, [&](std::uint64_t size, const all_reduce_plan* below) {
        return std::optional(measuring.best(size, below));
    });
}

/// tune() for submitted collectives. took(plan, bytes) submits a collective by this plan and
/// returns its time in any unit, for example between two points of the stream, or infinity if the
/// plan can't be used. Of `options`, only the sizes and `most_blocks` are used. With `most_blocks`,
/// plans have numbers of blocks.
template <std::invocable<const all_reduce_plan&, bytes> Took>
[[nodiscard]] tuning_table tune_submitted(std::uint32_t ranks, const Took& took, const tune_options& options = {}) {
    detail::check_sizes(options);
    std::vector<all_reduce_plan> plans;
    const auto most = static_cast<std::uint16_t>(std::min<std::uint32_t>(options.most_blocks, 65'535));
    for (std::uint32_t blocks = std::min<std::uint32_t>(most, 1); blocks <= most;
         blocks = detail::next_count(blocks, most))
        for (const all_reduce_plan& p : std::array<all_reduce_plan, 4>{
                 {{algorithm::one_shot}, {algorithm::two_shot}, {algorithm::two_shot, true}, {algorithm::ring}}}) {
            plans.push_back(p);
            plans.back().blocks = static_cast<std::uint16_t>(blocks);
        }
    return detail::merged(ranks, options, [&](std::uint64_t size, const all_reduce_plan* below) {
        std::vector<double> cost;
        for (const auto& p : plans) cost.push_back(static_cast<double>(took(p, bytes{size})));
        const std::size_t best = detail::cheapest(plans, cost, below);
        return cost[best] < std::numeric_limits<double>::infinity() ? std::optional(plans[best]) : std::nullopt;
    });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
