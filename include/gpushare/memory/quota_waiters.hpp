// SPDX-License-Identifier: Apache-2.0
// Waiting for bytes of a quota: first come first served, until a deadline or a stop request.
//
//   const gpushare::patience until{node.get_clock(), node.get_clock().now() + 50ms, stop};
//   void* p = mine.allocate_until(512_MiB, 256, until);      // throws memory_error: deadline_exceeded, stopped, ...
//   if (gpushare::charge_until(chat, 1_MiB, until).code == gpushare::errc::none) ...
//
// Whoever waits asks the hooks of the tree first (quota_hook.hpp), tells them the deadline, and then joins the line
// (quota_line.hpp). One of those who wait looks after the frees that streams have yet to reach: there is no thread but
// theirs.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <string_view>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/patience.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_hook.hpp>
#include <gpushare/memory/quota_line.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// A thread in the line of its tree.
struct quota_waiter : quota_place {
    quota_waiter(quota& of, bytes n) noexcept {
        at = &of;
        size = n.count();
        wake = [](quota_place& p) noexcept { static_cast<quota_waiter&>(p).woken.notify_one(); };
    }

    /// errc::none once the bytes are charged; else why not.
    template <clock Clock>
    errc wait(const patience<Clock>& until) noexcept {
        auto& root = *at->root_;
        const std::stop_callback on_stop(until.stop, [&] {
            const std::lock_guard lock(root.mutex_);
            woken.notify_one();
        });
        std::unique_lock lock(root.mutex_);
        quota_line::join(*this);
        while (state == claim_state::waiting) {
            const auto now = until.time.now();
            if (until.stop.stop_requested()) return give_up(errc::stopped);
            if (now >= until.deadline) return give_up(errc::deadline_exceeded);
            const bool polls = !root.polled_ && hook_registration::any_to_poll(root);
            const auto most = polls ? ns{slice} : ns{std::chrono::minutes(1)};
            const auto look_again = std::min(until.deadline, saturating_add(now, most));
            if (polls) {
                root.polled_ = true;
                const bool waited = hook_registration::poll(root, lock, look_again);
                root.polled_ = false;
                if (waited || state != claim_state::waiting) continue;
            }
            woken.wait_for(lock, look_again - now);
        }
        pass_on();
        return state == claim_state::granted ? errc::none : why;
    }

private:
    // How long streams may be waited for, or left alone while there is nothing to come from them, before whoever does it
    // looks at the rest again.
    static constexpr ns slice = std::chrono::milliseconds(1);

    errc give_up(errc code) noexcept {
        quota_line::leave(*this);
        pass_on();
        return code;
    }
    // Somebody else looks after the streams.
    void pass_on() noexcept {
        auto& root = *at->root_;
        if (root.polled_) return;
        for (auto* p = root.line_.front(); p != nullptr; p = p->next) {
            if (p->wake == nullptr) continue;  // no thread waits there
            p->wake(*p);
            break;
        }
    }

    std::condition_variable woken;
};

}  // namespace detail

/// Charges `n` bytes, or waits for them. deadline_exceeded or stopped, with the figures of the last refusal; over_quota or
/// out_of_memory, at once, where no release could ever make it fit; size_overflow. Throws nothing.
template <clock Clock>
[[nodiscard]] failure charge_until(quota& q, bytes n, const patience<Clock>& until) noexcept {
    errc why = q.try_charge(n);
    for (detail::hook_cursor asked{.until = until.deadline}; why != errc::none && q.ask_next(asked, n);)
        why = q.try_charge(n);
    if (why != errc::none) why = detail::quota_waiter(q, n).wait(until);
    return why == errc::none ? failure{} : q.explain(why, n);
}

/// Throws what a refused wait for `why.asked` bytes calls for, a std::bad_alloc in any case. Names who holds burst there.
[[noreturn]] inline void raise_waited(const quota& q, const failure& why, std::string_view tenant) {
    if (is_memory_refusal(why.code)) raise(why, tenant, "allocate");
    detail::message m;
    if (!tenant.empty()) m.add("tenant '", tenant.substr(0, detail::longest_name), "': ");
    m.add("allocate: asked ", bytes{why.asked}, ", ", bytes{why.left}, " of ", bytes{why.limit}, " left (",
          to_string(why.code), ")");
    if (const auto holder = holder_of_burst(q, bytes{why.asked}); holder.borrowed != bytes{}) {
        m.add("; ", holder.borrowed, " lent to ");
        holder.name.empty() ? m.add("another") : m.add("'", holder.name.substr(0, detail::longest_name), "'");
    }
    throw memory_error(why, tenant, m);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
