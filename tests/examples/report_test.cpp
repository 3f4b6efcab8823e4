// SPDX-License-Identifier: Apache-2.0
// The report if there is nothing to compare.
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "trace_replay/replay.hpp"
#include "trace_replay/report.hpp"
#include "trace_replay/workload.hpp"

using trace_replay::way;

TEST_CASE("without backlogged tenants the report claims nothing about shares", "[examples]") {
    trace_replay::workload w;
    w.tenants = {{.name = "a", .urgent = true}, {.name = "others"}};
    std::vector<trace_replay::outcome> runs;
    for (const auto how : {way::unlimited, way::fair, way::weighted})
        runs.push_back({.how = how, .tenants = std::vector<trace_replay::tenant_outcome>(2)});
    CHECK(trace_replay::to_table(w, runs.back()).find("percentage points") == std::string::npos);
    CHECK(trace_replay::to_table(w, runs.back()).find("no shares to compare") != std::string::npos);
    CHECK(trace_replay::verdict(w, runs).find("percentage points") == std::string::npos);

    runs.back().tenants[0].windows = runs.back().tenants[1].windows = 3;
    runs.back().share_error_pp = 0.5;
    CHECK(trace_replay::to_table(w, runs.back()).find("0.50 percentage points") != std::string::npos);
    CHECK(trace_replay::verdict(w, runs).find("within 0.50 percentage points") != std::string::npos);
}
