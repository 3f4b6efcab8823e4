// SPDX-License-Identifier: Apache-2.0
// must fail: required for the satisfaction of 'kernel_for<K,
// A kernel is called with its context.
#include <gpushare/backend/host/host.hpp>

void launch(gpushare::host::stream& s) {
    s.launch({.blocks = 8}, [] {});
}
