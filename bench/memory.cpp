// SPDX-License-Identifier: Apache-2.0
// Measures memory: what quotas, pools and arenas cost compared with floors and with peers, and
// whether quotas are exact.
#include <gpushare/memory/pool_resource.hpp>

#include <cstdio>
#include <exception>
#include <string>

#include "arguments.hpp"
#include "harness.hpp"
#include "memory/arena.hpp"
#include "memory/parts.hpp"
#include "memory/sources.hpp"

int main(int argc, char** argv) {
    try {
        const bench::arguments asked(argc, argv, {"quotas", "pools", "workloads", "arena"});
        bench::prepare_for_peers(argv);
        bench::start_a_second_thread();
        const gpushare::pool_options by_default;
        const auto mebibytes = [](gpushare::bytes b) { return std::to_string(b.count() >> 20) + " MiB"; };
        bench::report r("quotas with current, peak and counts; pools with segments of " +
                        mebibytes(by_default.usual_segment) + " and caches that may keep " +
                        mebibytes(by_default.kept));
        bench::peer_settings(r);
        if (asked.wants("quotas")) bench::quotas(r);
        if (asked.wants("pools")) bench::pools(r);
        if (asked.wants("workloads")) bench::workloads(r);
        if (asked.wants("arena")) bench::arena(r);
        r.write(asked.json());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_memory: %s\n", e.what());
        return 1;
    }
}
