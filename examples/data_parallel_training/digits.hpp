// SPDX-License-Identifier: Apache-2.0
// Handwritten digits of 8 x 8 pixels, from the file digits.csv that scikit-learn ships (E. Alpaydin
// and C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository,
// 1998). A row has 64 numbers from 0 to 16, and the digit.
//
//   // throws std::runtime_error: one clear line
//   const auto all = data_parallel_training::load_digits("digits.csv");
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace data_parallel_training {

struct digits {
    static constexpr std::size_t side = 8, pixels = side * side, classes = 10;
    std::vector<float> images;         // 64 numbers for each image, from 0 to 1
    std::vector<std::uint8_t> labels;  // the digit of each image

    [[nodiscard]] std::size_t size() const noexcept { return labels.size(); }
    [[nodiscard]] std::span<const float> image(std::size_t i) const {
        return std::span(images).subspan(i * pixels, pixels);
    }
};

/// The file that ./dev installs; it may not exist.
[[nodiscard]] const char* digits_file() noexcept;

/// Loads the digits, and puts them into a random order, which is always the same.
[[nodiscard]] digits load_digits(const std::string& path);

}  // namespace data_parallel_training
