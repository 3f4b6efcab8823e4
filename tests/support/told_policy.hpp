// SPDX-License-Identifier: Apache-2.0
// A policy that records the settings of its clients, and decides as weighted_fair does.
//
//   std::vector<client_settings> told;
//   support::told_policy policy;    policy.told = &told;
#pragma once

#include <vector>

#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/error.hpp>

namespace support {

struct told_policy : gpushare::weighted_fair {
    std::vector<gpushare::client_settings>* told = nullptr;

    gpushare::failure add(gpushare::client_id c, const gpushare::client_settings& s) {
        told->push_back(s);
        return gpushare::weighted_fair::add(c, s);
    }
    gpushare::failure change(gpushare::client_id c, const gpushare::client_settings& s) {
        told->push_back(s);
        return gpushare::weighted_fair::change(c, s);
    }
};
static_assert(gpushare::compute_policy<told_policy>);

}  // namespace support
