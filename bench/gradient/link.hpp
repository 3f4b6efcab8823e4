// SPDX-License-Identifier: Apache-2.0
// Measurements between processes in two network namespaces that a shaped link connects
// (tests/support/shaped_link.sh).
#pragma once

#include "harness.hpp"

namespace bench {

/// Compares all-reduces of 64 MiB, between two processes and among 2 x 2 ranks, with MPI_Allreduce,
/// coll_han, Gloo and iperf3.
void all_reduces_over_a_link(report& r);

/// Compares training by two processes with libtorch's DDP over Gloo.
void training_over_a_link(report& r);

}  // namespace bench
