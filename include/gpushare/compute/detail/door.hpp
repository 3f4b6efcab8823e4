// SPDX-License-Identifier: Apache-2.0
// A mutex behind which its owner puts things in order first, whoever comes in and from wherever: after a wait on a
// condition variable, too. So what is true of the owner between two calls is true behind it, and nobody can forget to see
// to that.
//
//   detail::door<limiter> mutex{*this};     // calls this->come_in()
//   std::unique_lock lock(mutex);
//   mutex.wait_for(woken, 5ms);             // held before and after
#pragma once

#include <condition_variable>
#include <mutex>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Lockable as std::mutex is, but for try_lock.
template <class Owner>
class door {
public:
    explicit door(Owner& owner) noexcept : owner_(&owner) {}
    door(const door&) = delete;
    door& operator=(const door&) = delete;

    void lock() {
        mutex_.lock();
        owner_->come_in();
    }
    void unlock() noexcept { mutex_.unlock(); }

    void wait_for(std::condition_variable& woken, ns most) {
        std::unique_lock held(mutex_, std::adopt_lock);
        woken.wait_for(held, most);
        held.release();
        owner_->come_in();
    }

private:
    std::mutex mutex_;
    Owner* owner_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
