// SPDX-License-Identifier: Apache-2.0
// Writes SVG elements one after the other, without knowing what they show.
//
//   canvas c(1600, 900);
//   c.text({20, 40}, "a < b", {.size = 18, .bold = true});
//   const std::string picture = std::move(c).finish("what it shows");
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace trace_replay {

/// The number of bytes of the UTF-8 letter at the beginning of `text`; 0 if there is no valid
/// letter.
[[nodiscard]] inline std::size_t letter_size(std::string_view text) noexcept {
    const auto byte = [text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    if (byte(0) < 0x80) return 1;
    const std::size_t size = byte(0) < 0xC2 ? 0 : byte(0) < 0xE0 ? 2 : byte(0) < 0xF0 ? 3 : byte(0) < 0xF5 ? 4 : 0;
    if (size == 0 || text.size() < size) return 0;
    // Rejects overlong forms, halves of surrogate pairs, and numbers beyond the last code point.
    const unsigned low = byte(0) == 0xE0 ? 0xA0 : byte(0) == 0xF0 ? 0x90 : 0x80;
    const unsigned high = byte(0) == 0xED ? 0x9F : byte(0) == 0xF4 ? 0x8F : 0xBF;
    if (byte(1) < low || byte(1) > high) return 0;
    const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; };
    return std::ranges::all_of(text.substr(2, size - 2), continues) ? size : 0;
}

/// Escapes text for element content and attribute values. Characters that XML can't hold become
/// '?'.
[[nodiscard]] inline std::string escaped(std::string_view text) {
    std::string out;
    while (!text.empty()) {
        const std::size_t size = letter_size(text);
        const std::string_view letter = text.substr(0, std::max<std::size_t>(size, 1));
        const auto first = static_cast<unsigned char>(letter.front());
        if (letter == "&") {
            out += "&amp;";
        } else if (letter == "<") {
            out += "&lt;";
        } else if (letter == ">") {
            out += "&gt;";
        } else if (letter == "\"") {
            out += "&quot;";
        } else if (size == 0 || first < 0x20 || letter == "\xEF\xBF\xBE" || letter == "\xEF\xBF\xBF") {
            out += '?';
        } else {
            out += letter;
        }
        text.remove_prefix(letter.size());
    }
    return out;
}

/// A number with at most `decimals` decimals and no trailing zeros. For |value| below 1e300.
[[nodiscard]] inline std::string fixed(double value, int decimals) {
    std::array<char, 340> digits{};
    const auto end =
        std::to_chars(digits.data(), digits.data() + digits.size(), value, std::chars_format::fixed, decimals).ptr;
    std::string out(digits.data(), end);
    if (out.find('.') != std::string::npos) {
        out.erase(out.find_last_not_of('0') + 1);
        if (out.back() == '.') out.pop_back();
    }
    return out == "-0" ? "0" : out;
}

/// Uses a mean advance of sans-serif letters, which is precise enough to keep labels apart.
[[nodiscard]] inline double text_width(std::string_view text, double size) {
    const auto letters =
        std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; });
    return 0.58 * size * static_cast<double>(letters);
}

/// `text`, or as much of it as fits into `room` with an ellipsis at the end.
[[nodiscard]] inline std::string fitted(std::string_view text, double size, double room) {
    if (text_width(text, size) <= room) return std::string(text);
    std::size_t end = 0;
    for (std::size_t i = 1; i < text.size(); ++i) {
        const bool within_letter = (static_cast<unsigned char>(text[i]) & 0xC0U) == 0x80U;
        if (within_letter) continue;
        if (text_width(text.substr(0, i), size) + size > room) break;
        end = i;
    }
    return std::string(text.substr(0, end)) + "\u2026";
}

struct point {
    double x, y;
};

/// Collects elements. Text is escaped here. Colours and dashes come from the program and aren't
/// escaped.
class canvas {
public:
    canvas(double width, double height) : width_(width), height_(height) {}

    struct text_style {
        double size = 14;
        std::string_view fill = "#222";
        std::string_view anchor = "start";
        bool bold = false;
        double turned = 0;  // in degrees
    };

    void text(point at, std::string_view words, const text_style& s) {
        if (words.empty()) return;
        open("text").number("x", at.x).number("y", at.y).number("font-size", s.size).attribute("fill", s.fill);
        if (s.anchor != "start") attribute("text-anchor", s.anchor);
        if (s.bold) attribute("font-weight", "bold");
        if (s.turned != 0) {
            out_ += " transform=\"rotate(" + fixed(s.turned, 1) + " " + fixed(at.x, 1) + " " + fixed(at.y, 1) + ")\"";
        }
        out_ += ">" + escaped(words) + "</text>\n";
    }

    void line(point a, point b, std::string_view stroke, double thick, std::string_view dashes = {}) {
        open("line").number("x1", a.x).number("y1", a.y).number("x2", b.x).number("y2", b.y);
        attribute("stroke", stroke).number("stroke-width", thick);
        if (!dashes.empty()) attribute("stroke-dasharray", dashes);
        out_ += "/>\n";
    }

    void rectangle(point corner, double w, double h, std::string_view fill) {
        open("rect").number("x", corner.x).number("y", corner.y).number("width", w).number("height", h);
        attribute("fill", fill);
        out_ += "/>\n";
    }

    void dot(point at, double radius, std::string_view fill) {
        open("circle").number("cx", at.x).number("cy", at.y).number("r", radius).attribute("fill", fill);
        out_ += "/>\n";
    }

    void polyline(std::span<const point> points, std::string_view stroke, double thick) {
        open("polyline").corners(points).attribute("fill", "none").attribute("stroke", stroke);
        number("stroke-width", thick).attribute("stroke-linejoin", "round").attribute("stroke-linecap", "round");
        out_ += "/>\n";
    }

    void area(std::span<const point> points, std::string_view fill) {
        open("polygon").corners(points).attribute("fill", fill);
        out_ += "/>\n";
    }

    /// The whole picture, on a white background.
    [[nodiscard]] std::string finish(std::string_view title) && {
        const std::string size = fixed(width_, 0) + "\" height=\"" + fixed(height_, 0);
        std::string head = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + size + "\" viewBox=\"0 0 " +
                           fixed(width_, 0) + " " + fixed(height_, 0) +
                           "\" font-family=\"Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\">\n";
        head += "<title>" + escaped(title) + "</title>\n<rect width=\"" + size + "\" fill=\"#fff\"/>\n";
        return std::move(head) + out_ + "</svg>\n";
    }

private:
    canvas& open(std::string_view element) {
        out_.append("<").append(element);
        return *this;
    }
    canvas& attribute(std::string_view name, std::string_view value) {
        out_.append(" ").append(name).append("=\"").append(value).append("\"");
        return *this;
    }
    canvas& number(std::string_view name, double value) { return attribute(name, fixed(value, 1)); }
    canvas& corners(std::span<const point> points) {
        out_ += " points=\"";
        for (const point& p : points) out_ += fixed(p.x, 1) + "," + fixed(p.y, 1) + " ";
        if (!points.empty()) out_.pop_back();
        out_ += "\"";
        return *this;
    }

    double width_, height_;
    std::string out_;
};

}  // namespace trace_replay
