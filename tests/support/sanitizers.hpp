// SPDX-License-Identifier: Apache-2.0
// Which sanitizers observe this program; g++ and clang say it in different ways. SUPPORT_SANITIZED: any that takes over
// memory and signals. SUPPORT_THREAD_SANITIZED: the one whose operator new can't be replaced.
#pragma once

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
