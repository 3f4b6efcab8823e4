// SPDX-License-Identifier: Apache-2.0
// must fail: spil_to
// at most 8 lines
// A misspelt option of a tenancy in braces is in the first lines.
#include <memory_resource>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/tenant/tenancy.hpp>

void make(gpushare::host::node& node) { gpushare::tenancy shared{node, {.spil_to = std::pmr::new_delete_resource()}}; }
