// SPDX-License-Identifier: Apache-2.0
// Links two generated files that include all headers in opposite orders: that it links shows that
// nothing is defined twice, and an inline variable has one address in both.
#include <gpushare/config.hpp>

const gpushare::version_number* version_seen_by_one();
const gpushare::version_number* version_seen_by_two();

int main() { return version_seen_by_one() == version_seen_by_two() ? 0 : 1; }
