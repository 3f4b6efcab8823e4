// SPDX-License-Identifier: Apache-2.0
// The library's main use, end to end: tenants of a production trace share the devices of one
// software node, under memory quotas and compute shares. The node's own ledger says what each
// tenant got. See --help.
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <new>
#include <span>
#include <string>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/observe/timeline_trace.hpp>

#include "machine.hpp"
#include "trace_replay/chart_data.hpp"
#include "trace_replay/generator.hpp"
#include "trace_replay/options.hpp"
#include "trace_replay/replay.hpp"
#include "trace_replay/report.hpp"
#include "trace_replay/trace.hpp"
#include "trace_replay/workload.hpp"

namespace {

using namespace trace_replay;

constexpr auto legend =
    "share %: of the device time that the backlogged tenants got together, over the whole seconds in which this one "
    "and\n"
    "  another had work waiting all the time; configured: its part of their shares; device seconds: how many of them\n"
    "  there were, all devices together. From the node's ledger.\n";

// the most records of the timeline; of a long run, the latest
constexpr std::size_t most_drawn = 200'000;

/// The head of a chart's data: the conditions that another run would have to match. The commit
/// comes from GPUSHARE_BENCH_COMMIT, which ./dev demo sets.
std::string head(const options& o, const bench::machine_load& load) {
    const char* commit = std::getenv("GPUSHARE_BENCH_COMMIT");
    char percents[128];
    std::snprintf(percents, sizeof percents,
                  "{\"average_before\": %.2f, \"others_percent\": %.1f, \"stolen_percent\": %.1f}",
                  load.average_before(), load.others_percent(), load.stolen_percent());
    const auto name = [](const std::string& path) { return path.substr(path.find_last_of('/') + 1); };
    return "\"commit\": " + quoted(commit == nullptr ? "unknown" : commit) + ",\n \"date\": " + quoted(bench::today()) +
           ",\n \"processor\": " + quoted(bench::processor()) + ",\n \"compiler\": " + quoted(bench::compiler()) +
           ",\n \"trace\": " + quoted(o.trace.empty() ? "built-in generator" : name(o.trace)) +
           ", \"seed\": " + std::to_string(o.seed) + ",\n \"load\": " + percents + ",\n ";
}

void draw(const options& o) {
    std::ifstream data(o.draw);
    const std::string text{std::istreambuf_iterator<char>(data), {}};
    if (!data) throw usage_error("cannot read '" + o.draw + "'");
    std::ofstream svg(o.svg);
    svg << to_svg(chart_of(text));
    svg.close();
    if (!svg) throw usage_error("cannot write the chart to '" + o.svg + "'");
}

void run(const options& o) {
    const bench::machine_load load;
    const trace t = o.trace.empty() ? generate(o.seed, demo_requests) : read_trace_file(o.trace);
    std::printf("trace: %s\n", o.trace.empty() ? "built-in generator" : o.trace.c_str());
    std::printf("  %s\n", to_string(t.summary).c_str());
    const workload w = make_workload(t, o);
    std::printf("window: %s\n", w.window.c_str());
    std::printf(
        "  arrivals %.0f times and work %.0f times as fast, so that %.0f s ask for %.2g times the device time of "
        "%u devices with %llu GiB each\n",
        w.arrival_speedup, w.speedup, o.seconds, o.load, o.devices, static_cast<unsigned long long>(o.memory_gib));
    std::printf("%s\n", legend);

    // opened now, so that a file that can't be written is reported before the run
    std::ofstream svg(o.svg);
    if (!svg) throw usage_error("cannot write the chart to '" + o.svg + "'");
    std::ofstream data_file;
    if (!o.data.empty()) {
        data_file.open(o.data);
        if (!data_file) throw usage_error("cannot write the chart's data to '" + o.data + "'");
    }
    std::ofstream timeline_file;
    gpushare::timeline_trace timeline;
    if (!o.timeline.empty()) {
        timeline_file.open(o.timeline);
        if (!timeline_file) throw usage_error("cannot write the timeline to '" + o.timeline + "'");
        timeline.start(most_drawn);
    }
    std::vector<outcome> runs;
    for (const auto how : {way::unlimited, way::fair, way::weighted}) {
        std::fprintf(stderr, "replaying %zu requests: %s ...\n", w.jobs.size(), std::string(to_string(how)).c_str());
        runs.push_back(replay(w, o, how, how == way::weighted && timeline.on() ? &timeline : nullptr));
        std::printf("%s\n", to_table(w, runs.back()).c_str());
        std::fflush(stdout);
    }
    std::printf("%s\n", verdict(w, runs).c_str());
    const auto data = data_of(to_chart(w, runs), head(o, load));
    svg << to_svg(chart_of(data));  // drawn from the data that is kept
    svg.close();
    if (!o.data.empty() && !(data_file << data).flush())
        throw usage_error("cannot write the chart's data to '" + o.data + "'");
    if (!svg) throw usage_error("cannot write the chart to '" + o.svg + "'");
    std::printf("chart: %s\n", o.svg.c_str());
    if (o.timeline.empty()) return;
    timeline_file << timeline.json();
    timeline_file.close();
    if (!timeline_file) throw usage_error("cannot write the timeline to '" + o.timeline + "'");
    std::printf("timeline: %s\n", o.timeline.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const auto o = parse_options(std::span(argv, static_cast<std::size_t>(argc)).subspan(argc > 0 ? 1 : 0));
        if (o.help) {
            std::fputs(help_text().data(), stdout);
            return 0;
        }
        o.draw.empty() ? run(o) : draw(o);
        return 0;
    } catch (const usage_error& e) {
        std::fprintf(stderr, "trace_replay: %s\n", e.what());
    } catch (const trace_error& e) {
        std::fprintf(stderr, "trace_replay: %s\n", e.what());
    } catch (const gpushare::error& e) {
        std::fprintf(stderr, "trace_replay: %s\n", e.what());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "trace_replay: %s\n", e.what());
        return 1;
    }
    return 2;
}
