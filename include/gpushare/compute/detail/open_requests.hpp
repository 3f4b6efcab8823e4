// SPDX-License-Identifier: Apache-2.0
// The arrival times of a client's open requests: the earliest one is due first.
//
//   detail::open_requests open;
//   open.arrived(now);  open.arrived(now + 1ms);
//   open.left(now);                                   // the one that arrived then
//   open.first();                                     // now + 1 ms
//
// Requests leave in any order. Eight arrivals are kept apart. While more are open, the last of the
// eight stands for the later ones as well, until all of these have left.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A value without allocations. Arrival times must not decrease.
class open_requests {
public:
    /// A request arrived.
    void arrived(instant now) noexcept {
        if (used_ == arrivals_.size()) {
            ++arrivals_.back().requests;
        } else {
            arrivals_[used_++] = {now, 1};
        }
    }
    /// A request that arrived at `came` is over. Does nothing if there is no such request.
    void left(instant came) noexcept {
        std::size_t n = used_;
        while (n != 0 && arrivals_[n - 1].at > came) --n;
        if (n == 0 || --arrivals_[n - 1].requests != 0) return;
        for (--used_; n <= used_; ++n) arrivals_[n - 1] = arrivals_[n];
    }
    [[nodiscard]] bool any() const noexcept { return used_ != 0; }
    /// When the earliest open request arrived; instant{} if there is none.
    [[nodiscard]] instant first() const noexcept { return any() ? arrivals_.front().at : instant{}; }

private:
    struct arrival {
        instant at{};
        std::uint32_t requests = 0;
    };
    std::array<arrival, 8> arrivals_{};
    std::size_t used_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
