// SPDX-License-Identifier: Apache-2.0
// Short names that all tests of tenants on the host use.
//
//   using namespace support::host_tenants;      node n(modelled(2));      tenancy shared(n);
#pragma once

#include <chrono>
#include <cstdint>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/units.hpp>

#include "support/code_of.hpp"

namespace support::host_tenants {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::device_id;
using gpushare::errc;
using gpushare::tenant_spec;
using support::code_of;

namespace host = gpushare::host;
using node = host::node;
using tenancy = gpushare::tenancy<node>;

/// Options for devices of 64 MiB each, with modelled time.
inline host::node_options modelled(std::uint32_t devices = 1, std::uint32_t sms = 2) {
    return {.devices = devices, .memory = 64_MiB, .sms = sms, .timing = host::timing::modelled};
}

/// A deadline that no test reaches.
inline gpushare::instant soon() { return host::steady_clock::now() + 5min; }

}  // namespace support::host_tenants
