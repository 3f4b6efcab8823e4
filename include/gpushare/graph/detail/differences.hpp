// SPDX-License-Identifier: Apache-2.0
// Compares values of models as results of operators, and says which numbers differ too much.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include <gpushare/config.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/serving/operator_selection.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// Compares floats. The absolute tolerance is at least this part of the largest expected magnitude.
template <class T>
[[nodiscard]] operator_result compared_floats(void* at, std::size_t size, operator_tolerance within,
                                              double of_largest) {
    const std::size_t n = size / sizeof(T);
    const auto difference = [=](const std::byte* expected, const std::byte* got) {
        double largest = 0;
        for (std::size_t i = 0; i < n; ++i) {
            T x;
            std::memcpy(&x, expected + i * sizeof(T), sizeof(T));
            double y = 0;
            if constexpr (std::same_as<T, double>)
                y = std::abs(x);
            else
                y = std::abs(static_cast<double>(static_cast<float>(x)));
            if (std::isfinite(y)) largest = std::max(largest, y);
        }
        const operator_tolerance t{std::max(within.absolute, of_largest * largest), within.relative};
        return compared(static_cast<T*>(nullptr), n, t).difference(expected, got);
    };
    return {at, size, difference};
}

/// How to compare `size` bytes of `type`: floats within the tolerance, other types exactly.
[[nodiscard]] inline operator_result compared_as(element type, void* at, std::size_t size, operator_tolerance within,
                                                 double of_largest) {
    const auto exactly = [&]<class T>(T) {
        auto made = compared(static_cast<T*>(nullptr), size / sizeof(T));
        made.at = at;
        return made;
    };
    switch (type) {
        case element::f32:
        case element::complex64: return compared_floats<float>(at, size, within, of_largest);
        case element::f64:
        case element::complex128: return compared_floats<double>(at, size, within, of_largest);
        case element::f16: return compared_floats<float16>(at, size, within, of_largest);
        case element::bf16: return compared_floats<bfloat16>(at, size, within, of_largest);
        case element::i8: return exactly(std::int8_t{});
        case element::i16: return exactly(std::int16_t{});
        case element::i32: return exactly(std::int32_t{});
        case element::i64: return exactly(std::int64_t{});
        case element::u16: return exactly(std::uint16_t{});
        case element::u32: return exactly(std::uint32_t{});
        case element::u64: return exactly(std::uint64_t{});
        default: return exactly(std::uint8_t{});
    }
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
