// SPDX-License-Identifier: Apache-2.0
// A language model that continues a text token by token.
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "inference_server/openvino/language_model.hpp"
#include "serving/engines.hpp"

namespace bench::serving {

namespace {

constexpr std::string_view prompt = "The capital of France is";
constexpr std::size_t tokens = 64, room = 128;

class writer final : public engine {
public:
    explicit writer(std::pmr::memory_resource& memory) : engine(tokens), text_(model_, memory) {}

    [[nodiscard]] std::string said() const override {
        std::string all;
        for (const auto token : prompt_) all += model_.text_of(token);
        for (std::size_t i = prompt_.size() - 1; i < tokens; ++i) all += model_.text_of(spoken_[i]);
        return all;
    }

private:
    std::uint64_t step(std::size_t i) override {
        if (i == 0) text_.begin();
        spoken_[i] = text_.hear(i < prompt_.size() ? prompt_[i] : spoken_[i - 1]);
        return static_cast<std::uint64_t>(spoken_[i]);
    }

    inference_server::openvino::language_model model_{room};
    inference_server::openvino::language_model::text text_;
    const std::vector<std::int32_t> prompt_ = model_.tokens_of(prompt);
    std::array<std::int32_t, tokens> spoken_{};
};

}  // namespace

std::unique_ptr<engine> make_language_model(std::pmr::memory_resource& memory) {
    return std::make_unique<writer>(memory);
}

}  // namespace bench::serving
