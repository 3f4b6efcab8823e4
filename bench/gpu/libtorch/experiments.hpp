// SPDX-License-Identifier: Apache-2.0
// The experiments of torch_figures, a process each.
#pragma once

#include "harness.hpp"

namespace gpu_torch {

/// The small decoder of examples/ in a tenant's scope, batched by iteration, with a page_store's
/// pages as its cache. Throws if no text yields, since the figure would say less then. False if a
/// token differs from the one that the text gets by itself, or if the planted fault isn't found.
[[nodiscard]] bool decoder(bench::report& out, bool small);

/// Which of libtorch's operators run on a stream of a slice of SMs: by handles that the thread made
/// outside of the slice, and by handles that were made in the slice's context.
void slices(bench::report& out, bool small);

}  // namespace gpu_torch
