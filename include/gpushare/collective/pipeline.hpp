// SPDX-License-Identifier: Apache-2.0
// A pipeline: a fused all-reduce as a value. It has the elements, the operator that combines ranks, and the stages.
//
//   auto p = gpushare::reduced(x, width) | gpushare::add(residual) | gpushare::rms_norm(weight, 1e-6F);
//
// Nothing has run yet: fused_all_reduce.hpp runs it in the ranks' threads, submit.hpp on the devices' streams.
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>

#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// The element type that the last stage to declare one makes; else T.
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

/// An all-reduce of `count` elements in rows of `width`, and the stages behind it. A value that points to its arrays.
/// `out_type` is the type of the result: that of the last cast() or quantise(), else T.
template <class T, class Op, class... Stages>
struct pipeline {
    /// The type of the result's elements.
    using out_type = typename detail::result_of_stages<T, Stages...>::type;

    const T* in = nullptr;       ///< what this rank brings
    std::size_t count = 0;       ///< elements
    std::size_t width = 1;       ///< elements of a row
    Op op{};                     ///< how ranks are combined
    epilogue<Stages...> list{};  ///< what follows

    /// Adds stages.
    template <detail::epilogue_part S>
    [[nodiscard]] friend constexpr auto operator|(const pipeline& p, const S& more) {
        const auto with = [&p]<class... All>(const epilogue<All...>& all) {
            return pipeline<T, Op, All...>{p.in, p.count, p.width, p.op, all};
        };
        return with(detail::joined(p.list, detail::as_epilogue(more)));
    }
};

/// The beginning of a pipeline: the sum of all ranks' elements, or their combination by `op`. Nothing runs yet. The
/// elements are whole rows of `width`.
template <class R, class Op = sum>
requires requires(const R& r) { std::span(r); }
[[nodiscard]] constexpr auto reduced(const R& in, std::size_t width, Op op = {}) {
    using T = std::remove_cvref_t<decltype(*std::data(in))>;
    static_assert(reducible<T>);
    return pipeline<T, Op>{std::data(in), std::size(in), width, op, {}};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
