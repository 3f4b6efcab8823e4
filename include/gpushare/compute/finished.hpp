// SPDX-License-Identifier: Apache-2.0
// What the device has done of a submission that was in flight, and how several that were timed together share what was
// measured. A part of flights.hpp.
//
//   const ns part = detail::cost_part_of(total, one.predicted, all_predicted);
#pragma once

#include <cstddef>

#include <gpushare/compute/grant.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI::detail {

template <timeline Stream>
struct finished {
    const grant& what;
    std::size_t slot = 0;                 // free again after the call
    const typename Stream::point& end;    // of its batch
    ns span{}, after{};                   // its part of the batch, which ends so long before that end
    submission<Stream>* owner = nullptr;  // null: a permit
    errc code = errc::none;
    ns cost{};
    outcome::source from = outcome::source::own;
    bool written_off = false;
};

/// Of `total`, in proportion to what was predicted of this one and of all.
[[nodiscard]] inline ns cost_part_of(ns total, ns predicted, ns of_all) noexcept {
    if (of_all <= ns{0}) return ns{0};
    return ns{static_cast<ns::rep>(static_cast<double>(total.count()) * static_cast<double>(predicted.count()) /
                                   static_cast<double>(of_all.count()))};
}

}  // namespace gpushare::inline GPUSHARE_ABI::detail
