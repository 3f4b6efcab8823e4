// SPDX-License-Identifier: Apache-2.0
// The submissions that a limiter's core admits at one time.
//
//   const auto in = support::drain(core);    CHECK(in.size() == 3);    core.complete(in.front(), 1ms);
#pragma once

#include <vector>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/units.hpp>

namespace support {

/// Admits everything that can go, and returns the admissions in order.
inline std::vector<gpushare::admission> drain(gpushare::limiter_core<>& core, gpushare::instant now = {}) {
    std::vector<gpushare::admission> in;
    while (const auto next = core.next(now)) in.push_back(*next);
    return in;
}

}  // namespace support
