// SPDX-License-Identifier: Apache-2.0
// Is somebody speaking? Silero's model from the package silero-vad, for sound of 16 kHz.
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
    /// Samples that one probability is about, those before them that are looked at as well, and how
    /// many of them a call takes.
    static constexpr std::size_t chunk = 512, context = 64, chunks = 16;
    static constexpr std::size_t samples = context + chunks * chunk;

    voice_detector();
    voice_detector(const voice_detector&) = delete;
    voice_detector& operator=(const voice_detector&) = delete;
    ~voice_detector();

    void begin() noexcept;
    /// Beginning with the end of what was heard before. The result is there until the next call.
    [[nodiscard]] std::span<const float, chunks> hear(std::span<const float, samples> sound);

private:
    struct model;
    std::unique_ptr<model> model_;
    bool first_ = true;
};

}  // namespace inference_server::openvino
