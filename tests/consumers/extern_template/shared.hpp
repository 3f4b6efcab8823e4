// SPDX-License-Identifier: Apache-2.0
// What docs/serving.md says of many files that use one tenancy: its classes are compiled in shared.cpp alone.
#pragma once

#include <gpushare/backend/host/host.hpp>
#include <gpushare/gpushare.hpp>

extern template class gpushare::tenancy<gpushare::host::node>;
extern template class gpushare::tenant<gpushare::host::node>;
extern template class gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock>;
