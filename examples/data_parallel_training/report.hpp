// SPDX-License-Identifier: Apache-2.0
// The command line, the progress bar, the results and the picture, for training by threads and by
// processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "data_parallel_training/digits.hpp"
#include "data_parallel_training/training.hpp"

namespace data_parallel_training {

struct command {
    training_options training{};
    std::uint32_t ranks = 2;  // the threads of this process
    std::string data = digits_file(), svg = "data_parallel_training.svg";
    bool go_on = false;           // continue without a process that is lost
    bool tenant = false;          // train beside a tenant that answers requests
    std::uint32_t fail_rank = 0;  // the process that kills itself, to show what the others do
    std::size_t fail_step = 0;    // the step after which it does so; 0 means never
    bool help = false;
};

class usage_error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// `arguments` doesn't include the program's name. Throws usage_error.
[[nodiscard]] command parse(std::span<const char* const> arguments);
[[nodiscard]] std::string_view help_text();
/// Checks that a batch can be divided among the ranks, and similar conditions. Throws usage_error.
void check(const command& asked, const digits& data, std::uint32_t ranks);

void draw_progress(std::size_t step, std::size_t steps, float loss);
/// Prints the accuracy, the parameters' fingerprint and the times, or the ranks that failed.
/// Returns true if the training was good.
bool print(const training_result& result, std::string_view who);
/// Draws the loss and the parts of each step's time. Throws std::runtime_error.
void write_svg(const training_result& result, std::string_view who, const std::string& path);

}  // namespace data_parallel_training
