// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Figures can fail: a figure whose planted fault isn't found is void, and a time that doubles is
// noticed.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.hpp"
#include "harness.hpp"
#include "support/catch.hpp"

namespace {

using namespace std::chrono_literals;
using bench::at_least, bench::at_most;

/// Stands still but where the test lets time pass.
struct stepped_clock {
    using duration = std::chrono::nanoseconds;
    using time_point = std::chrono::time_point<stepped_clock>;
    static inline time_point time{};
    static time_point now() { return time; }
};
void spend(std::chrono::nanoseconds span) { stepped_clock::time += span; }

/// The JSON text of a report with one figure, of value 1, beside such a control.
std::string written(const bench::control& planted) {
    const auto path =
        std::filesystem::temp_directory_path() / ("gpushare_harness_test_" + std::to_string(::getpid()) + ".json");
    bench::report r("a test", "_of_a_kind");
    r.figure("a.cost", {1}, "x", planted);
    r.write(path.c_str());
    std::ifstream file(path);
    std::string text{std::istreambuf_iterator<char>(file), {}};
    std::filesystem::remove(path);
    return text;
}

bool has(const std::string& text, const char* what) { return text.find(what) != std::string::npos; }

}  // namespace

TEST_CASE("a figure whose planted fault isn't found is void", "[bench]") {
    for (const auto& [bar, found, missed] : {std::tuple{at_most(2), 2.1, 2.0}, {at_least(5), 4.9, 5.0}}) {
        const auto good = written({bar, found, "a fault"});
        CHECK(has(good, "\"a.cost_of_a_kind\": {"));
        CHECK(has(good, "\"a.cost_with_a_planted_fault_of_a_kind\": {"));
        CHECK(has(good, "\"void\": {}"));
        using limits = std::numeric_limits<double>;
        for (const double unseen : {missed, limits::quiet_NaN(), limits::infinity(), -limits::infinity()}) {
            const auto bad = written({bar, unseen, "a fault"});
            CHECK(has(bad, "\"a.cost_with_a_planted_fault_of_a_kind\": {") == std::isfinite(unseen));
            for (const char* const no_json : {" nan", " inf", " -inf"}) CHECK_FALSE(has(bad, no_json));
            CHECK_FALSE(has(bad, "\"a.cost_of_a_kind\": {"));
            CHECK(has(bad, "\"void\": {\"a.cost_of_a_kind\": \"not found: a fault\"}"));
        }
    }
}

TEST_CASE("work that takes twice as long is measured as twice as long", "[bench]") {
    const auto once = [] { return bench::ns_per_call<stepped_clock>(50, [] { spend(20us); }); };
    const auto twice = [] { return bench::ns_per_call<stepped_clock>(50, [] { spend(20us), spend(20us); }); };
    CHECK(bench::value_of(bench::statistic::median, bench::repeated(5, once)) == Approx(20'000));
    CHECK(bench::value_of(bench::statistic::median, bench::ratios(9, twice, once)) == Approx(2));
}

TEST_CASE("a part of a benchmark is asked for with a file for its results and without", "[bench]") {
    const auto asked = [](std::vector<const char*> words) {
        words.insert(words.begin(), "bench");
        return bench::arguments(static_cast<int>(words.size()), const_cast<char**>(words.data()), {"first", "second"});
    };
    for (const auto& words : {std::vector<const char*>{"second"}, {"out.json", "second"}}) {
        const auto a = asked(words);
        CHECK(a.wants("second"));
        CHECK_FALSE(a.wants("first"));
        CHECK((a.json() == nullptr) == (words.size() == 1));
    }
    const auto all = asked({"out.json"});
    CHECK(std::string(all.json()) == "out.json");
    CHECK(all.wants("first"));
    CHECK_THROWS_AS(asked({"out.json", "third"}), std::invalid_argument);
    CHECK_THROWS_AS(asked({"second", "first"}), std::invalid_argument);
}
