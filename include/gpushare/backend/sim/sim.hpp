// SPDX-License-Identifier: Apache-2.0
// Everything of the simulated backend: discrete events in virtual time, the same on every run, for thousands of devices.
//
//   gpushare::sim::world world{{.devices = 1000}};
#pragma once

#include <gpushare/backend/sim/random.hpp>
#include <gpushare/backend/sim/world.hpp>
