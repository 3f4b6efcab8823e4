// SPDX-License-Identifier: Apache-2.0
// must fail: gpushare: a kernel is called with its context
// at most 15 lines
// A kernel is called with its context.
#include <gpushare/backend/host/host.hpp>

void launch(gpushare::host::stream& s) {
    s.launch({.blocks = 8}, [] {});
}
