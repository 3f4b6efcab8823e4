// SPDX-License-Identifier: Apache-2.0
// Closing: before a resource goes away, for example when a tenant ends, the resources built on it
// (pools, caches, arenas) have to give back the memory that they keep. A close_source calls them:
// they give the memory back, and hand out no more. The classes work like std::stop_source,
// stop_token and stop_callback, but the callbacks get a deadline and return whether they are done.
//
//   gpushare::close_source closing;  // of the resource that will close
//   gpushare::close_callback gives_back{closing.token(), [&](gpushare::instant by) { return pool.drain(by); }};
//   if (closing.close(deadline)) ...;  // all resources above have given up its memory
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/inplace_function.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

class close_callback;

namespace detail {

/// The state that a source, its tokens and their callbacks share.
struct close_state {
    std::mutex mutex;
    std::condition_variable returned;  // notified when a callback or a close returns
    std::atomic<bool> closed{false};   // written under the mutex
    close_callback* newest = nullptr;
    bool calling = false;  // one close at a time
    std::uint64_t passes = 0;
};

/// Waits for a notification until the deadline of the steady clock, for a minute at most. Returns
/// false immediately if the deadline has passed, so call it in a loop.
inline bool wait_until(std::condition_variable& told, std::unique_lock<std::mutex>& lock, instant deadline) noexcept {
    const instant now = std::chrono::steady_clock::now();
    if (now >= deadline) return false;
    told.wait_for(lock, std::min(deadline, saturating_add(now, longest_sleep)) - now);
    return true;
}

}  // namespace detail

/// Lets resources that are built on another resource ask whether that resource is closed, and
/// register callbacks (close_callback). All copies refer to the same source and may outlive it.
/// Safe from any thread.
class close_token {
public:
    /// The token of a resource that never closes.
    close_token() noexcept = default;

    /// Whether there is a source that can close.
    [[nodiscard]] explicit operator bool() const noexcept { return state_ != nullptr; }
    /// Whether the close has begun. Acquire: a thread that sees the close also sees what the
    /// closing thread did before.
    [[nodiscard]] bool closed() const noexcept {
        return state_ != nullptr && state_->closed.load(std::memory_order_acquire);
    }

private:
    friend class close_source;
    friend class close_callback;
    explicit close_token(std::shared_ptr<detail::close_state> state) noexcept : state_(std::move(state)) {}

    std::shared_ptr<detail::close_state> state_;
};

/// A callback that stays registered as long as it lives, or until it returns true. The source calls
/// the newest callback first, so that a resource closes before the resource below it. Neither
/// copied nor moved.
class close_callback {
public:
    /// At most 48 bytes of captures. The closing thread calls the function with the deadline of the
    /// close, and holds no lock of the source. From then on the callback's owner must refuse with
    /// errc::closed. True: the owner keeps no memory of the resource and doesn't touch the resource
    /// any more. False: some memory is still in use, and the next close calls the function again.
    using function = detail::inplace_function<bool(instant), 48>;

    /// Does nothing for an empty token. If the source is already closed, its next close() calls the
    /// callback.
    close_callback(const close_token& token, function call) noexcept : state_(token.state_), call_(std::move(call)) {
        if (state_ == nullptr) return;
        const std::lock_guard lock(state_->mutex);
        older_ = std::exchange(state_->newest, this);
        if (older_ != nullptr) older_->newer_ = this;
    }
    close_callback(const close_callback&) = delete;
    close_callback& operator=(const close_callback&) = delete;
    /// Waits until no other thread is in a call of the callback. The callback may destroy itself.
    ~close_callback() {
        if (state_ == nullptr) return;
        std::unique_lock lock(state_->mutex);
        if (gone_ != nullptr && caller_ == std::this_thread::get_id())
            *gone_ = true;
        else
            state_->returned.wait(lock, [this] { return gone_ == nullptr; });
        unlink();
    }

private:
    friend class close_source;

    void unlink() noexcept {
        if (!linked_) return;
        linked_ = false;
        (newer_ != nullptr ? newer_->older_ : state_->newest) = older_;
        if (older_ != nullptr) older_->newer_ = newer_;
    }

    std::shared_ptr<detail::close_state> state_;
    function call_;
    // Under the mutex of the state.
    close_callback *older_ = nullptr, *newer_ = nullptr;
    bool linked_ = true;
    bool* gone_ = nullptr;  // during a call: set to true if the callback is destroyed
    std::thread::id caller_{};
    std::uint64_t asked_in_ = 0;  // the last pass that called this callback
};

/// The source of a resource that can close. Neither copied nor moved. Safe from any thread.
class close_source {
public:
    /// Throws std::bad_alloc.
    close_source() : state_(std::make_shared<detail::close_state>()) {}
    close_source(const close_source&) = delete;
    close_source& operator=(const close_source&) = delete;

    /// The token for resources built on this one.
    [[nodiscard]] close_token token() const noexcept { return close_token(state_); }
    /// See close_token::closed.
    [[nodiscard]] bool closed() const noexcept { return state_->closed.load(std::memory_order_acquire); }

    /// Calls every callback, the newest first. Returns true once all callbacks have given up their
    /// memory, and false if one couldn't by `deadline`, of the steady clock: then call close()
    /// again. A closed source stays closed. A second call that overlaps the first waits for the
    /// first, until its own deadline. A call from within a callback would wait for itself, so give
    /// that call a deadline.
    bool close(instant deadline) noexcept {
        auto& s = *state_;
        std::unique_lock lock(s.mutex);
        s.closed.store(true, std::memory_order_release);
        while (s.calling)
            if (!detail::wait_until(s.returned, lock, deadline)) return false;
        s.calling = true;
        const auto pass = ++s.passes;
        bool all = true;
        for (;;) {
            close_callback* c = s.newest;
            while (c != nullptr && c->asked_in_ == pass) c = c->older_;
            if (c == nullptr) break;
            bool gone = false;
            c->asked_in_ = pass;
            c->caller_ = std::this_thread::get_id();
            c->gone_ = &gone;
            lock.unlock();
            bool done = false;
            try {
                done = c->call_(deadline);
            } catch (...) {  // counts as memory that is still in use
            }
            lock.lock();
            if (gone) continue;
            c->gone_ = nullptr;
            if (done) c->unlink();
            all = all && done;
            s.returned.notify_all();
        }
        s.calling = false;
        s.returned.notify_all();
        return all;
    }

private:
    std::shared_ptr<detail::close_state> state_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
