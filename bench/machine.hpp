// SPDX-License-Identifier: Apache-2.0
// The conditions on which a figure depends besides the code: processor, compiler, and the load from
// other programs during the measurement.
//
//   bench::machine_load load;             // from here on
//   ... measure ...
//   // of all cores, taken by other programs; above some 2 a timing says little
//   load.others_percent();
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

namespace bench {

/// "AMD EPYC, family 25, model 1, 2 cores".
[[nodiscard]] inline std::string processor() {
    std::ifstream file("/proc/cpuinfo");
    std::string line, name = "unknown", family, model;
    const auto is = [&line](std::string_view key) {
        return line.starts_with(key) && line.find_first_not_of(" \t", key.size()) == line.find(':');
    };
    while (std::getline(file, line) && !line.empty()) {
        const auto value = [&] { return line.substr(line.find(':') + 2); };
        if (is("model name"))
            name = value();
        else if (is("cpu family"))
            family = value();
        else if (is("model"))
            model = value();
    }
    std::string text = name;
    if (!family.empty()) text.append(", family ").append(family);
    if (!model.empty()) text.append(", model ").append(model);
    return text + ", " + std::to_string(sysconf(_SC_NPROCESSORS_ONLN)) + " cores";
}

[[nodiscard]] inline std::string compiler() {
#ifdef __clang__
    return std::string("clang ") + __clang_version__;
#else
    return std::string("g++ ") + __VERSION__;
#endif
}

/// "2026-11-23", in UTC.
[[nodiscard]] inline std::string today() {
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    gmtime_r(&now, &utc);
    char text[16];
    return {text, std::strftime(text, sizeof text, "%Y-%m-%d", &utc)};
}

/// The system's one-minute load average; -1 if the system has none.
[[nodiscard]] inline double load_average() {
    double load = -1;
    std::ifstream("/proc/loadavg") >> load;
    return load;
}

/// Measures how much of the cores other programs have used since the construction. On a virtual
/// machine, also measures how much the host took away.
class machine_load {
public:
    machine_load() : average_(load_average()), begin_(now()) {}

    /// The load average at the construction.
    [[nodiscard]] double average_before() const noexcept { return average_; }
    /// The percentage of all cores used by other programs. This program and the finished children
    /// for which it has waited don't count.
    [[nodiscard]] double others_percent() const {
        const counters end = now();
        const double others = (end.busy - begin_.busy) - (end.own - begin_.own);
        return percent(others > 0 ? others : 0, end);
    }
    /// The percentage of all cores that the host of a virtual machine took away.
    [[nodiscard]] double stolen_percent() const {
        const counters end = now();
        return percent(end.stolen - begin_.stolen, end);
    }

private:
    struct counters {
        double busy = 0, stolen = 0, all = 0, own = 0;  // summed over all cores, in seconds
    };

    [[nodiscard]] double percent(double seconds, const counters& end) const {
        return end.all > begin_.all ? 100 * seconds / (end.all - begin_.all) : 0;
    }

    static double cpu_seconds(int who) {
        rusage used{};
        getrusage(who, &used);
        const auto seconds = [](const timeval& t) {
            return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
        };
        return seconds(used.ru_utime) + seconds(used.ru_stime);
    }

    static counters now() {
        std::ifstream file("/proc/stat");
        std::string cpu;
        double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, irq = 0, softirq = 0, stolen = 0;
        file >> cpu >> user >> nice >> system >> idle >> waiting >> irq >> softirq >> stolen;
        const double tick = 1.0 / static_cast<double>(sysconf(_SC_CLK_TCK));
        const double busy = user + nice + system + irq + softirq;
        return {tick * busy, tick * stolen, tick * (busy + idle + waiting + stolen),
                cpu_seconds(RUSAGE_SELF) + cpu_seconds(RUSAGE_CHILDREN)};
    }

    double average_;
    counters begin_;
};

}  // namespace bench
