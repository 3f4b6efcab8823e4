// SPDX-License-Identifier: Apache-2.0
// training_figures: two ranks on one device train modules of libtorch. torch_device_ranks averages
// the gradients, and both ranks must learn exactly the same parameters.
//
//   training_figures [JSON] [--small]
//
// --small uses small modules and one round; the rate then means nothing. Exit codes:
//  - 1: the run failed, parameters differ, or the planted fault wasn't found;
//  - 2: the command line was wrong;
//  - 3: there is no device or driver;
//  - 4: the device or driver doesn't support the run.
#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <vector>

#include <torch/version.h>

#include "../describe.hpp"
#include "harness.hpp"
#include "operators.hpp"
#include "ranks.hpp"

namespace {

using namespace gpu_training;

struct asked {
    asked(int argc, char** argv) {
        for (int i = 1; i < argc; ++i) {
            const std::string_view a = argv[i];
            if (a == "--small")
                small = true;
            else if (a.starts_with('-') || json != nullptr)
                throw std::invalid_argument("usage: training_figures [JSON] [--small]");
            else
                json = argv[i];
        }
    }
    const char* json = nullptr;
    bool small = false;
};

/// Trains both modules once.
std::vector<lesson> lessons(two_ranks& ranks, bool small, bool planted) {
    const convolutional_sizes pictures =
        small ? convolutional_sizes{.images = 2, .side = 8, .channels = 8} : convolutional_sizes{};
    const transformer_sizes texts =
        small ? transformer_sizes{.texts = 1, .tokens = 8, .width = 16, .heads = 2} : transformer_sizes{};
    constexpr int steps = 20;
    return {ranks.train({make_convolutional(pictures, 0), make_convolutional(pictures, 1)}, steps, planted),
            ranks.train({make_transformer(texts, 0), make_transformer(texts, 1)}, steps, planted)};
}

int run(const asked& a) {
    bench::report out(bench::describe_device());
    out.setting("libtorch", TORCH_VERSION);
    bench::start_a_second_thread();
    start_operators();
    two_ranks ranks(a.small ? 2 : 36, a.small ? 32 : 512);
    std::vector<double> differ, rates;
    for (int round = 0; round < (a.small ? 1 : 3); ++round) {
        const auto both = lessons(ranks, a.small, false);
        differ.push_back(both[0].differing + both[1].differing);
        rates.push_back(2 / (1 / both[0].steps_per_s + 1 / both[1].steps_per_s));
    }
    const auto faulty = lessons(ranks, a.small, true);
    const double planted = std::min(faulty[0].differing, faulty[1].differing);
    out.figure("gpu.torch_training_steps_per_s", rates, "1/s");
    out.figure("gpu.torch_training_parameters_differ", differ, "parameters",
               {bench::at_most(0), planted, "a step of one rank by its own gradients"}, bench::statistic::most);
    out.write(a.json);
    return std::ranges::max(differ) == 0 && planted > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    const auto read = [&] { return asked(argc, argv); };
    return bench::run_program("training_figures", read, run);
}
