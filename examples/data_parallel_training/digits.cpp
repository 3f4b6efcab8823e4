// SPDX-License-Identifier: Apache-2.0
#include "data_parallel_training/digits.hpp"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <fstream>
#include <numeric>
#include <random>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

namespace data_parallel_training {

const char* digits_file() noexcept { return GPUSHARE_DIGITS; }

digits load_digits(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    digits all;
    std::string line;
    for (std::size_t number = 1; std::getline(file, line); ++number) {
        const char *at = line.data(), *const end = at + line.size();
        for (std::size_t i = 0; i <= digits::pixels; ++i) {
            unsigned value = 0;
            const auto [stop, code] = std::from_chars(at, end, value);
            const bool last = i == digits::pixels;
            const bool good =
                code == std::errc{} && value <= (last ? 9U : 16U) && (last || (stop != end && *stop == ','));
            if (!good)
                throw std::runtime_error(path + ", line " + std::to_string(number) + ": not 64 pixels and a digit");
            if (last)
                all.labels.push_back(static_cast<std::uint8_t>(value));
            else
                all.images.push_back(static_cast<float>(value) / 16.0F);
            at = last ? stop : stop + 1;
        }
    }
    if (all.size() == 0) throw std::runtime_error(path + ": no digits");
    // The file is sorted by writer. Without the shuffle, no digits of the last writers would be
    // trained on.
    digits mixed = all;
    std::mt19937_64 any(1);
    std::vector<std::size_t> order(all.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[any() % i]);
    for (std::size_t i = 0; i < order.size(); ++i) {
        mixed.labels[i] = all.labels[order[i]];
        const auto image = all.image(order[i]);
        std::copy(image.begin(), image.end(), mixed.images.begin() + static_cast<std::ptrdiff_t>(i * digits::pixels));
    }
    return mixed;
}

}  // namespace data_parallel_training
