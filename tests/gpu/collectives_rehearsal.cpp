// SPDX-License-Identifier: Apache-2.0
// The suite of collectives over the stand-in: that it finds what it should on a device that does
// what it should.
#include "standins/cuda/launch.hpp"
#include "standins/cuda/standin.hpp"

#include "gpu/collectives_suite.hpp"

namespace {
// A thread for each block of a launch.
const bool started = (standin::reset({.devices = 2, .memory = gpushare::bytes{1 << 30}}), true);
}  // namespace
