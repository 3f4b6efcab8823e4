// SPDX-License-Identifier: Apache-2.0
// The small examples check themselves with expect(), which prints each expectation. The first
// expectation that doesn't hold ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

inline void expect(bool good, const char* what) {
    std::printf("%s %s\n", good ? "ok:  " : "NOT: ", what);
    if (!good) std::exit(1);
}
