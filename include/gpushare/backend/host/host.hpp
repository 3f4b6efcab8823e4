// SPDX-License-Identifier: Apache-2.0
// The host backend: a software node whose devices are threads and memory of this process.
//
//   #include <gpushare/backend/host/host.hpp>
//   gpushare::host::node node{{.devices = 2}};
#pragma once

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/backend/host/kernel_context.hpp>
#include <gpushare/backend/host/ledger.hpp>
#include <gpushare/backend/host/memory.hpp>
#include <gpushare/backend/host/node.hpp>
#include <gpushare/backend/host/options.hpp>
#include <gpushare/backend/host/point.hpp>
#include <gpushare/backend/host/pool.hpp>
#include <gpushare/backend/host/stream.hpp>
