// SPDX-License-Identifier: Apache-2.0
#include "shared.hpp"

template class gpushare::tenancy<gpushare::host::node>;
template class gpushare::tenant<gpushare::host::node>;
template class gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock>;
