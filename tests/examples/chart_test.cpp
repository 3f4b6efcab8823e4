// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The chart as text: well-formed for any input, and showing the given data.
#include "trace_replay/chart.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "support/catch.hpp"
#include "trace_replay/chart_data.hpp"

using trace_replay::chart;
using trace_replay::column;
using trace_replay::no_value;
using trace_replay::panel;
using trace_replay::series;
using trace_replay::to_svg;

namespace {

std::size_t count(std::string_view text, std::string_view what) {
    std::size_t n = 0;
    for (auto at = text.find(what); at != std::string_view::npos; at = text.find(what, at + what.size())) ++n;
    return n;
}

/// Tags are balanced, '<' and '>' delimit nothing else, '&' starts known entities, quotes in tags
/// are paired.
bool well_formed(std::string_view xml) {
    std::vector<std::string> open;
    bool closed_root = false;
    for (std::size_t i = 0; i < xml.size();) {
        if (xml[i] == '>') return false;
        if (xml[i] == '&') {
            bool known = false;
            for (const std::string_view entity : {"&amp;", "&lt;", "&gt;", "&quot;"})
                known |= xml.substr(i).starts_with(entity);
            if (!known) return false;
        }
        if (xml[i] != '<') {
            ++i;
            continue;
        }
        if (closed_root) return false;
        const auto end = xml.find('>', i);
        if (end == std::string_view::npos) return false;
        const std::string_view tag = xml.substr(i + 1, end - i - 1);
        if (tag.empty() || tag.find('<') != std::string_view::npos || count(tag, "\"") % 2 != 0) return false;
        const std::string name(tag.substr(0, tag.find_first_of(" /", 1)));
        if (tag.front() == '/') {
            if (open.empty() || "/" + open.back() != tag) return false;
            open.pop_back();
            closed_root = open.empty();
        } else if (tag.back() != '/') {
            open.push_back(name);
        }
        i = end + 1;
    }
    return open.empty() && closed_root;
}

/// Numbers of the picture that lie in attributes: none may be "nan" or "inf". Text is chosen
/// without these.
void check_sound(const std::string& svg) {
    CHECK(well_formed(svg));
    CHECK(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
    CHECK(count(svg, "viewBox=\"0 0 1600 900\"") == 1);
    CHECK(count(svg, "nan") == 0);
    CHECK(count(svg, "inf") == 0);
}

chart with(panel p) {
    chart c{.title = "title", .subtitle = "subtitle", .x_label = "seconds", .x0 = 0, .dx = 1, .columns = {}};
    c.columns.push_back({"way", "", {std::move(p)}});
    return c;
}

panel of(std::vector<series> lines) { return {.title = "panel", .y_label = "y", .lines = std::move(lines)}; }

}  // namespace

TEST_CASE("the checker of the tests sees what is wrong", "[examples][chart]") {
    CHECK(well_formed("<a><b x=\"1\"/>t &amp; u</a>"));
    for (const char* text :
         {"<a>", "</a>", "<a></b>", "<a>&</a>", "<a>></a>", "<a x=\"1></a>", "<a><</a>", "<a></a><b></b>", "x"}) {
        INFO(text);
        CHECK_FALSE(well_formed(text));
    }
}

TEST_CASE("a chart without data says so", "[examples][chart]") {
    for (const chart& c : {chart{}, chart{.title = "t", .columns = {column{}}}, with(of({})), with(of({{"a", {}}}))}) {
        const std::string svg = to_svg(c);
        check_sound(svg);
        CHECK(count(svg, "no data") == 1);
        CHECK(count(svg, "<polyline") == 0);
    }
    panel gaps = of({{"a", {no_value, no_value}}});
    for (const bool stacked : {false, true}) {
        gaps.stacked = stacked;
        check_sound(to_svg(with(gaps)));
    }
}

TEST_CASE("each stretch between gaps is a line, a lonely bin a dot", "[examples][chart]") {
    std::string svg =
        to_svg(with(of({{"a", {1, 2, no_value, 3, 4}}, {"b", {1, 2, 3, 4, 5}}, {"c", {no_value, 7, no_value}}})));
    check_sound(svg);
    CHECK(count(svg, "<polyline") == 3);
    CHECK(count(svg, "<circle") == 1);

    svg = to_svg(with(of({{"a", {5}}})));
    check_sound(svg);
    CHECK(count(svg, "<circle") == 1);
}

TEST_CASE("on a logarithmic axis what isn't positive is a gap", "[examples][chart]") {
    panel p = of({{"a", {1, 10, 0, 100, 1000, -1, 5, 5}}});
    p.log_y = true;
    const std::string svg = to_svg(with(p));
    check_sound(svg);
    CHECK(count(svg, "<polyline") == 3);
    CHECK(count(svg, ">1k</text>") == 1);
    CHECK(count(svg, ">10</text>") == 1);
}

TEST_CASE("stacked areas add up", "[examples][chart]") {
    panel p = of({{"a", {30, 30}}, {"b", {70, 70, 70}}});
    p.stacked = true;
    p.y_max = 100;
    const std::string svg = to_svg(with(p));
    check_sound(svg);
    CHECK(count(svg, "<polygon") == 2);
    CHECK(count(svg, ">100</text>") == 1);
    // The upper edge of both together lies at the top of the panel in the first two bins.
    CHECK(count(svg, "points=\"92,226 ") >= 1);
}

TEST_CASE("columns share axes and colours", "[examples][chart]") {
    chart c = with(of({{"a", {1, 2}}, {"b", {3, 4}}}));
    c.columns.push_back({"other way", "a note", {of({{"b", {30, 40}}})}});
    const std::string svg = to_svg(c);
    check_sound(svg);
    CHECK(count(svg, ">40</text>") == 1);  // the ticks, once
    CHECK(count(svg, "stroke=\"#e69f00\"") == 2);
    CHECK(count(svg, "stroke=\"#0072b2\"") == 1);
}

TEST_CASE("configured levels are dashed guides with their values, equal ones once", "[examples][chart]") {
    const auto dashes = [](const std::vector<series>& lines, bool stacked) {
        panel p = of(lines);
        p.stacked = stacked;
        const std::string svg = to_svg(with(p));
        check_sound(svg);
        return count(svg, "stroke-dasharray");
    };
    CHECK(dashes({{"a", {1, 2}}}, false) == 0);
    CHECK(dashes({{"a", {1, 2}, 33}, {"b", {1, 2}, 33}}, false) == 1 + 1);  // and one in the legend
    CHECK(dashes({{"a", {1, 2}, 33}, {"b", {1, 2}, 33}}, true) == 2 + 1);
    CHECK(dashes({{"a", {1, 2}, 10}, {"b", {1, 2}, 20}, {"c", {1, 2}}}, false) == 2 + 1);
}

TEST_CASE("text is escaped, shortened where it is too long, and always XML", "[examples][chart]") {
    chart c = with(of({{"<b> & \"c\"", {1, 2}}, {std::string(5000, 'w'), {1, 2}}}));
    c.title = "a < b && c > \"d\"";
    c.subtitle = "bad \xFF\xC3 bytes, \x01 control, \xED\xA0\x80 surrogate, good \u00e9\u2026\U0001F600";
    c.columns.push_back({std::string(5000, 'w'), std::string(5000, 'w'), {of({})}});
    const std::string svg = to_svg(c);
    check_sound(svg);
    CHECK(count(svg, "a &lt; b &amp;&amp; c &gt; &quot;d&quot;</text>") == 1);
    CHECK(count(svg, ">&lt;b&gt; &amp; &quot;c&quot;</text>") == 1);
    CHECK(count(svg, ">bad ?? bytes, ? control, ??? surrogate, good \u00e9\u2026\U0001F600</text>") == 1);
    CHECK(svg.size() < 10000);
}

TEST_CASE("more names than the legend holds are counted", "[examples][chart]") {
    std::vector<series> lines;
    for (int i = 0; i < 60; ++i) lines.push_back({"user number " + std::to_string(i), {1, 2}});
    const std::string svg = to_svg(with(of(lines)));
    check_sound(svg);
    CHECK(count(svg, " more</text>") == 1);
    CHECK(count(svg, "<polyline") == 60);
}

TEST_CASE("no numbers, however odd, spoil the picture", "[examples][chart][property]") {
    constexpr double most = std::numeric_limits<double>::max();
    const double odd[] = {0,     -0.0,     1,        -1,        1e-320, 1e-12,     1e12,  1e13, most,
                          -most, no_value, HUGE_VAL, -HUGE_VAL, 1e-7,   12345.678, 1e100, 99.5, 3};
    for (unsigned seed = 0; seed < 2000; ++seed) {
        CAPTURE(seed);
        std::minstd_rand random(seed + 1);
        const auto any = [&] { return odd[random() % std::size(odd)]; };
        chart c;
        if (random() % 2 == 0) {
            c.x0 = any();
            c.dx = any();
        }
        for (auto columns = random() % 4; columns > 0; --columns) {
            column& col = c.columns.emplace_back();
            for (auto panels = random() % 3; panels > 0; --panels) {
                panel& p = col.panels.emplace_back();
                p.stacked = random() % 2 == 0;
                p.log_y = random() % 3 == 0;
                if (random() % 4 == 0) p.y_max = any();
                for (auto lines = random() % 4; lines > 0; --lines) {
                    series& s = p.lines.emplace_back();
                    s.name = std::string(random() % 3, 'x');
                    if (random() % 2 == 0) s.level = any();
                    const bool plain = random() % 2 == 0;
                    for (auto n = random() % 12; n > 0; --n)
                        s.y.push_back(plain ? static_cast<double>(random() % 100) : any());
                }
            }
        }
        const std::string svg = to_svg(c);
        if (!well_formed(svg) || count(svg, "nan") != 0 || count(svg, "inf") != 0) FAIL(svg);
        if (seed < 50) check_sound(svg);
    }
}

TEST_CASE("a chart is drawn the same from its data", "[examples]") {
    chart c{
        .title = "two \"tenants\" & more", .subtitle = "s", .x_label = "seconds", .x0 = 1, .dx = 0.25, .columns = {}};
    c.columns.push_back({.title = "fair", .note = "n", .panels = {}});
    c.columns[0].panels.push_back({.title = "share",
                                   .y_label = "%",
                                   .lines = {{"chat", {33.3125, no_value, 34}, 50}, {"batch", {1, 2, 3.5}}},
                                   .stacked = true,
                                   .y_max = 100});
    c.columns[0].panels.push_back(
        {.title = "latency", .y_label = "ms", .lines = {{"chat", {1, 10, 100}}}, .log_y = true});
    const auto data = trace_replay::data_of(c, "\"trace\": " + trace_replay::quoted("a \"b\"\\\n\xff.csv") + ",\n ");
    CHECK(to_svg(trace_replay::chart_of(data)) == to_svg(c));
    auto other = c;
    other.columns[0].panels[0].lines[0].y[2] = 35;
    CHECK(to_svg(trace_replay::chart_of(trace_replay::data_of(other))) != to_svg(c));
    CHECK(data.starts_with("{\"trace\": \"a \\\"b\\\"\\\\\\u000a\xEF\xBF\xBD.csv\",\n "));
    CHECK_THROWS(trace_replay::chart_of("{}"));
}
