// SPDX-License-Identifier: Apache-2.0
// All macros of the library: its version, the inline namespace that carries the version, and
// annotations that let one function body serve g++ and nvcc. The macros depend only on the
// compiler, and not on which other headers exist, so every translation unit sees the same
// definitions.
//
//   // gpushare::v0_2_0::f, written as gpushare::f
//   namespace gpushare { inline namespace GPUSHARE_ABI { void f(); } }
//
// Programs can check the version as a value:
//
//   static_assert(::gpushare::version >= ::gpushare::version_number{0, 2, 0});
#pragma once

#include <compare>

/// Major part of version_number.
#define GPUSHARE_VERSION_MAJOR 0
/// Minor part of version_number.
#define GPUSHARE_VERSION_MINOR 2
/// Patch part of version_number.
#define GPUSHARE_VERSION_PATCH 0

/// The inline namespace. Two shared objects that were built with different versions can be in one
/// process, since their symbols differ.
#define GPUSHARE_ABI v0_2_0

#if defined(__CUDACC__)
/// Before a function for host and device. Empty without nvcc.
#define GPUSHARE_HD __host__ __device__
/// Silences nvcc's check that a host-device template calls only host-device functions, since that
/// depends on the instantiation.
#define GPUSHARE_EXEC_CHECK_DISABLE _Pragma("nv_exec_check_disable")
#else
#define GPUSHARE_HD
#define GPUSHARE_EXEC_CHECK_DISABLE
#endif

/// Before a function that is rarely called. The function is compiled out of line, so its caller has
/// more registers. Not used on a device, where a call needs a stack in the memory of every thread.
#if defined(__CUDA_ARCH__)
#define GPUSHARE_RARE
#else
#define GPUSHARE_RARE [[gnu::noinline, gnu::cold]]
#endif

/// Before a function that works in registers only if it is inlined into a loop that is `flatten`.
/// clang's `flatten` isn't recursive. g++'s is, and g++ would make narrow vectors of wide ones if
/// it inlined the function any earlier. Without optimisation nothing stays in registers, and clang
/// would only take three times as long, for three times the code.
#if defined(__clang__) && defined(__OPTIMIZE__) && !defined(__CUDACC__)
#define GPUSHARE_FLAT [[gnu::always_inline]]
#else
#define GPUSHARE_FLAT
#endif

/// Whether the headers show the bodies of functions that aren't templates. Programs that link
/// gpushare::compiled (which defines GPUSHARE_COMPILED) find these bodies in its library. Only the
/// library's own file defines GPUSHARE_COMPILING.
#if defined(GPUSHARE_COMPILED) && !defined(GPUSHARE_COMPILING)
#define GPUSHARE_BODIES 0
#else
#define GPUSHARE_BODIES 1
#endif
/// Before such a body. The library has a copy of each function, called or not. g++ keeps copies of
/// inline functions that are `used`, and inlines them into each other as in a program without the
/// library; functions that aren't declared inline cost a pool a fifth of its speed. clang's `used`
/// keeps only the constructors of base classes, so by clang these functions aren't inline.
#if defined(GPUSHARE_COMPILING) && defined(__clang__)
#define GPUSHARE_INLINE
#elif defined(GPUSHARE_COMPILING)
#define GPUSHARE_INLINE [[gnu::used]] inline
#else
#define GPUSHARE_INLINE inline
#endif
/// Before the instantiations of tenant/detail/compiled.hpp. cmake/compiled*.cpp compile them, and
/// all other files declare them.
#if defined(GPUSHARE_INSTANTIATING)
#define GPUSHARE_EXTERN
#else
#define GPUSHARE_EXTERN extern
#endif

static_assert(__cplusplus >= 202002L, "gpushare needs C++20: compile with -std=c++20 or newer");

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A version, compared by major, then minor, then patch.
struct version_number {
    // Trailing underscores: <sys/types.h> may define major and minor.
    int major_ = 0;  ///< changes the interface
    int minor_ = 0;  ///< adds to the interface
    int patch_ = 0;  ///< leaves the interface as it is

    friend constexpr auto operator<=>(version_number, version_number) = default;
    friend constexpr bool operator==(version_number, version_number) = default;
};

/// The version of these headers.
inline constexpr version_number version{GPUSHARE_VERSION_MAJOR, GPUSHARE_VERSION_MINOR, GPUSHARE_VERSION_PATCH};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
