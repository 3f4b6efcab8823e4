// SPDX-License-Identifier: Apache-2.0
// Measures the core: the cost of the parts on which everything else rests, and how exactly the demo
// divides the device.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/gpushare.hpp>

#include "arguments.hpp"
#include "harness.hpp"
#include "quota_floor.hpp"
#include "trace_replay/generator.hpp"
#include "trace_replay/replay.hpp"
#include "trace_replay/trace.hpp"
#include "trace_replay/workload.hpp"

namespace {

std::atomic<std::size_t> allocations{0};

}  // namespace

// Counts the program's allocations, so that the benchmark can measure "no allocation". The
// functions aren't inlined, because g++ would then see a pointer from malloc reach operator delete
// and warn.
[[gnu::noinline]] void* operator new(std::size_t size) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;

constexpr std::size_t repeats = 41;

/// Compares a quota that tracks the current level, the peak and the counts with the cheapest
/// correct quota: one compare-and-swap to reserve and one subtraction to release.
void quota_pair(bench::report& r) {
    constexpr std::size_t calls = 200'000;
    const auto ours = [] {
        gpushare::quota q{1_GiB};
        return bench::ns_per_call(calls, [&] {
            bench::keep(q.try_charge(4_KiB));
            bench::keep(q.release(4_KiB));
        });
    };
    r.figure("core.quota_pair_ns", bench::repeated(repeats, ours), "ns");
    r.figure("core.quota_pair_vs_cas", bench::ratios(repeats, ours, [] { return bench::quota_floor(calls); }), "x");
}

/// Finishes each piece of work at once, so that only the limiter's own cost is left.
struct immediate_stream {
    using point = gpushare::immediate_point;
    static point record() { return {}; }
};

/// Measures an uncontended permit, from the request to the hand-over of the work: the gate and its
/// accounting.
void admit(bench::report& r) {
    constexpr std::size_t calls = 100'000;
    gpushare::compute_limiter<immediate_stream, gpushare::host::steady_clock> limiter;
    const auto client = limiter.add({.weight = 50_pct});
    (void)limiter.add({.weight = 50_pct});
    immediate_stream s;
    const auto permit = [&] {
        return bench::ns_per_call(calls, [&] { limiter.acquire(client)->enqueue(s, [](auto& x) { bench::keep(x); }); });
    };
    const auto values = bench::repeated(repeats, permit);
    const auto before = allocations.load();
    permit();
    if (allocations.load() != before) throw std::runtime_error("core.admit_ns: the gate has allocated memory");
    r.figure("core.admit_ns", values, "ns");
    const auto queued = [&] {
        return bench::ns_per_call(calls, [&] { (void)limiter.submit(client, s, [](auto& x) { bench::keep(x); }); });
    };
    r.figure("core.submit_ns", bench::repeated(repeats, queued), "ns");
    limiter.close(client);
}

/// Measures an empty kernel's launch on the host device while the SMs are busy, which is when
/// launches matter.
void host_launch(bench::report& r) {
    constexpr std::size_t calls = 20'000;
    r.figure("core.host_launch_ns",
             bench::repeated(repeats,
                             [] {
                                 gpushare::host::node node{{.sms = 1, .timing = gpushare::host::timing::modelled}};
                                 auto busy = node.make_stream({0}, {1}, 1), s = node.make_stream({0}, {}, 2);
                                 const auto launch = [&] { s.launch({.blocks = 1}, [](auto&) {}); };
                                 for (std::size_t i = 0; i < calls; ++i) launch();  // fills the pools
                                 s.record().wait(gpushare::never);
                                 busy.enqueue(60s);
                                 const double cost = bench::ns_per_call(calls, launch);
                                 node.faults({0}).lose_device();
                                 return cost;
                             }),
             "ns");
}

/// Runs the demo with weights. The figure is the largest share error of a backlogged tenant in any
/// second of any window of the trace, by the node's ledger.
void demo_shares(bench::report& r) {
    trace_replay::options o;
#ifdef GPUSHARE_SHARED_DATA
    o.trace = GPUSHARE_SHARED_DATA "/lora_request_trace.csv";
#endif
    if (!std::filesystem::exists(o.trace)) o.trace.clear();
    const auto trace = o.trace.empty() ? trace_replay::generate(o.seed, trace_replay::demo_requests)
                                       : trace_replay::read_trace_file(o.trace);
    std::vector<double> errors, relative, together;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {  // five windows of the trace
        o.seed = seed;
        const auto run = trace_replay::replay(trace_replay::make_workload(trace, o), o, trace_replay::way::weighted);
        errors.push_back(run.share_error_pp);
        relative.push_back(run.share_error_percent);
        together.push_back(run.together_s);
        if (run.share_error_pp == 0) throw std::runtime_error("core.demo_share_error_pp: nobody was backlogged");
    }
    std::printf("# weighted runs of 5 windows of %s\n",
                o.trace.empty() ? "the built-in generator" : "lora_request_trace.csv");
    r.figure("core.demo_share_error_pp", {std::ranges::max(errors)}, "pp");  // the worst window
    r.figure("core.demo_share_error_of_a_window_pp", errors, "pp");
    r.figure("core.demo_share_error_of_a_share", {std::ranges::max(relative)}, "%");
    r.figure("core.demo_three_backlogged_s", together, "s");
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const bench::arguments asked(argc, argv);
        bench::start_a_second_thread();
        bench::report r("one thread, limiter depth 3, host node with 2 modelled SMs a device");
        quota_pair(r);
        admit(r);
        host_launch(r);
        demo_shares(r);
        r.write(asked.json());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_core: %s\n", e.what());
        return 1;
    }
}
