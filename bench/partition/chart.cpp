// SPDX-License-Identifier: Apache-2.0
#include "partition/chart.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>

namespace bench {

namespace {

constexpr double width = 1100, height = 640, left = 80, right = 280, top = 90, bottom = 70;

std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f", x);
    return text;
}

std::string text(double x, double y, const std::string& words, double size, const std::string& colour,
                 const std::string& more = {}) {
    std::string escaped;
    for (const char c : words) escaped += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
    return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" font-size=\"" + number(size) + "\" fill=\"" + colour +
           "\"" + more + ">" + escaped + "</text>\n";
}

std::string line(double x1, double y1, double x2, double y2, const std::string& colour) {
    return "<line x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) + "\" y2=\"" + number(y2) +
           "\" stroke=\"" + colour + "\"/>\n";
}

}  // namespace

std::string draw_chart(const std::string& title, const std::string& subtitle, int first,
                       std::span<const chart_line> lines) {
    double low = 100, high = 0;
    std::size_t levels = 2;
    for (const auto& l : lines) {
        for (const double p : l.percent) {
            low = std::min(low, p);
            high = std::max(high, p);
        }
        levels = std::max(levels, l.percent.size());
    }
    low = std::floor(low);
    high = std::max(std::ceil(high), low + 1);
    const auto x = [&](double level) {
        return left + (width - left - right) * level / static_cast<double>(levels - 1);
    };
    const auto y = [&](double percent) {
        return height - bottom - (height - top - bottom) * (percent - low) / (high - low);
    };

    const std::string size = number(width) + "\" height=\"" + number(height);
    std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + size + "\" viewBox=\"0 0 " +
                      number(width) + " " + number(height) +
                      "\" font-family=\"Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\">\n" + "<title>" +
                      title + "</title>\n<rect width=\"" + size + "\" fill=\"#fff\"/>\n";
    out += text(left, 38, title, 22, "#222", " font-weight=\"bold\"") + text(left, 64, subtitle, 14, "#666");
    const double step = high - low > 12 ? 5 : high - low > 6 ? 2 : 1;
    for (double p = std::ceil(low / step) * step; p <= high; p += step) {
        out += line(left, y(p), width - right, y(p), "#e4e4e4");
        out += text(left - 10, y(p) + 5, number(p).substr(0, number(p).find('.')) + " %", 13, "#444",
                    " text-anchor=\"end\"");
    }
    for (std::size_t i = 0; i < levels; ++i) {
        const int level = first + static_cast<int>(i);
        if (level % 10 != 0) continue;
        const double at = x(static_cast<double>(i));
        out += line(at, height - bottom, at, height - bottom + 6, "#888");
        out += text(at, height - bottom + 24, std::to_string(level) + " %", 13, "#444", " text-anchor=\"middle\"");
    }
    out +=
        text((left + width - right) / 2, height - 14, "GPUs that arrivals have asked for, in percent of the cluster's",
             14, "#444", " text-anchor=\"middle\"");

    struct end_label {
        double at = 0;
        const chart_line* line = nullptr;
    };
    std::vector<end_label> labels;
    for (const auto& l : lines) {
        if (l.percent.empty()) continue;
        out += "<polyline fill=\"none\" stroke=\"" + l.colour + "\" stroke-width=\"" + number(l.thickness) +
               "\" stroke-linejoin=\"round\"" + (l.dashes.empty() ? "" : " stroke-dasharray=\"" + l.dashes + "\"") +
               " points=\"";
        for (std::size_t i = 0; i < l.percent.size(); ++i)
            out += number(x(static_cast<double>(i))) + "," + number(y(l.percent[i])) + " ";
        out += "\"/>\n";
        labels.push_back({y(l.percent.back()), &l});
    }
    // Labels keep their order and a line's height between them.
    constexpr double apart = 19;
    std::ranges::sort(labels, {}, &end_label::at);
    for (std::size_t i = 1; i < labels.size(); ++i) labels[i].at = std::max(labels[i].at, labels[i - 1].at + apart);
    const double over = labels.empty() ? 0 : std::max(0.0, labels.back().at - (height - bottom));
    for (auto& l : labels) l.at -= over;
    for (const auto& [at, l] : labels) {
        out += line(width - right, y(l->percent.back()), width - right + 14, at, l->colour);
        char value[16];
        std::snprintf(value, sizeof value, "%.2f", l->percent.back());
        out += text(width - right + 18, at + 5, std::string(value) + "  " + l->label, 14, l->colour,
                    l->thickness > 2 ? " font-weight=\"bold\"" : "");
    }
    return out + "</svg>\n";
}

}  // namespace bench
