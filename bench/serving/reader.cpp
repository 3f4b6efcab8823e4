// SPDX-License-Identifier: Apache-2.0
// Engines that read text: whole pages, and single lines.
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "inference_server/openvino/text_reader.hpp"
#include "serving/engines.hpp"

namespace bench::serving {

namespace {

namespace openvino = inference_server::openvino;

std::uint64_t digest(std::string_view text) {
    std::uint64_t h = 0xcbf29ce484222325U;
    for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
    return h;
}

constexpr std::array<std::array<std::string_view, 2>, 3> texts{
    {{"PAGE ONE", "TOTAL 47"}, {"SHARE 30", "PAGE TWO"}, {"BILL 26", "3 PAGES"}}};

/// The texts on the pages, and the texts that the engine has read.
class reading : public engine {
public:
    [[nodiscard]] std::string said() const override {
        std::string all;
        for (const auto& s : read_) all += (all.empty() ? "\"" : ", \"") + s + "\"";
        return all;
    }

protected:
    explicit reading(std::size_t script) : engine(script), read_(script) {
        for (const auto& lines : texts) {
            auto& page = pages_.emplace_back(openvino::picture{320, 320});
            for (std::size_t i = 0; i < lines.size(); ++i) write(page, lines[i], 30, 70 + 110 * i, 3);
        }
    }
    std::uint64_t note(std::size_t i, std::string text) {
        read_[i] = std::move(text);
        return digest(read_[i]);
    }

    openvino::line_reader line_reader_;
    std::vector<openvino::picture> pages_;

private:
    std::vector<std::string> read_;
};

class reader final : public reading {
public:
    reader() : reading(texts.size()) {}

private:
    std::uint64_t step(std::size_t i) override {
        std::string text;
        for (const auto& b : finder_.lines(pages_[i])) {
            between_parts();
            text += (text.empty() ? "" : " / ") + line_reader_.read(pages_[i], b);
        }
        return note(i, std::move(text));
    }

    openvino::line_finder finder_;
};

class reader_of_lines final : public reading {
public:
    reader_of_lines() : reading(texts.size()) {}

private:
    std::uint64_t step(std::size_t i) override { return note(i, line_reader_.read(pages_[i], {32, 72, 250, 90})); }
};

}  // namespace

std::unique_ptr<engine> make_reader() { return std::make_unique<reader>(); }
std::unique_ptr<engine> make_line_reader() { return std::make_unique<reader_of_lines>(); }

}  // namespace bench::serving
