// SPDX-License-Identifier: Apache-2.0
// Measures and reports: repeats a measurement, prints the median as a `figure` line, and keeps the spread for the JSON
// file. Ratios are taken repeat by repeat, ours and the other one in turn, so that a drift of the machine cancels out.
//
//   bench::report r("core");
//   r.figure("core.pair_vs_cas", bench::ratios(9, ours_ns, floor_ns), "x");
//   r.write(argv[1]);
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace bench {

/// Keeps the compiler from dropping or moving what a value depends on.
template <class T>
void keep(const T& value) {
    asm volatile("" : : "r,m"(value) : "memory");
}

/// Nanoseconds per call of `f`, over `calls` calls.
template <std::invocable F>
double ns_per_call(std::size_t calls, F f) {
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < calls; ++i) f();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
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

/// The C library skips its locks until a second thread has existed: without this, locks look a third cheaper.
inline void start_a_second_thread() {
    std::jthread([] {});
}

class report {
public:
    explicit report(std::string configuration) : configuration_(std::move(configuration)) {
        std::printf("# %s\n", configuration_.c_str());
    }

    /// Prints the median. `values` are the repeats.
    void figure(const std::string& name, std::vector<double> values, const std::string& unit) {
        if (values.empty()) throw std::invalid_argument("figure " + name + " was not measured");
        std::ranges::sort(values);
        std::printf("figure %s %.4g %s\n", name.c_str(), values[values.size() / 2], unit.c_str());
        std::printf("#   %zu repeats, %.4g to %.4g\n", values.size(), values.front(), values.back());
        std::fflush(stdout);
        figures_.push_back({name, unit, std::move(values)});
    }

    /// Nothing without a path.
    void write(const char* path) const {
        if (path == nullptr) return;
        std::FILE* file = std::fopen(path, "w");
        if (file == nullptr) throw std::runtime_error(std::string("cannot write ") + path);
        std::fprintf(file, "{\"configuration\": \"%s\",\n \"figures\": {", configuration_.c_str());
        for (const char* separator = "\n"; const auto& f : figures_) {
            std::fprintf(file,
                         "%s  \"%s\": {\"median\": %.6g, \"min\": %.6g, \"max\": %.6g, \"unit\": \"%s\", \"values\": [",
                         std::exchange(separator, ",\n"), f.name.c_str(), f.sorted[f.sorted.size() / 2],
                         f.sorted.front(), f.sorted.back(), f.unit.c_str());
            for (const char* comma = ""; const double v : f.sorted)
                std::fprintf(file, "%s%.6g", std::exchange(comma, ", "), v);
            std::fprintf(file, "]}");
        }
        std::fprintf(file, "\n}}\n");
        if (std::fclose(file) != 0) throw std::runtime_error(std::string("cannot write ") + path);
    }

private:
    struct entry {
        std::string name, unit;
        std::vector<double> sorted;
    };
    std::string configuration_;
    std::vector<entry> figures_;
};

}  // namespace bench
