// SPDX-License-Identifier: Apache-2.0
// What can be fused behind an all-reduce: stages that see each row of the result while it is in registers and in the
// first-level cache, composed when compiling.
//
//   auto p = gpushare::all_reduce(x, width) | gpushare::add(residual) | gpushare::rms_norm(weight, 1e-6F)
//          | gpushare::cast<gpushare::bfloat16>();
//
// A stage changes a few elements at a time: apply(values, at, statistic). One that needs a number of the whole row first, such
// as a mean, also has `gather` (collects what this thread sees), `merge` (combines collections) and `settle` (makes the
// statistic). Everything is computed in float, in an order that depends on nothing but the row's width.
//
// A user's stage is any function of a float: gpushare::map(f). Or a class like those below.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/bundle.hpp>
#include <gpushare/collective/channel.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/square_root.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// The elements that a stage is given: n of them, from `column` of `row` on. `index` counts from the beginning of what this
/// rank keeps: everything, or its own rows where the result is sharded.
struct stage_place {
    std::size_t row = 0;  // the rank's own count, too
    std::size_t column = 0;
    std::size_t index = 0;
    std::uint32_t n = 0;
    // For stages that write something besides the result. `again`: this stage has seen these elements in an earlier pass.
    bool again = false;
    bool first_thread = true;
    std::uint32_t ranks = 0;  // that get it; 0 where each keeps its own
    std::uint32_t shared = 0;
    const detail::flag_line* told = nullptr;

    /// Calls f with the array of each rank that gets what the stage writes; `own` is this rank's.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class T, class F>
    GPUSHARE_HD void each_copy(T* own, const F& f) const noexcept {
        if (ranks == 0) f(own);
        for (std::uint32_t r = 0; r < ranks; ++r) f(static_cast<T*>(told[r].other[shared]));
    }
};

namespace stages {

/// x + other[index]
template <class T>
struct add {
    const T* other;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void apply(Values& x, const stage_place& at, float) const noexcept {
        x.combine(sum{}, Values::load_some(other + at.index, at.n));
    }
};

/// residual[index] += x, and that instead of x
template <class T>
struct add_to {
    T* residual;
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD void* shares() const noexcept { return residual; }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void apply(Values& x, const stage_place& at, float) const noexcept {
        if (!at.again) {
            x.combine(sum{}, Values::load_some(residual + at.index, at.n));
            at.each_copy(residual, [&](T* to) { x.store_some(to + at.index, at.n); });
        }
        x = Values::load_some(residual + at.index, at.n);
    }
};

/// x + bias[column]
template <class T>
struct bias {
    const T* values;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void apply(Values& x, const stage_place& at, float) const noexcept {
        x.combine(sum{}, Values::load_some(values + at.column, at.n));
    }
};

struct scale {
    float factor;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void apply(Values& x, const stage_place&, float) const noexcept {
        x.combine(product{}, Values::filled(factor));
    }
};

struct relu {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void apply(Values& x, const stage_place&, float) const noexcept {
        x.combine(maximum{}, Values::filled(0.0F));
    }
};

template <class F>
struct map {
    F f;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void apply(Values& x, const stage_place&, float) const noexcept {
        x.each([&](float v, std::uint32_t) { return f(v); });
    }
};

/// x - mean(x)
struct centre {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void gather(Values& all, const Values& x) const noexcept {
        all.combine(sum{}, x);
    }
    using merge = sum;
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD float settle(float total, std::size_t width, const stage_place&) const noexcept {
        return total / static_cast<float>(width);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void apply(Values& x, const stage_place&, float mean) const noexcept {
        x.combine(sum{}, Values::filled(-mean));
    }
};

/// x / sqrt(mean(x * x) + epsilon) * weight[column]
template <class W>
struct rms_norm {
    const W* weight;
    float epsilon;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void gather(Values& all, const Values& x) const noexcept {
        Values square = x;
        square.combine(product{}, x);
        all.combine(sum{}, square);
    }
    using merge = sum;
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD float settle(float total, std::size_t width, const stage_place&) const noexcept {
        return 1.0F / detail::square_root(total / static_cast<float>(width) + epsilon);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void apply(Values& x, const stage_place& at, float factor) const noexcept {
        x.combine(product{}, Values::filled(factor));
        x.combine(product{}, Values::load_some(weight + at.column, at.n));
    }
};

/// The largest number that quantised ones are scaled to.
template <class Q>
[[nodiscard]] GPUSHARE_HD constexpr float quantised_limit() noexcept {
    if constexpr (std::same_as<Q, std::int8_t>)
        return 127.0F;
    else
        return static_cast<float>(Q::max());
}

/// x * factor as a whole number where Q is an integer, to nearest even, and not beyond Q's limit.
GPUSHARE_EXEC_CHECK_DISABLE
template <class Q, class Values>
[[gnu::always_inline]] GPUSHARE_HD inline void to_quantised(Values& x, float factor) noexcept {
    constexpr float limit = quantised_limit<Q>();
    x.combine(product{}, Values::filled(factor));
    x.combine(minimum{}, Values::filled(limit));
    x.combine(maximum{}, Values::filled(-limit));
    if constexpr (std::integral<Q>) {
        // Numbers this large have no fraction: adding one rounds, taking it away leaves the rounded.
        x.combine(sum{}, Values::filled(0x1.8p23F));
        x.combine(sum{}, Values::filled(-0x1.8p23F));
    }
}

/// Each row by its own largest element; scales[row] is what a quantised number times that gives back.
template <class Q>
struct quantise_rows {
    float* scales;
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD void* shares() const noexcept { return scales; }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void gather(Values& all, const Values& x) const noexcept {
        all.combine(maximum{}, x);
        Values negative = x;
        negative.combine(product{}, Values::filled(-1.0F));
        all.combine(maximum{}, negative);
    }
    using merge = maximum;
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD float settle(float largest, std::size_t, const stage_place& at) const noexcept {
        const float s = largest / quantised_limit<Q>();
        if (at.first_thread) at.each_copy(scales, [&](float* to) { to[at.row] = s; });
        return s > 0 ? 1.0F / s : 0.0F;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void apply(Values& x, const stage_place&, float factor) const noexcept {
        to_quantised<Q>(x, factor);
    }
};

/// Everything by one scale, known beforehand.
template <class Q>
struct quantise_by {
    float factor;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    [[gnu::always_inline]] GPUSHARE_HD void apply(Values& x, const stage_place&, float) const noexcept {
        to_quantised<Q>(x, factor);
    }
};

}  // namespace stages

/// A stage that needs a number of the whole row before it changes anything.
template <class S>
concept row_stage = requires {
    typename S::merge;
};

/// A stage that writes an array besides the result. A pipeline has at most four.
template <class S>
concept sharing_stage = requires(const S& s) {
    s.shares();
};

namespace detail {

/// Stages one after the other, with the statistic of each.
template <class... Stages>
struct stage_list {
    static constexpr std::uint32_t row_stages = 0, sharing = 0;
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void collect(void**) const noexcept {}
};
template <class First, class... Rest>
struct stage_list<First, Rest...> {
    First first;
    stage_list<Rest...> rest;
    static constexpr std::uint32_t row_stages = (row_stage<First> ? 1 : 0) + stage_list<Rest...>::row_stages;
    static constexpr std::uint32_t sharing = (sharing_stage<First> ? 1 : 0) + stage_list<Rest...>::sharing;
    /// The arrays that stages write, in their order.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void collect(void** to) const noexcept {
        if constexpr (sharing_stage<First>) *to++ = first.shares();
        rest.collect(to);
    }
};

template <class Stage>
[[nodiscard]] constexpr auto appended(const stage_list<>&, const Stage& s) {
    return stage_list<Stage>{s, {}};
}
template <class First, class... Rest, class Stage>
[[nodiscard]] constexpr auto appended(const stage_list<First, Rest...>& l, const Stage& s) {
    return stage_list<First, Rest..., Stage>{l.first, appended(l.rest, s)};
}

/// What `|` has on its right side: one or two stages, and the type of the result from there on.
template <class Out, class... Stages>
struct added_stages {
    stage_list<Stages...> list;
};
struct unchanged {};

template <class Stage>
[[nodiscard]] constexpr added_stages<unchanged, Stage> one_stage(const Stage& s) {
    return {{s, {}}};
}

}  // namespace detail

// --- what a user writes. Everything that is pointed to must last until the collective is done.

/// Adds an array as large as what the rank keeps of the result: all of it, or its own rows where it is sharded.
template <class R>
[[nodiscard]] constexpr auto add(const R& other) {
    using T = std::remove_cvref_t<decltype(*std::data(other))>;
    return detail::one_stage(stages::add<T>{std::data(other)});
}
/// The same, and the sum is stored in the array: on every rank, where the result is replicated. What follows sees the sum as
/// it is stored. (The residual stream of a transformer.)
template <class R>
[[nodiscard]] constexpr auto add_to(R&& residual) {
    using T = std::remove_reference_t<decltype(*std::data(residual))>;
    return detail::one_stage(stages::add_to<T>{std::data(residual)});
}
/// Adds one number per column.
template <class R>
[[nodiscard]] constexpr auto bias(const R& values) {
    using T = std::remove_cvref_t<decltype(*std::data(values))>;
    return detail::one_stage(stages::bias<T>{std::data(values)});
}
[[nodiscard]] constexpr auto scale(float factor) { return detail::one_stage(stages::scale{factor}); }
[[nodiscard]] constexpr auto relu() { return detail::one_stage(stages::relu{}); }
/// f(x) for each element: an activation, or whatever a user likes. On a device, a functor.
template <class F>
requires std::is_invocable_r_v<float, const F&, float>
[[nodiscard]] constexpr auto map(const F& f) { return detail::one_stage(stages::map<F>{f}); }
/// One weight per column (B. Zhang, R. Sennrich: Root mean square layer normalization, 2019).
template <class R>
[[nodiscard]] constexpr auto rms_norm(const R& weight, float epsilon) {
    using W = std::remove_cvref_t<decltype(*std::data(weight))>;
    return detail::one_stage(stages::rms_norm<W>{std::data(weight), epsilon});
}
/// One weight and one bias per column (J. L. Ba, J. R. Kiros, G. E. Hinton: Layer normalization, 2016).
template <class R, class B>
[[nodiscard]] constexpr auto layer_norm(const R& weight, const B& shift, float epsilon) {
    using W = std::remove_cvref_t<decltype(*std::data(weight))>;
    using S = std::remove_cvref_t<decltype(*std::data(shift))>;
    using list = detail::stage_list<stages::centre, stages::rms_norm<W>, stages::bias<S>>;
    return detail::added_stages<detail::unchanged, stages::centre, stages::rms_norm<W>, stages::bias<S>>{
        list{{}, {{std::data(weight), epsilon}, {{std::data(shift)}, {}}}}};
}
/// The result is stored as Out.
template <class Out>
[[nodiscard]] constexpr auto cast() {
    return detail::added_stages<Out>{};
}
/// The result is stored as Q (std::int8_t, fp8_e4m3 or fp8_e5m2), each row divided by scales[row], which is written for all
/// rows that the rank keeps.
template <class Q>
[[nodiscard]] constexpr auto quantise(std::span<float> scales) {
    return detail::added_stages<Q, stages::quantise_rows<Q>>{{stages::quantise_rows<Q>{scales.data()}, {}}};
}
/// The same with one scale for all, known beforehand.
template <class Q>
[[nodiscard]] constexpr auto quantise(float by) {
    return detail::added_stages<Q, stages::quantise_by<Q>>{{stages::quantise_by<Q>{1.0F / by}, {}}};
}

}  // namespace gpushare::inline GPUSHARE_ABI
