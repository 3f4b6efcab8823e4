// SPDX-License-Identifier: Apache-2.0
// The parts of two_level.hpp: which rank is in which process, the operators of each level, and how
// all ranks of a process agree on a call.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Op without its finish(), for operators whose finish() must run once and not at each level.
template <class Op>
struct without_finish {
    static constexpr std::uint32_t id = op_id<Op>();
    template <class A>
    requires requires(A& a, const A& b) { Op::into(a, b); }
    [[gnu::always_inline]] GPUSHARE_HD static constexpr void into(A& a, const A& b) noexcept { Op::into(a, b); }
    template <class A>
    GPUSHARE_HD constexpr A operator()(const A& a, const A& b) const noexcept {
        return Op{}(a, b);
    }
};
template <class Op>
inline constexpr bool has_finish = requires(const Op& op, float a) {
    op.finish(a, a);
};

/// Whether each level has to average, because a level's sum may not fit T although the average
/// does.
template <class T, class Op>
inline constexpr bool averages_by_level = std::same_as<Op, average> && sizeof(T) < sizeof(float);

/// The operator of both levels, if all processes have the same number of ranks: Op, or Op without
/// its finish().
template <class T, class Op>
[[nodiscard]] constexpr auto op_of_a_level(const Op& op) noexcept {
    if constexpr (has_finish<Op> && !averages_by_level<T, Op>)
        return without_finish<Op>{};
    else
        return op;
}

/// One process's part of an average, which is added to the parts of the other processes. Processes
/// may have different numbers of ranks. Apart from rounding, neither a part nor a sum of parts is
/// larger than the largest input.
struct part_of_average {
    float of_ranks;  ///< the number of ranks in all processes
    /// T's largest number divided by the number of ranks, less a rounding
    float near_largest = __builtin_huge_valf();
    float rounded_down = 1;  ///< the factor for larger parts
    static constexpr std::uint32_t id = 0x7001;
    template <class A>
    [[gnu::always_inline]] GPUSHARE_HD static constexpr void into(A& a, const A& b) noexcept {
        a = a + b;
    }
    template <class A>
    GPUSHARE_HD constexpr A operator()(const A& a, const A& b) const noexcept {
        return a + b;
    }
    template <class A, class N>
    GPUSHARE_HD constexpr A finish(const A& a, [[maybe_unused]] N n) const noexcept {
        const A part = a / static_cast<N>(of_ranks);
        if constexpr (std::floating_point<A>) {
            const A most = static_cast<A>(near_largest) * static_cast<A>(n);
            if (part > most || part < -most) return part * static_cast<A>(rounded_down);
        }
        return part;
    }
};
/// part_of_average for elements of type T. Parts close to T's largest number aren't rounded up,
/// because the parts of finite inputs could then add up to infinity.
template <class T>
[[nodiscard]] part_of_average part_of_ranks(std::uint32_t ranks) noexcept {
    part_of_average part{static_cast<float>(ranks)};
    if constexpr (is_stored_number<T>) {
        const auto largest = static_cast<float>(T::max());
        const auto next = static_cast<float>(T::from_bits(static_cast<typename T::bits_type>(T::max().bits() - 1)));
        // the rounding is at most this
        const float half = (largest - next) / (largest + (largest - next));
        part.near_largest = largest * (1 - 2 * half) / part.of_ranks;
        part.rounded_down = 1 - half;
    }
    return part;
}

/// How many ranks each process has. All ranks are numbered in the order of processes.
class ranks_of_processes {
public:
    ranks_of_processes() = default;
    explicit ranks_of_processes(std::span<const std::uint32_t> sizes) : first_(sizes.size() + 1) {
        for (std::size_t p = 0; p < sizes.size(); ++p) {
            first_[p + 1] = first_[p] + sizes[p];
            largest_ = std::max(largest_, sizes[p]);
        }
        alike_ = std::size_t{largest_} * sizes.size() == size();
    }
    /// The number of ranks in all processes.
    [[nodiscard]] std::uint32_t size() const noexcept { return first_.empty() ? 0 : first_.back(); }
    /// The most ranks of a process.
    [[nodiscard]] std::uint32_t largest() const noexcept { return largest_; }
    /// Whether all processes have equally many ranks.
    [[nodiscard]] bool alike() const noexcept { return alike_; }
    /// The number of the first rank of process p, among all ranks.
    [[nodiscard]] std::uint32_t first(std::uint32_t p) const noexcept { return first_[p]; }
    [[nodiscard]] std::uint32_t count(std::uint32_t p) const noexcept { return first_[p + 1] - first_[p]; }
    [[nodiscard]] std::uint32_t process_of(std::uint32_t rank) const noexcept {
        return static_cast<std::uint32_t>(std::upper_bound(first_.begin(), first_.end(), rank) - first_.begin() - 1);
    }
    [[nodiscard]] std::uint32_t processes() const noexcept {
        return first_.empty() ? 0 : static_cast<std::uint32_t>(first_.size() - 1);
    }

    /// Moves the ranks' blocks of `block` bytes so that each process's blocks begin where they
    /// would if all processes had largest() ranks. The memory has room for processes() * largest()
    /// blocks. Gaps get a copy of the block before them, so operators only see values that are
    /// inputs.
    void spread(std::byte* blocks, std::size_t block) const noexcept {
        for (std::uint32_t p = processes(); p-- > 0;) {
            std::byte* const to = blocks + std::size_t{p} * largest_ * block;
            std::memmove(to, blocks + first(p) * block, count(p) * block);
            for (std::uint32_t r = count(p); r < largest_; ++r)
                std::memcpy(to + r * block, to + (r - 1) * block, block);
        }
    }
    /// The inverse of spread(), from `spread` to `blocks`.
    void join(const std::byte* spread, std::byte* blocks, std::size_t block) const noexcept {
        for (std::uint32_t p = 0; p < processes(); ++p)
            std::memcpy(blocks + first(p) * block, spread + std::size_t{p} * largest_ * block, count(p) * block);
    }

private:
    // empty without processes, so that the default constructor doesn't allocate
    std::vector<std::uint32_t> first_;
    std::uint32_t largest_ = 0;
    bool alike_ = true;
};

/// Calls f(operator inside a process, operator between processes, function applied at the end).
template <class T, class Op, class F>
[[nodiscard]] collective_fault by_levels(const ranks_of_processes& ranks, const Op& op, const F& f) {
    constexpr auto nothing = [](std::span<T>) {};
    if constexpr (averages_by_level<T, Op>) {
        const part_of_average part = part_of_ranks<T>(ranks.size());
        return ranks.alike() ? f(op, op, nothing) : f(part, sum{}, nothing);
    } else if constexpr (has_finish<Op>) {
        const auto by = op_of_a_level<T>(op);
        return f(by, by, [&](std::span<T> data) {
            using A = accumulator_t<T, Op>;
            for (T& x : data) x = static_cast<T>(op.finish(static_cast<A>(x), static_cast<A>(ranks.size())));
        });
    } else {
        return f(op, op, nothing);
    }
}

/// The number of elements in a chunk: a multiple of 64 for each rank, so that a part is whole cache
/// lines.
template <class T>
[[nodiscard]] std::size_t elements_of_a_chunk(bytes chunk, const ranks_of_processes& ranks) noexcept {
    const std::size_t grain = std::size_t{64} * ranks.largest();
    return std::max<std::size_t>(chunk.count() / sizeof(T) / grain, 1) * grain;
}

/// Collective over `outer`: the processes tell each other how many ranks they have, and take the
/// smallest of their chunks. Throws operation_error for a fault of `outer`, and if a process lacks
/// memory or the transport throws there; that process throws its own exception.
template <class Outer>
[[nodiscard]] ranks_of_processes meet_processes(Outer& outer, std::uint32_t ranks, bytes& chunk, instant deadline) {
    const auto gather = [&](auto mine, auto all) { return outer.all_gather(mine, all, deadline); };
    const auto all = exchange_words(outer, {ranks, chunk.count()}, std::size_t{2} * outer.size(), gather, deadline);
    ranks_of_processes known;
    const auto read = [&] {
        std::vector<std::uint32_t> sizes(outer.size());
        for (std::uint32_t p = 0; p < outer.size(); ++p) {
            sizes[p] = static_cast<std::uint32_t>(all[std::size_t{2} * p]);
            chunk = std::min(chunk, bytes{all[std::size_t{2} * p + 1]});
        }
        // The limit keeps the sum of a chunk's size and a length from overflowing.
        chunk = std::min(chunk, bytes{std::uint64_t{1} << 48});
        known = ranks_of_processes(sizes);
    };
    // No process continues, or fails, before all processes know the sizes, because the sizes tell
    // which rank a fault names.
    make_on_all(
        outer, read, [] {}, deadline);
    return known;
}

/// All-reduces between processes. Each start() belongs to the finish() with the same number, so
/// several may be under way if the transport has pipelines.
template <class Outer>
struct outer_reduces {
    Outer& outer;
    std::vector<std::uint64_t> tickets{};
    std::size_t finished = 0;
    collective_fault fault{};

    template <class T, class By>
    void start(std::span<T> data, const By& by, instant deadline) {
        if constexpr (pipelined_transport<Outer>) {
            tickets.push_back(outer.start_all_reduce(data, by));
            outer.advance();
        } else if (!fault) {
            fault = outer.all_reduce(std::span<const T>(data), data, by, deadline);
        }
    }
    [[nodiscard]] collective_fault finish(instant deadline) {
        if constexpr (pipelined_transport<Outer>)
            return outer.finish(tickets[finished++], deadline);
        else
            return fault;
    }
};

/// The rank, among all ranks, that is named by a fault of the transport between processes. If the
/// fault names only a process, this is the process's first rank.
[[nodiscard]] inline std::uint32_t named_rank(const ranks_of_processes& ranks, std::uint32_t rank) noexcept {
    return rank < ranks.processes() ? ranks.first(rank) : rank - ranks.processes();
}

/// A barrier of a process's ranks, at which all ranks must pass the same word.
struct agreement_body {
    std::uint64_t word;
    static constexpr auto kind = collective_kind::barrier;
    collective_fault operator()(session<thread_context>& t, std::uint32_t blocks) const {
        if (!t.meet(call_signature(kind, 64U, 0, word, blocks))) return t.fault();
        return t.leave();
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
