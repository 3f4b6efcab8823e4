// SPDX-License-Identifier: Apache-2.0
// A tenant in miniature, for tests of pools: a pool over a quota, over memory of the process that
// counts its blocks.
//
//   support::capped_pool<> c(8_MiB, {.segment = 1_MiB});     // 8 MiB: the quota
//   c.pool.allocate(4096, 256);     CHECK(c.upstream.blocks() == 1);
#pragma once

#include <string_view>

#include <gpushare/concepts.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/units.hpp>

#include "support/fault_resource.hpp"

namespace support {

template <gpushare::timeline_point Point = gpushare::immediate_point>
struct capped_pool {
    explicit capped_pool(gpushare::bytes cap, const gpushare::pool_options& options = {}, std::string_view owner = {})
        : limit(cap), mine(limit, upstream, owner), pool(mine, options) {}

    fault_resource upstream;
    gpushare::quota limit;
    gpushare::quota_resource<fault_resource> mine;
    gpushare::pool_resource<gpushare::quota_resource<fault_resource>, Point> pool;
};

}  // namespace support
