// SPDX-License-Identifier: Apache-2.0
// The main() of test programs without one of their own.
#include "support/run_catch.hpp"

int main(int argc, char** argv) { return support::run_catch(argc, argv); }
