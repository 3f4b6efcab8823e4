// SPDX-License-Identifier: Apache-2.0
// How the small examples check themselves: what is expected is printed, and the first that isn't so
// ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

inline void expect(bool good, const char* what) {
    std::printf("%s %s\n", good ? "ok:  " : "NOT: ", what);
    if (!good) std::exit(1);
}
