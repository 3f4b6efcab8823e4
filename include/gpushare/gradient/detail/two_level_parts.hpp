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
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Op without what it does at the end, which is done once and not at each level.
template <class Op>
struct without_finish {
    static constexpr bool elementwise = requires { Op::elementwise; };
    static constexpr std::uint32_t id = op_id<Op>();
    template <class A>
    requires requires(A& a, const A& b) { Op::into(a, b); }
    [[gnu::always_inline]] static constexpr void into(A& a, const A& b) noexcept { Op::into(a, b); }
    template <class A>
    constexpr A operator()(const A& a, const A& b) const noexcept {
        return Op{}(a, b);
    }
};
template <class Op>
inline constexpr bool has_finish = requires(const Op& op, float a) {
    op.finish(a, a);
};

/// Whether the sum of a level may be too large for T where the average isn't: so it must never be between the two.
template <class T, class Op>
inline constexpr bool averages_by_level = std::same_as<Op, average> && sizeof(T) < sizeof(float);

/// The operator of both levels, if all processes have as many ranks: Op, or the part of it that can
/// be done in two steps.
template <class T, class Op>
[[nodiscard]] constexpr auto op_of_a_level(const Op& op) noexcept {
    if constexpr (has_finish<Op> && !averages_by_level<T, Op>)
        return without_finish<Op>{};
    else
        return op;
}

/// The part of an average that one process adds to those of the others, however many ranks it has:
/// none is larger than the largest input, nor is any sum of them.
struct part_of_average {
    float of_ranks;  ///< in all processes
    static constexpr bool elementwise = true;
    static constexpr std::uint32_t id = 0x7001;
    template <class A>
    [[gnu::always_inline]] static constexpr void into(A& a, const A& b) noexcept {
        a = a + b;
    }
    template <class A>
    constexpr A operator()(const A& a, const A& b) const noexcept {
        return a + b;
    }
    template <class A, class N>
    constexpr A finish(const A& a, N) const noexcept {
        return a / static_cast<N>(of_ranks);
    }
};

/// How many ranks each process has, which number all ranks in the order of processes.
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
    [[nodiscard]] std::uint32_t size() const noexcept { return first_.back(); }  ///< in all processes
    [[nodiscard]] std::uint32_t largest() const noexcept { return largest_; }    ///< ranks of a process, at most
    [[nodiscard]] bool alike() const noexcept { return alike_; }                 ///< all have as many
    [[nodiscard]] std::uint32_t first(std::uint32_t p) const noexcept { return first_[p]; }  ///< rank of process p
    [[nodiscard]] std::uint32_t count(std::uint32_t p) const noexcept { return first_[p + 1] - first_[p]; }
    [[nodiscard]] std::uint32_t process_of(std::uint32_t rank) const noexcept {
        return static_cast<std::uint32_t>(std::upper_bound(first_.begin(), first_.end(), rank) - first_.begin() - 1);
    }
    [[nodiscard]] std::uint32_t processes() const noexcept { return static_cast<std::uint32_t>(first_.size() - 1); }

    /// Moves what lies rank by rank so that each process's blocks begin where those of the largest
    /// one would: `block` bytes a rank, in room for processes() * largest() of them. Gaps get a
    /// copy of the block before, so no operator sees what isn't an input.
    void spread(std::byte* blocks, std::size_t block) const noexcept {
        for (std::uint32_t p = processes(); p-- > 0;) {
            std::byte* const to = blocks + std::size_t{p} * largest_ * block;
            std::memmove(to, blocks + first(p) * block, count(p) * block);
            for (std::uint32_t r = count(p); r < largest_; ++r)
                std::memcpy(to + r * block, to + (r - 1) * block, block);
        }
    }
    /// The way back, from one place to another.
    void join(const std::byte* spread, std::byte* blocks, std::size_t block) const noexcept {
        for (std::uint32_t p = 0; p < processes(); ++p)
            std::memcpy(blocks + first(p) * block, spread + std::size_t{p} * largest_ * block, count(p) * block);
    }

private:
    std::vector<std::uint32_t> first_ = {0};
    std::uint32_t largest_ = 0;
    bool alike_ = true;
};

/// Returns once all ranks of a process have called it with the same word.
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
