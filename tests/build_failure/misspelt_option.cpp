// SPDX-License-Identifier: Apache-2.0
// must fail: memry
// at most 12 lines
// A misspelt field is in the first lines.
#include <gpushare/backend/host/host.hpp>
#include <gpushare/tenant/tenancy.hpp>

using namespace gpushare::literals;

void admit(gpushare::tenancy<gpushare::host::node>& shared) { (void)shared.admit({.name = "chat", .memry = 64_MiB}); }
