// SPDX-License-Identifier: Apache-2.0
// A transport carries gradients between ranks: our own collectives between the threads of a
// process, an MPI between processes (interop/mpi.hpp), NCCL between devices (interop/nccl.hpp), or
// two of them, one inside the other (two_level.hpp). The algorithms of gradient/ run over
// transports whose bytes the host reads (host_transport). That excludes NCCL, whose collectives are
// called directly.
//
//   gpushare::communicator group(4);
//   gpushare::thread_transport net(group.rank(r));          // in thread r of four
//   if (auto fault = net.all_reduce(gradient, gradient, gpushare::average{}, deadline)) ...
//
// A transport is one rank's end. One thread uses it at a time, but for abort(), which any may call.
//
// Parameters can be averaged in place of gradients: with the neighbours in a topology at every step
// (gossip), or with all ranks every so many steps (local steps).
//
//   const auto ring = gpushare::neighbour_graph::ring(net.size());
//   gpushare::gossip_average(net, ring, parameters, deadline);
//
//   constexpr gpushare::local_steps local{.every = 8};
//   if (local.due(step)) gpushare::average_all(net, list_of_parameters, deadline);
//
// Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017;
// Stich, "Local SGD converges fast and communicates little", ICLR 2019. Weights: Xiao and Boyd,
// "Fast linear iterations for distributed averaging", 2004 (Metropolis).
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/gossip.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// Mixes words to one: equal where all of them are equal, and hardly ever elsewhere.
[[nodiscard]] constexpr std::uint64_t mixed_word(std::initializer_list<std::uint64_t> words) noexcept {
    std::uint64_t mix = 0;
    for (const std::uint64_t word : words) {
        mix = (mix ^ word) * 0x9e37'79b9'7f4a'7c15U;  // of the golden ratio: spreads what differs over the bits above
        mix ^= mix >> 29;
    }
    return mix;
}

/// A hash of everything in which ranks must agree. Ranks compare their words before they use each
/// other's bytes. `op` and `root` are 0 for calls that have none.
template <class T>
[[nodiscard]] constexpr std::uint64_t call_word(collective_kind what, std::size_t elements, std::uint32_t op = 0,
                                                std::uint32_t root = 0) noexcept {
    return mixed_word(
        {elements, std::uint64_t{sizeof(T)} << 32 | type_id<T>(), static_cast<std::uint64_t>(what) << 32 | op, root});
}

/// The first rank whose word isn't the largest party's; between equal parties, the party of the
/// lowest rank counts as the larger. All ranks choose the same one.
[[nodiscard]] inline std::optional<std::uint32_t> odd_one(std::span<const std::uint64_t> words) noexcept {
    const auto party = [&](std::uint64_t word) { return std::count(words.begin(), words.end(), word); };
    std::uint64_t most = words.empty() ? 0 : words.front();
    for (const std::uint64_t word : words)
        if (word != most && party(word) > party(most)) most = word;
    for (std::uint32_t r = 0; r < words.size(); ++r)
        if (words[r] != most) return r;
    return std::nullopt;
}

}  // namespace detail

/// One rank's end of a group. Its collectives are those of collective/ by name and meaning: called
/// by all ranks in the same order, back by the deadline, with the fault if there is one, which
/// names the rank. After a fault, every later call returns one. Ranks that call something else than
/// the others (another collective, length, type, operator or root) all get errc::mismatch.
///
///   all_reduce(in, out, op, deadline)        any length; `in` may be `out`
///   reduce_scatter(in, out, op, deadline)    size() * out.size() elements in; `out` may be this rank's part of `in`
///   all_gather(in, out, deadline)            size() * in.size() elements out; `in` may be this rank's part of `out`
///   broadcast(data, root, deadline)
///   barrier(deadline)
///   abort(rank, why)                         ends the collectives of all ranks, naming `rank`, which may be any number; doesn't wait
///   carried()                                how many bytes went into its collectives so far: of `in`, or of broadcast data
///   rank_ordered                             whether each element is combined in the order of ranks, in float or wider: the same
///                                            bits for every length, chunk and run
///   in_host_memory                           whether spans are of memory that the host reads: see host_transport
template <class T>
concept transport = requires(T& t, const T& c, std::span<const float> in, std::span<float> out,
                             std::span<std::uint64_t> words, instant deadline) {
    { T::rank_ordered } -> std::convertible_to<bool>;
    { T::in_host_memory } -> std::convertible_to<bool>;
    { c.rank() }
    noexcept->std::same_as<std::uint32_t>;
    { c.size() }
    noexcept->std::same_as<std::uint32_t>;
    { c.carried() }
    noexcept->std::same_as<bytes>;
    { t.all_reduce(in, out, sum{}, deadline) } -> std::same_as<collective_fault>;
    { t.reduce_scatter(in, out, sum{}, deadline) } -> std::same_as<collective_fault>;
    { t.all_gather(in, out, deadline) } -> std::same_as<collective_fault>;
    { t.broadcast(words, std::uint32_t{}, deadline) } -> std::same_as<collective_fault>;
    { t.barrier(deadline) } -> std::same_as<collective_fault>;
    t.abort(std::uint32_t{}, errc::aborted);
};

/// A transport whose spans are of the host's memory, with results there once a call has returned.
/// Code that looks at elements, or keeps its own on the stack, requires it.
template <class T>
concept host_transport = transport<T> && T::in_host_memory;

/// A transport whose parts may differ in length, and be empty: `counts` has the number of elements
/// of each rank's part, the same on every rank. Arrays are at least as long as their elements need.
/// errc::mismatch on all ranks if counts differ or don't fit.
///
///   reduce_scatterv(in, out, counts, op, deadline)   `out` may be this rank's part of `in`
///   all_gatherv(in, out, counts, deadline)           `in` may be this rank's part of `out`
///   all_to_allv(in, sends, out, receives, deadline)  sends[q] elements to rank q, receives[q] from
///                                                    it; not in place
template <class T>
concept unequal_transport = transport<T> && requires(T& t, std::span<const float> in, std::span<float> out,
                                                     std::span<const std::uint64_t> counts, instant deadline) {
    { t.reduce_scatterv(in, out, counts, sum{}, deadline) } -> std::same_as<collective_fault>;
    { t.all_gatherv(in, out, counts, deadline) } -> std::same_as<collective_fault>;
    { t.all_to_allv(in, counts, out, counts, deadline) } -> std::same_as<collective_fault>;
};

/// One that combines many arrays where they lie, without packing them: see collective/collectives.hpp.
template <class T>
concept list_transport = transport<T> && requires(T& t, std::span<const std::span<float>> list, instant deadline) {
    { t.all_reduce_list(list, sum{}, deadline) } -> std::same_as<collective_fault>;
    { t.reduce_scatter_list(list, sum{}, deadline) } -> std::same_as<collective_fault>;
    { t.all_gather_list(list, deadline) } -> std::same_as<collective_fault>;
};

/// One whose collectives can be under way, several at once, while the caller does something else.
///
///   start_all_reduce(data, op)         a ticket; `data`, the input and the output, isn't touched until it is finished
///   start_reduce_scatter(data, op)     the same, of size() parts; the part of this rank is its output
///   start_all_gather(data)             the same; the part of this rank is its input
///   advance()                          does what can be done without waiting
///   finish(ticket, deadline)           waits for it
template <class T>
concept pipelined_transport = transport<T> && requires(T& t, std::span<float> data, instant deadline) {
    { t.finish(t.start_all_reduce(data, sum{}), deadline) } -> std::same_as<collective_fault>;
    { t.finish(t.start_reduce_scatter(data, sum{}), deadline) } -> std::same_as<collective_fault>;
    { t.finish(t.start_all_gather(data), deadline) } -> std::same_as<collective_fault>;
    t.advance();
};

/// A transport that a rank can leave in order, without loss of the others' last results.
///
///   leave(rank, why)    this rank makes no more calls. The others finish the calls that it took
///                       part in; their later calls return `why` and name `rank`, which may be any
///                       number. Called by the thread that uses the transport, with nothing under
///                       way. Doesn't wait for the others' calls
template <class T>
concept leaving_transport = transport<T> && requires(T& t) {
    t.leave(std::uint32_t{}, errc::stopped);
};

/// The transport for a communicator's rank that is a thread of this process.
class thread_transport {
public:
    static constexpr bool rank_ordered = true;    ///< see transport
    static constexpr bool in_host_memory = true;  ///< see transport

    /// The rank `me`, on its channel: one transport a channel.
    explicit thread_transport(const member& me) noexcept : me_(me) {}

    [[nodiscard]] std::uint32_t rank() const noexcept { return me_.rank(); }  ///< from 0
    [[nodiscard]] std::uint32_t size() const noexcept { return me_.size(); }  ///< ranks of the group
    [[nodiscard]] bytes carried() const noexcept { return carried_; }         ///< see transport
    [[nodiscard]] const member& me() const noexcept { return me_; }           ///< for all else that collective/ has

    /// See transport.
    template <reducible T, class Op>
    [[nodiscard]] collective_fault all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                              const Op& op, instant deadline) {
        count(in);
        return try_all_reduce(me_, in, out, op, deadline);
    }
    /// See transport.
    template <reducible T, class Op>
    [[nodiscard]] collective_fault reduce_scatter(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                  const Op& op, instant deadline) {
        count(in);
        return try_reduce_scatter(me_, in, out, op, deadline);
    }
    /// See transport.
    template <class T>
    [[nodiscard]] collective_fault all_gather(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                              instant deadline) {
        count(in);
        return try_all_gather(me_, in, out, deadline);
    }
    /// See transport.
    template <class T>
    [[nodiscard]] collective_fault broadcast(std::span<T> data, std::uint32_t root, instant deadline) {
        count(std::span<const T>(data));
        return try_broadcast(me_, data, root, deadline);
    }
    /// See unequal_transport.
    template <reducible T, class Op>
    [[nodiscard]] collective_fault reduce_scatterv(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                   std::span<const std::uint64_t> counts, const Op& op,
                                                   instant deadline) {
        count(in);
        return try_reduce_scatterv(me_, in, out, counts, op, deadline);
    }
    /// See unequal_transport.
    template <class T>
    [[nodiscard]] collective_fault all_gatherv(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                               std::span<const std::uint64_t> counts, instant deadline) {
        count(in);
        return try_all_gatherv(me_, in, out, counts, deadline);
    }
    /// See unequal_transport.
    template <class T>
    [[nodiscard]] collective_fault all_to_allv(std::span<const std::type_identity_t<T>> in,
                                               std::span<const std::uint64_t> sends, std::span<T> out,
                                               std::span<const std::uint64_t> receives, instant deadline) {
        count(in);
        return try_all_to_allv(me_, in, sends, out, receives, deadline);
    }
    /// See transport.
    [[nodiscard]] collective_fault barrier(instant deadline) { return try_barrier(me_, deadline); }
    /// See neighbour_transport.
    template <class T>
    [[nodiscard]] collective_fault exchange(std::span<const std::type_identity_t<T>> in,
                                            std::span<const std::uint32_t> neighbours, std::span<T> out,
                                            instant deadline) {
        count(in);
        return try_exchange(me_, in, neighbours, out, deadline);
    }
    /// See list_transport. `finite`: see try_all_reduce_list.
    template <reducible T, class Op>
    [[nodiscard]] collective_fault all_reduce_list(std::span<const std::span<T>> list, const Op& op, instant deadline,
                                                   bool* finite = nullptr) {
        for (const auto& array : list) count(std::span<const T>(array));
        return try_all_reduce_list<T>(me_, list, op, deadline, finite);
    }
    /// See list_transport.
    template <reducible T, class Op>
    [[nodiscard]] collective_fault reduce_scatter_list(std::span<const std::span<T>> list, const Op& op,
                                                       instant deadline, bool* finite = nullptr) {
        for (const auto& array : list) count(std::span<const T>(array));
        return try_reduce_scatter_list<T>(me_, list, op, deadline, finite);
    }
    /// See list_transport.
    template <class T>
    [[nodiscard]] collective_fault all_gather_list(std::span<const std::span<T>> list, instant deadline) {
        for (const auto& array : list) count(std::span<const T>(array));
        return try_all_gather_list<T>(me_, list, deadline);
    }
    /// See transport.
    void abort(std::uint32_t rank, errc why) const noexcept {
        const rank_progress at = me_.progress();
        me_.close({why, at.what, rank, at.epoch});
    }
    /// See leaving_transport. Waits for the other ranks to come out of the last call that this rank
    /// took part in.
    void leave(std::uint32_t rank, errc why) const noexcept {
        me_.await_last();
        abort(rank, why);
    }

private:
    template <class T>
    void count(std::span<const T> in) noexcept {
        carried_ += bytes{in.size_bytes()};
    }

    member me_;
    bytes carried_;
};
static_assert(list_transport<thread_transport> && host_transport<thread_transport> &&
              unequal_transport<thread_transport> && leaving_transport<thread_transport>);

/// A transport that exchanges elements with some ranks alone: `out` gets each neighbour's elements,
/// one behind the other. The relation is mutual: a neighbour of a rank has that rank as its
/// neighbour.
template <class T>
concept neighbour_transport = transport<T> && requires(T& t, std::span<const float> in, std::span<float> out,
                                                       std::span<const std::uint32_t> neighbours, instant deadline) {
    { t.exchange(in, neighbours, out, deadline) } -> std::same_as<collective_fault>;
};

/// The averaging partners: a graph of ranks, with weights for which repeated averages converge to
/// the average of all ranks, if the graph is connected. A value, the same on all ranks.
class neighbour_graph {
public:
    /// Made of pairs; each counts for both. Throws operation_error (errc::invalid_specification)
    /// for a rank that isn't there, or a pair of a rank with itself.
    neighbour_graph(std::uint32_t ranks, std::span<const std::pair<std::uint32_t, std::uint32_t>> edges)
        : neighbours_(ranks) {
        for (const auto& [a, b] : edges) {
            if (a >= ranks || b >= ranks || a == b)
                raise({errc::invalid_specification, std::max(a, b), 0, ranks, reason::no_such_link}, {}, "a topology");
            neighbours_[a].push_back(b);
            neighbours_[b].push_back(a);
        }
        for (auto& n : neighbours_) {
            std::sort(n.begin(), n.end());
            n.erase(std::unique(n.begin(), n.end()), n.end());
        }
    }
    /// Each with the one before and the one behind.
    [[nodiscard]] static neighbour_graph ring(std::uint32_t ranks) {
        std::vector<std::pair<std::uint32_t, std::uint32_t>> edges;
        for (std::uint32_t r = 0; r + 1 < ranks; ++r) edges.emplace_back(r, r + 1);
        if (ranks > 2) edges.emplace_back(ranks - 1, 0);
        return {ranks, edges};
    }
    /// Connects ranks whose numbers differ in one bit: few neighbours each, and short paths between
    /// all ranks.
    [[nodiscard]] static neighbour_graph hypercube(std::uint32_t ranks) {
        std::vector<std::pair<std::uint32_t, std::uint32_t>> edges;
        for (std::uint32_t r = 0; r < ranks; ++r)
            for (std::uint32_t bit = 1; bit < ranks; bit <<= 1)
                if ((r & bit) == 0 && (r | bit) < ranks) edges.emplace_back(r, r | bit);
        return {ranks, edges};
    }

    [[nodiscard]] std::uint32_t size() const noexcept {
        return static_cast<std::uint32_t>(neighbours_.size());
    }  ///< ranks
    /// A rank's neighbours, ascending.
    [[nodiscard]] std::span<const std::uint32_t> neighbours(std::uint32_t r) const noexcept { return neighbours_[r]; }
    /// The weight with which rank r takes rank q's numbers. The weights that a rank takes sum to 1,
    /// and so do the weights with which others take its numbers.
    [[nodiscard]] float weight(std::uint32_t r, std::uint32_t q) const noexcept {
        if (r != q) {
            const auto& mine = neighbours_[r];
            if (!std::binary_search(mine.begin(), mine.end(), q)) return 0;
            return 1.0F / static_cast<float>(1 + std::max(mine.size(), neighbours_[q].size()));
        }
        float rest = 1;
        for (const std::uint32_t n : neighbours_[r]) rest -= weight(r, n);
        return rest;
    }

private:
    std::vector<std::vector<std::uint32_t>> neighbours_;
};

/// One step of averaging: `x` becomes the weighted mean of this rank's and its neighbours', added
/// in the order of ranks. Called by all ranks, with as many elements and the same topology.
/// errc::mismatch, on this rank alone, for a topology of another size.
template <neighbour_transport Net>
requires host_transport<Net>
[[nodiscard]] collective_fault gossip_average(Net& net, const neighbour_graph& among, std::span<float> x,
                                              instant deadline = never) {
    if (among.size() != net.size()) return {errc::mismatch, collective_kind::all_gather, net.rank(), 0};
    const auto beside = among.neighbours(net.rank());
    std::vector<float> theirs(x.size() * beside.size());
    if (const auto f = net.exchange(std::span<const float>(x), beside, std::span(theirs), deadline)) return f;
    std::vector<float> weights;
    for (const std::uint32_t q : beside) weights.push_back(among.weight(net.rank(), q));
    const float own = among.weight(net.rank(), net.rank());
    const auto before =
        static_cast<std::size_t>(std::lower_bound(beside.begin(), beside.end(), net.rank()) - beside.begin());
    for (std::size_t i = 0; i < x.size(); ++i) {
        float sum = 0;
        for (std::size_t k = 0; k < before; ++k) detail::add_weighted(sum, weights[k], theirs[k * x.size() + i]);
        detail::add_weighted(sum, own, x[i]);
        for (std::size_t k = before; k < beside.size(); ++k)
            detail::add_weighted(sum, weights[k], theirs[k * x.size() + i]);
        x[i] = sum;
    }
    return {};
}

/// Steps between two averages of all ranks.
struct local_steps {
    std::uint64_t every = 1;  ///< 1: after each
    /// Whether the ranks average behind this step, which is counted from 0.
    [[nodiscard]] constexpr bool due(std::uint64_t step) const noexcept {
        return every != 0 && (step + 1) % every == 0;
    }
};

/// Each array becomes the mean of all ranks'.
template <transport Net>
[[nodiscard]] collective_fault average_all(Net& net, std::span<const std::span<float>> list, instant deadline = never) {
    if constexpr (list_transport<Net>) {
        return net.all_reduce_list(list, average{}, deadline);
    } else {
        for (const auto& x : list)
            if (const auto f = net.all_reduce(std::span<const float>(x), x, average{}, deadline)) return f;
        return {};
    }
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
