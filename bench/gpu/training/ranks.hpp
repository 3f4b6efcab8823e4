// SPDX-License-Identifier: Apache-2.0
// Data-parallel training with two ranks: threads of one process that share a device, each with its
// own stream. A third stream averages the gradients while the backward passes continue.
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

/// The result of a training.
struct lesson {
    double differing = 0;    ///< number of single parameters whose bits differ between the ranks
    double steps_per_s = 0;  ///< steps per second of rank 0, without the first steps
};

class two_ranks {
public:
    /// `blocks` is the maximum number of blocks per rank in a launch.
    two_ranks(std::uint32_t blocks, std::uint32_t threads);

    /// With `planted`, rank 1 takes one step with its own gradients in the middle of the training,
    /// without averaging. Throws if a step fails or if the losses don't fall.
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
