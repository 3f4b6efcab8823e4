// SPDX-License-Identifier: Apache-2.0
// What a main() of tests calls. Programs that have none get one that does only that.
#pragma once

namespace support {

/// Runs the tests that the arguments name, as Catch2's own main() does.
int run_catch(int argc, char** argv);

}  // namespace support
