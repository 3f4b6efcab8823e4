// SPDX-License-Identifier: Apache-2.0
// Tells which sanitizers observe this program; g++ and clang report it in different ways.
// SUPPORT_SANITIZED: a sanitizer that takes over memory and signals. SUPPORT_THREAD_SANITIZED:
// ThreadSanitizer, whose operator new can't be replaced.
//
//   for (int i = 0; i < support::few(20'000); ++i) ...  // where more rounds find more wrong results, but no more of what sanitizers look for
#pragma once

#include <concepts>

#if defined(__SANITIZE_THREAD__)
#define SUPPORT_THREAD_SANITIZED
#elif defined(__SANITIZE_ADDRESS__)
#define SUPPORT_SANITIZED
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SUPPORT_THREAD_SANITIZED
#elif __has_feature(address_sanitizer)
#define SUPPORT_SANITIZED
#endif
#endif

#if defined(SUPPORT_THREAD_SANITIZED) && !defined(SUPPORT_SANITIZED)
#define SUPPORT_SANITIZED
#endif

namespace support {

/// With sanitizers, tests run one of so many rounds, since loops run about that many times slower.
#ifdef SUPPORT_SANITIZED
inline constexpr unsigned stride = 13;
#else
inline constexpr unsigned stride = 1;
#endif

/// The number of rounds to run out of `n`: all of them without sanitizers, and at least one with
/// them.
template <std::integral N>
[[nodiscard]] constexpr N few(N rounds) {
    return (rounds + static_cast<N>(stride - 1)) / static_cast<N>(stride);
}

}  // namespace support
