// SPDX-License-Identifier: Apache-2.0
// Compares a model in a tenant's memory (interop/libtorch.hpp) with the same model in torch's own
// cache, in alternating runs.
//   const auto r = pool_vs_cache([] { return make_resnet_training({}, place::cuda); }, false);
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "models.hpp"

namespace gpu_engines {

struct memory_ratio {
    std::vector<double> of_scope;  ///< passes per second in the scope, relative to torch's cache
    double of_no_cache = 0;        ///< the same if the tenant keeps no memory after a pass
};

/// Needs a device. Makes the model twice, so that each model's weights lie in the memory in which
/// its passes compute. `small` is for a trial.
[[nodiscard]] memory_ratio pool_vs_cache(const std::function<std::unique_ptr<model>()>& make, bool small);

}  // namespace gpu_engines
