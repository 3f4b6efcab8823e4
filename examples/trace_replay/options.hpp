// SPDX-License-Identifier: Apache-2.0
// The command line of trace_replay.
//
//   // throws usage_error: one clear line
//   const auto parsed = trace_replay::parse_options(argc, argv);
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace trace_replay {

struct options {
    std::string trace{};  // empty for the built-in generator
    std::string svg = "trace_replay.svg";
    std::string data{};      // the file for the chart's data; empty for none
    std::string draw{};      // data of a chart to draw, without a replay
    std::string timeline{};  // empty for none
    std::uint32_t devices = 2;
    std::uint64_t memory_gib = 16;  // memory of each device
    // the requested device time, relative to the available device time
    double load = 1.5;
    // tenants with names; the remaining groups share one more tenant
    std::uint32_t tenants = 4;
    std::uint64_t seed = 1;
    double seconds = 8;  // how long requests arrive, in each of the three runs
    bool help = false;
};

class usage_error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// `arguments` doesn't include the program's name.
[[nodiscard]] options parse_options(std::span<const char* const> arguments);

[[nodiscard]] std::string_view help_text();

}  // namespace trace_replay
