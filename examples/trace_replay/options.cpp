// SPDX-License-Identifier: Apache-2.0
#include "trace_replay/options.hpp"

#include <charconv>
#include <cmath>
#include <system_error>

namespace trace_replay {

namespace {

template <class T>
T number(std::string_view option, std::string_view text, T least, T most) {
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool whole = error == std::errc{} && end == text.data() + text.size();
    if (!whole || !(value >= least && value <= most)) {
        auto show = [](T n) {
            std::string s = std::to_string(n);
            if constexpr (std::is_floating_point_v<T>) s.erase(s.find_last_not_of('0') + 1);
            if (s.ends_with('.')) s.pop_back();
            return s;
        };
        throw usage_error(std::string(option) + ": '" + std::string(text) + "' is not a number from " + show(least) +
                          " to " + show(most));
    }
    return value;
}

}  // namespace

options parse_options(std::span<const char* const> arguments) {
    options o;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        std::string_view name = arguments[i];
        if (name == "--help" || name == "-h") {
            o.help = true;
            return o;
        }
        std::string_view value;
        if (const auto equals = name.find('='); equals != std::string_view::npos) {
            value = name.substr(equals + 1);
            name = name.substr(0, equals);
        } else if (name.starts_with("--") && i + 1 < arguments.size()) {
            value = arguments[++i];
        }
        if (!name.starts_with("--")) throw usage_error("unexpected argument '" + std::string(name) + "'; see --help");
        if (name == "--trace")
            o.trace = value;
        else if (name == "--svg")
            o.svg = value;
        else if (name == "--data")
            o.data = value;
        else if (name == "--draw")
            o.draw = value;
        else if (name == "--timeline")
            o.timeline = value;
        else if (name == "--devices")
            o.devices = number<std::uint32_t>(name, value, 1, 8);
        else if (name == "--memory")
            o.memory_gib = number<std::uint64_t>(name, value, 1, 4096);
        else if (name == "--load")
            o.load = number<double>(name, value, 0.1, 10);
        else if (name == "--tenants")
            o.tenants = number<std::uint32_t>(name, value, 2, 16);
        else if (name == "--seed")
            o.seed = number<std::uint64_t>(name, value, 0, UINT64_MAX);
        else if (name == "--seconds")
            o.seconds = number<double>(name, value, 1, 600);
        else
            throw usage_error("unknown option '" + std::string(name) + "'; see --help");
        if (value.empty()) throw usage_error(std::string(name) + " needs a value; see --help");
    }
    return o;
}

std::string_view help_text() {
    return R"(usage: trace_replay [options]

Replays a trace of multi-tenant inference requests on a software node in three ways: without limits,
with fair shares, and with weighted shares and one tenant of higher priority. Prints a table for each
way, and draws shares and latencies over time.

  --trace FILE    a CSV file with the columns of Alibaba's cluster-trace-v2026-GenAI
                  (lora_request_trace.csv); without it, a built-in generator makes a trace with the
                  same columns and statistics
  --devices N     devices of the node, 1 to 8 (2)
  --memory GIB    memory of each device in GiB (16)
  --load X        requested device time over available device time (1.5); arrivals are scaled to this load
  --tenants N     groups of the trace that become separate tenants, 2 to 16 (4); all other groups share
                  one more tenant
  --seconds S     how long requests arrive in each run (8); each run then finishes its waiting requests
  --seed N        the seed of the generator, and of the window taken from the trace (1)
  --svg FILE      the file for the chart (trace_replay.svg)
  --data FILE     a file for the chart's data and the description of the measurement, as JSON
  --draw FILE     draw the chart from a file that --data wrote, and replay nothing
  --timeline FILE a file for a timeline of the third run, for ui.perfetto.dev: waits, permits, kernels, bounds
  --help          print this text

Exit code: 0, or 2 if an option or the trace can't be used.
)";
}

}  // namespace trace_replay
