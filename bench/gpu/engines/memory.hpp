// SPDX-License-Identifier: Apache-2.0
// The same model in a tenant's memory (interop/libtorch.hpp) and in torch's own cache, in turns.
//
//   const auto r = pool_vs_cache([] { return make_resnet_training({}, place::cuda); }, false);
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "models.hpp"

namespace gpu_engines {

struct memory_ratio {
    std::vector<double> of_scope;  ///< passes a second in the scope, over those in torch's cache
    double of_no_cache = 0;        ///< the same where the tenant keeps no memory behind a pass
};

/// On a device. Makes the model twice: its weights lie where its passes compute. `small`: a trial.
[[nodiscard]] memory_ratio pool_vs_cache(const std::function<std::unique_ptr<model>()>& make, bool small);

}  // namespace gpu_engines
