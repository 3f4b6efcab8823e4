// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The synthetic trace: reproducible, well-formed, and like the published trace in the figures that
// its header states.
#include "trace_replay/generator.hpp"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"

using trace_replay::generate;
using trace_replay::request;
using trace_replay::trace;

namespace {

constexpr std::size_t published_requests = 26392;

template <class Predicate>
double part(const trace& t, Predicate p) {
    return static_cast<double>(std::ranges::count_if(t.requests, p)) / static_cast<double>(t.requests.size());
}

double quantile(std::vector<double> values, double p) {
    std::ranges::sort(values);
    return values[std::min(values.size() - 1, static_cast<std::size_t>(p * static_cast<double>(values.size())))];
}

std::vector<double> seconds(const trace& t) {
    std::vector<double> out;
    for (const request& r : t.requests) out.push_back(r.exec_s);
    return out;
}

double mean_seconds(const trace& t) {
    double sum = 0;
    for (const request& r : t.requests) sum += r.exec_s;
    return sum / static_cast<double>(t.requests.size());
}

/// Parts of all requests by group or model, the largest first.
std::vector<double> parts(const trace& t, std::string request::*by) {
    std::map<std::string, double> counts;
    for (const request& r : t.requests) counts[r.*by] += 1.0 / static_cast<double>(t.requests.size());
    std::vector<double> out;
    for (const auto& [name, value] : counts) out.push_back(value);
    std::ranges::sort(out, std::greater{});
    return out;
}

double top(const std::vector<double>& parts, std::size_t n) {
    double sum = 0;
    for (std::size_t i = 0; i < std::min(n, parts.size()); ++i) sum += parts[i];
    return sum;
}

std::vector<double> session_sizes(const trace& t) {
    std::map<std::string, std::pair<double, double>> open;  // group: last arrival, requests
    std::vector<double> sizes;
    for (const request& r : t.requests) {
        auto& [last_s, size] = open.try_emplace(r.group, r.arrival_s, 0).first->second;
        if (r.arrival_s - last_s > 900) sizes.push_back(std::exchange(size, 0));
        last_s = r.arrival_s;
        ++size;
    }
    for (const auto& [name, session] : open) sizes.push_back(session.second);
    return sizes;
}

double within_15_percent(double value) { return 0.15 * value; }

/// What generator.hpp states, with room for the luck of a seed.
void check_statistics(const trace& t) {
    const auto near = [](double value, double margin) { return Approx(value).margin(margin); };
    CHECK(part(t, [](const request& r) { return r.steps == 30; }) == near(0.907, 0.02));
    CHECK(part(t, [](const request& r) { return r.steps == 40; }) == near(0.051, 0.02));
    CHECK(part(t, [](const request& r) { return r.loras == 0; }) == near(0.835, 0.03));
    CHECK(part(t, [](const request& r) { return r.loras == 1; }) == near(0.154, 0.03));
    CHECK(part(t, [](const request& r) { return r.loras > 1; }) == near(0.011, 0.006));

    const auto groups = parts(t, &request::group);
    CHECK(groups.size() == near(4240, 400));
    CHECK(top(groups, 1) == near(0.045, 0.015));
    CHECK(top(groups, 10) == near(0.147, 0.03));
    CHECK(top(groups, 50) == near(0.294, 0.05));
    CHECK(top(groups, 200) == near(0.455, 0.06));
    CHECK(top(groups, 1000) == near(0.73, 0.05));

    const auto models = parts(t, &request::model);
    CHECK(models.size() == near(79, 2));
    CHECK(top(models, 1) == near(0.312, 0.04));
    CHECK(top(models, 5) == near(0.712, 0.05));
    CHECK(top(models, 10) == near(0.874, 0.04));

    const auto s = seconds(t);
    const std::pair<double, double> exec_quantiles[] = {{0.1, 13}, {0.25, 17},  {0.5, 23},   {0.75, 33},
                                                        {0.9, 53}, {0.99, 106}, {0.999, 160}};
    for (const auto& [p, expected] : exec_quantiles) {
        CAPTURE(p);
        CHECK(quantile(s, p) == near(expected, within_15_percent(expected)));
    }
    CHECK(mean_seconds(t) == near(28.9, 2));
    CHECK(*std::ranges::min_element(s) >= 3);

    const auto sizes = session_sizes(t);
    CHECK(static_cast<double>(t.requests.size()) / static_cast<double>(sizes.size()) == near(4.2, 0.4));
    CHECK(quantile(sizes, 0.5) == 2);
    CHECK(quantile(sizes, 0.9) == near(9, 1));
    CHECK(quantile(sizes, 0.99) == near(30, 9));

    const auto hour = [&t](const request& r) {
        const std::int64_t at = t.start.time_since_epoch().count() + static_cast<std::int64_t>(r.arrival_s);
        return at % 86400 / 3600;
    };
    CHECK(part(t, [&](const request& r) { return hour(r) >= 6 && hour(r) < 16; }) < 0.04);
    CHECK(part(t, [&](const request& r) { return hour(r) >= 21 || hour(r) < 1; }) == near(0.52, 0.06));
    CHECK(mean_seconds(t) * static_cast<double>(t.requests.size()) / t.requests.back().arrival_s == near(0.385, 0.04));
}

}  // namespace

TEST_CASE("the same seed makes the same trace, another one another", "[examples][generator]") {
    CHECK(generate(7, 500).requests == generate(7, 500).requests);
    CHECK(generate(7, 500).requests != generate(8, 500).requests);
    // The same with every compiler and library: the text is pinned.
    const trace t = generate(1, 2000);
    std::uint64_t hash = 1469598103934665603U;
    std::ostringstream text;
    write_csv(text, t);
    for (const char c : text.str()) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
    CHECK(hash == 8201747710560931624U);
}

TEST_CASE("a shorter trace is the beginning of a longer one", "[examples][generator]") {
    const auto longer = generate(3, 3000).requests;
    for (const std::size_t n : {1U, 2U, 100U, 2999U}) {
        const auto shorter = generate(3, n).requests;
        REQUIRE(shorter.size() == n);
        CHECK(std::equal(shorter.begin(), shorter.end(), longer.begin()));
    }
    CHECK(generate(3, 0).requests.empty());
}

TEST_CASE("made-up requests are sound and in order", "[examples][generator]") {
    const trace t = generate(11, 5000);
    CHECK(t.requests.front().arrival_s == 0);
    CHECK(std::ranges::is_sorted(t.requests, {}, &request::arrival_s));
    CHECK(std::ranges::all_of(t.requests, [](const request& r) {
        return r.steps > 0 && r.exec_s >= 3 && !r.group.empty() && !r.model.empty() && r.loras <= 6;
    }));
    CHECK(to_string(t.summary) == "5000 of 5000 rows kept");
}

TEST_CASE("a made-up trace survives the way through a file", "[examples][generator]") {
    const trace t = generate(5, 2000);
    std::stringstream file;
    write_csv(file, t);
    const trace back = trace_replay::read_trace(file, "copy");
    CHECK(back.requests == t.requests);
    CHECK(back.start == t.start);
}

TEST_CASE("made-up traces have the published one's statistics", "[examples][generator][property]") {
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
        CAPTURE(seed);
        check_statistics(generate(seed, published_requests));
    }
}

TEST_CASE("the published trace has the statistics that are stated of it", "[examples][generator]") {
#if defined(GPUSHARE_SHARED_DATA)
    const std::string path = GPUSHARE_SHARED_DATA "/lora_request_trace.csv";
    if (std::ifstream(path).good()) {
        check_statistics(trace_replay::read_trace_file(path));
        return;
    }
#endif
    WARN("the published trace isn't here: not checked");
}
