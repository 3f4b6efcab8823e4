// SPDX-License-Identifier: Apache-2.0
// What is measured between processes: two network namespaces joined by a shaped link
// (tests/support/shaped_link.sh).
#pragma once

#include "harness.hpp"

namespace bench {

/// All-reduces of 64 MiB between two processes and of 2 x 2 ranks, against MPI_Allreduce, coll_han,
/// Gloo and iperf3.
void all_reduces_over_a_link(report& r);

/// Training by two processes, against libtorch's DDP over Gloo.
void training_over_a_link(report& r);

}  // namespace bench
