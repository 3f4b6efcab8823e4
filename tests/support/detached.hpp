// SPDX-License-Identifier: Apache-2.0
// Coroutines that start at once. One kind has no owner; the other kind is destroyed with its
// handle, wherever it is suspended.
//
//   [&]() -> support::detached { done = co_await tenant.async_submit(work); }();
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

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

class held {
public:
    struct promise_type {
        held get_return_object() noexcept { return held(std::coroutine_handle<promise_type>::from_promise(*this)); }
        std::suspend_never initial_suspend() noexcept { return {}; }
        std::suspend_always final_suspend() noexcept { return {}; }
        void return_void() noexcept {}
        void unhandled_exception() { std::terminate(); }
    };
    held(held&& other) noexcept : of_(std::exchange(other.of_, {})) {}
    held& operator=(held&&) = delete;
    ~held() {
        if (of_) of_.destroy();
    }
    [[nodiscard]] bool over() const noexcept { return of_.done(); }

private:
    explicit held(std::coroutine_handle<promise_type> of) noexcept : of_(of) {}
    std::coroutine_handle<promise_type> of_;
};

}  // namespace support
