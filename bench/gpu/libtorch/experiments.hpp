// SPDX-License-Identifier: Apache-2.0
// The experiments of torch_figures. Each experiment is a process.
#pragma once

#include "harness.hpp"

namespace gpu_torch {

/// Runs the small decoder of examples/ in a tenant's scope, batched by iteration, with the pages of
/// a page_store as its cache. Throws if no text yields, because the figure would then prove less.
/// Returns false if a token differs from the token that the text gets alone, or if the planted
/// fault isn't found.
[[nodiscard]] bool decoder(bench::report& out, bool small);

/// Finds out which of libtorch's operators run on a stream of a slice of SMs: with handles that the
/// thread made outside the slice, and with handles made in the slice's context.
void slices(bench::report& out, bool small);

}  // namespace gpu_torch
