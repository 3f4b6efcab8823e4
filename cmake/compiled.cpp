// SPDX-License-Identifier: Apache-2.0
// The library of gpushare::compiled: the host backend's functions, and tenancies on it. See
// include/gpushare/tenant/detail/compiled.hpp.
#define GPUSHARE_COMPILING
#define GPUSHARE_INSTANTIATING
#include <gpushare/backend/host/host.hpp>
#include <gpushare/gpushare.hpp>
