// SPDX-License-Identifier: Apache-2.0
// A scope whose leaks are intended. At its end a tenancy gives up objects that work may still use,
// and LeakSanitizer would report these.
//
//   const support::leaks_are_meant here;
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GPUSHARE_TESTS_FIND_LEAKS
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define GPUSHARE_TESTS_FIND_LEAKS
#endif

#ifdef GPUSHARE_TESTS_FIND_LEAKS
extern "C" void __lsan_disable();  // NOLINT: the sanitizer's
extern "C" void __lsan_enable();   // NOLINT
#endif

namespace support {

/// Applies to this thread's allocations.
class leaks_are_meant {
public:
    leaks_are_meant() noexcept {
#ifdef GPUSHARE_TESTS_FIND_LEAKS
        __lsan_disable();
#endif
    }
    leaks_are_meant(const leaks_are_meant&) = delete;
    leaks_are_meant& operator=(const leaks_are_meant&) = delete;
    ~leaks_are_meant() {
#ifdef GPUSHARE_TESTS_FIND_LEAKS
        __lsan_enable();
#endif
    }
};

}  // namespace support
