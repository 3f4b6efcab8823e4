// SPDX-License-Identifier: Apache-2.0
// The command line, the progress bar, the lines at the end and the picture, for threads and for
// processes alike.
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
    std::uint32_t ranks = 2;  // threads of this process
    std::string data = digits_file(), svg = "data_parallel_training.svg";
    bool go_on = false;           // without a process that is lost
    bool tenant = false;          // beside a tenant that answers requests
    std::uint32_t fail_rank = 0;  // a process that kills itself, to see what the others do,
    std::size_t fail_step = 0;    // behind this step; 0: none
    bool help = false;
};

class usage_error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// `arguments` without the program's name. Throws usage_error.
[[nodiscard]] command parse(std::span<const char* const> arguments);
[[nodiscard]] std::string_view help_text();
/// That a batch can be divided among so many ranks, and the like. Throws usage_error.
void check(const command& asked, const digits& data, std::uint32_t ranks);

void draw_progress(std::size_t step, std::size_t steps, float loss);
/// Prints the accuracy, the parameters' fingerprint and the times, or the ranks that failed. True
/// if the training was good.
bool print(const training_result& result, std::string_view who);
/// Loss and where the time goes, step by step. Throws std::runtime_error.
void write_svg(const training_result& result, std::string_view who, const std::string& path);

}  // namespace data_parallel_training
