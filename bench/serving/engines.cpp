// SPDX-License-Identifier: Apache-2.0
// The voice detector, and what all engines have in common.
#include "serving/engines.hpp"

#include <algorithm>
#include <bit>
#include <bitset>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numbers>

#include <gpushare/backend/sim/random.hpp>

#include "serving/openvino.hpp"

namespace bench::serving {

ov::Core& core() {
    static ov::Core one;
    return one;
}

std::string file(const std::string& name) { return GPUSHARE_BENCH_ENGINES "/" + name; }

ov::CompiledModel compile(const std::shared_ptr<ov::Model>& model) {
    return core().compile_model(model, "CPU", ov::inference_num_threads(1), ov::num_streams(1),
                                ov::hint::enable_cpu_pinning(false), ov::hint::inference_precision(ov::element::f32));
}

gpushare::ns engine::rehearse() {
    using clock = std::chrono::steady_clock;
    for (std::size_t i = 0; i < std::min<std::size_t>(answers_.size(), 8); ++i) (void)step(i);
    std::vector<gpushare::ns> took;
    for (std::size_t i = 0; i < answers_.size(); ++i) {
        const auto begin = clock::now();
        answers_[i] = step(i);
        took.push_back(clock::now() - begin);
    }
    std::ranges::nth_element(took, took.begin() + static_cast<std::ptrdiff_t>(took.size() / 2));
    return took[took.size() / 2];
}

namespace {

/// Something like vowels: a buzz of 130 Hz with two formants, four syllables a second, pauses, a little noise.
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

/// Sixteen chunks of 32 ms a call, each with the end of the one before.
class detector final : public engine {
public:
    detector() : engine(calls), sound_(speech(context + calls * chunks * chunk)) {
        const auto model = core().read_model(file("serving/silero_vad/data/silero_vad_16k_sequence.onnx"));
        model->reshape({{"input", ov::PartialShape{chunks, context + chunk}}});
        request_ = compile(model).create_infer_request();
    }

    [[nodiscard]] std::string said() const override {
        return "speech in " + std::to_string(speaking_.count()) + " of " + std::to_string(speaking_.size()) + " chunks";
    }

private:
    static constexpr std::size_t calls = 20, chunks = 16, chunk = 512, context = 64;

    std::uint64_t step(std::size_t i) override {
        for (const auto* state : {"h", "c"}) {
            auto to = request_.get_tensor(state);
            if (i == 0)
                std::memset(to.data(), 0, to.get_byte_size());
            else
                request_.get_tensor(std::string(state) + "n").copy_to(to);
        }
        auto* to = request_.get_tensor("input").data<float>();
        const float* from = sound_.data() + i * chunks * chunk;
        for (std::size_t c = 0; c < chunks; ++c, from += chunk) to = std::copy(from, from + context + chunk, to);
        request_.infer();
        const auto* probability = request_.get_tensor("speech_probs").data<float>();
        std::uint64_t answer = 0;
        for (std::size_t c = 0; c < chunks; ++c) {
            speaking_[i * chunks + c] = probability[c] > 0.5F;
            answer = 31 * answer + std::bit_cast<std::uint32_t>(probability[c]);
        }
        return answer;
    }

    ov::InferRequest request_;
    std::vector<float> sound_;
    std::bitset<calls * chunks> speaking_;
};

}  // namespace

std::unique_ptr<engine> make_detector() { return std::make_unique<detector>(); }

}  // namespace bench::serving
