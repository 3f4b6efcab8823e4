// SPDX-License-Identifier: Apache-2.0
#include "inference_server/openvino/text_reader.hpp"

#include <algorithm>
#include <sstream>
#include <utility>

#include "inference_server/openvino/runtime.hpp"

namespace inference_server::openvino {

namespace {

std::shared_ptr<ov::Model> read(const std::string& name, const ov::PartialShape& shape) {
    auto model = core().read_model(file("serving/rapidocr/models/" + name));
    model->reshape(shape);
    return model;
}

/// Fills a model's input: three equal planes, with values from -1 to 1.
void fill(ov::Tensor to, const std::vector<float>& grey) {
    auto* p = to.data<float>();
    for (int plane = 0; plane < 3; ++plane) p = std::ranges::transform(grey, p, [](float g) { return 2 * g - 1; }).out;
}

/// A part of a picture, scaled to another size. The part is given by its upper left corner, and by
/// how many of its pixels make up a new pixel.
picture part(const picture& of, double left, double top, double scale, std::size_t width, std::size_t height) {
    picture p{width, height};
    for (std::size_t y = 0; y < height; ++y)
        for (std::size_t x = 0; x < width; ++x)
            p.grey[y * width + x] = of.at(left + scale * static_cast<double>(x), top + scale * static_cast<double>(y));
    return p;
}

}  // namespace

struct line_reader::model {
    static constexpr std::size_t height = 48, width = 320;
    std::vector<std::string> letters;
    ov::InferRequest request;
};

line_reader::line_reader() : model_(std::make_unique<model>()) {
    const auto m = openvino::read("PP-OCRv6_rec_small.onnx", {1, 3, model::height, model::width});
    std::istringstream letters(m->get_rt_info<std::string>({"framework", "character"}));
    for (std::string letter; std::getline(letters, letter);) model_->letters.push_back(letter);
    model_->request = compile(m).create_infer_request();
}
line_reader::~line_reader() = default;

std::string line_reader::read(const picture& page, const box& b) {
    constexpr double margin = 5;  // white margin, in pixels of the page
    const double scale = (static_cast<double>(b.bottom - b.top) + 2 * margin) / model::height;
    auto& m = *model_;
    fill(m.request.get_input_tensor(), part(page, static_cast<double>(b.left) - margin,
                                            static_cast<double>(b.top) - margin, scale, model::width, model::height)
                                           .grey);
    m.request.infer();
    const auto out = m.request.get_output_tensor();
    const std::size_t steps = out.get_shape()[1], kinds = out.get_shape()[2];
    std::string text;
    for (std::size_t i = 0, last = 0; i < steps; ++i) {
        const float* row = out.data<float>() + i * kinds;
        const auto best = static_cast<std::size_t>(std::max_element(row, row + kinds) - row);
        // Class 0 isn't a letter, and the class after the list's letters is the space.
        if (best != 0 && best != last) text += best <= m.letters.size() ? m.letters[best - 1] : " ";
        last = best;
    }
    return text;
}

struct line_finder::model {
    static constexpr std::size_t size = 320;
    ov::InferRequest request;
};

line_finder::line_finder() : model_(std::make_unique<model>()) {
    constexpr auto size = model::size;
    model_->request = compile(openvino::read("PP-OCRv6_det_small.onnx", {1, 3, size, size})).create_infer_request();
}
line_finder::~line_finder() = default;

// Finds groups of neighbouring rows with text, and the columns of each group.
std::vector<box> line_finder::lines(const picture& page) {
    constexpr auto size = model::size;
    auto& request = model_->request;
    const double scale = static_cast<double>(std::max(page.width, page.height)) / size;
    fill(request.get_input_tensor(),
         page.width == size && page.height == size ? page.grey : part(page, 0, 0, scale, size, size).grey);
    request.infer();
    const auto* map = request.get_output_tensor().data<const float>();
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
    const auto in_page = [scale](std::size_t& x) { x = static_cast<std::size_t>(scale * static_cast<double>(x)); };
    for (auto& b : found) in_page(b.left), in_page(b.top), in_page(b.right), in_page(b.bottom);
    return found;
}

}  // namespace inference_server::openvino
