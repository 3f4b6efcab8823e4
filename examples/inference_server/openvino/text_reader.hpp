// SPDX-License-Identifier: Apache-2.0
// Reads text by PP-OCR's models from the package rapidocr, without the model that turns lines
// around. Lines are found as rows of the page that contain text, so text columns side by side count
// as one line.
//
//   text_reader r;
//   for (const auto& line : r.lines(page)) r.read(page, line);
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "inference_server/openvino/picture.hpp"

namespace inference_server::openvino {

/// A part of a picture in pixels, ends excluded.
struct box {
    std::size_t left = 0, top = 0, right = 0, bottom = 0;
};

/// Reads the line in a box of a picture.
class line_reader {
public:
    line_reader();
    line_reader(const line_reader&) = delete;
    line_reader& operator=(const line_reader&) = delete;
    ~line_reader();
    [[nodiscard]] std::string read(const picture& page, const box& line);

private:
    struct model;
    std::unique_ptr<model> model_;
};

/// Finds the lines of a page, which is scaled to 320 x 320 pixels.
class line_finder {
public:
    line_finder();
    line_finder(const line_finder&) = delete;
    line_finder& operator=(const line_finder&) = delete;
    ~line_finder();
    [[nodiscard]] std::vector<box> lines(const picture& page);

private:
    struct model;
    std::unique_ptr<model> model_;
};

}  // namespace inference_server::openvino
