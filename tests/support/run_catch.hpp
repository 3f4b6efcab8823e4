// SPDX-License-Identifier: Apache-2.0
// The function that a test program's main() calls. Programs without a main() get one that only
// calls this function.
#pragma once

namespace support {

/// Runs the tests that the arguments name, as Catch2's own main() does.
int run_catch(int argc, char** argv);

}  // namespace support
