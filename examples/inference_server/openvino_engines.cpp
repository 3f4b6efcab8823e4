// SPDX-License-Identifier: Apache-2.0
#include "inference_server/openvino_engines.hpp"

#include <malloc.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "inference_server/openvino/language_model.hpp"
#include "inference_server/openvino/text_reader.hpp"
#include "inference_server/openvino/voice_detector.hpp"

namespace inference_server {

namespace {

/// The first member of an engine, so that it is destroyed last. It gives freed memory back to the
/// system. Otherwise the next load would reuse that memory, and would be measured as smaller than
/// it is.
struct gives_back {
    gives_back() = default;
    gives_back(const gives_back&) = delete;
    gives_back& operator=(const gives_back&) = delete;
    ~gives_back() { ::malloc_trim(0); }
};

template <class T>
tensor tensor_of(std::string name, datatype type, std::vector<std::int64_t> shape, const std::vector<T>& elements) {
    tensor t{std::move(name), type, std::move(shape), {}};
    const auto bytes = std::as_bytes(std::span(elements));
    t.data.assign(bytes.begin(), bytes.end());
    return t;
}

class voice final : public engine {
public:
    static constexpr std::int64_t most_samples = 16'000 * 600;

    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs,
             gpushare::host::kernel_context& on) override {
        using openvino::voice_detector;
        const auto sound = inputs[0].as<float>();
        if (inputs[0].shape[0] > most_samples) throw refused(400, "more than ten minutes of sound");
        const std::size_t chunks = (sound.size() + voice_detector::chunk - 1) / voice_detector::chunk;
        // Silence comes before the sound, and after it as far as the last call reaches.
        constexpr std::size_t step = voice_detector::chunk * voice_detector::chunks;
        std::vector<float> padded(voice_detector::context + (sound.size() + step - 1) / step * step);
        std::ranges::copy(sound, padded.begin() + voice_detector::context);
        std::vector<float> speech;
        detector_.begin();
        for (std::size_t at = 0; speech.size() < chunks; at += step) {
            const auto some =
                detector_.hear(std::span<const float, voice_detector::samples>(&padded[at], voice_detector::samples));
            speech.insert(speech.end(), some.begin(), some.end());
            gpushare::yield_point(on);  // more urgent work runs between two halves of a second
        }
        speech.resize(chunks);
        outputs.push_back(tensor_of("speech", datatype::fp32, {static_cast<std::int64_t>(chunks)}, speech));
    }

private:
    gives_back last_;
    openvino::voice_detector detector_;
};

class reader final : public engine {
public:
    static constexpr std::int64_t most_pixels = 4096;  // of an edge

    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs,
             gpushare::host::kernel_context& on) override {
        const auto& image = inputs[0];
        if (std::ranges::any_of(image.shape, [](auto n) { return n < 1 || n > most_pixels; }))
            throw refused(400, "an image has 1 to 4096 rows and columns");
        openvino::picture page{static_cast<std::size_t>(image.shape[1]), static_cast<std::size_t>(image.shape[0])};
        std::ranges::transform(image.as<std::uint8_t>(), page.grey.begin(),
                               [](std::uint8_t g) { return static_cast<float>(g) / 255; });
        std::vector<std::string> lines;
        std::vector<std::int32_t> boxes;
        for (const auto& b : finder_.lines(page)) {
            gpushare::yield_point(on);
            lines.push_back(reader_.read(page, b));
            for (const auto edge : {b.left, b.top, b.right, b.bottom}) boxes.push_back(static_cast<std::int32_t>(edge));
        }
        const auto n = static_cast<std::int64_t>(lines.size());
        outputs.push_back(texts_tensor("text", lines));
        outputs.push_back(tensor_of("boxes", datatype::int32, {n, 4}, boxes));
    }

private:
    gives_back last_;
    openvino::line_finder finder_;
    openvino::line_reader reader_;
};

class gemma final : public engine {
public:
    explicit gemma(std::pmr::memory_resource& memory) : memory_(memory) {}

    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs,
             gpushare::host::kernel_context& on) override {
        std::string all;
        const auto prompts = inputs[0].texts();
        const auto text = generate(std::string(prompts[0]), 32);
        for (int i = 0; i < 32; ++i) {
            const auto token = text->next();
            if (!token) break;
            all += *token;
            gpushare::yield_point(on);
        }
        outputs.push_back(texts_tensor("text_output", {&all, 1}));
    }
    std::unique_ptr<generation> generate(const std::string& prompt, std::size_t) override {
        // in bytes, because splitting a longer prompt into tokens would take too long
        constexpr std::size_t longest = 2000;
        if (prompt.size() > longest) throw refused(400, "the text has more than 2000 bytes");
        if (!json::is_utf8(prompt)) throw refused(400, "the text isn't UTF-8");
        auto tokens = model_.tokens_of(prompt);
        if (tokens.size() >= model_.room()) throw refused(400, "the text has more than 255 tokens");
        return std::make_unique<speaker>(*this, std::move(tokens));
    }

private:
    class speaker final : public generation {
    public:
        speaker(gemma& of, std::vector<std::int32_t> prompt)
            : of_(of.model_), text_(of.model_, of.memory_), prompt_(std::move(prompt)) {}

        // A character may consist of several tokens, which form one piece.
        std::optional<std::string> next() override {
            std::string said;
            do {
                if (text_.size() == of_.room()) return std::nullopt;
                for (const auto token : prompt_) last_ = text_.hear(token);
                prompt_ = {last_};
                if (of_.ends(last_)) return std::nullopt;
                said += of_.text_of(last_);
            } while (!json::is_utf8(said) && said.size() < 8);
            return json::is_utf8(said) ? said : "\uFFFD";
        }

    private:
        openvino::language_model& of_;
        openvino::language_model::text text_;
        std::vector<std::int32_t> prompt_;  // the part of the prompt that isn't read yet
        std::int32_t last_ = 0;
    };

    gives_back last_;
    std::pmr::memory_resource& memory_;
    openvino::language_model model_{256};
};

template <class Engine>
std::unique_ptr<engine> loaded(std::pmr::memory_resource& memory) {
    if constexpr (std::is_constructible_v<Engine, std::pmr::memory_resource&>)
        return std::make_unique<Engine>(memory);
    else
        return std::make_unique<Engine>();
}

}  // namespace

std::vector<model_source> openvino_models(bool gemma_terms_accepted) {
    std::vector<model_source> all;
    const auto add = [&](model_info info, auto load) {
        info.platform = "openvino";
        all.push_back({std::move(info), load, {}, true});
    };
    add({"voice", {}, {{"samples", datatype::fp32, {-1}}}, {{"speech", datatype::fp32, {-1}}}}, loaded<voice>);
    add({"reader",
         {},
         {{"image", datatype::uint8, {-1, -1}}},
         {{"text", datatype::bytes, {-1}}, {"boxes", datatype::int32, {-1, 4}}}},
        loaded<reader>);
    if (gemma_terms_accepted)
        add({"gemma", {}, {{"text_input", datatype::bytes, {1}}}, {{"text_output", datatype::bytes, {1}}}, 0, true},
            loaded<gemma>);
    return all;
}

}  // namespace inference_server
