// SPDX-License-Identifier: Apache-2.0
// Waits for memory to promise to a tenant. Until a deadline, it makes the tenants that have
// borrowed memory as burst give that memory back.
//
//   gpushare::detail::room_wait wait{devices, until};  // until: a patience, see concepts.hpp
//   while (!try_it()) if (const errc why = wait.again(per_device); why != errc::none) return why;
//
// No tenant loses guaranteed bytes. The waiting thread tries the devices again every two
// milliseconds.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <limits>
#include <mutex>
#include <stop_token>
#include <string_view>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/detail/stable_list.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// After a refusal for lack of `per_device` bytes: makes the borrowers of `roots` give back idle
/// memory, which is memory in pools, and frees whose streams have reached them. Returns true if
/// another try makes sense. Calls none of the embedder's hooks.
///
/// From the first refusal on, no tenant keeps borrowed bytes. So once all borrowers have been
/// asked, a refusal is right for the moment of its try: a block that was freed on a device by then
/// is free there, and in no pool.
class idle_room {
public:
    explicit idle_room(plain_list<quota*> roots)
        : roots_(std::move(roots)), asked_(roots_.size(), hook_cursor{.last = std::numeric_limits<int>::min()}) {}

    [[nodiscard]] bool gather(bytes per_device) {
        const bool first = pressed_.empty();
        if (first)
            for (quota* root : roots_) pressed_.emplace_back(*root);
        bool more = first;
        for (std::size_t i = 0; i < roots_.size(); ++i)
            while (roots_[i]->ask_next(asked_[i], per_device)) more = true;
        return more;
    }

private:
    plain_list<quota*> roots_;
    plain_list<hook_cursor> asked_;
    stable_list<quota_pressure> pressed_;  // a list, because the elements must not move
};

/// For one request. `roots` are the quotas of the devices on which the request may be promised
/// memory. They must outlive the wait.
template <clock Clock>
class room_wait {
public:
    room_wait(plain_list<quota*> roots, const patience<Clock>& until)
        : roots_(std::move(roots)), asked_(roots_.size(), hook_cursor{.until = until.deadline}), until_(until) {}

    /// After a refusal for lack of `per_device` bytes. errc::none: try again. deadline_exceeded;
    /// stopped.
    [[nodiscard]] errc again(bytes per_device) {
        for (std::size_t i = 0; i < roots_.size(); ++i)
            if (roots_[i]->free() < per_device && roots_[i]->ask_next(asked_[i], per_device)) return errc::none;
        if (until_.stop.stop_requested()) return errc::stopped;
        const auto now = until_.time.now();
        if (now >= until_.deadline) return errc::deadline_exceeded;
        std::mutex mutex;
        std::unique_lock lock(mutex);
        std::condition_variable_any stopped;
        (void)stopped.wait_for(lock, until_.stop, std::min(look_slice, until_.deadline - now), [] { return false; });
        return errc::none;
    }

    /// The largest borrower on one of the devices.
    [[nodiscard]] burst_holder holder(bytes per_device) const noexcept {
        burst_holder most;
        for (const quota* q : roots_)
            if (const auto here = holder_of_burst(*q, per_device); here.borrowed > most.borrowed) most = here;
        return most;
    }

    /// Throws the error for `code`, which again() returned, with the figures of the last refusal.
    [[noreturn]] void refuse(errc code, const failure& last, std::string_view tenant, bytes per_device) const {
        message m;
        const failure why{code, last.asked, last.left, last.limit, reason::size_left};
        m.of(tenant).add(why);
        if (const auto who = holder(per_device); who.borrowed != bytes{})
            m.add("; ", who.borrowed, " lent to '", tenant_name{who.name}, "'");
        throw operation_error(why, tenant, m);
    }

private:
    plain_list<quota*> roots_;
    plain_list<hook_cursor> asked_;
    const patience<Clock>& until_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
