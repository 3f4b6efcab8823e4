// SPDX-License-Identifier: Apache-2.0
// The voice detector, and the common code of all engines.
#include "serving/engines.hpp"

#include <algorithm>
#include <bit>
#include <bitset>
#include <chrono>
#include <cmath>
#include <numbers>
#include <span>
#include <utility>

#include <gpushare/backend/sim/sim.hpp>

#include "inference_server/openvino/voice_detector.hpp"

namespace bench::serving {

gpushare::ns engine::rehearse() {
    using clock = std::chrono::steady_clock;
    for (std::size_t i = 0; i < std::min<std::size_t>(answers_.size(), 8); ++i) (void)step(i);
    std::vector<gpushare::ns> took;
    for (std::size_t i = 0; i < answers_.size(); ++i) {
        const auto begin = part_began_ = clock::now();
        answers_[i] = step(i);
        end_part();
        took.push_back(clock::now() - begin);
    }
    part_began_ = {};
    std::ranges::nth_element(took, took.begin() + static_cast<std::ptrdiff_t>(took.size() / 2));
    return took[took.size() / 2];
}

void engine::end_part() {
    const auto now = std::chrono::steady_clock::now();
    longest_part_ = std::max<gpushare::ns>(longest_part_, now - std::exchange(part_began_, now));
}

namespace {

/// Makes a sound like vowels: a buzz of 130 Hz with two formants, four syllables per second, pauses
/// and a little noise.
std::vector<float> speech(std::size_t samples) {
    constexpr double rate = 16000, pitch = 130;
    gpushare::sim::random any(1);
    std::vector<float> sound(samples);
    for (std::size_t i = 0; i < samples; ++i) {
        const double t = static_cast<double>(i) / rate;
        const double syllable = std::max(0.0, std::sin(2 * std::numbers::pi * 4 * t)), second = std::fmod(t, 1.6);
        double v = 0;
        for (int k = 1; k <= 24; ++k) {
            const double f = k * pitch * (1 + 0.02 * std::sin(2 * std::numbers::pi * 5 * t));
            const double formants = std::exp(-std::pow((f - 600) / 250, 2)) + std::exp(-std::pow((f - 1300) / 300, 2));
            v += (0.05 + formants) / k * std::sin(2 * std::numbers::pi * k * pitch * t);
        }
        sound[i] = static_cast<float>((second < 1.0 ? 0.3 * syllable * v : 0) + 0.002 * (any.fraction() - 0.5));
    }
    return sound;
}

/// Each call hears sixteen chunks of 32 ms. Each chunk includes the end of the previous chunk.
class detector final : public engine {
public:
    detector() : engine(calls), sound_(speech(model::context + calls * step_size)) {}

    [[nodiscard]] std::string said() const override {
        return "speech in " + std::to_string(speaking_.count()) + " of " + std::to_string(speaking_.size()) + " chunks";
    }

private:
    using model = inference_server::openvino::voice_detector;
    static constexpr std::size_t calls = 20, step_size = model::chunks * model::chunk;

    std::uint64_t step(std::size_t i) override {
        if (i == 0) model_.begin();
        const std::span<const float, model::samples> sound(sound_.data() + i * step_size, model::samples);
        std::uint64_t answer = 0;
        for (std::size_t at = i * model::chunks; const float probability : model_.hear(sound)) {
            speaking_[at++] = probability > 0.5F;
            answer = 31 * answer + std::bit_cast<std::uint32_t>(probability);
        }
        return answer;
    }

    model model_;
    std::vector<float> sound_;
    std::bitset<calls * model::chunks> speaking_;
};

}  // namespace

std::unique_ptr<engine> make_detector() { return std::make_unique<detector>(); }

}  // namespace bench::serving
