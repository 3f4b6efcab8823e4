// SPDX-License-Identifier: Apache-2.0
// A submission on a CUDA device, over the stand-in, for walk.py.
#include <gpushare/backend/cuda/node.hpp>

#include "structure/walk/submission.hpp"
#include "support/cuda_standin/launch.hpp"
#include "support/cuda_standin/standin.hpp"

int main(int, char** arguments) {
    standin::reset({.devices = 1});
    gpushare::cuda::node node;
    using stream = gpushare::cuda::stream;
    return walk::of_submission(
        node, arguments[1], [](stream& s) { standin::hold(s.native_handle()); },
        [](stream& s) { standin::let_go(s.native_handle()); });
}
