// SPDX-License-Identifier: Apache-2.0
// must fail: could not convert '48' from 'int'
// N is bytes; M is a count.
#include <vector>

#include <gpushare/partition/equal_split.hpp>

auto split(const std::vector<gpushare::device_room>& node) { return gpushare::equal_split(48, 4, node); }
