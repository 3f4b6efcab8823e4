// SPDX-License-Identifier: Apache-2.0
// Waiting for memory that could be promised: those who have borrowed it are asked to give it back until a deadline.
//
//   gpushare::detail::room_wait wait{devices, until};            // until: a patience, see memory/quota_wait.hpp
//   while (!try_it()) if (const errc why = wait.again(per_device); why != errc::none) return why;
//
// Guaranteed bytes are nobody's to give: only burst is asked for. The devices are tried again every two milliseconds, by
// the thread that waits.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_hook.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// For one request. `roots` are the quotas of the devices that it may be promised memory on; they must outlive it.
template <clock Clock>
class room_wait {
public:
    room_wait(std::vector<quota*> roots, const patience<Clock>& until)
        : roots_(std::move(roots)), asked_(roots_.size(), hook_cursor{.until = until.deadline}), until_(until) {}

    /// After a refusal for want of `per_device` bytes: errc::none if it is worth another try; deadline_exceeded; stopped.
    [[nodiscard]] errc again(bytes per_device) {
        for (std::size_t i = 0; i < roots_.size(); ++i)
            if (roots_[i]->free() < per_device && roots_[i]->ask_next(asked_[i], per_device)) return errc::none;
        if (until_.stop.stop_requested()) return errc::stopped;
        const auto now = until_.time.now();
        if (now >= until_.deadline) return errc::deadline_exceeded;
        std::mutex mutex;
        std::unique_lock lock(mutex);
        std::condition_variable_any stopped;
        (void)stopped.wait_for(lock, until_.stop, std::min(ns{std::chrono::milliseconds(2)}, until_.deadline - now),
                               [] { return false; });
        return errc::none;
    }

    /// Who has borrowed most on one of the devices.
    [[nodiscard]] burst_holder holder(bytes per_device) const noexcept {
        burst_holder most;
        for (const quota* q : roots_)
            if (const auto here = holder_of_burst(*q, per_device); here.borrowed > most.borrowed) most = here;
        return most;
    }

    /// Throws what `code`, from again(), calls for, with the figures of the last refusal.
    [[noreturn]] void refuse(errc code, const failure& last, std::string_view tenant, bytes per_device) const {
        message m;
        m.add("tenant '", tenant.substr(0, longest_name), "': asked ", bytes{last.asked}, ", ", bytes{last.left},
              " of ", bytes{last.limit}, " left (", to_string(code), ")");
        if (const auto who = holder(per_device); who.borrowed != bytes{})
            m.add("; ", who.borrowed, " lent to '", who.name.substr(0, longest_name), "'");
        throw operation_error(failure{code, last.asked, last.left, last.limit}, tenant, m);
    }

private:
    std::vector<quota*> roots_;
    std::vector<hook_cursor> asked_;
    const patience<Clock>& until_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
