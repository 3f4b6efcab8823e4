// SPDX-License-Identifier: Apache-2.0
// A scope whose leaks are intended. At its end a tenancy gives up objects that work may still use,
// and LeakSanitizer would report these. And a transport whose calls may end so that what it was
// lent is never freed: of this memory alone the leak is intended.
//
//   const support::leaks_are_meant here;
//   support::kept_words kept;
#pragma once

#include <initializer_list>
#include <span>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GPUSHARE_TESTS_FIND_LEAKS
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define GPUSHARE_TESTS_FIND_LEAKS
#endif

#ifdef GPUSHARE_TESTS_FIND_LEAKS
extern "C" void __lsan_disable();                   // NOLINT: the sanitizer's
extern "C" void __lsan_enable();                    // NOLINT
extern "C" void __lsan_ignore_object(const void*);  // NOLINT
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

/// The memory that a transport was lent last. The lender never frees this memory if the call, or
/// one that it makes after this call, throws or leaves the memory in use.
class kept_words {
public:
    /// Makes a call of the transport to which `in` and `out` are lent.
    template <class T, class Call>
    auto to(std::span<const T> in, std::span<T> out, const Call& call) {
        in_ = in.data();
        out_ = out.data();
        return of(call);
    }
    /// Makes a call of the transport to which nothing is lent.
    template <class Call>
    auto of(const Call& call) {
        try {
            auto f = call();
            if (f.buffers_in_use) are_meant();
            return f;
        } catch (...) {
            are_meant();
            throw;
        }
    }

private:
    void are_meant() const noexcept {
#ifdef GPUSHARE_TESTS_FIND_LEAKS
        for (const void* const memory : {in_, out_})
            if (memory != nullptr) __lsan_ignore_object(memory);
#endif
    }

    const void* in_ = nullptr;
    const void* out_ = nullptr;
};

}  // namespace support
