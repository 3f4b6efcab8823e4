// SPDX-License-Identifier: Apache-2.0
// The figures of the front door: what a tenant's calls cost beside the parts that they are made of.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <stdexcept>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/gpushare.hpp>

#include "arguments.hpp"
#include "harness.hpp"
#include "support/composition/host_backend.hpp"
#include "support/composition/matrix.hpp"

namespace {

using namespace gpushare::literals;

constexpr std::size_t repeats = 41, calls = 200'000;

/// The least that a correct quota can do: one compare-and-swap to reserve and one subtract to release.
double floor_pair() {
    std::atomic<std::uint64_t> used{0};
    return bench::ns_per_call(calls, [&] {
        auto now = used.load(std::memory_order_relaxed);
        while (now + 4096 <= (1ULL << 30) && !used.compare_exchange_weak(now, now + 4096)) {
        }
        bench::keep(now);
        used.fetch_sub(4096);
    });
}

template <class Tenant>
double pair_of(Tenant& tenant) {
    return bench::ns_per_call(calls, [&] {
        void* const p = tenant.memory().allocate(4096);
        bench::keep(p);
        bench::keep(tenant.memory().deallocate(p, 4096));
    });
}

/// A block of a tenant's memory, allocated and freed through its handle, in a tenancy without options.
void allocate_pair(bench::report& r) {
    gpushare::host::node node{{.memory = 8_GiB}};
    gpushare::tenancy shared{node};
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
    r.figure("tenant.allocate_pair_vs_cas", bench::ratios(repeats, ours, floor_pair), "x");
    const auto direct = [&] { return pair_of(each); };
    r.figure("tenant.allocate_pair_direct_vs_cas", bench::ratios(repeats, direct, floor_pair), "x");
}

/// The composition matrix of the tests, on the host: how many cells it has, and in how many a promise wasn't kept.
void matrix(bench::report& r) {
    const auto all = support::composition::run_matrix<support::composition::host_backend>();
    for (const auto& what : all.wrong) std::printf("# %s\n", what.c_str());
    r.figure("tenant.matrix_cells", {static_cast<double>(all.cells)}, "count");
    r.figure("tenant.matrix_failures", {static_cast<double>(all.failed)}, "count");
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const bench::arguments asked(argc, argv);
        bench::start_a_second_thread();
        bench::report r("one thread, a tenancy without options over a host node");
        allocate_pair(r);
        matrix(r);
        r.write(asked.json());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_tenant: %s\n", e.what());
        return 1;
    }
}
