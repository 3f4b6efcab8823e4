// SPDX-License-Identifier: Apache-2.0
// Tags: slow
// The replay: the processing of a trace, the arithmetic of its report, and small runs of all three
// ways.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include <gpushare/observe/timeline_trace.hpp>

#include "support/catch.hpp"
#include "trace_replay/backlog.hpp"
#include "trace_replay/generator.hpp"
#include "trace_replay/replay.hpp"
#include "trace_replay/report.hpp"
#include "trace_replay/workload.hpp"

using namespace std::chrono_literals;
using gpushare::instant;
using trace_replay::interval;
using trace_replay::way;

namespace {

instant at(gpushare::ns t) { return instant{t}; }

trace_replay::options small(double seconds = 1) {
    trace_replay::options o;
    o.seconds = seconds;
    return o;
}

/// Device seconds that the jobs ask for.
double asked(const trace_replay::workload& w) {
    double s = 0;
    for (const auto& j : w.jobs) s += std::chrono::duration<double>(j.kernel_time).count() * j.steps * j.kernels;
    return s;
}

}  // namespace

TEST_CASE("a workload asks for the stated load, whatever the trace", "[examples]") {
    const auto t = trace_replay::generate(3, 4000);
    for (const double load : {0.5, 1.5, 4.0}) {
        for (const unsigned devices : {1U, 4U}) {
            auto o = small(2);
            o.load = load;
            o.devices = devices;
            const auto w = trace_replay::make_workload(t, o);
            CHECK(asked(w) == Approx(load * devices * 2).epsilon(0.001));
            CHECK(w.jobs.front().arrival == 0s);
            CHECK(w.jobs.back().arrival == 2s);
            CHECK(std::ranges::is_sorted(w.jobs, {}, &trace_replay::job::arrival));
        }
    }
}

TEST_CASE("the biggest groups become tenants by name, and the others share a tenant", "[examples]") {
    const auto t = trace_replay::generate(3, 4000);
    auto o = small(2);
    o.tenants = 3;
    const auto w = trace_replay::make_workload(t, o);
    REQUIRE(w.tenants.size() == 4);
    CHECK(w.tenants.back().name == "others");
    CHECK(w.tenants[0].demand >= w.tenants[1].demand);
    CHECK(w.tenants[1].demand >= w.tenants[2].demand);
    double demand = 0;
    unsigned weighted = 0, fair = 0;
    std::size_t requests = 0;
    gpushare::bytes memory;
    for (const auto& tenant : w.tenants) {
        demand += tenant.demand;
        weighted += tenant.weighted.permille();
        fair += tenant.fair.permille();
        requests += tenant.requests;
        memory += tenant.quota;
    }
    CHECK(demand == Approx(1));
    CHECK(weighted == 1000);
    CHECK(fair <= 1000);
    CHECK(requests == w.jobs.size());
    CHECK(memory == gpushare::bytes{(16ULL << 30) * 2});  // all of two devices
    CHECK(std::ranges::count(w.tenants, true, &trace_replay::tenant_profile::urgent) == 1);
}

TEST_CASE("a trace that is too small for the options is refused in one line", "[examples]") {
    trace_replay::trace empty;
    CHECK_THROWS_WITH(trace_replay::make_workload(empty, small()), "the trace has no usable request");
    trace_replay::trace lonely;
    for (int i = 0; i < 50; ++i)
        lonely.requests.push_back({.arrival_s = i * 1.0, .group = "only", .model = "m", .steps = 30, .exec_s = 10});
    CHECK_THROWS_AS(trace_replay::make_workload(lonely, small()), trace_replay::usage_error);
}

TEST_CASE("backlogged shares: joined intervals, windows, errors", "[examples]") {
    const auto j = trace_replay::joined({{at(5s), at(6s)}, {at(0s), at(2s)}, {at(1s), at(3s)}, {at(3s), at(4s)}});
    REQUIRE(j.size() == 2);
    CHECK(j[0].from == at(0s));
    CHECK(j[0].to == at(4s));
    CHECK(trace_replay::covers(j, at(1s), at(4s)));
    CHECK_FALSE(trace_replay::covers(j, at(3s), at(5s)));

    // Three tenants for 4 s; the third one goes first and is not compared. The first second doesn't
    // count.
    trace_replay::backlog_meter meter(3, at(0s), at(4s));
    const std::vector<interval> always{{at(0s), at(4s)}};
    meter.add_device({always, always, always}, {0.6, 0.2, 0.0}, [](instant from, instant) {
        return from == at(2s) ? std::vector{0.5, 0.25, 0.25} : std::vector{0.6, 0.2, 0.2};
    });
    CHECK(meter.tenants()[0].windows == 3);
    CHECK(meter.tenants()[2].windows == 0);
    CHECK(meter.tenants()[0].configured == Approx(3 * 0.75));
    CHECK(meter.largest_error_pp() == Approx(100 * (0.75 - 0.5 / 0.75)));
    CHECK(meter.largest_relative_error() == Approx(100 * (0.25 / 0.75 / 0.25 - 1)));
    CHECK(meter.together() == 4s);
    meter.add_device({always, always, always}, {0.6, 0.2, 0.0}, [](instant, instant) {
        return std::vector{0.6, 0.2, 0.2};
    });
    CHECK(meter.together() == 4s);  // at the same time on two devices

    // Alone, or not all the time, is not backlogged beside anybody.
    trace_replay::backlog_meter alone(2, at(0s), at(4s));
    alone.add_device({always, {{at(0s), at(1500ms)}}}, {0.5, 0.5}, [](instant, instant) {
        return std::vector{1.0, 0.0};
    });
    CHECK(alone.tenants()[0].windows == 0);
    CHECK(alone.largest_error_pp() == 0);
    CHECK(alone.together() == 0s);
}

TEST_CASE("quantiles are values that occur", "[examples]") {
    CHECK(trace_replay::quantile({4, 1, 3, 2}, 0.5) == 2);
    CHECK(trace_replay::quantile({4, 1, 3, 2}, 0.99) == 4);
    CHECK(trace_replay::quantile({4, 1, 3, 2}, 0) == 1);
    CHECK(trace_replay::quantile({7}, 0.5) == 7);
    CHECK(std::isnan(trace_replay::quantile({}, 0.5)));
}

TEST_CASE("all three ways do the same work with the same bits", "[examples]") {
    const auto w = trace_replay::make_workload(trace_replay::generate(1, 2000), small());
    std::vector<trace_replay::outcome> runs;
    for (const auto how : {way::unlimited, way::fair, way::weighted}) runs.push_back(replay(w, small(), how));
    for (const auto& r : runs) {
        std::size_t accounted = 0;
        double busy = 0;
        for (std::size_t i = 0; i < r.tenants.size(); ++i) {
            const auto& t = r.tenants[i];
            accounted += t.done + t.refused + t.failed;
            CHECK(t.failed == 0);
            CHECK(t.latency_ms.size() == t.done);
            CHECK(std::ranges::all_of(t.latency_ms, [](double ms) { return ms > 0; }));
            if (r.how != way::unlimited) CHECK(t.peak <= w.tenants[i].quota);
            busy += std::accumulate(t.busy.begin(), t.busy.end(), 0.0);
        }
        CHECK(accounted == w.jobs.size());
        // Device seconds by the ledger: what the jobs asked for that ran, and the loading of
        // models. How many are refused for want of memory depends on how far the machine falls
        // behind.
        auto ran = w;
        ran.jobs.clear();
        for (std::size_t i = 0; i < w.jobs.size(); ++i)
            if (r.results[i] != 0) ran.jobs.push_back(w.jobs[i]);
        CHECK(busy * std::chrono::duration<double>(r.bin).count() * 2 > asked(ran) * 0.9);
        CHECK(ran.jobs.size() > w.jobs.size() / 4);
        CHECK(trace_replay::to_table(w, r).find("others") != std::string::npos);
    }
    CHECK(trace_replay::differing_results(runs) == 0);
    CHECK(trace_replay::verdict(w, runs).find("every result has the same bits") != std::string::npos);
    CHECK(trace_replay::to_chart(w, runs).columns.size() == 3);

    // The check of the bits can fail.
    runs.back().results.front() ^= 1;
    CHECK(trace_replay::differing_results(runs) == 1);
}

TEST_CASE("the limiters' work is drawn on request", "[examples]") {
    const auto w = trace_replay::make_workload(trace_replay::generate(1, 2000), small(0.5));
    gpushare::timeline_trace timeline;
    timeline.start(200'000);
    (void)replay(w, small(0.5), way::weighted, &timeline);
    const auto drawn = timeline.json();
    for (const auto& j : w.jobs) {
        const auto& name = w.tenants[j.tenant].name;
        CHECK(drawn.find("\"bound of " + name + "\"") != std::string::npos);
    }
    CHECK(drawn.find("\"name\": \"wait\"") != std::string::npos);
    CHECK(drawn.find("\"name\": \"kernel\"") != std::string::npos);
}

TEST_CASE("requests that can never fit their quota are refused, and nothing hangs", "[examples]") {
    auto o = small(0.5);
    o.memory_gib = 4;  // less than some models
    const auto w = trace_replay::make_workload(trace_replay::generate(1, 2000), o);
    const auto r = replay(w, o, way::weighted);
    std::size_t refused = 0, done = 0;
    for (const auto& t : r.tenants) {
        refused += t.refused;
        done += t.done;
        CHECK(t.peak <= t.quota);
    }
    CHECK(refused > 0);
    CHECK(refused + done == w.jobs.size());
}
