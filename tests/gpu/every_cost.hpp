// SPDX-License-Identifier: Apache-2.0
// The cost of every kernel of jobs.cu, collectives first.
//
//   for (const jobs::cost& c : jobs::every_cost()) ...
#pragma once

#include <utility>
#include <vector>

#include "gpu/batch_norm.hpp"
#include "gpu/job_rig.hpp"
#include "gpu/joined.hpp"
#include "gpu/packing.hpp"
#include "gpu/softmax.hpp"

namespace jobs {

[[nodiscard]] inline std::vector<cost> every_cost() {
    std::vector<cost> all = costs();
    for (cost& c : costs_of_packing()) all.push_back(std::move(c));
    all.push_back(cost_of_batch_norm());
    all.push_back(cost_of_softmax());
    for (cost& c : costs_of_joined()) all.push_back(std::move(c));
    return all;
}

}  // namespace jobs
