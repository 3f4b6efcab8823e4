// SPDX-License-Identifier: Apache-2.0
// Number types of 8 and 16 bits for storage: compute in float, and round once when storing. They
// have the bits, size and alignment of the CUDA toolkit's __half, __nv_bfloat16, __nv_fp8_e4m3 and
// __nv_fp8_e5m2, but don't need the toolkit.
//
//   out[i] = gpushare::bfloat16{float{a[i]} + float{b[i]}};
//   auto theirs = std::bit_cast<__nv_bfloat16>(out[i]);
//
// Formats: IEEE 754-2019 binary16; bfloat16, the upper half of binary32; E4M3 and E5M2 of the OCP
// 8-bit floating point specification (OFP8) 1.0.
//
// Numbers, and elements of other types, are moved 16 bytes at a time. On a device one instruction
// moves them if the address is a multiple of 16:
//
//   constexpr auto width = gpushare::packed<gpushare::bfloat16>::width;         // 8
//   for (auto i = ctx.thread_rank() * width; i + width <= n; i += ctx.num_threads() * width)
//       gpushare::store_packed(to + i, gpushare::load_packed(from + i));
#pragma once

#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// Conversions between binary32 and a format with fewer bits, both as bit patterns. Rounds as
/// device hardware does: to nearest, ties to even; subnormal numbers are kept.
template <int ExponentBits, int MantissaBits>
struct number_format {
    static constexpr int bits = 1 + ExponentBits + MantissaBits;
    static constexpr int bias = (1 << (ExponentBits - 1)) - 1;
    // binary32 has 23 bits of mantissa and a bias of 127
    static constexpr std::uint32_t dropped = 23 - MantissaBits;
    static constexpr std::uint32_t magnitude = (1U << (bits - 1)) - 1;
    // E4M3 spends what would be infinity on numbers and keeps a single NaN.
    static constexpr bool has_infinity = !(ExponentBits == 4 && MantissaBits == 3);
    static constexpr std::uint32_t infinity = magnitude ^ ((1U << MantissaBits) - 1);
    static constexpr std::uint32_t largest = has_infinity ? infinity - 1 : magnitude - 1;
    static constexpr std::uint32_t nan = magnitude;
    // Programs choose the scale of 8-bit numbers so that all numbers fit. Clamping a number that
    // doesn't fit is better than losing it.
    static constexpr bool saturates = bits == 8;
    static constexpr bool is_upper_half = ExponentBits == 8;
    static constexpr std::uint32_t rebias = std::uint32_t{127 - bias} << 23;

    /// Binary32 to this format.
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t narrow(std::uint32_t from) noexcept {
        const std::uint32_t sign = from >> 31 << (bits - 1);
        const std::uint32_t abs = from & 0x7fff'ffffU;
        if (abs > 0x7f80'0000U) return nan;
        // Exponents as binary32 stores them. bfloat16 has the same, and no subnormal case of its
        // own.
        constexpr int smallest_normal = is_upper_half ? 0 : 128 - bias;
        const int exponent = static_cast<int>(abs >> 23);
        std::uint32_t to = 0;
        if (exponent >= smallest_normal) {
            to = rounded(abs - rebias, dropped);
        } else {
            // A subnormal result keeps one bit less for each power of two below the smallest normal
            // number. From 25 dropped bits on, every value rounds to 0.
            const std::uint32_t drop = dropped + static_cast<std::uint32_t>(smallest_normal - exponent);
            if (drop <= 24) to = rounded((abs & 0x7f'ffffU) | 0x80'0000U, drop);
        }
        if (to > largest) to = saturates ? largest : infinity;
        return sign | to;
    }

    /// This format to binary32, which is always exact.
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t widen(std::uint32_t from) noexcept {
        if constexpr (is_upper_half) {
            return from << 16;
        } else {
            const std::uint32_t sign = from >> (bits - 1) << 31;
            const std::uint32_t abs = from & magnitude;
            if (abs > (has_infinity ? infinity : largest)) return 0x7fff'ffffU;
            if (has_infinity && abs == infinity) return sign | 0x7f80'0000U;
            if (abs >= 1U << MantissaBits) return sign | ((abs << dropped) + rebias);
            // A subnormal number is a multiple of the smallest positive one. The product is normal,
            // so flush-to-zero leaves the product alone.
            constexpr auto smallest = __builtin_bit_cast(float, std::uint32_t{128 - bias - MantissaBits} << 23);
            return sign | __builtin_bit_cast(std::uint32_t, static_cast<float>(abs) * smallest);
        }
    }

private:
    // `value` without its last `drop` bits, to nearest even. A carry into the exponent is correct.
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t rounded(std::uint32_t value, std::uint32_t drop) noexcept {
        return (value + ((1U << (drop - 1)) - 1) + ((value >> drop) & 1U)) >> drop;
    }
};

}  // namespace detail

/// A number that is stored in few bits. It converts from float explicitly, rounding to nearest
/// even, and to float exactly. It has no arithmetic: every operation would round, and a sum of many
/// would drift.
///
/// As the toolkit's constructors do: 16-bit types overflow to infinity; 8-bit types saturate, so
/// anything too large, infinity included, becomes the largest finite number. A NaN becomes the
/// format's NaN with all bits set and no sign; back in float it is 0x7fffffff, except that bfloat16
/// keeps its bits.
template <int ExponentBits, int MantissaBits>
class stored_number {
    using format = detail::number_format<ExponentBits, MantissaBits>;

public:
    /// An unsigned number of its size.
    using bits_type = std::conditional_t<format::bits == 8, std::uint8_t, std::uint16_t>;

    /// leaves the bits unset: a __shared__ array of these must need no constructor
    stored_number() = default;
    /// From float alone: a double would be rounded twice, an integer perhaps as well.
    template <std::same_as<float> F>
    GPUSHARE_HD constexpr explicit stored_number(F value) noexcept : bits_(narrow(value)) {}

    /// The number with those bits.
    [[nodiscard]] GPUSHARE_HD static constexpr stored_number from_bits(bits_type bits) noexcept {
        stored_number n{};
        n.bits_ = bits;
        return n;
    }
    /// Its bits.
    [[nodiscard]] GPUSHARE_HD constexpr bits_type bits() const noexcept { return bits_; }
    /// Exact.
    [[nodiscard]] GPUSHARE_HD constexpr explicit operator float() const noexcept { return widen(bits_); }
    /// As numbers: a NaN equals nothing, the two zeros each other.
    [[nodiscard]] GPUSHARE_HD friend constexpr bool operator==(stored_number a, stored_number b) noexcept {
        return static_cast<float>(a) == static_cast<float>(b);
    }

    /// The largest finite number.
    [[nodiscard]] GPUSHARE_HD static constexpr stored_number max() noexcept { return from_bits(format::largest); }

private:
    // Devices convert the common types in one instruction, to the same bits; the rest goes the way
    // of the host.
    [[nodiscard]] GPUSHARE_HD static constexpr bits_type narrow(float value) noexcept {
#ifdef __CUDA_ARCH__
        if (!__builtin_is_constant_evaluated()) {
            std::uint16_t to = 0;
            if constexpr (ExponentBits == 5 && MantissaBits == 10) {
                asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to) : "f"(value));
                return to;
            } else if constexpr (format::is_upper_half) {
                asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to) : "f"(value));
                return to;
            }
        }
#endif
        return static_cast<bits_type>(format::narrow(__builtin_bit_cast(std::uint32_t, value)));
    }
    [[nodiscard]] GPUSHARE_HD static constexpr float widen(bits_type bits) noexcept {
#ifdef __CUDA_ARCH__
        if constexpr (ExponentBits == 5 && MantissaBits == 10) {
            if (!__builtin_is_constant_evaluated()) {
                float to = 0;
                asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(bits));
                return to;
            }
        }
#endif
        return __builtin_bit_cast(float, format::widen(bits));
    }

    bits_type bits_;
};

namespace detail {
template <class T>
inline constexpr bool is_stored_number = false;
template <int E, int M>
inline constexpr bool is_stored_number<stored_number<E, M>> = true;
template <class T>
inline constexpr bool is_half = is_stored_number<T> && sizeof(T) == 2;
template <class T>
inline constexpr bool is_fp8 = is_stored_number<T> && sizeof(T) == 1;
}  // namespace detail

/// IEEE 754 binary16.
using float16 = stored_number<5, 10>;
/// The upper half of binary32.
using bfloat16 = stored_number<8, 7>;
/// OFP8 E4M3: no infinity, one NaN, up to 448.
using fp8_e4m3 = stored_number<4, 3>;
/// OFP8 E5M2: up to 57344.
using fp8_e5m2 = stored_number<5, 2>;

static_assert(sizeof(float16) == 2 && sizeof(bfloat16) == 2 && sizeof(fp8_e4m3) == 1 && sizeof(fp8_e5m2) == 1);
static_assert(std::is_trivial_v<float16> && std::is_trivial_v<fp8_e4m3>);

/// As many elements of T as fit into 16 bytes. An aggregate.
template <class T>
requires(std::is_trivially_copyable_v<T> && 16 % sizeof(T) == 0) struct alignas(16) packed {
    /// Elements in it.
    static constexpr std::uint32_t width = 16 / sizeof(T);
    T lane[width];  ///< in the order of memory

    /// Element `i`, below width.
    GPUSHARE_HD constexpr T& operator[](std::uint32_t i) noexcept { return lane[i]; }
    /// Element `i`, below width.
    GPUSHARE_HD constexpr const T& operator[](std::uint32_t i) const noexcept { return lane[i]; }
};

/// Whether the elements at `p` move in one access. At any other address they move one by one, with
/// the same result.
[[nodiscard]] GPUSHARE_HD inline bool is_packed(const void* p) noexcept {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

namespace detail {

#ifdef __CUDA_ARCH__
/// Stores 4, 8 or 16 bytes by one instruction, at an address that is a multiple of their number.
/// nvcc takes an assignment apart, down to single bytes for elements of one byte, and doesn't
/// always join the parts again. (PTX ISA, 9.7.9.11: a vector's address is a multiple of its size,
/// and is generic where no state space is named.)
template <class Bytes>
__device__ void store_at_once(void* to, const Bytes& x) noexcept {
    std::uint32_t w[sizeof x / 4];
    memcpy(w, &x, sizeof x);
    if constexpr (sizeof x == 16)
        asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                     : "memory");
    else if constexpr (sizeof x == 8)
        asm volatile("st.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(w[0]), "r"(w[1]) : "memory");
    else
        asm volatile("st.b32 [%0], %1;" ::"l"(to), "r"(w[0]) : "memory");
    static_assert(sizeof x == 4 || sizeof x == 8 || sizeof x == 16);
}
#endif

}  // namespace detail

/// The `packed<T>::width` elements that begin at `from`. The address needs only T's own alignment.
template <class T>
[[nodiscard]] GPUSHARE_HD packed<T> load_packed(const T* from) noexcept {
    packed<T> to;
#ifdef __CUDA_ARCH__
    if (is_packed(from)) {
        *reinterpret_cast<uint4*>(&to) = *reinterpret_cast<const uint4*>(from);
    } else {
        for (std::uint32_t i = 0; i < packed<T>::width; ++i) to.lane[i] = from[i];
    }
#else
    std::memcpy(static_cast<void*>(&to), from, sizeof to);  // a single unaligned move on a CPU
#endif
    return to;
}

/// Writes the elements to `to` and the places after it. The address needs only T's own alignment.
template <class T>
GPUSHARE_HD void store_packed(T* to, const packed<T>& from) noexcept {
#ifdef __CUDA_ARCH__
    if (is_packed(to)) {
        detail::store_at_once(to, from);
    } else {
        for (std::uint32_t i = 0; i < packed<T>::width; ++i) to[i] = from.lane[i];
    }
#else
    std::memcpy(static_cast<void*>(to), &from, sizeof from);
#endif
}

/// As load_packed, where `from` is a multiple of 16. Without a branch, a thread's next load doesn't
/// wait for this one.
template <class T>
[[nodiscard]] GPUSHARE_HD packed<T> load_aligned(const T* from) noexcept {
#ifdef __CUDA_ARCH__
    packed<T> to;
    *reinterpret_cast<uint4*>(&to) = *reinterpret_cast<const uint4*>(from);
    return to;
#else
    return load_packed(from);
#endif
}
/// As store_packed, where `to` is a multiple of 16.
template <class T>
GPUSHARE_HD void store_aligned(T* to, const packed<T>& from) noexcept {
#ifdef __CUDA_ARCH__
    detail::store_at_once(to, from);
#else
    store_packed(to, from);
#endif
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
