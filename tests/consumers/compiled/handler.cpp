// SPDX-License-Identifier: Apache-2.0
// A file of a server that only allocates, submits and waits, as most of its files do.
#include <gpushare/backend/host/host.hpp>
#include <gpushare/gpushare.hpp>

void handle(gpushare::tenant<gpushare::host::node>& tenant, unsigned* out);

void handle(gpushare::tenant<gpushare::host::node>& tenant, unsigned* out) {
    auto* x = static_cast<unsigned*>(tenant.memory().allocate(sizeof(unsigned)));
    *x = 42;
    tenant.submit([x, out](auto& stream) { stream.launch({.blocks = 1}, [x, out](auto&) { *out = *x; }); }).wait();
    tenant.memory().deallocate(x, sizeof(unsigned));
}
