// SPDX-License-Identifier: Apache-2.0
// What a limiter's core lets in at one time.
//
//   const auto in = support::drain(core);    CHECK(in.size() == 3);    core.complete(in.front(), 1ms);
#pragma once

#include <vector>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/units.hpp>

namespace support {

/// Lets in all that can go, in the order in which it goes.
inline std::vector<gpushare::admission> drain(gpushare::limiter_core<>& core, gpushare::instant now = {}) {
    std::vector<gpushare::admission> in;
    while (const auto next = core.next(now)) in.push_back(*next);
    return in;
}

}  // namespace support
