// SPDX-License-Identifier: Apache-2.0
// ONNX's numbers for element types. ONNX Runtime has the same numbers.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// Element types by ONNX's numbers. Later types, such as 8-bit floats, are unknown.
inline constexpr std::array<element, 17> elements{
    element::unknown, element::f32, element::u8,        element::i8,         element::u16, element::i16,
    element::i32,     element::i64, element::text,      element::boolean,    element::f16, element::f64,
    element::u32,     element::u64, element::complex64, element::complex128, element::bf16};
[[nodiscard]] inline element element_of(std::int32_t type) noexcept {
    return type >= 0 && static_cast<std::size_t>(type) < elements.size() ? elements[static_cast<std::size_t>(type)]
                                                                         : element::unknown;
}
[[nodiscard]] inline std::int32_t number_of(element e) noexcept {
    return static_cast<std::int32_t>(std::ranges::find(elements, e) - elements.begin());
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
