// SPDX-License-Identifier: Apache-2.0
// Measures the front door: a tenant's calls compared with the parts that they combine.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/gpushare.hpp>
#include <gpushare/tenant/move.hpp>

#include "arguments.hpp"
#include "harness.hpp"
#include "quota_floor.hpp"
#include "support/composition/host_backend.hpp"
#include "support/composition/matrix.hpp"

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::device_id;
using gpushare::host::node;

constexpr std::size_t repeats = 41, calls = 200'000;

double floor_ns() { return bench::quota_floor(calls); }

template <class Tenant>
double pair_of(Tenant& tenant) {
    return bench::ns_per_call(calls, [&] {
        void* const p = tenant.memory().allocate(4096);
        bench::keep(p);
        bench::keep(tenant.memory().deallocate(p, 4096));
    });
}

/// Measures a block of tenant memory, allocated and freed through the tenant's handle, in a tenancy
/// without options.
void allocate_pair(bench::report& r) {
    node device{{.memory = 8_GiB}};
    gpushare::tenancy shared{device};
    auto chat = shared.admit({.name = "chat", .memory = 6_GiB, .compute = 50_pct});
    auto each =
        shared.admit({.name = "each", .memory = 1_GiB, .compute = 50_pct, .stack = gpushare::memory_stack::direct});
    const auto ours = [&] { return pair_of(chat); };
    const auto values = bench::repeated(repeats, ours);
    const auto before = chat.memory().limit().usage().charges;
    ours();
    if (chat.memory().limit().usage().charges != before)
        throw std::runtime_error("tenant.allocate_pair_ns: the device was asked");
    r.figure("tenant.allocate_pair_ns", values, "ns");
    const auto direct = bench::ratios(
        repeats, [&] { return pair_of(each); }, floor_ns);
    r.figure("tenant.allocate_pair_vs_cas", bench::ratios(repeats, ours, floor_ns), "x",
             {bench::at_most(4), bench::value_of(bench::statistic::median, direct), "each block from the device"});
    r.figure("tenant.allocate_pair_direct_vs_cas", direct, "x");
}

double us(gpushare::ns t) { return std::chrono::duration<double, std::micro>(t).count(); }

/// Measures the admission of one more tenant to eight devices that a thousand tenants share.
void admission(bench::report& r) {
    constexpr std::size_t there = 1000, each = 10;
    node devices{{.devices = 8, .memory = 1_GiB, .sms = 1, .timing = gpushare::host::timing::modelled}};
    gpushare::tenancy shared{devices};
    const auto admit = [&](std::size_t number) {
        return shared.admit(
            {.name = std::to_string(number), .memory = 1_MiB, .compute = gpushare::share::of_permille(1)});
    };
    std::vector<decltype(shared)::tenant> all;
    while (all.size() < there) all.push_back(admit(all.size()));
    const auto one_more = [&] {
        gpushare::ns took{};
        for (std::size_t i = 0; i < each; ++i) {
            const auto began = shared.now();
            auto t = admit(there);
            took += shared.now() - began;
            t.close();
        }
        return us(took) / each;
    };
    r.figure("tenant.admit_us", bench::repeated(repeats, one_more), "us");
}

/// Moves a tenant with 256 MiB in 16 blocks and a millisecond of work in progress to another
/// device, and on the next pass back. After each such move, measures a move to the same device.
void moves(bench::report& r) {
    constexpr std::size_t count = 16, size = std::size_t{16} << 20;
    constexpr double per_gib = 1024.0 / (count * 16);
    node devices{{.devices = 2, .memory = 1_GiB, .sms = 2, .timing = gpushare::host::timing::modelled}};
    gpushare::tenancy shared{devices};
    auto chat = shared.admit({.name = "chat", .memory = 300_MiB, .compute = 40_pct, .on = {{0}}});
    std::vector<gpushare::moving_block> blocks;
    for (std::size_t i = 0; i < count; ++i) {
        blocks.push_back({.at = chat.memory().allocate(size), .size = size});
        std::memset(blocks.back().at, 1, size);
    }
    const auto move_to = [&](device_id d) {
        chat.submit([](auto& s) { s.launch({.blocks = 1, .hold = 1ms}, [](auto&) {}); });
        const auto began = shared.now();
        auto moved = move_tenant(shared, chat, {d}, blocks);
        const auto all = shared.now() - began;
        if (!moved.report.closed.complete) throw std::runtime_error("tenant.move_us_per_gib: it isn't closed");
        chat = std::move(moved.successor);
        return std::pair{moved.report, all};
    };
    std::vector<double> all, reserve, wait, copy, scrub, kept;
    for (std::size_t i = 0; i <= repeats; ++i) {
        const auto [report, took] = move_to({i % 2 == 0 ? 1U : 0U});
        const auto stayed = move_to({i % 2 == 0 ? 1U : 0U}).second;
        if (i == 0) continue;  // a warm-up
        all.push_back(us(took) * per_gib);
        reserve.push_back(us(report.reserve));
        wait.push_back(us(report.wait));
        copy.push_back(us(report.copy) * per_gib);
        scrub.push_back(us(report.scrub) * per_gib);
        kept.push_back(us(stayed));
    }
    r.figure("tenant.move_us_per_gib", all, "us");
    r.figure("tenant.move_copy_us_per_gib", copy, "us");
    r.figure("tenant.move_scrub_us_per_gib", scrub, "us");
    r.figure("tenant.move_wait_us", wait, "us");
    r.figure("tenant.move_reserve_us", reserve, "us");
    r.figure("tenant.move_kept_us", kept, "us");
}

/// Runs the tests' composition matrix on the host: counts the cells, and counts the cells in which
/// a promise was broken.
void matrix(bench::report& r) {
    const auto all = support::composition::run_matrix<support::composition::host_backend>();
    for (const auto& what : all.wrong) std::printf("# %s\n", what.c_str());
    using support::composition::host_backend;
    const auto planted = support::composition::run_matrix<host_backend>(
        10, {support::composition::kind<support::composition::refusing_stack<host_backend>, host_backend>("refusing")},
        "refusing, quota");
    r.figure("tenant.matrix_cells", {static_cast<double>(all.cells)}, "count");
    r.figure("tenant.matrix_failures", {static_cast<double>(all.failed)}, "count",
             {bench::at_most(0), static_cast<double>(planted.failed), "a stack that refuses what fits"});
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const bench::arguments asked(argc, argv);
        bench::start_a_second_thread();
        bench::report r("one thread, a tenancy without options over a host node");
        allocate_pair(r);
        admission(r);
        moves(r);
        matrix(r);
        r.write(asked.json());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_tenant: %s\n", e.what());
        return 1;
    }
}
