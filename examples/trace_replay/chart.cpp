// SPDX-License-Identifier: Apache-2.0
#include "trace_replay/chart.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <string_view>
#include <utility>

#include <range/v3/view/chunk_by.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/reverse.hpp>

#include "trace_replay/svg.hpp"

namespace trace_replay {
namespace {

// ---- appearance ----

struct colour {
    std::string_view fill;
    std::string_view ink;  // for text on top of this colour
};
// After Okabe and Ito: people with any kind of colour vision can tell these colours apart. Grey
// replaces black, and yellow is left out, because it is hard to see as a line on white.
constexpr std::array<colour, 7> palette{{{"#0072b2", "#fff"},
                                         {"#e69f00", "#222"},
                                         {"#009e73", "#fff"},
                                         {"#cc79a7", "#222"},
                                         {"#56b4e9", "#222"},
                                         {"#d55e00", "#fff"},
                                         {"#8c8c8c", "#fff"}}};
constexpr std::string_view ink = "#222", soft_ink = "#666", grid = "#e4e4e4", frame = "#999";

constexpr double width = 1600, height = 900;
constexpr double left = 92, right = 1540, top = 226, bottom = 832;
constexpr double column_gap = 62, row_gap = 56;  // the column gap holds the values of the guides

// ---- axes ----

std::string short_number(double value) {
    constexpr std::array<std::pair<double, std::string_view>, 3> units{{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}}};
    const double size = std::abs(value);
    if (size >= 1e12 || (size > 0 && size < 1e-4)) {
        std::array<char, 32> digits{};
        return {digits.data(),
                std::to_chars(digits.data(), digits.data() + digits.size(), value, std::chars_format::general, 3).ptr};
    }
    for (const auto& [from, unit] : units) {
        if (size >= from) return fixed(value / from, 2).append(unit);
    }
    return fixed(value, size >= 100 ? 0 : size >= 1 ? 1 : 4);
}

// Larger values aren't drawn. Below this limit, no sum or power in this file overflows.
constexpr double largest = 1e12;

bool drawable(double value, bool log) { return std::abs(value) <= largest && (!log || value > 0); }

struct axis {
    double low = 0, high = 1;
    bool log = false;
    std::vector<double> ticks;

    /// 0 at the low end, 1 at the high end. Values outside of the axis are at its edge.
    [[nodiscard]] double place(double value) const {
        const double at = log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
        return std::clamp(at, 0.0, 1.0);
    }
};

/// The smallest number of the form 1, 2 or 5 times a power of ten that isn't below `value`.
double round_up(double value) {
    const double power = std::pow(10, std::floor(std::log10(value)));
    for (const double step : {1.0, 2.0, 5.0}) {
        if (value <= step * power * (1 + 1e-9)) return step * power;
    }
    return 10 * power;
}

axis linear_axis(double low, double high, int most_ticks) {
    if (high - low < 1e-9) high = low + 1;
    axis a{low, high, false, {}};
    const double step = round_up((high - low) / most_ticks);
    const double first = std::ceil(low / step - 1e-9);
    for (int i = 0; i <= most_ticks && (first + i) * step <= high + step * 1e-6; ++i) {
        a.ticks.push_back((first + i) * step);
    }
    return a;
}

axis log_axis(double low, double high) {
    low = std::clamp(low, 1e-9, largest);
    high = std::clamp(high, low, largest);
    axis a{1 / round_up(1 / low), round_up(high), true, {}};
    if (a.high < a.low * 10) a.high = a.low * 10;
    const double decades = std::log10(a.high / a.low);
    const bool all_steps = decades < 2.2;
    const int every = std::max(1, static_cast<int>(decades / 6));
    const int first = static_cast<int>(std::floor(std::log10(a.low) + 1e-9));
    for (int e = first; std::pow(10, e) <= a.high * (1 + 1e-9); e += every) {
        for (const double step : {1.0, 2.0, 5.0}) {
            const double tick = step * std::pow(10, e);
            const bool inside = tick >= a.low * (1 - 1e-9) && tick <= a.high * (1 + 1e-9);
            if (inside && (step == 1 || all_steps)) a.ticks.push_back(tick);
        }
    }
    return a;
}

/// The heights of the upper edges of stacked areas, from the first series up. Gaps count as zero.
std::vector<std::vector<double>> stack(const panel& p) {
    std::vector<std::vector<double>> edges;
    std::vector<double> sum;
    for (const series& s : p.lines) {
        sum.resize(std::max(sum.size(), s.y.size()), 0.0);
        for (const auto& [i, value] : ranges::views::enumerate(s.y)) {
            if (drawable(value, false)) sum[i] += std::max(value, 0.0);
        }
        edges.push_back(sum);
    }
    for (auto& edge : edges) edge.resize(sum.size(), 0.0);  // bins that only later series have
    return edges;
}

/// One axis for all panels of a row, so that a reader can compare columns by eye.
axis row_axis(const std::vector<const panel*>& row) {
    double low = std::numeric_limits<double>::infinity(), high = 0;
    std::optional<double> wanted;
    const bool log = std::ranges::any_of(row, [](const panel* p) { return p->log_y; });
    for (const panel* p : row) {
        double levels = 0;
        for (const series& s : p->lines) {
            for (const double value : s.y) {
                if (!drawable(value, log)) continue;
                low = std::min(low, value);
                high = std::max(high, value);
            }
            if (drawable(s.level, log)) high = std::max(high, p->stacked ? levels += s.level : s.level);
        }
        if (p->stacked) {
            const auto edges = stack(*p);
            if (!edges.empty() && !edges.back().empty()) high = std::max(high, std::ranges::max(edges.back()));
        }
        if (p->y_max && drawable(*p->y_max, true)) wanted = std::max(wanted.value_or(0), *p->y_max);
    }
    if (log) return high > 0 ? log_axis(low, wanted.value_or(high)) : log_axis(1, 10);
    if (wanted) return linear_axis(0, *wanted, 5);
    const axis rough = linear_axis(0, high, 5);
    const double step = rough.ticks.size() > 1 ? rough.ticks[1] - rough.ticks[0] : 1;
    return linear_axis(0, std::max(step, std::ceil(high / step - 1e-9) * step), 5);
}

// ---- the picture ----

class painter {
public:
    explicit painter(const chart& c) : chart_(c), x0_(c.x0), dx_(c.dx) {
        std::size_t bins = 0;
        for (const column& col : c.columns) {
            rows_ = std::max(rows_, col.panels.size());
            for (const panel& p : col.panels) {
                for (const series& s : p.lines) {
                    bins = std::max(bins, s.y.size());
                    has_levels_ = has_levels_ || drawable(s.level, p.log_y);
                    if (std::ranges::find(names_, s.name) == names_.end()) names_.push_back(s.name);
                }
            }
        }
        if (!drawable(x0_, false)) x0_ = 0;
        if (!drawable(dx_, true)) dx_ = 1;
        x_ = linear_axis(x0_, x0_ + dx_ * static_cast<double>(std::max<std::size_t>(bins, 1)), 6);
    }

    std::string paint() && {
        svg_.text({left, 54}, fitted(chart_.title, 28, right - left), {.size = 28, .bold = true});
        svg_.text({left, 85}, fitted(chart_.subtitle, 16, right - left), {.size = 16, .fill = soft_ink});
        legend();
        const auto num_columns = static_cast<double>(std::max<std::size_t>(chart_.columns.size(), 1));
        const auto num_rows = static_cast<double>(std::max<std::size_t>(rows_, 1));
        const double w = (right - left - (num_columns - 1) * column_gap) / num_columns;
        const double h = (bottom - top - (num_rows - 1) * row_gap) / num_rows;
        if (rows_ == 0) {
            svg_.text({width / 2, height / 2}, "no data", {.size = 20, .fill = soft_ink, .anchor = "middle"});
        }
        for (std::size_t r = 0; r < rows_; ++r) {
            std::vector<const panel*> row;
            for (const column& c : chart_.columns) {
                if (r < c.panels.size()) row.push_back(&c.panels[r]);
            }
            y_ = row_axis(row);
            for (const auto& [i, c] : ranges::views::enumerate(chart_.columns)) {
                box_ = {left + static_cast<double>(i) * (w + column_gap), top + static_cast<double>(r) * (h + row_gap),
                        w, h};
                if (r == 0) column_head(c);
                if (r < c.panels.size()) draw(c.panels[r], i == 0, r + 1 == rows_);
            }
        }
        svg_.text({(left + right) / 2, height - 20}, fitted(chart_.x_label, 15, right - left),
                  {.size = 15, .fill = soft_ink, .anchor = "middle"});
        return std::move(svg_).finish(chart_.title);
    }

private:
    struct box {
        double x = 0, y = 0, w = 0, h = 0;
    };

    [[nodiscard]] const colour& colour_of(std::string_view name) const {
        const auto at = std::ranges::find(names_, name) - names_.begin();
        return palette[static_cast<std::size_t>(at) % palette.size()];
    }
    [[nodiscard]] double x_of(double value) const { return box_.x + box_.w * x_.place(value); }
    [[nodiscard]] double y_of(double value) const { return box_.y + box_.h * (1 - y_.place(value)); }
    [[nodiscard]] double edge_of_bin(std::size_t i) const { return x_of(x0_ + dx_ * static_cast<double>(i)); }
    [[nodiscard]] double middle_of_bin(std::size_t i) const { return x_of(x0_ + dx_ * (static_cast<double>(i) + 0.5)); }

    void legend() {
        constexpr double size = 15, swatch = 14, space = 26, baseline = 122, more = 110;
        double x = left;
        const auto entry = [&](std::string_view name, auto draw_sign) {
            draw_sign();
            svg_.text({x + swatch + 7, baseline}, name, {.size = size});
            x += swatch + 7 + text_width(name, size) + space;
        };
        if (has_levels_) {
            const auto dashes = [&] { svg_.line({x - 1, baseline - 5}, {x + 16, baseline - 5}, ink, 1.6, "7 3"); };
            entry("configured", dashes);
        }
        for (const auto& [i, name] : ranges::views::enumerate(names_)) {
            const std::string label = fitted(name, size, 240);
            if (x + swatch + 7 + text_width(label, size) > right - more) {
                svg_.text({x, baseline}, "and " + std::to_string(names_.size() - i) + " more",
                          {.size = size, .fill = soft_ink});
                return;
            }
            const std::string_view fill = colour_of(name).fill;
            entry(label, [&] { svg_.rectangle({x, baseline - 12}, swatch, swatch, fill); });
        }
    }

    void column_head(const column& c) {
        svg_.text({box_.x, box_.y - 62}, fitted(c.title, 19, box_.w), {.size = 19, .bold = true});
        svg_.text({box_.x, box_.y - 41}, fitted(c.note, 14, box_.w), {.size = 14, .fill = soft_ink});
    }

    void draw(const panel& p, bool first_column, bool last_row) {
        svg_.text({box_.x, box_.y - 13}, fitted(p.title, 15, box_.w), {.size = 15});
        for (const double tick : y_.ticks) {
            svg_.line({box_.x, y_of(tick)}, {box_.x + box_.w, y_of(tick)}, grid, 1);
            if (first_column) {
                svg_.text({box_.x - 8, y_of(tick) + 5}, short_number(tick), {.fill = soft_ink, .anchor = "end"});
            }
        }
        if (first_column) {
            svg_.text({30, box_.y + box_.h / 2}, fitted(p.y_label, 15, box_.h),
                      {.size = 15, .fill = soft_ink, .anchor = "middle", .turned = -90});
        }
        const bool any = std::ranges::any_of(p.lines, [](const series& s) { return !s.y.empty(); });
        p.stacked ? areas(p) : lines(p);
        if (!any) {
            svg_.text({box_.x + box_.w / 2, box_.y + box_.h / 2}, "no data",
                      {.size = 16, .fill = soft_ink, .anchor = "middle"});
        }
        levels(p);
        svg_.line({box_.x, box_.y + box_.h}, {box_.x + box_.w, box_.y + box_.h}, frame, 1.2);
        for (const double tick : x_.ticks) {
            svg_.line({x_of(tick), box_.y + box_.h}, {x_of(tick), box_.y + box_.h + 5}, frame, 1.2);
            if (last_row) {
                svg_.text({x_of(tick), box_.y + box_.h + 22}, short_number(tick),
                          {.fill = soft_ink, .anchor = "middle"});
            }
        }
    }

    /// Draws a line through the middles of the bins, interrupted by gaps. The first series is drawn
    /// last, on top.
    void lines(const panel& p) {
        for (const series& s : p.lines | ranges::views::reverse) {
            const auto is_gap = [this](double value) { return !drawable(value, y_.log); };
            std::size_t bin = 0;
            for (auto&& run :
                 s.y | ranges::views::chunk_by([&](double a, double b) { return is_gap(a) == is_gap(b); })) {
                std::vector<point> points;
                for (const double value : run) {
                    if (!is_gap(value)) points.push_back({middle_of_bin(bin), y_of(value)});
                    ++bin;
                }
                if (points.size() == 1) svg_.dot(points.front(), 2.5, colour_of(s.name).fill);
                if (points.size() > 1) svg_.polyline(points, colour_of(s.name).fill, 2.2);
            }
        }
    }

    /// Draws steps, since a bin's share applies to the whole bin. Areas are painted from the top
    /// down, each over the area above.
    void areas(const panel& p) {
        const auto edges = stack(p);
        for (std::size_t n = edges.size(); n-- > 0;) {
            std::vector<point> outline;
            for (const auto& [i, value] : ranges::views::enumerate(edges[n])) {
                outline.push_back({edge_of_bin(i), y_of(value)});
                outline.push_back({edge_of_bin(i + 1), y_of(value)});
            }
            if (outline.empty()) continue;
            const std::vector<point> rim = outline;
            outline.push_back({rim.back().x, y_of(0)});
            outline.push_back({rim.front().x, y_of(0)});
            svg_.area(outline, colour_of(p.lines[n].name).fill);
            svg_.polyline(rim, "#fff", 1);
        }
        for (std::size_t n = 0; n < edges.size(); ++n) {
            name_area(p.lines[n].name, n == 0 ? nullptr : &edges[n - 1], edges[n]);
        }
    }

    /// Writes the name into its area if the area is wide and thick enough. Among the places that
    /// are nearly as thick as the thickest place, takes the place nearest to the middle of the
    /// panel.
    void name_area(const std::string& full_name, const std::vector<double>* below, const std::vector<double>& above) {
        constexpr double size = 14, least = 20, enough = 44;
        if (above.empty()) return;
        const std::string name = fitted(full_name, size, 120);
        const double bin = std::max(edge_of_bin(1) - edge_of_bin(0), 0.01);
        const auto span = static_cast<std::size_t>(std::ceil((text_width(name, size) + 12) / bin));
        double best = 0;
        std::optional<point> place;
        for (std::size_t i = 0; i + span <= above.size(); ++i) {
            double floor = box_.y + box_.h, ceiling = box_.y;
            for (std::size_t j = i; j < i + span; ++j) {
                ceiling = std::max(ceiling, y_of(above[j]));
                if (below != nullptr) floor = std::min(floor, y_of((*below)[j]));
            }
            const double middle = (edge_of_bin(i) + edge_of_bin(i + span)) / 2;
            const double off = std::abs(middle - (box_.x + box_.w / 2)) / box_.w;
            const double merit = std::min(floor - ceiling, enough) - 20 * off;
            if (floor - ceiling < least || (place && merit <= best)) continue;
            best = merit;
            place = point{middle, (floor + ceiling) / 2 + 0.36 * size};
        }
        if (place) svg_.text(*place, name, {.size = size, .fill = colour_of(full_name).ink, .anchor = "middle"});
    }

    struct guide {
        double at, label_at, value;
        std::string_view stroke, fill;
    };

    /// Draws dashed guides, equal guides only once, with their values to the right of the panel:
    /// beside the guide, or in a stack if values would overlap.
    void levels(const panel& p) {
        std::vector<guide> guides;
        double sum = 0;
        for (const series& s : p.lines) {
            if (!drawable(s.level, y_.log)) continue;
            const std::string_view own = colour_of(s.name).fill;
            const double from = y_of(sum);
            sum += s.level;
            const double at = y_of(p.stacked ? sum : s.level);
            const auto same = std::ranges::find_if(guides, [at](const guide& g) { return std::abs(g.at - at) < 0.5; });
            if (p.stacked) {
                guides.push_back({at, (at + from) / 2, s.level, ink, own});
            } else if (same == guides.end()) {
                guides.push_back({at, at, s.level, own, own});
            } else {
                same->stroke = same->fill = soft_ink;
            }
        }
        std::ranges::sort(guides, {}, &guide::label_at);
        double lowest_label = 0;
        for (const guide& g : guides) {
            svg_.line({box_.x, g.at}, {box_.x + box_.w, g.at}, g.stroke, 1.4, "7 4");
            lowest_label = std::max(g.label_at + 5, lowest_label + 16);
            svg_.text({box_.x + box_.w + 7, lowest_label}, short_number(g.value), {.fill = g.fill, .bold = true});
        }
    }

    const chart& chart_;
    double x0_, dx_;
    std::vector<std::string> names_;
    std::size_t rows_ = 0;
    bool has_levels_ = false;
    axis x_, y_;
    box box_;
    canvas svg_{width, height};
};

}  // namespace

std::string to_svg(const chart& c) { return painter(c).paint(); }

}  // namespace trace_replay
