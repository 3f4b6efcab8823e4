// SPDX-License-Identifier: Apache-2.0
// Compares all-reduce with each MPI library on this machine, with Gloo, and with a plain copy of
// the same bytes. Also compares pipelines with the same steps in sequence, streams with rank
// threads, and measures how fast an abort takes effect.
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/submit.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>

#include "arguments.hpp"
#include "collective/group.hpp"
#include "collective/measurements.hpp"
#include "collective/peers.hpp"
#include "collective/sweep.hpp"
#include "harness.hpp"

namespace {

namespace gs = gpushare;
using namespace std::chrono_literals;
using bench::on_ranks;

constexpr std::size_t rounds = 5;
constexpr std::size_t sizes = std::size(bench::sweep_sizes);

/// Tunes for programs that read the result, as the sweep does.
gs::tuning_table tuned(unsigned ranks) {
    const gs::communicator group(ranks);
    gs::tuning_table table;
    on_ranks(group, [&](const gs::member& me) {
        auto mine = gs::tune(me);
        if (me.rank() == 0) table = std::move(mine);
    });
    return table;
}

/// Our all-reduce with default settings, a thread for each rank.
std::vector<double> ours(unsigned ranks) {
    const gs::communicator group(ranks);
    std::vector<double> medians;
    on_ranks(group, [&](const gs::member& me) {
        bench::arenas memory;
        auto mine = bench::sweep(
            memory,
            [&](float* in, float* out, std::size_t n) { gs::all_reduce(me, std::span(in, n), std::span(out, n)); },
            [&] { gs::barrier(me); });
        if (me.rank() == 0) medians = std::move(mine);
    });
    return medians;
}

/// Our all-reduce on streams of the host backend. One thread submits and waits for all ranks.
std::vector<double> ours_on_streams(unsigned ranks) {
    gs::host::node node({.devices = ranks, .sms = 1});
    const gs::communicator group(ranks);
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> queues;
    std::vector<gs::member> members;
    for (unsigned r = 0; r < ranks; ++r) {
        devices.push_back({r});
        queues.push_back(node.make_stream(devices[r]));
        members.push_back(group.rank(r));
    }
    std::vector<bench::arenas> memory(ranks);
    return bench::sweep(
        memory[0],
        [&](float* first_in, float* first_out, std::size_t n) {
            std::vector<const float*> in;
            std::vector<float*> out;
            const auto at = first_in - memory[0].in.data();
            for (auto& m : memory) {
                in.push_back(m.in.data() + at);
                out.push_back((first_in == first_out ? m.in : m.out).data() + at);
            }
            if (gs::submit_all_reduce<float>(node.gangs(), devices, std::span(queues), members, in, out, n) !=
                gs::errc::none)
                throw std::runtime_error("submitting failed");
            for (auto& q : queues) q.record().wait(gs::never);
            // The sweep itself reads the result of rank 0.
            for (unsigned r = 1; r < ranks; ++r) bench::read_result(out[r], n);
        },
        [] {}, 4);
}

/// The result of one sweep for each round.
using sweeps = std::vector<std::vector<double>>;

/// Reports the lowest ratio among the sizes in [first, last) and the buffer uses `from` to `to`.
/// The ratio for a size is the median over the rounds.
void ratio_figure(bench::report& r, const std::string& name, const sweeps& mine, const sweeps& other, std::size_t first,
                  std::size_t last, bench::buffers from = bench::buffers::warm,
                  bench::buffers to = bench::buffers::cold) {
    std::vector<double> least;
    for (auto i = static_cast<std::size_t>(from) * sizes; i < (static_cast<std::size_t>(to) + 1) * sizes; ++i) {
        if (i % sizes < first || i % sizes >= last) continue;
        std::vector<double> ratios;
        for (std::size_t k = 0; k < mine.size(); ++k)
            if (!other[k].empty()) ratios.push_back(other[k][i] / mine[k][i]);
        if (ratios.empty()) return;
        std::ranges::sort(ratios);
        if (least.empty() || ratios[ratios.size() / 2] < least[least.size() / 2]) least = ratios;
    }
    r.figure(name, least, "x");
}

double median_at(const sweeps& all, std::size_t i) {
    std::vector<double> values;
    for (const auto& s : all)
        if (!s.empty()) values.push_back(s[i]);
    return values.empty() ? 0 : bench::value_of(bench::statistic::median, std::move(values));
}

void compare(bench::report& r, unsigned ranks) {
    const std::string tail = ranks == 2 ? "" : "_" + std::to_string(ranks) + "_ranks";
    sweeps mine, streams, mpi, gloo;
    const bench::mpi_peers mpis(ranks);
    r.setting("mpi" + tail, mpis.kept());
    r.setting("gloo", bench::gloo_settings());
    for (std::size_t k = 0; k < rounds; ++k) {
        mpi.push_back(mpis.sweep());
        mine.push_back(ours(ranks));
        gloo.push_back(bench::gloo_tcp(ranks));
        if (ranks == 2) streams.push_back(ours_on_streams(ranks));
    }
    std::printf("# %u ranks, us: bytes, ours, the best MPI, Gloo; the same cold; the same in place\n", ranks);
    for (std::size_t i = 0; i < sizes; ++i) {
        std::printf("# %9zu", bench::sweep_sizes[i]);
        for (std::size_t use = 0; use < std::size(bench::sweep_buffers); ++use)
            std::printf("   %9.2f %9.2f %9.2f", median_at(mine, i + use * sizes), median_at(mpi, i + use * sizes),
                        median_at(gloo, i + use * sizes));
        std::printf("\n");
    }
    ratio_figure(r, "collective.vs_openmpi_min" + tail, mine, mpi, 3, sizes);
    ratio_figure(r, "collective.vs_openmpi_small_min" + tail, mine, mpi, 0, 3);
    constexpr auto in_place = bench::buffers::in_place;
    ratio_figure(r, "collective.vs_openmpi_in_place_min" + tail, mine, mpi, 3, sizes, in_place, in_place);
    ratio_figure(r, "collective.vs_openmpi_in_place_small_min" + tail, mine, mpi, 0, 3, in_place, in_place);
    ratio_figure(r, "collective.vs_gloo_min" + tail, mine, gloo, 0, sizes);
    if (ranks != 2) return;
    ratio_figure(r, "collective.streams_vs_openmpi_min", streams, mpi, 3, sizes);
    ratio_figure(r, "collective.streams_vs_openmpi_small_min", streams, mpi, 0, 3);
}

void streams(bench::report& r) {
    gs::host::node node({.devices = 2, .sms = 1});
    std::vector<gs::device_id> devices{{0}, {1}};
    std::vector<gs::host::stream> queues;
    for (const auto d : devices) queues.push_back(node.make_stream(d));
    const gs::communicator group(2);
    std::vector<gs::member> members{group.rank(0), group.rank(1)};
    std::vector<std::vector<float>> x(2, std::vector<float>(256));
    const std::vector<const float*> in{x[0].data(), x[1].data()};
    const std::vector<float*> out{x[0].data(), x[1].data()};
    const auto submitted = [&] {
        return bench::ns_per_call(200, [&] {
            if (gs::submit_all_reduce<float>(node.gangs(), devices, std::span(queues), members, in, out, 256) !=
                gs::errc::none)
                throw std::runtime_error("submitting failed");
            for (auto& q : queues) q.record().wait(gs::never);
        });
    };
    const gs::communicator other(2);
    const auto called = [&] {
        double us = 0;
        on_ranks(other, [&](const gs::member& me) {
            std::vector<float> y(256);
            gs::barrier(me);
            const double ns = bench::ns_per_call(2000, [&] { gs::all_reduce(me, y, std::span(y)); });
            if (me.rank() == 0) us = ns;
        });
        return us;
    };
    r.figure("collective.stream_overhead_us", bench::repeated(9, [&] { return (submitted() - called()) / 1e3; }), "us");
}

void aborts(bench::report& r) {
    r.figure("collective.abort_ms",
             bench::repeated(
                 21,
                 [] {
                     const gs::communicator group(4);
                     std::atomic<int> waiting{0};
                     std::atomic<std::int64_t> last{0};
                     std::int64_t begin = 0;
                     {
                         std::vector<std::jthread> threads;
                         for (std::uint32_t rank = 1; rank < 4; ++rank)
                             threads.emplace_back([&, rank] {
                                 std::vector<float> x(1 << 20);
                                 ++waiting;
                                 if (gs::try_all_reduce(group.rank(rank), x, std::span(x)).code != gs::errc::aborted)
                                     std::abort();
                                 const std::int64_t now = gs::detail::thread_context::now();
                                 for (auto seen = last.load(); seen < now && !last.compare_exchange_weak(seen, now);) {
                                 }
                             });
                         while (waiting < 3) std::this_thread::yield();
                         std::this_thread::sleep_for(1ms);
                         begin = gs::detail::thread_context::now();
                         group.abort(0);
                     }
                     return static_cast<double>(last.load() - begin) / 1e6;
                 }),
             "ms");
}

}  // namespace

int main(int argc, char** argv) try {
    const bench::arguments asked(argc, argv, {"two", "four", "floors", "types", "fused", "streams", "abort", "tune"});
    bench::report r(
        "collective: float32, one communicator per measurement, the default tuning table; every result is read by its "
        "rank");
    bench::start_a_second_thread();
    if (asked.wants_only("tune")) {
        for (const unsigned ranks : {2U, 4U}) std::printf("%s", tuned(ranks).save().c_str());
        return 0;
    }
    if (asked.wants("two")) compare(r, 2);
    if (asked.wants("four")) compare(r, 4);
    if (asked.wants("floors")) bench::collective::floors(r);
    if (asked.wants("types")) bench::collective::types(r);
    if (asked.wants("fused")) bench::collective::fused_gains(r);
    if (asked.wants("streams")) streams(r);
    if (asked.wants("abort")) aborts(r);
    r.write(asked.json());
} catch (const std::exception& e) {
    std::fprintf(stderr, "bench_collective: %s\n", e.what());
    return 1;
}
