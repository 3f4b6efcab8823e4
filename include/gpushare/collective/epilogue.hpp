// SPDX-License-Identifier: Apache-2.0
// Epilogues: stages, composed at compile time, that are fused after a collective. A rank that has
// reduced a piece of the result applies the stages immediately, while the piece is in registers and
// in the first-level cache.
//
//   namespace gs = gpushare;
//   const auto finish = gs::add(residual) | gs::rms_norm(weight, 1e-6F) | gs::cast<gs::bfloat16>();
//   gs::run(me, gs::reduced(x, width) | finish, out);
//
// epilogue_stages.hpp has the stages; apply_rows() there applies stages alone, or after a
// collective of your own. An all-reduce with its stages is a value, too: a pipeline. Making a
// pipeline runs nothing. fused_all_reduce.hpp runs the pipeline in the ranks' threads, submit.hpp
// on the devices' streams.
//
//   auto p = gs::reduced(x, width) | gs::add(residual) | gs::rms_norm(weight, 1e-6F);
//
// A stage is any copyable functor that takes a few floats and their place, and returns as many
// floats:
//
//   struct square {
//       static constexpr bool any_row = true;
//       template <class V> GPUSHARE_HD V operator()(const V& x, const gpushare::place&) const { return x * x; }
//   };
//
// A stage reads arrays of its own by load_floats<V>(array + at.column, at.count). In the host's
// threads V has 16 floats, which are in registers of 4 or of 8; on a device V has 4 floats. So a
// stage must accept each of these types. One thread gets its elements of a row in ascending order
// of columns; different elements of a row may come from different threads. Some stages need another
// form:
//  - A sink has `template <class V> void store(const V& x, const place& at) const` in place of the
//    call operator. A sink writes x, and x passes through unchanged.
//  - A row stage looks at the whole row, once or several times, before it changes the row: see
//    row_stage.
//  - A group stage looks at some neighbouring columns first: see group_stage.
// A sink, or a row stage with publish(), that writes to all ranks is also a sharing_stage. A stage
// that any rank may run on any row says so: see any_row_stage.
//
// The result doesn't depend on the number of ranks, on the rank that reduces a piece, or on which
// parts are fused. The result depends on the elements and, if a stage adds up a row, on the number
// of threads in a block, which decides the order of the additions (see row_sum).
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Where a few elements are: `count` columns of one row, from `column` on.
struct place {
    std::size_t row = 0;        ///< the row in the whole result
    std::size_t shard_row = 0;  ///< the row, counted among the rows that this rank reduces
    std::size_t column = 0;     ///< the first column
    std::size_t width = 0;      ///< columns of a row
    std::uint32_t count = 0;    ///< how many elements are valid; the rest are unspecified
    bool streams = false;       ///< hint to sinks: store past the caches
};

/// The rows that one call works on.
struct row_range {
    std::size_t first = 0;  ///< the first row, in the whole result
    std::size_t rows = 0;   ///< the number of rows
    std::size_t width = 0;  ///< elements of a row
    /// the first row that this rank reduces: place::shard_row counts from this row
    std::size_t shard_first = 0;
    bool streams = false;  ///< as place::streams
};

/// Sums a row. Each thread has several partial sums, 16 on a host and 4 on a device, and each
/// partial sum runs over its columns in ascending order. The partial sums, and then the threads'
/// sums, are added as trees. So a device may round differently than a host, and blocks of different
/// sizes may round differently as well.
struct row_sum {
    static constexpr float none = 0;  ///< changes no sum
    /// The sum of both.
    template <class R>
    GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return a + b;
    }
};
/// The largest number of a row, or NaN if the row has one. The numbers must not be negative.
struct row_max {
    static constexpr float none = 0;  ///< changes no maximum
    /// The larger of both.
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

/// A stage that looks at a whole row, once or several times, before it changes the row:
///  - `looks`: how often the stage looks
///  - `combine`: row_sum or row_max
///  - `learnt`: the type of the stage's knowledge about a row, trivially copyable
///  - `measure<Look>(x, at, known)` maps a few elements to the numbers that this look combines over
///    the row
///  - `learn(look, total, at, known)` updates `known` with the result of a look
///  - `apply(x, at, known)` returns the new elements
///  - `publish(at, known)` is optional: one thread calls it once for each row
template <class S>
concept row_stage = std::copyable<S> && std::is_trivially_copyable_v<typename S::learnt> &&
    requires(const S& s, const floats<4>& x, const place& at, typename S::learnt& known) {
    { S::looks } -> std::convertible_to<std::uint32_t>;
    typename S::combine;
    { s.template measure<0>(x, at, known) } -> std::same_as<floats<4>>;
    { s.learn(std::uint32_t{}, float{}, at, known) } -> std::same_as<void>;
    { s.apply(x, at, known) } -> std::same_as<floats<4>>;
};

/// A stage that looks at `group` neighbouring columns of a row before it changes them. Groups are
/// counted from column 0; the last group of a row may be shorter. Neither a row stage nor another
/// group stage may follow.
///  - `group`: the columns of a group, a power of two from 16 to 128
///  - `learnt`: the type of the stage's knowledge about a group, trivially copyable
///  - `learn(largest, known)` computes `known` from the group's largest magnitude, which is
///    infinity if an element is infinite or NaN
///  - `apply(x, at, known)` returns the new elements
///  - `publish(at, known)`: one thread calls it once for each group; `at` is the first element
template <class S>
concept group_stage = std::copyable<S> && std::is_trivially_copyable_v<typename S::learnt> &&
    requires(const S& s, const floats<4>& x, const place& at, typename S::learnt& known) {
    { S::group } -> std::convertible_to<std::uint32_t>;
    { s.learn(float{}, known) } -> std::same_as<void>;
    { s.apply(x, at, known) } -> std::same_as<floats<4>>;
    { s.publish(at, known) } -> std::same_as<void>;
};

/// A row stage that writes the values that it has computed for each row. The concept exists because
/// nvcc 13.0 crashes if a template's body asks the same question in a requires-expression that
/// names the template's parameters.
template <class S>
concept publishing_stage = row_stage<S> && requires(const S& s, const place& at, const typename S::learnt& known) {
    { s.publish(at, known) } -> std::same_as<void>;
};

/// A stage that writes the same values to one array of every rank. shares() is this rank's array,
/// and with(p) is the stage that writes to p instead. An epilogue after a collective has at most
/// four sharing stages.
template <class S>
concept sharing_stage = requires(const S& s, void* p) {
    { s.shares() } -> std::same_as<void*>;
    { s.with(p) } -> std::same_as<S>;
};

/// A stage that any rank may run on any row, because the stage uses neither place::shard_row nor an
/// array that has only one rank's rows. It declares `static constexpr bool any_row = true`. If all
/// stages are any_row_stages, an all-reduce of few bytes waits once instead of twice
/// (fused_plan::one_shot).
template <class S>
concept any_row_stage = requires {
    requires S::any_row;
};

/// Any of these stages.
template <class S>
concept epilogue_stage = element_stage<S> || sink_stage<S> || row_stage<S> || group_stage<S>;

/// A list of stages, in the order in which they run. A plain value, which is copied into a kernel's
/// arguments with all its stages.
template <class... Stages>
struct epilogue {
    static constexpr std::uint32_t size = 0;     ///< the number of stages
    static constexpr std::uint32_t sharing = 0;  ///< stages that write to all ranks
    /// Whether the epilogue can be applied to whole rows only.
    static constexpr bool whole_rows = false;
    static constexpr bool any_row = true;  ///< whether all stages are any_row_stages
    /// Lists the addresses of this rank's arrays to which sharing stages write. This epilogue has
    /// none.
    GPUSHARE_HD void collect(void**) const noexcept {}
};
/// A stage, followed by the remaining stages.
template <class First, class... Rest>
struct epilogue<First, Rest...> {
    static constexpr std::uint32_t size = 1 + sizeof...(Rest);  ///< the number of stages
    /// Whether the epilogue can only be applied to whole rows.
    static constexpr bool whole_rows = row_stage<First> || group_stage<First> || epilogue<Rest...>::whole_rows;
    static_assert(!(group_stage<First> && epilogue<Rest...>::whole_rows),
                  "gpushare: no stage behind a group stage looks at rows or groups");
    /// Whether all stages are any_row_stages.
    static constexpr bool any_row = any_row_stage<First> && epilogue<Rest...>::any_row;
    /// How many stages write to all ranks.
    static constexpr std::uint32_t sharing = (sharing_stage<First> ? 1 : 0) + epilogue<Rest...>::sharing;

    First stage;             ///< the first stage
    epilogue<Rest...> rest;  ///< the remaining stages

    /// Puts the addresses of this rank's arrays to which sharing stages write into `to`, in the
    /// order of the stages: `sharing` addresses.
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

/// The number of sharing stages before stage I.
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

/// Joins stages or epilogues. At least one of the two must be a type of this library; otherwise
/// begin with `epilogue<>{} |`.
template <detail::epilogue_part A, detail::epilogue_part B>
[[nodiscard]] GPUSHARE_HD constexpr auto operator|(const A& a, const B& b) noexcept {
    return detail::joined(detail::as_epilogue(a), detail::as_epilogue(b));
}

namespace detail {
using gpushare::operator|;  // found from the stages, which are here

/// The element type of the last stage that declares one; otherwise T.
template <class T, class... Stages>
struct result_of_stages {
    using type = T;
};
template <class T, class First, class... Rest>
struct result_of_stages<T, First, Rest...> : result_of_stages<T, Rest...> {};
template <class T, class First, class... Rest>
requires requires { typename First::result_type; }
struct result_of_stages<T, First, Rest...> : result_of_stages<typename First::result_type, Rest...> {};

}  // namespace detail

/// An all-reduce of `count` elements in rows of `width`, and the stages after it. A pipeline is a
/// value that points to its arrays. `out_type` is the type of the result: that of the last cast()
/// or quantise(), or else T.
template <class T, class Op, class... Stages>
struct pipeline {
    /// The type of the result's elements.
    using out_type = typename detail::result_of_stages<T, Stages...>::type;

    const T* in = nullptr;       ///< this rank's elements
    std::size_t count = 0;       ///< the number of elements
    std::size_t width = 1;       ///< the elements of a row
    Op op{};                     ///< how the ranks' elements are combined
    epilogue<Stages...> list{};  ///< the stages that follow

    /// Adds stages.
    template <detail::epilogue_part S>
    [[nodiscard]] friend constexpr auto operator|(const pipeline& p, const S& more) {
        const auto with = [&p]<class... All>(const epilogue<All...>& all) {
            return pipeline<T, Op, All...>{p.in, p.count, p.width, p.op, all};
        };
        return with(detail::joined(p.list, detail::as_epilogue(more)));
    }
};

/// The beginning of a pipeline: the sum of all ranks' elements, or their combination by `op`. The
/// elements form whole rows of `width`. reduced() runs nothing.
template <class R, class Op = sum>
requires requires(const R& r) { std::span(r); }
[[nodiscard]] constexpr auto reduced(const R& in, std::size_t width, Op op = {}) {
    using T = std::remove_cvref_t<decltype(*std::data(in))>;
    static_assert(reducible<T>);
    return pipeline<T, Op>{std::data(in), std::size(in), width, op, {}};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
