// SPDX-License-Identifier: Apache-2.0
// A kernel in place of an all-reduce between two ranks.
//
//   stream.launch({}, support::average_of_two<float>{a, b, n});
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>

#include <gpushare/config.hpp>

namespace support {

/// Computes in place the average that an all-reduce computes, in the order of ranks.
template <class T>
struct average_of_two {
    T *a, *b;
    std::size_t n;
    template <class C>
    GPUSHARE_HD void operator()(C& ctx) const {
        using wide = std::conditional_t<std::same_as<T, double>, double, float>;
        for (std::size_t i = ctx.thread_rank(); i < n; i += ctx.num_threads())
            a[i] = b[i] = static_cast<T>((static_cast<wide>(a[i]) + static_cast<wide>(b[i])) / 2);
    }
};

}  // namespace support
