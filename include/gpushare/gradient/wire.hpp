// SPDX-License-Identifier: Apache-2.0
// How gradients travel: as they are, or in 16 bits. They are combined in float32 either way, and
// rounded once on the way out and once on the way back (of two levels, once more between these).
//
//   gpushare::to_wire(gradient, std::span(halves), residual);        // bfloat16 or float16; the residual keeps the rounded part
//   net.all_reduce<gpushare::bfloat16>(halves, halves, gpushare::average{}, deadline);
//   gpushare::from_wire(std::span(std::as_const(halves)), gradient);
//   if (!gpushare::all_finite(gradient)) skip_this_step();           // on all ranks alike: they have the same bits
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <gpushare/collective/finite.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The format of a gradient between ranks.
enum class wire_format : std::uint8_t {
    as_is,  ///< as it is in memory
    fp16,   ///< more digits; beyond 65504 it is infinite, and the step is skipped
    bf16,   ///< the range of float32
};

/// Its name.
[[nodiscard]] constexpr std::string_view to_string(wire_format f) noexcept {
    switch (f) {
        case wire_format::as_is: return "as_is";
        case wire_format::fp16: return "fp16";
        case wire_format::bf16: return "bf16";
    }
    return "unknown format";
}

/// The bytes that `elements` elements of `element` bytes take on the wire.
[[nodiscard]] constexpr bytes bytes_on_wire(wire_format f, std::size_t elements, std::size_t element = 4) noexcept {
    return bytes{elements * (f == wire_format::as_is ? element : 2)};
}

/// 16 bits for all gradients but sensitive, cheap ones: gradients of fewer than `least` elements,
/// such as most norms and biases, stay as they are. A caller that knows the sensitive ones
/// (torch_gradients: those of one dimension) doesn't ask for 16 bits for them.
struct mixed_format {
    wire_format large = wire_format::bf16;  ///< of the others
    std::size_t least = 4096;               ///< elements
    /// That of a gradient.
    [[nodiscard]] constexpr wire_format of(std::size_t elements) const noexcept {
        return elements < least ? wire_format::as_is : large;
    }
};

namespace detail {

/// As many as are whole vectors, and how many that were.
template <class V, class From, class To>
[[gnu::always_inline]] inline std::size_t convert_vectors(const From* from, To* to, std::size_t n) noexcept {
    std::size_t i = 0;
    for (; i + V::lanes <= n; i += V::lanes) store_floats(to + i, load_floats<V>(from + i));
    return i;
}
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
template <class From, class To>
[[nodiscard, gnu::flatten, gnu::target("avx2,f16c"), gnu::noinline]] std::size_t convert_by_f16c(
    const From* from, To* to, std::size_t n) noexcept {
    return convert_vectors<floats<16, 8>>(from, to, n);
}
#endif
/// The same bits as one by one. Float16 by the processor's own instructions where it has them;
/// bfloat16 is as fast as memory without.
template <class From, class To>
void convert(const From* from, To* to, std::size_t n) noexcept {
    std::size_t i = 0;
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    if constexpr (std::same_as<From, float16> || std::same_as<To, float16>)
        if (widest_vectors() != vector_width::narrow) i = convert_by_f16c(from, to, n);
#endif
    i += convert_vectors<floats<16>>(from + i, to + i, n - i);
    for (; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

}  // namespace detail

/// Rounds to nearest even. With a residual, which is as long or empty: adds the earlier rounding
/// error to `from`, rounds the sum and keeps the new error, so that small gradients add up instead
/// of being lost. Values that aren't finite leave no residual. `to` is as long.
template <class Wire>
requires detail::is_half<Wire>
void to_wire(std::span<const float> from, std::span<Wire> to, std::span<float> residual = {}) noexcept {
    if (residual.empty()) return detail::convert(from.data(), to.data(), from.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
        const float x = from[i] + residual[i];
        to[i] = Wire(x);
        const float rest = x - static_cast<float>(to[i]);
        residual[i] = std::isfinite(rest) ? rest : 0.0F;
    }
}

/// Exact. `to` is as long.
template <class Wire>
requires detail::is_half<Wire>
void from_wire(std::span<const Wire> from, std::span<float> to) noexcept {
    detail::convert(from.data(), to.data(), from.size());
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
