// SPDX-License-Identifier: Apache-2.0
// must fail: gpushare: the policy is a template argument
// at most 15 lines
// A tenancy has its policy by its type, or by a function of the device.
#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/policies/by_order.hpp>
#include <gpushare/tenant/tenancy.hpp>

void share(gpushare::host::node& node) { gpushare::tenancy shared{node, gpushare::fifo{}}; }
