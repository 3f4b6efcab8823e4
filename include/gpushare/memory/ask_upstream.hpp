// SPDX-License-Identifier: Apache-2.0
// Asking any resource for memory without being thrown at: the one place that knows in which ways resources say no.
//
//   gpushare::upstream_refusal why;
//   if (void* p = gpushare::ask_upstream(upstream, 4096, 256, why)) ...;
//   else if (why.final) ...;                     // not for want of memory: asking again is no use
#pragma once

#include <cstddef>
#include <exception>
#include <new>
#include <string_view>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// What is known of a refusal.
struct upstream_refusal {
    failure why{};                // with figures, where the resource has any
    std::exception_ptr thrown{};  // where it can't say no otherwise
    bool final = false;           // it threw, and that wasn't a std::bad_alloc
};

/// By try_allocate where there is one, with a reason if it gives one. Null, and `r` says what is known; `r.why` stays as
/// it is where the resource gives no reason.
template <memory_resource Upstream>
[[nodiscard]] void* ask_upstream(Upstream& upstream, std::size_t size, std::size_t alignment,
                                 upstream_refusal& r) noexcept {
    if constexpr (requires { upstream.try_allocate(size, alignment, &r.why); }) {
        return upstream.try_allocate(size, alignment, &r.why);
    } else if constexpr (requires { upstream.try_allocate(size, alignment, std::string_view{}, &r.why); }) {
        return upstream.try_allocate(size, alignment, std::string_view{}, &r.why);  // that of a tenant takes a label
    } else if constexpr (requires { upstream.try_allocate(size, alignment); }) {
        return upstream.try_allocate(size, alignment);
    } else {
        r.thrown = nullptr;
        try {
            return upstream.allocate(size, alignment);
        } catch (const std::bad_alloc&) {
            r.thrown = std::current_exception();
        } catch (...) {
            r.thrown = std::current_exception();
            r.final = true;
        }
        return nullptr;
    }
}

/// Null, whatever the reason.
template <memory_resource Upstream>
[[nodiscard]] void* ask_upstream(Upstream& upstream, std::size_t size, std::size_t alignment) noexcept {
    upstream_refusal r;
    return ask_upstream(upstream, size, alignment, r);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
