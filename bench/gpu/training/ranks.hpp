// SPDX-License-Identifier: Apache-2.0
// Data-parallel training by two ranks: threads of one process that share a device, each with a
// stream of its own. A third stream averages their gradients while backward passes go on.
//
//   two_ranks both(2, 64);
//   const lesson plain = both.train({make_transformer({}, 0), make_transformer({}, 1)}, 20, false);
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/collective/submit.hpp>

#include "pupils.hpp"

namespace gpu_training {

/// The outcome of a training.
struct lesson {
    double differing = 0;    ///< parameters, single numbers, whose bits aren't those of the other rank
    double steps_per_s = 0;  ///< of both ranks together, without the first steps
};

class two_ranks {
public:
    /// A launch has so many blocks for each rank at most.
    two_ranks(std::uint32_t blocks, std::uint32_t threads);

    /// `planted`: amid the training rank 1 takes a step by its own gradients, without the average.
    /// Throws where a step fails, and where the losses don't fall.
    [[nodiscard]] lesson train(const std::array<pupil, 2>& pupils, int steps, bool planted);

private:
    gpushare::cuda::node node_{{.devices = {0}}};
    gpushare::cuda::pinned_memory visible_{node_};
    gpushare::device_communicator<gpushare::cuda::node, gpushare::cuda::pinned_memory> group_;
    gpushare::launch_options shape_;
    gpushare::cuda::stream combining_;
    std::vector<gpushare::cuda::stream> training_;
    std::vector<gpushare::member> members_;
};

}  // namespace gpu_training
