// SPDX-License-Identifier: Apache-2.0
#include "trace_replay/chart_data.hpp"

#include <array>
#include <charconv>
#include <cmath>

#include "inference_server/json.hpp"

namespace trace_replay {

namespace {

namespace json = inference_server::json;

std::string number(double x) {
    if (!std::isfinite(x)) return "null";
    std::array<char, 32> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), x, std::chars_format::general, 6).ptr;
    return {digits.data(), end};
}

/// `text(item)` of each item, separated by commas.
template <class List, class F>
std::string each(const List& all, const F& text) {
    std::string out;
    for (const auto& x : all) out.append(out.empty() ? "" : ",").append(text(x));
    return out;
}

double number(const json::value& v) { return v.what() == json::kind::null ? no_value : v.number<double>(); }

series series_of(const json::value& v) {
    series s{.name = v.at("name").string(), .y = {}, .level = number(v.at("level"))};
    for (const auto& y : v.at("y").elements()) s.y.push_back(number(y));
    return s;
}

panel panel_of(const json::value& v) {
    panel p{.title = v.at("title").string(),
            .y_label = v.at("y_label").string(),
            .lines = {},
            .stacked = v.at("stacked").boolean(),
            .log_y = v.at("log_y").boolean(),
            .y_max = {}};
    if (const double most = number(v.at("y_max")); !std::isnan(most)) p.y_max = most;
    for (const auto& line : v.at("lines").elements()) p.lines.push_back(series_of(line));
    return p;
}

}  // namespace

std::string quoted(std::string_view text) {
    std::string out;
    json::append(out, text);
    return out;
}

std::string data_of(const chart& c, std::string_view head) {
    const auto line = [](const series& s) {
        return "\n    {\"name\": " + quoted(s.name) + ", \"level\": " + number(s.level) + ", \"y\": [" +
               each(s.y, [](double y) { return number(y); }) + "]}";
    };
    const auto panel_text = [&](const panel& p) {
        return "\n   {\"title\": " + quoted(p.title) + ", \"y_label\": " + quoted(p.y_label) +
               ", \"stacked\": " + (p.stacked ? "true" : "false") + ", \"log_y\": " + (p.log_y ? "true" : "false") +
               ", \"y_max\": " + number(p.y_max.value_or(no_value)) + ", \"lines\": [" + each(p.lines, line) + "]}";
    };
    const auto column_text = [&](const column& k) {
        return "\n  {\"title\": " + quoted(k.title) + ", \"note\": " + quoted(k.note) + ", \"panels\": [" +
               each(k.panels, panel_text) + "]}";
    };
    return "{" + std::string(head) + "\"title\": " + quoted(c.title) + ",\n \"subtitle\": " + quoted(c.subtitle) +
           ",\n \"x_label\": " + quoted(c.x_label) + ", \"x0\": " + number(c.x0) + ", \"dx\": " + number(c.dx) +
           ",\n \"columns\": [" + each(c.columns, column_text) + "]}\n";
}

chart chart_of(std::string_view text) {
    const auto v = json::parse(text);
    chart c{.title = v.at("title").string(),
            .subtitle = v.at("subtitle").string(),
            .x_label = v.at("x_label").string(),
            .x0 = number(v.at("x0")),
            .dx = number(v.at("dx")),
            .columns = {}};
    for (const auto& k : v.at("columns").elements()) {
        auto& to = c.columns.emplace_back(
            column{.title = k.at("title").string(), .note = k.at("note").string(), .panels = {}});
        for (const auto& p : k.at("panels").elements()) to.panels.push_back(panel_of(p));
    }
    return c;
}

}  // namespace trace_replay
