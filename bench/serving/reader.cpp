// SPDX-License-Identifier: Apache-2.0
// Reading text: PP-OCR's models as rapidocr ships them, without the one that turns lines around.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serving/engines.hpp"
#include "serving/openvino.hpp"
#include "serving/page.hpp"

namespace bench::serving {

namespace {

std::shared_ptr<ov::Model> read(const std::string& name, const ov::PartialShape& shape) {
    auto model = core().read_model(file("serving/rapidocr/models/" + name));
    model->reshape(shape);
    return model;
}

/// What a model is given: three planes, here alike, from -1 to 1.
void fill(ov::Tensor to, const std::vector<float>& grey) {
    auto* p = to.data<float>();
    for (int plane = 0; plane < 3; ++plane) p = std::ranges::transform(grey, p, [](float g) { return 2 * g - 1; }).out;
}

std::uint64_t digest(std::string_view text) {
    std::uint64_t h = 0xcbf29ce484222325U;
    for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
    return h;
}

/// A part of a picture, ends excluded.
struct box {
    std::size_t left = 0, top = 0, right = 0, bottom = 0;
};

/// Reads the line in a box of a picture.
class recogniser {
public:
    recogniser() {
        const auto model = read("PP-OCRv6_rec_small.onnx", {1, 3, height, width});
        std::istringstream letters(model->get_rt_info<std::string>({"framework", "character"}));
        for (std::string letter; std::getline(letters, letter);) letters_.push_back(letter);
        request_ = compile(model).create_infer_request();
    }

    std::string read_line(const picture& page, const box& b) {
        constexpr double margin = 5;  // of white, in pixels of the page
        const double scale = (static_cast<double>(b.bottom - b.top) + 2 * margin) / height;
        picture line{width, height};
        for (std::size_t y = 0; y < height; ++y)
            for (std::size_t x = 0; x < width; ++x)
                line.grey[y * width + x] =
                    page.at(static_cast<double>(b.left) - margin + scale * static_cast<double>(x),
                            static_cast<double>(b.top) - margin + scale * static_cast<double>(y));
        fill(request_.get_input_tensor(), line.grey);
        request_.infer();
        const auto out = request_.get_output_tensor();
        const std::size_t steps = out.get_shape()[1], kinds = out.get_shape()[2];
        std::string text;
        for (std::size_t i = 0, last = 0; i < steps; ++i) {
            const float* row = out.data<float>() + i * kinds;
            const auto best = static_cast<std::size_t>(std::max_element(row, row + kinds) - row);
            // 0 is no letter, and behind those of the list comes the space.
            if (best != 0 && best != last) text += best <= letters_.size() ? letters_[best - 1] : " ";
            last = best;
        }
        return text;
    }

private:
    static constexpr std::size_t height = 48, width = 320;
    std::vector<std::string> letters_;
    ov::InferRequest request_;
};

constexpr std::array<std::array<std::string_view, 2>, 3> texts{
    {{"PAGE ONE", "TOTAL 47"}, {"SHARE 30", "PAGE TWO"}, {"BILL 26", "3 PAGES"}}};

/// What is on the pages, and what was read of them.
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
            auto& page = pages_.emplace_back(picture{320, 320});
            for (std::size_t i = 0; i < lines.size(); ++i) write(page, lines[i], 30, 70 + 110 * i, 3);
        }
    }
    std::uint64_t note(std::size_t i, std::string text) {
        read_[i] = std::move(text);
        return digest(read_[i]);
    }

    recogniser recogniser_;
    std::vector<picture> pages_;

private:
    std::vector<std::string> read_;
};

class reader final : public reading {
public:
    reader()
        : reading(texts.size()),
          request_(compile(read("PP-OCRv6_det_small.onnx", {1, 3, 320, 320})).create_infer_request()) {}

private:
    std::uint64_t step(std::size_t i) override {
        fill(request_.get_input_tensor(), pages_[i].grey);
        request_.infer();
        std::string text;
        for (const auto& b : lines()) text += (text.empty() ? "" : " / ") + recogniser_.read_line(pages_[i], b);
        return note(i, std::move(text));
    }

    /// Rows with text that follow each other, and the columns of these.
    std::vector<box> lines() {
        const auto* map = request_.get_output_tensor().data<const float>();
        constexpr std::size_t size = 320;
        std::vector<box> found;
        for (std::size_t y = 0; y < size; ++y) {
            std::size_t first = size, last = 0;
            for (std::size_t x = 0; x < size; ++x)
                if (map[y * size + x] > 0.3F) {
                    first = std::min(first, x);
                    last = x + 1;
                }
            if (first == size) continue;
            if (found.empty() || found.back().bottom != y) found.push_back({first, y, last, y});
            auto& b = found.back();
            b = {std::min(b.left, first), b.top, std::max(b.right, last), y + 1};
        }
        return found;
    }

    ov::InferRequest request_;
};

class line_reader final : public reading {
public:
    line_reader() : reading(texts.size()) {}

private:
    std::uint64_t step(std::size_t i) override { return note(i, recogniser_.read_line(pages_[i], {32, 72, 250, 90})); }
};

}  // namespace

std::unique_ptr<engine> make_reader() { return std::make_unique<reader>(); }
std::unique_ptr<engine> make_line_reader() { return std::make_unique<line_reader>(); }

}  // namespace bench::serving
