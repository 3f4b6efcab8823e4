// SPDX-License-Identifier: Apache-2.0
// A transport carries gradients between ranks. There are transports over our own collectives
// between the threads of a process, over an MPI between processes (mpi.hpp), and over NCCL
// between devices (nccl.hpp). A transport can also consist of two transports, one inside
// the other (two_level.hpp). The algorithms of gradient/ require transports of host memory
// (host_transport). NCCL's isn't one, so call its collectives directly.
//
//   gpushare::communicator group(4);
//   gpushare::thread_transport net(group.rank(r));          // in thread r of four
//   if (auto fault = net.all_reduce(gradient, gradient, gpushare::average{}, deadline)) ...
//
// A transport is one rank's end of a group. One thread at a time uses it. Any thread may call
// abort().
//
// Ranks can average parameters instead of gradients: with their neighbours in a graph at every step
// (gossip), or with all ranks every few steps (local steps).
//
//   const auto ring = gpushare::neighbour_graph::ring(net.size());
//   gpushare::gossip_average(net, ring, parameters, deadline);
//
//   constexpr gpushare::local_steps local{.every = 8};
//   if (local.due(step)) gpushare::average_all(net, list_of_parameters, deadline);
//
// Literature: Lian et al., "Can decentralized algorithms outperform centralized algorithms?",
// NeurIPS 2017; Stich, "Local SGD converges fast and communicates little", ICLR 2019. The weights
// are those of Xiao and Boyd, "Fast linear iterations for distributed averaging", 2004
// (Metropolis).
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
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
#include <gpushare/detail/code_thrown.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/gossip.hpp>
#include <gpushare/gradient/detail/lent_arrays.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// A hash of the words.
[[nodiscard]] constexpr std::uint64_t mixed_word(std::initializer_list<std::uint64_t> words) noexcept {
    std::uint64_t mix = 0;
    for (const std::uint64_t word : words) {
        mix = (mix ^ word) * 0x9e37'79b9'7f4a'7c15U;  // golden ratio: spreads differences upwards
        mix ^= mix >> 29;
    }
    return mix;
}

/// A hash of everything on which ranks must agree. Ranks compare these hashes before they use each
/// other's bytes. `op` and `root` are 0 for calls without an operator or a root.
template <class T>
[[nodiscard]] constexpr std::uint64_t call_word(collective_kind what, std::size_t elements, std::uint32_t op = 0,
                                                std::uint32_t root = 0) noexcept {
    return mixed_word(
        {elements, std::uint64_t{sizeof(T)} << 32 | type_id<T>(), static_cast<std::uint64_t>(what) << 32 | op, root});
}

/// The first rank whose word differs from the most common word. If several words are equally
/// common, the lowest rank's word counts. All ranks compute the same answer.
[[nodiscard]] inline std::optional<std::uint32_t> odd_one(std::span<const std::uint64_t> words) noexcept {
    const auto party = [&](std::uint64_t word) { return std::count(words.begin(), words.end(), word); };
    std::uint64_t most = words.empty() ? 0 : words.front();
    for (const std::uint64_t word : words)
        if (word != most && party(word) > party(most)) most = word;
    for (std::uint32_t r = 0; r < words.size(); ++r)
        if (words[r] != most) return r;
    return std::nullopt;
}

/// The fault that `net` has met so far, if the transport reports one. Doesn't wait.
template <class Net>
[[nodiscard]] collective_fault fault_so_far(const Net& net) noexcept {
    if constexpr (requires { collective_fault(net.fault()); })
        return net.fault();
    else
        return {};
}
/// Gives up this rank's work under way, without waiting. A transport without a thread of its own
/// then also tells the other ranks of an abort. Returns whether the transport may still touch the
/// work's memory.
template <class Net>
[[nodiscard]] bool gives_up(Net& net) noexcept {
    try {
        return net.barrier(std::chrono::steady_clock::now()).buffers_in_use;
    } catch (...) {
        return true;
    }
}
/// `deadline`, or a year from now if that comes first, because some condition variables overflow
/// when they wait until `never`.
[[nodiscard]] inline instant within_a_year(instant deadline) noexcept {
    return std::min<instant>(deadline, std::chrono::steady_clock::now() + std::chrono::hours(24 * 365));
}
/// Makes a call of `net`. If the transport throws, this rank ends the calls of all ranks, and then
/// throws the exception.
template <class Net, class Call>
[[nodiscard]] collective_fault or_end_all(Net& net, const Call& call) {
    try {
        return call();
    } catch (...) {
        net.abort(net.rank(), code_thrown());
        (void)gives_up(net);
        throw;
    }
}
/// Calls `make`, which may throw, on all ranks. If `make` throws on a rank, all ranks call `undo`
/// and throw: a rank that failed throws its own exception, and the other ranks throw an
/// operation_error that names a rank that failed. If the transport throws, its rank ends the calls
/// of all ranks.
template <class Net, class Make, class Undo>
void make_on_all(Net& net, const Make& make, const Undo& undo, instant deadline) {
    constexpr std::uint64_t good = ~std::uint64_t{0};
    // This rank's word, and the least of all ranks. They aren't on the stack, because after a fault
    // the transport may still touch them. Only a rank without memory for them has them there.
    std::uint64_t without_memory[] = {good, good};
    std::span<std::uint64_t> both(without_memory);
    std::vector<std::uint64_t> words;
    std::exception_ptr thrown;
    try {
        words.assign(2, good);
        both = words;
        make();
    } catch (...) {
        thrown = std::current_exception();
        both[0] = std::uint64_t{net.rank()} << 32 | static_cast<std::uint32_t>(code_thrown());
    }
    collective_fault f;
    lent_arrays memory(words);
    const auto meet = [&] {
        const auto met =
            net.all_reduce(std::span<const std::uint64_t>(both.first(1)), both.last(1), minimum{}, deadline);
        // The barrier keeps every rank from continuing, and perhaps failing, before all ranks have
        // the answer. If the barrier fails, each rank's next call reports the fault.
        if (!met) (void)net.barrier(deadline);
        return met;
    };
    try {
        f = memory.to([&] { return or_end_all(net, meet); });
    } catch (...) {
        if (!thrown) thrown = std::current_exception();
    }
    if (const std::uint64_t& least = both[1]; !f && !thrown && least != good)
        f = {static_cast<errc>(least & 0xffU), collective_kind::all_reduce, static_cast<std::uint32_t>(least >> 32), 0};
    if (!thrown && !f) return;
    undo();
    if (thrown) std::rethrow_exception(thrown);
    raise_fault(f);
}
/// Collective over `net`. Returns the `size` words that `call(in, out)`, a call of `net`, writes to
/// `out`; `in` has this rank's words. Throws operation_error for a fault of `net`. If a rank lacks
/// memory or the transport throws there, that rank throws its own exception, and the other ranks
/// throw an operation_error. After a fault with buffers_in_use, or an exception, neither array is
/// freed.
template <class Net, class Call>
[[nodiscard]] std::vector<std::uint64_t> exchange_words(Net& net, std::initializer_list<std::uint64_t> mine,
                                                        std::size_t size, const Call& call, instant deadline) {
    std::vector<std::uint64_t> in, out;
    const auto allocate = [&] {
        in = mine;
        out.resize(size);
    };
    make_on_all(
        net, allocate, [] {}, deadline);
    lent_arrays memory(in, out);
    raise_fault(memory.to(
        [&] { return or_end_all(net, [&] { return call(std::span<const std::uint64_t>(in), std::span(out)); }); }));
    return out;
}

}  // namespace detail

/// One rank's end of a group. The collectives have the names and meanings of collective/. All ranks
/// call them in the same order, and each call returns at its deadline or a short grace later, with
/// a fault or without.
///
/// A fault names a rank. If calls differ between ranks (in the collective, length, type, operator
/// or root), all ranks get errc::mismatch. After any of these faults, every later call returns a
/// fault. If the arguments of one rank's call don't fit each other, only this rank gets
/// errc::mismatch, immediately, and it hasn't taken part.
///
///  - all_reduce(in, out, op, deadline): any length; `in` may be `out`
///  - reduce_scatter(in, out, op, deadline): `in` has size() * out.size() elements; `out` may be
///    this rank's part of `in`
///  - all_gather(in, out, deadline): `out` has size() * in.size() elements; `in` may be this rank's
///    part of `out`
///  - broadcast(data, root, deadline)
///  - barrier(deadline)
///  - abort(rank, why) ends the collectives of all ranks and names `rank`, which may be any number
///    below 65536; doesn't wait
///  - carried() is the bytes that this rank has brought to collectives: `in`, or broadcast data
///  - rank_ordered says whether each element is combined in the order of ranks, in float or wider,
///    so that the bits are the same for every length, chunk and run
///  - in_host_memory says whether spans are of memory that the host reads: see host_transport
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

/// A transport of host memory. Once a call has returned, its results are in memory. Code that reads
/// elements, or passes arrays on its stack, requires a host_transport.
template <class T>
concept host_transport = transport<T> && T::in_host_memory;

/// A transport whose parts may differ in length, and may be empty. `counts` has the number of
/// elements of each rank's part, the same on every rank. Arrays may be longer than their parts. If
/// the counts differ or don't fit, all ranks get errc::mismatch. No call uses counts once it ends.
///
///  - reduce_scatterv(in, out, counts, op, deadline): `out` may be this rank's part of `in`
///  - all_gatherv(in, out, counts, deadline): `in` may be this rank's part of `out`
///  - all_to_allv(in, sends, out, receives, deadline) brings sends[q] elements for rank q and gets
///    receives[q] elements from rank q; `in` and `out` must not overlap
template <class T>
concept unequal_transport = transport<T> && requires(T& t, std::span<const float> in, std::span<float> out,
                                                     std::span<const std::uint64_t> counts, instant deadline) {
    { t.reduce_scatterv(in, out, counts, sum{}, deadline) } -> std::same_as<collective_fault>;
    { t.all_gatherv(in, out, counts, deadline) } -> std::same_as<collective_fault>;
    { t.all_to_allv(in, counts, out, counts, deadline) } -> std::same_as<collective_fault>;
};

/// A transport that combines many arrays in place, without packing: see collective/collectives.hpp.
template <class T>
concept list_transport = transport<T> && requires(T& t, std::span<const std::span<float>> list, instant deadline) {
    { t.all_reduce_list(list, sum{}, deadline) } -> std::same_as<collective_fault>;
    { t.reduce_scatter_list(list, sum{}, deadline) } -> std::same_as<collective_fault>;
    { t.all_gather_list(list, deadline) } -> std::same_as<collective_fault>;
};

/// A transport that can run several collectives at once while the caller does other work.
///
///  - start_all_reduce(data, op) returns a ticket. `data` is the input and the output: don't touch
///    `data` before the all-reduce is finished.
///  - start_reduce_scatter(data, op): likewise; `data` has size() equal parts, and this rank's part
///    is the output
///  - start_all_gather(data): likewise; this rank's part is the input
///  - advance() does all that can be done without waiting
///  - finish(ticket, deadline) waits until the ticket's collective is finished
template <class T>
concept pipelined_transport = transport<T> && requires(T& t, std::span<float> data, instant deadline) {
    { t.finish(t.start_all_reduce(data, sum{}), deadline) } -> std::same_as<collective_fault>;
    { t.finish(t.start_reduce_scatter(data, sum{}), deadline) } -> std::same_as<collective_fault>;
    { t.finish(t.start_all_gather(data), deadline) } -> std::same_as<collective_fault>;
    t.advance();
};

/// A transport that a rank can leave without costing the other ranks their last results.
///
/// leave(rank, why) says that this rank makes no more calls. The other ranks finish the calls in
/// which this rank took part; their later calls return `why` and name `rank`, which may be any
/// number below 65536. The thread that uses the transport calls leave(), with no collective under
/// way. leave() doesn't wait for the other ranks' later calls.
template <class T>
concept leaving_transport = transport<T> && requires(T& t) {
    t.leave(std::uint32_t{}, errc::stopped);
};

/// The transport of a communicator's rank, which is a thread of this process.
class thread_transport {
public:
    static constexpr bool rank_ordered = true;    ///< see transport
    static constexpr bool in_host_memory = true;  ///< see transport

    /// Makes the transport of rank `me` on its channel. Make one for each channel.
    explicit thread_transport(const member& me) noexcept : me_(me) {}

    [[nodiscard]] std::uint32_t rank() const noexcept { return me_.rank(); }  ///< from 0
    /// The number of ranks.
    [[nodiscard]] std::uint32_t size() const noexcept { return me_.size(); }
    [[nodiscard]] bytes carried() const noexcept { return carried_; }  ///< see transport
    /// The member, for collective/.
    [[nodiscard]] const member& me() const noexcept { return me_; }
    /// No fault until a rank has failed or aborted.
    [[nodiscard]] collective_fault fault() const noexcept { return me_.fault(); }

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
    /// See leaving_transport. Waits until the other ranks have returned from the last call in which
    /// this rank took part.
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

/// A transport that exchanges elements with some ranks only. `out` gets the elements of one
/// neighbour after the other, in the order of the list. If q is a neighbour of r, r must be a
/// neighbour of q.
template <class T>
concept neighbour_transport = transport<T> && requires(T& t, std::span<const float> in, std::span<float> out,
                                                       std::span<const std::uint32_t> neighbours, instant deadline) {
    { t.exchange(in, neighbours, out, deadline) } -> std::same_as<collective_fault>;
};

/// A graph of ranks, with weights, that says which ranks average with each other. If the graph is
/// connected, repeated averaging converges to the average of all ranks. A plain value, the same on
/// all ranks.
class neighbour_graph {
public:
    /// Each pair makes two ranks neighbours. Throws operation_error (errc::invalid_specification)
    /// for a rank that doesn't exist, or a pair of a rank with itself.
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
    /// Connects each rank with the ranks before and after it, and the last rank with the first.
    [[nodiscard]] static neighbour_graph ring(std::uint32_t ranks) {
        std::vector<std::pair<std::uint32_t, std::uint32_t>> edges;
        for (std::uint32_t r = 0; r + 1 < ranks; ++r) edges.emplace_back(r, r + 1);
        if (ranks > 2) edges.emplace_back(ranks - 1, 0);
        return {ranks, edges};
    }
    /// Connects ranks whose numbers differ in one bit. Each rank has few neighbours, and paths
    /// between ranks are short. Throws operation_error (errc::invalid_specification) for more than
    /// 2^31 ranks.
    [[nodiscard]] static neighbour_graph hypercube(std::uint32_t ranks) {
        constexpr std::uint32_t most = std::uint32_t{1} << 31;  // so that `bit` doesn't wrap
        if (ranks > most)
            raise({errc::invalid_specification, ranks, 0, most, reason::count_limit}, {}, "ranks of a hypercube");
        std::vector<std::pair<std::uint32_t, std::uint32_t>> edges;
        for (std::uint32_t r = 0; r < ranks; ++r)
            for (std::uint32_t bit = 1; bit < ranks; bit <<= 1)
                if ((r & bit) == 0 && (r | bit) < ranks) edges.emplace_back(r, r | bit);
        return {ranks, edges};
    }

    /// The number of ranks.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(neighbours_.size()); }
    /// A rank's neighbours, ascending.
    [[nodiscard]] std::span<const std::uint32_t> neighbours(std::uint32_t r) const noexcept { return neighbours_[r]; }
    /// The weight of rank q's numbers in rank r's average. The weights within a rank's average sum
    /// to 1, and so do the weights that one rank's numbers have in all averages.
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

/// One step of gossip: `x` becomes the weighted mean of this rank's and its neighbours' elements,
/// added in the order of ranks. All ranks pass the same number of elements and the same graph. If
/// the graph and `net` have different sizes, only this rank gets errc::mismatch.
template <neighbour_transport Net>
requires host_transport<Net>
[[nodiscard]] collective_fault gossip_average(Net& net, const neighbour_graph& among, std::span<float> x,
                                              instant deadline = never) {
    if (among.size() != net.size()) return {errc::mismatch, collective_kind::all_gather, net.rank(), 0};
    const auto beside = among.neighbours(net.rank());
    std::vector<float> theirs(x.size() * beside.size());
    detail::lent_arrays memory(theirs);
    if (const auto f =
            memory.to([&] { return net.exchange(std::span<const float>(x), beside, std::span(theirs), deadline); }))
        return f;
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

/// How often all ranks average.
struct local_steps {
    std::uint64_t every = 1;  ///< average after this many steps; 0 means never
    /// Whether the ranks average after this step. Steps are counted from 0.
    [[nodiscard]] constexpr bool due(std::uint64_t step) const noexcept {
        return every != 0 && (step + 1) % every == 0;
    }
};

/// Each array becomes the mean of the arrays at its place in all ranks' lists.
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
