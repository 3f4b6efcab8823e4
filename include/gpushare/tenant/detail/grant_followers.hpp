// SPDX-License-Identifier: Apache-2.0
// The functions that a tenant calls whenever its grant changes. tenant::watch_grant() adds one.
//
//   auto all = std::make_shared<detail::grant_followers>(spec);
//   const auto number = all->add(told, copy);       // copy(into): what is granted now
//   all->tell(copy);                                // after each change
//   all->remove(number);
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/tenant/specification.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Calls each function under a mutex of its own, and so one call at a time. If two changes
/// coincide, the later call has the newer grant. The calls allocate nothing, because a change that
/// has been made can't be refused any more.
class grant_followers {
public:
    using follower = std::function<void(const tenant_spec&)>;

    explicit grant_followers(const tenant_spec& granted) : granted_(granted) {}

    /// Calls `told` before it returns. `told` must not call add(), remove() or tell(). Throws
    /// std::bad_alloc, and the exceptions of `told`; `told` isn't added then.
    template <class Copy>
    [[nodiscard]] std::uint64_t add(follower told, Copy copy) {
        const std::lock_guard lock(mutex_);
        list_.reserve(list_.size() + 1);
        copy(granted_);
        told(granted_);
        list_.push_back({++last_, std::move(told)});
        return last_;
    }
    /// Waits for a call that is under way.
    void remove(std::uint64_t number) noexcept {
        follower gone;  // destroyed without the mutex: objects it owns may add or remove others
        const std::lock_guard lock(mutex_);
        auto at = list_.begin();
        while (at != list_.end() && at->number != number) ++at;
        if (at == list_.end()) return;
        gone = std::move(at->told);
        list_.erase(at);
    }
    template <class Copy>
    void tell(Copy copy) noexcept {
        const std::lock_guard lock(mutex_);
        copy(granted_);
        for (const one& o : list_) try {
                o.told(granted_);
            } catch (...) {  // the change stands all the same
            }
    }

private:
    struct one {
        std::uint64_t number;
        follower told;
    };
    std::mutex mutex_;
    tenant_spec granted_;  // with room for the name and the devices, which never change
    std::vector<one> list_;
    std::uint64_t last_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
