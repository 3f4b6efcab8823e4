// SPDX-License-Identifier: Apache-2.0
// Whether the addresses or threads of this program are under observation, which replaces operator new and the handler of
// some signals: SUPPORT_SANITIZED is defined then. g++ and clang say it in different ways.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SUPPORT_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SUPPORT_SANITIZED
#endif
#endif
