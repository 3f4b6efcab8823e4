// SPDX-License-Identifier: Apache-2.0
// What the device has done of a submission that was in flight, and how several that were timed together share what was
// measured. A part of flights.hpp.
//
//   const ns part = detail::proportion(total, all_predicted)(one.predicted);
#pragma once

#include <cstddef>

#include <gpushare/compute/detail/held_up.hpp>
#include <gpushare/compute/grant.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <timeline Stream>
struct finished {
    const grant& what;                    // of several that are alike, with the sum of what was predicted
    std::size_t slot = 0;                 // its number; free again after the call
    std::uint32_t times = 1;              // so many are alike, and went well
    const typename Stream::point& end;    // of its batch
    ns span{}, after{};                   // its part of the batch, which ends so long before that end
    enqueue_time enqueued{};              // where it had points of its own
    submission<Stream>* owner = nullptr;  // null: a permit
    errc code = errc::none;
    ns cost{};
    outcome::source from = outcome::source::own;
    bool written_off = false;
};

/// Parts of a total, each in proportion to what was predicted of it. A division for all of them; none if it isn't `asked`.
class proportion {
public:
    proportion(ns total, ns predicted, bool asked = true) noexcept
        : rate_(asked && predicted > ns{0} ? static_cast<double>(total.count()) / static_cast<double>(predicted.count())
                                           : 0) {}
    [[nodiscard]] ns operator()(ns predicted) const noexcept {
        return ns{static_cast<ns::rep>(static_cast<double>(predicted.count()) * rate_)};
    }

private:
    double rate_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
