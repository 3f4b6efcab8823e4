// SPDX-License-Identifier: Apache-2.0
// Moves 16 bytes of elements, on a device by one instruction if the address is aligned for it.
//
//   constexpr auto width = gpushare::packed<gpushare::bfloat16>::width;         // 8
//   for (auto i = ctx.thread_rank() * width; i + width <= n; i += ctx.num_threads() * width)
//       gpushare::store_packed(to + i, gpushare::load_packed(from + i));
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// As many T as 16 bytes hold. An aggregate.
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

/// Whether elements at `p` move in one access. Anywhere else they move one by one, to the same effect.
[[nodiscard]] GPUSHARE_HD inline bool is_packed(const void* p) noexcept {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

namespace detail {

#ifdef __CUDA_ARCH__
/// 4, 8 or 16 bytes to a multiple of as many, as one store: nvcc takes an assignment apart, to bytes where elements have so few, and
/// doesn't always put it together again. (PTX ISA, 9.7.9.11: a vector's address is a multiple of its size, and generic without a space.)
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

/// The `packed<T>::width` elements from `from` on, which needs T's own alignment only.
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

/// Writes to `to` and on, which needs T's own alignment only.
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

/// The same where `from` is a multiple of 16: no branch keeps a thread's next load waiting for this one.
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
/// The same where `to` is a multiple of 16.
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
