// SPDX-License-Identifier: Apache-2.0
// Catch2's implementation, compiled once and linked into every test program.
#define CATCH_CONFIG_RUNNER
#include "support/run_catch.hpp"

#include "support/catch.hpp"

int support::run_catch(int argc, char** argv) { return Catch::Session().run(argc, argv); }
