// SPDX-License-Identifier: Apache-2.0
// What is fused behind a collective: stages composed at compile time, applied to each piece of the result by the rank that
// has just reduced it, while the piece is in registers and in the first cache.
//
//   gs::run(me, gs::reduced(x, width) | gs::add_to(residual) | gs::rms_norm(weight, 1e-6F) | gs::cast<gs::bfloat16>(), out);
//
// Stages are in epilogue_stages.hpp, epilogue_norms.hpp and epilogue_quantise.hpp; what applies them, behind a collective or
// alone, in epilogue_apply.hpp. A stage is any copyable functor that takes a few floats and where they are, and returns as many:
//
//   struct square { template <class V> GPUSHARE_HD V operator()(const V& x, const gpushare::place&) const { return x * x; } };
//
// It reads arrays of its own by load_floats<V>(array + at.column, at.count), and may be called with floats of more than one width: 16
// at once in the host's threads, in registers of 4 or of 8, and 4 on a device.
// It is called for a row's elements in rising order of their columns, by several threads for different ones. Two kinds
// are different:
//   a sink       `template <class V> void store(const V& x, const place& at) const` instead: writes, and lets x pass
//                as it is.
//   a row stage  needs to have seen the whole row, once or several times: see row_stage.
// Sinks, and row stages with publish(), that write to all ranks are sharing_stages, too.
//
// The result depends on the elements alone: not on the number of ranks, on who reduces what, or on what is fused with what.
// Sums over a row have a fixed order (see row_sum), which depends on the number of threads of a block.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Where a few elements are: `count` columns of one row, from `column` on.
struct place {
    std::size_t row = 0;        ///< of the whole result
    std::size_t shard_row = 0;  ///< of the rows that this rank reduces
    std::size_t column = 0;     ///< the first
    std::size_t width = 0;      ///< columns of a row
    std::uint32_t count = 0;    ///< elements that count; the others hold anything
    bool streams = false;       ///< sinks had better store past the caches
};

/// What one call works on.
struct row_range {
    std::size_t first = 0;        ///< row of the whole result
    std::size_t rows = 0;         ///< how many
    std::size_t width = 0;        ///< elements of a row
    std::size_t shard_first = 0;  ///< the first row that this rank reduces: shards are counted from there
    bool streams = false;         ///< see place
};

/// Adds up a row. Each of 16 partial sums of each thread adds its columns in rising order, then these and threads are added as trees.
struct row_sum {
    static constexpr float none = 0;  ///< changes no sum
    /// Their sum.
    template <class R>
    GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return a + b;
    }
};
/// The largest of a row, NaN if there is one. Of numbers that aren't negative.
struct row_max {
    static constexpr float none = 0;  ///< changes no maximum
    /// The larger.
    template <class R>
    GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return detail::larger_lanes{}(a, b);
    }
};

/// A stage that works element by element.
template <class S>
concept element_stage = std::copyable<S> && requires(const S& s, const floats<4>& x, const place& at) {
    { s(x, at) } -> std::same_as<floats<4>>;
};

/// A stage that writes.
template <class S>
concept sink_stage = std::copyable<S> && requires(const S& s, const floats<4>& x, const place& at) {
    { s.store(x, at) } -> std::same_as<void>;
};

/// A stage that looks at a whole row, once or several times, before it changes it:
///   looks                         how often
///   combine                       row_sum or row_max
///   learnt                        what it knows of the row: trivially copyable
///   measure<Look>(x, at, known)   what is combined over the row in this look, for a few elements
///   learn(look, total, at, known) adds what a look has told to `known`
///   apply(x, at, known)           the new elements
///   publish(at, known)            if there: called once a row by one thread
template <class S>
concept row_stage = std::copyable<S> && std::is_trivially_copyable_v<typename S::learnt> &&
    requires(const S& s, const floats<4>& x, const place& at, typename S::learnt& known) {
    { S::looks } -> std::convertible_to<std::uint32_t>;
    typename S::combine;
    { s.template measure<0>(x, at, known) } -> std::same_as<floats<4>>;
    { s.learn(std::uint32_t{}, float{}, at, known) } -> std::same_as<void>;
    { s.apply(x, at, known) } -> std::same_as<floats<4>>;
};

/// A row stage that writes what it has learnt of each row. A concept of its own: nvcc 13.0 crashes where a template's body asks
/// the same in a requires-expression that names its parameters.
template <class S>
concept publishing_stage = row_stage<S> && requires(const S& s, const place& at, const typename S::learnt& known) {
    { s.publish(at, known) } -> std::same_as<void>;
};

/// A stage that writes to an array of each rank, all of them alike: shares() is where this rank's is, and with(p) the stage
/// that writes to p instead. An epilogue behind a collective has at most four.
template <class S>
concept sharing_stage = requires(const S& s, void* p) {
    { s.shares() } -> std::same_as<void*>;
    { s.with(p) } -> std::same_as<S>;
};

/// Any stage.
template <class S>
concept epilogue_stage = element_stage<S> || sink_stage<S> || row_stage<S>;

/// Stages, the first of them first. A plain value: copied into a kernel's arguments with all its stages.
template <class... Stages>
struct epilogue {
    static constexpr std::uint32_t size = 0;     ///< stages
    static constexpr std::uint32_t sharing = 0;  ///< stages that write to all ranks
    static constexpr bool whole_rows = false;    ///< whether it can be applied to whole rows only
    /// Where this rank's arrays are that all ranks write to: none.
    GPUSHARE_HD void collect(void**) const noexcept {}
};
/// A stage, and those behind it.
template <class First, class... Rest>
struct epilogue<First, Rest...> {
    static constexpr std::uint32_t size = 1 + sizeof...(Rest);  ///< stages
    /// Whether it can be applied to whole rows only.
    static constexpr bool whole_rows = row_stage<First> || epilogue<Rest...>::whole_rows;
    /// How many stages write to all ranks.
    static constexpr std::uint32_t sharing = (sharing_stage<First> ? 1 : 0) + epilogue<Rest...>::sharing;

    First stage;             ///< the first
    epilogue<Rest...> rest;  ///< the others

    /// Where this rank's arrays are that such stages write to, in their order: `sharing` of them.
    GPUSHARE_HD void collect(void** to) const noexcept {
        if constexpr (sharing_stage<First>) *to++ = stage.shares();
        rest.collect(to);
    }
};

namespace detail {

template <class>
inline constexpr bool is_epilogue = false;
template <class... S>
inline constexpr bool is_epilogue<epilogue<S...>> = true;

template <std::uint32_t I, class First, class... Rest>
[[nodiscard]] GPUSHARE_HD constexpr const auto& stage_of(const epilogue<First, Rest...>& e) noexcept {
    if constexpr (I == 0)
        return e.stage;
    else
        return stage_of<I - 1>(e.rest);
}

/// Sharing stages before stage I.
template <std::uint32_t I, class First, class... Rest>
[[nodiscard]] GPUSHARE_HD constexpr std::uint32_t sharing_before(const epilogue<First, Rest...>*) noexcept {
    if constexpr (I == 0)
        return 0;
    else
        return (sharing_stage<First> ? 1 : 0) + sharing_before<I - 1>(static_cast<const epilogue<Rest...>*>(nullptr));
}
template <std::uint32_t I>
[[nodiscard]] GPUSHARE_HD constexpr std::uint32_t sharing_before(const epilogue<>*) noexcept {
    return 0;
}

template <class... B>
[[nodiscard]] GPUSHARE_HD constexpr epilogue<B...> joined(const epilogue<>&, const epilogue<B...>& b) noexcept {
    return b;
}
template <class A, class... As, class... B>
[[nodiscard]] GPUSHARE_HD constexpr epilogue<A, As..., B...> joined(const epilogue<A, As...>& a,
                                                                    const epilogue<B...>& b) noexcept {
    return {a.stage, joined(a.rest, b)};
}

template <class S>
[[nodiscard]] GPUSHARE_HD constexpr auto as_epilogue(const S& s) noexcept {
    if constexpr (is_epilogue<S>)
        return s;
    else
        return epilogue<S>{s, {}};
}

template <class S>
concept epilogue_part = is_epilogue<S> || epilogue_stage<S>;

}  // namespace detail

/// One after the other. At least one of the two belongs to this library: begin with `epilogue<>{} |` where neither does.
template <detail::epilogue_part A, detail::epilogue_part B>
[[nodiscard]] GPUSHARE_HD constexpr auto operator|(const A& a, const B& b) noexcept {
    return detail::joined(detail::as_epilogue(a), detail::as_epilogue(b));
}

namespace detail {
using gpushare::operator|;  // found from the stages, which are here
}  // namespace detail

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
