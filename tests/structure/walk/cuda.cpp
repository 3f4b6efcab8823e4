// SPDX-License-Identifier: Apache-2.0
// A submission on a CUDA device, over the stand-in, for walk.py.
#include <gpushare/backend/cuda/node.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/standin.hpp"
#include "structure/walk/submission.hpp"

int main(int, char** arguments) {
    standin::reset({.devices = 1});
    gpushare::cuda::node node;
    using stream = gpushare::cuda::stream;
    return walk::of_submission(
        node, arguments[1], [](stream& s) { standin::hold(s.native_handle()); },
        [](stream& s) { standin::let_go(s.native_handle()); });
}
