// SPDX-License-Identifier: Apache-2.0
// must fail: no matching function for call to '.*make_cache\(
// A pool's streams are those whose points it knows.
#include <gpushare/backend/host/host.hpp>
#include <gpushare/memory/pool_resource.hpp>

void make(gpushare::host::node::memory_type& memory, gpushare::host::stream& stream) {
    gpushare::pool_resource pool{memory};  // of work that is done at once
    auto cache = pool.make_cache(stream);
}
