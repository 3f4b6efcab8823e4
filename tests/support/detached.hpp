// SPDX-License-Identifier: Apache-2.0
// A coroutine that starts at once and belongs to nobody.
//
//   [&]() -> support::detached { done = co_await tenant.async_submit(work); }();
#pragma once

#include <coroutine>
#include <exception>

namespace support {

struct detached {
    struct promise_type {
        detached get_return_object() noexcept { return {}; }
        std::suspend_never initial_suspend() noexcept { return {}; }
        std::suspend_never final_suspend() noexcept { return {}; }
        void return_void() noexcept {}
        void unhandled_exception() { std::terminate(); }
    };
};

}  // namespace support
