// SPDX-License-Identifier: Apache-2.0
// Detects speech by Silero's model from the package silero-vad, for sound of 16 kHz.
//
//   voice_detector d;
//   d.begin();                                     // forgets what it heard
//   for (...) d.hear(sound);  // half a second: the probability of speech in each 32 ms
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace inference_server::openvino {

class voice_detector {
public:
    /// The samples of one probability, the earlier samples that the model also looks at, and how
    /// many probabilities a call computes.
    static constexpr std::size_t chunk = 512, context = 64, chunks = 16;
    static constexpr std::size_t samples = context + chunks * chunk;

    voice_detector();
    voice_detector(const voice_detector&) = delete;
    voice_detector& operator=(const voice_detector&) = delete;
    ~voice_detector();

    void begin() noexcept;
    /// Takes the next sound; the model also sees the end of the sound before. The result is valid
    /// until the next call.
    [[nodiscard]] std::span<const float, chunks> hear(std::span<const float, samples> sound);

private:
    struct model;
    std::unique_ptr<model> model_;
    bool first_ = true;
};

}  // namespace inference_server::openvino
