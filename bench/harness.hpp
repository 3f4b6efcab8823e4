// SPDX-License-Identifier: Apache-2.0
// The measuring and reporting tools of all benchmarks. A report repeats a measurement, prints the
// median as a `figure` line, and keeps every repeat for the JSON file. ratios() alternates between
// ours and the other side and divides within each repeat, so that a drift of the machine cancels
// out.
//
//   bench::report r("core");
//   r.figure("core.pair_vs_cas", bench::ratios(9, ours_ns, floor_ns), "x");
//   r.write(argv[1]);
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "machine.hpp"

namespace bench {

/// Keeps the compiler from removing or moving the computation of `value`.
template <class T>
void keep(const T& value) {
    asm volatile("" : : "r,m"(value) : "memory");
}

/// Nanoseconds per call of `f`, over `calls` calls.
template <class Clock = std::chrono::steady_clock, std::invocable F>
double ns_per_call(std::size_t calls, F f) {
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < calls; ++i) f();
    const std::chrono::duration<double, std::nano> took = Clock::now() - begin;
    return took.count() / static_cast<double>(calls);
}

template <std::invocable F>
std::vector<double> repeated(std::size_t repeats, F measure) {
    measure();  // warm-up
    std::vector<double> values(repeats);
    std::ranges::generate(values, measure);
    return values;
}

template <std::invocable Ours, std::invocable Other>
std::vector<double> ratios(std::size_t repeats, Ours ours, Other other) {
    return repeated(repeats, [&] {
        const double theirs = other();
        return ours() / theirs;
    });
}

/// Starts a thread that ends at once. The C library skips its locks until a program has started a
/// second thread; without this call, locks would look a third cheaper.
inline void start_a_second_thread() {
    std::jthread([] {});
}

/// The statistic of the repeats that becomes the figure. A figure is the median unless
/// bench/README.md defines another statistic.
enum class statistic { median, mean, least, most };

[[nodiscard]] constexpr const char* name(statistic s) noexcept {
    switch (s) {
        case statistic::mean: return "mean";
        case statistic::least: return "least";
        case statistic::most: return "most";
        case statistic::median: break;
    }
    return "median";
}

/// `values` must not be empty.
[[nodiscard]] inline double value_of(statistic s, std::vector<double> values) {
    std::ranges::sort(values);
    switch (s) {
        case statistic::mean:
            return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
        case statistic::least: return values.front();
        case statistic::most: return values.back();
        case statistic::median: break;
    }
    const auto middle = values.size() / 2;
    return values.size() % 2 != 0 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

/// Rounds a number to three digits for a text.
[[nodiscard]] inline std::string rounded(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g", x);
    return text;
}

/// The limit that bench/README.md sets for a figure.
struct bar {
    double value;
    bool at_most;
    [[nodiscard]] constexpr bool met_by(double x) const noexcept { return at_most ? x <= value : x >= value; }
};
[[nodiscard]] constexpr bar at_most(double x) noexcept { return {x, true}; }
[[nodiscard]] constexpr bar at_least(double x) noexcept { return {x, false}; }

/// Shows that a figure can fail: the same code, in the same run, measures something with a planted
/// fault, and the result must miss the bar.
struct control {
    bar missed;  ///< the bar that the control must miss
    /// Infinite or NaN if the measurement didn't find the fault; the figure is then void.
    double value;
    /// A description of the planted fault: "a limiter that lets one in at a time".
    std::string fault;
};

/// Prints figures as the benchmark measures them, and writes them to a file with everything on
/// which they depend (bench/README.md, Results).
class report {
public:
    /// `suffix` goes after the names of all figures. A run with unusual conditions states the
    /// conditions in the suffix.
    explicit report(std::string configuration, std::string suffix = {})
        : configuration_(std::move(configuration)), suffix_(std::move(suffix)) {
        std::printf("# %s\n", configuration_.c_str());
    }

    /// Replaces the constructor's suffix for all later figures.
    void end_names_with(std::string suffix) { suffix_ = std::move(suffix); }

    /// `values` are the repeats in the order of measurement.
    void figure(std::string name, std::vector<double> values, const std::string& unit,
                statistic s = statistic::median) {
        name += suffix_;
        if (values.empty()) throw std::invalid_argument("figure " + name + " was not measured");
        const auto [least, most] = std::ranges::minmax(values);
        const double value = value_of(s, values);
        std::printf("figure %s %.4g %s\n", name.c_str(), value, unit.c_str());
        std::printf("#   %s of %zu, %.4g to %.4g\n", bench::name(s), values.size(), least, most);
        std::fflush(stdout);
        figures_.push_back({std::move(name), unit, s, value, least, most, std::move(values)});
    }

    /// Reports a figure with a control. If the control, NAME_with_a_planted_fault, meets the bar,
    /// the figure is void: the figure couldn't have failed.
    void figure(const std::string& name, std::vector<double> values, const std::string& unit, const control& planted,
                statistic s = statistic::median) {
        const bool is_number = std::isfinite(planted.value);  // JSON can't express infinity or NaN
        if (is_number) figure(name + "_with_a_planted_fault", {planted.value}, unit);
        if (!is_number || planted.missed.met_by(planted.value))
            is_void(name, "not found: " + planted.fault);
        else
            figure(name, std::move(values), unit, s);
    }

    /// Adds a text to the results, such as a table of measurements.
    void text(std::string name, std::string value) {
        std::printf("# %s:\n%s", name.c_str(), value.c_str());
        texts_.emplace_back(std::move(name), std::move(value));
    }

    /// Declares a figure void: a control in the same run met the bar, or the conditions were wrong.
    /// `why` explains the reason. The file lists the figure under "void", not among the figures.
    void is_void(std::string name, const std::string& why) {
        name += suffix_;
        std::printf("void %s: %s\n", name.c_str(), why.c_str());
        std::fflush(stdout);
        void_.emplace_back(std::move(name), why);
    }

    /// Records something else on which figures depend, such as a peer's version or the peer's best
    /// settings.
    void setting(std::string name, std::string value) {
        std::printf("# %s: %s\n", name.c_str(), value.c_str());
        settings_.emplace_back(std::move(name), std::move(value));
    }

    /// Does nothing without a path. The commit comes from GPUSHARE_BENCH_COMMIT, which ./dev bench
    /// sets.
    void write(const char* path) const {
        if (path == nullptr) return;
        std::FILE* file = std::fopen(path, "w");
        if (file == nullptr) throw std::runtime_error(std::string("cannot write ") + path);
        const char* commit = std::getenv("GPUSHARE_BENCH_COMMIT");
        std::fprintf(file, "{\"configuration\": \"%s\",\n", configuration_.c_str());
        std::fprintf(file, " \"commit\": \"%s\",\n \"date\": \"%s\",\n", commit == nullptr ? "unknown" : commit,
                     today().c_str());
        std::fprintf(file, " \"processor\": \"%s\",\n \"compiler\": \"%s\",\n \"flags\": \"%s\",\n",
                     processor().c_str(), compiler().c_str(), GPUSHARE_BENCH_FLAGS);
        std::fprintf(file,
                     " \"load\": {\"average_before\": %.2f, \"others_percent\": %.1f, \"stolen_percent\": %.1f},\n",
                     load_.average_before(), load_.others_percent(), load_.stolen_percent());
        write_texts(file, "settings", settings_);
        write_texts(file, "void", void_);
        write_texts(file, "texts", texts_);
        std::fprintf(file, " \"figures\": {");
        for (const char* separator = "\n"; const auto& f : figures_) {
            std::fprintf(file,
                         "%s  \"%s\": {\"value\": %.6g, \"is\": \"%s\", \"unit\": \"%s\", \"least\": %.6g, \"most\": "
                         "%.6g, \"repeats\": [",
                         std::exchange(separator, ",\n"), f.name.c_str(), f.value, bench::name(f.is), f.unit.c_str(),
                         f.least, f.most);
            for (const char* comma = ""; const double v : f.repeats)
                std::fprintf(file, "%s%.6g", std::exchange(comma, ", "), v);
            std::fprintf(file, "]}");
        }
        std::fprintf(file, "\n}}\n");
        if (std::fclose(file) != 0) throw std::runtime_error(std::string("cannot write ") + path);
    }

private:
    using named_texts = std::vector<std::pair<std::string, std::string>>;

    static void write_texts(std::FILE* file, const char* key, const named_texts& texts) {
        std::fprintf(file, " \"%s\": {", key);
        for (const char* comma = ""; const auto& [name, text] : texts) {
            std::fprintf(file, "%s\"%s\": \"", std::exchange(comma, ", "), name.c_str());
            for (const char c : text) {
                if (c == '\n') std::fputs("\\n", file);
                if (c == '"' || c == '\\') std::fputc('\\', file);
                if (static_cast<unsigned char>(c) >= ' ') std::fputc(c, file);
            }
            std::fputc('"', file);
        }
        std::fprintf(file, "},\n");
    }

    struct entry {
        std::string name, unit;
        statistic is;
        double value, least, most;
        std::vector<double> repeats;
    };
    std::string configuration_, suffix_;
    machine_load load_;
    std::vector<entry> figures_;
    named_texts texts_, settings_, void_;
};

}  // namespace bench
