// SPDX-License-Identifier: Apache-2.0
// All-reduce against OpenMPI, Gloo and a copy of the same bytes; pipelines against their steps one after the other; streams
// against rank threads; how fast an abort is.
#include <gpushare/collective/all_reduce.hpp>
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/collective/tune.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>

#include "arguments.hpp"
#include "collective/copies.hpp"
#include "collective/peers.hpp"
#include "collective/sweep.hpp"
#include "harness.hpp"

namespace {

namespace gs = gpushare;
using namespace std::chrono_literals;

constexpr std::size_t rounds = 5;
constexpr std::size_t sizes = std::size(bench::sweep_sizes);

/// Calls body(member) in a thread per rank.
template <class Body>
void on_ranks(const gs::communicator& group, const Body& body) {
    std::vector<std::jthread> threads;
    for (std::uint32_t r = 0; r < group.size(); ++r) threads.emplace_back([&, r] { body(group.rank(r)); });
}

/// For results that nobody reads, which is what a sweep measures.
gs::tuning_table tuned(unsigned ranks, bool results_are_read = false) {
    const gs::communicator group(ranks);
    gs::tuning_table table;
    on_ranks(group, [&](const gs::member& me) {
        auto mine = gs::tune(me, {.results_are_read = results_are_read});
        if (me.rank() == 0) table = std::move(mine);
    });
    return table;
}

std::vector<double> ours(unsigned ranks, const gs::tuning_table& table) {
    const gs::communicator group(ranks, {.tuning = table});
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

/// A sweep per round.
using sweeps = std::vector<std::vector<double>>;

/// The least ratio over sizes [first, last) and the uses of buffers from `from` to `to` of the medians over rounds.
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

std::string commented(const std::string& lines) {
    std::string text;
    for (std::size_t at = 0; at < lines.size();) {
        const std::size_t end = lines.find('\n', at);
        text += "#   " + lines.substr(at, end - at) + '\n';
        at = end + 1;
    }
    return text;
}

double median_at(const sweeps& all, std::size_t i) {
    std::vector<double> values;
    for (const auto& s : all)
        if (!s.empty()) values.push_back(s[i]);
    if (values.empty()) return 0;
    std::ranges::sort(values);
    return values[values.size() / 2];
}

void compare(bench::report& r, unsigned ranks) {
    sweeps mine, mpi, gloo;
    const auto table = tuned(ranks);
    std::printf("# what `tune` found where nobody reads the results:\n%s", commented(table.save()).c_str());
    for (std::size_t k = 0; k < rounds; ++k) {
        mpi.push_back(bench::open_mpi(ranks));
        mine.push_back(ours(ranks, table));
        gloo.push_back(k < 3 ? bench::gloo_tcp(ranks) : std::vector<double>{});
    }
    std::printf("# %u ranks, us: bytes, ours, OpenMPI, Gloo; the same cold; the same in place\n", ranks);
    for (std::size_t i = 0; i < sizes; ++i) {
        std::printf("# %9zu", bench::sweep_sizes[i]);
        for (std::size_t use = 0; use < std::size(bench::sweep_buffers); ++use)
            std::printf("   %9.2f %9.2f %9.2f", median_at(mine, i + use * sizes), median_at(mpi, i + use * sizes),
                        median_at(gloo, i + use * sizes));
        std::printf("\n");
    }
    const std::string tail = ranks == 2 ? "" : "_" + std::to_string(ranks) + "_ranks";
    ratio_figure(r, "collective.vs_openmpi_min" + tail, mine, mpi, 3, sizes);
    ratio_figure(r, "collective.vs_openmpi_small_min" + tail, mine, mpi, 0, 3);
    constexpr auto in_place = bench::buffers::in_place;
    ratio_figure(r, "collective.vs_openmpi_in_place_min" + tail, mine, mpi, 3, sizes, in_place, in_place);
    ratio_figure(r, "collective.vs_openmpi_in_place_small_min" + tail, mine, mpi, 0, 3, in_place, in_place);
    ratio_figure(r, "collective.vs_gloo_min" + tail, mine, gloo, 0, sizes);
}

/// Microseconds, the median of `n` runs of `f` on every rank at once.
double timed(const gs::communicator& group, std::size_t n, const std::function<void(const gs::member&)>& f) {
    std::vector<double> took;
    on_ranks(group, [&](const gs::member& me) {
        for (std::size_t i = 0; i < n + 1; ++i) {
            gs::barrier(me);
            const auto begin = std::chrono::steady_clock::now();
            f(me);
            gs::barrier(me);
            const std::chrono::duration<double, std::micro> d = std::chrono::steady_clock::now() - begin;
            if (me.rank() == 0 && i > 0) took.push_back(d.count());
        }
    });
    std::ranges::sort(took);
    return took[took.size() / 2];
}

struct aligned_floats {
    explicit aligned_floats(std::size_t n) : memory(n + 16) {
        data = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64 / sizeof(float);
        for (std::size_t i = 0; i < n; ++i) data[i] = static_cast<float>(i % 13);
    }
    std::vector<float> memory;
    float* data;
};

/// Each rank's thread touches its arrays first. The floor is the copy that is the fastest over all rounds.
void copy_fraction(bench::report& r) {
    const gs::communicator group(2);
    constexpr std::size_t n = std::size_t{16} << 20;
    std::vector<std::optional<aligned_floats>> in(2), out(2);
    on_ranks(group, [&](const gs::member& me) {
        in[me.rank()].emplace(n);
        out[me.rank()].emplace(n);
    });
    const auto ways = bench::copies();
    std::vector<std::vector<double>> copying(ways.size());
    std::vector<double> reducing;
    for (std::size_t k = 0; k < rounds; ++k) {
        for (std::size_t w = 0; w < ways.size(); ++w)
            copying[w].push_back(timed(
                group, 5, [&](const gs::member& me) { ways[w].call(out[me.rank()]->data, in[me.rank()]->data, n); }));
        reducing.push_back(timed(group, 5, [&](const gs::member& me) {
            gs::all_reduce(me, std::span(in[me.rank()]->data, n), std::span(out[me.rank()]->data, n));
        }));
    }
    const auto middle = [](std::vector<double> v) {
        std::ranges::sort(v);
        return v[v.size() / 2];
    };
    const auto best = static_cast<std::size_t>(std::ranges::min_element(copying, {}, middle) - copying.begin());
    std::vector<double> fractions;
    for (std::size_t k = 0; k < rounds; ++k) fractions.push_back(copying[best][k] / reducing[k]);
    r.figure("collective.copy_64mib_us", copying[best], "us");
    std::printf("#   %s\n", ways[best].name);
    r.figure("collective.all_reduce_64mib_us", reducing, "us");
    r.figure("collective.copy_fraction_64mib", fractions, "of a copy");
}

/// Elements of 8 and 16 bits, and the larger of two floats, against sums of floats that take as many bytes: 1 MiB.
void types(bench::report& r) {
    const gs::communicator group(2);
    constexpr std::size_t bytes = std::size_t{1} << 20;
    const auto us_of = [&]<class T, class Op>(std::vector<std::vector<T>>& x, std::vector<std::vector<T>>& y, Op op) {
        return timed(group, 51, [&](const gs::member& me) {
            gs::all_reduce(me, std::span<const T>(x[me.rank()]), std::span(y[me.rank()]), op);
        });
    };
    const auto against_floats = [&]<class T, class Op = gs::sum>(const char* name, T, Op op = {}) {
        std::vector<std::vector<T>> x(2, std::vector<T>(bytes / sizeof(T))), y = x;
        std::vector<std::vector<float>> a(2, std::vector<float>(bytes / sizeof(float))), b = a;
        r.figure(name,
                 bench::ratios(
                     rounds, [&] { return us_of(x, y, op); }, [&] { return us_of(a, b, gs::sum{}); }),
                 "x");
    };
    against_floats("collective.bfloat16_vs_float", gs::bfloat16{});
    against_floats("collective.float16_vs_float", gs::float16{});
    against_floats("collective.int8_vs_float", std::int8_t{});
    against_floats("collective.int8_average_vs_float", std::int8_t{}, gs::average{});
    against_floats("collective.int32_average_vs_float", std::int32_t{}, gs::average{});
    against_floats("collective.fp8_e4m3_vs_float", gs::fp8_e4m3{});
    against_floats("collective.maximum_vs_float", float{}, gs::maximum{});
    // A transformer's residual and norm of 64 rows, everything in T.
    const auto fused_us = [&]<class T>(T) {
        constexpr std::size_t width = 4096, n = 64 * width;
        const std::vector<T> weight(width, T{1.1F});
        std::vector<std::vector<T>> x(2, std::vector<T>(n, T{0.5F})), residual = x, y = x;
        return timed(group, 51, [&](const gs::member& me) {
            const auto own = me.rank();
            gs::run(me,
                    gs::reduced(std::span<const T>(x[own]), width) | gs::add(residual[own]) |
                        gs::rms_norm(weight, 1e-6F) | gs::cast<T>(),
                    std::span(y[own]));
        });
    };
    const auto fused_against_floats = [&]<class T>(const char* name, T of_type) {
        r.figure(name,
                 bench::ratios(
                     rounds, [&] { return fused_us(of_type); }, [&] { return fused_us(float{}); }),
                 "x");
    };
    fused_against_floats("collective.fused_bfloat16_vs_float", gs::bfloat16{});
    fused_against_floats("collective.fused_float16_vs_float", gs::float16{});
}

/// All-reduce + residual + RMSNorm + bf16 of `tokens` rows of 4096.
struct transformer_step {
    static constexpr std::size_t width = 4096;
    explicit transformer_step(std::size_t tokens) : group(2), n(tokens * width), weight(width, 1.1F) {
        for (int r = 0; r < 2; ++r) {
            alone.emplace_back(1U);
            x.emplace_back(n);
            residual.emplace_back(n);
            a.emplace_back(n);
            b.emplace_back(n);
            c.emplace_back(n);
            out.emplace_back(n);
        }
    }
    [[nodiscard]] auto head(std::uint32_t r) const { return gs::reduced(std::span<const float>(x[r].data, n), width); }
    double fused() const {
        return timed(group, repeats(), [&](const gs::member& me) {
            const auto r = me.rank();
            gs::run(me, head(r) | gs::add(residual_of(r)) | gs::rms_norm(weight, 1e-6F) | gs::cast<gs::bfloat16>(),
                    out[r]);
        });
    }
    double one_by_one() const {
        return timed(group, repeats(), [&](const gs::member& me) {
            const auto r = me.rank();
            gs::all_reduce(me, std::span<const float>(x[r].data, n), std::span(a[r].data, n));
            steps(alone[r].rank(0), r, n, residual_of(r));
        });
    }
    double field() const {
        return timed(group, repeats(), [&](const gs::member& me) {
            const auto r = me.rank();
            gs::all_reduce(me, std::span<const float>(x[r].data, n), std::span(a[r].data, n));
            gs::run(alone[r].rank(0),
                    gs::reduced(std::span<const float>(a[r].data, n), width) | gs::add(residual_of(r)) |
                        gs::rms_norm(weight, 1e-6F) | gs::cast<gs::bfloat16>(),
                    out[r]);
        });
    }
    double sharded() const {
        return timed(group, repeats(), [&](const gs::member& me) {
            const auto r = me.rank();
            gs::run_sharded(me,
                            head(r) | gs::add(residual_of(r)) | gs::rms_norm(weight, 1e-6F) | gs::cast<gs::bfloat16>(),
                            std::span(out[r]).first(n / 2));
        });
    }
    double sharded_one_by_one() const {
        return timed(group, repeats(), [&](const gs::member& me) {
            const auto r = me.rank();
            gs::reduce_scatter(me, std::span<const float>(x[r].data, n), std::span(a[r].data, n / 2));
            steps(alone[r].rank(0), r, n / 2, residual_of(r).first(n / 2));
        });
    }

private:
    [[nodiscard]] std::size_t repeats() const { return n > (std::size_t{1} << 20) ? 9 : 51; }
    [[nodiscard]] std::span<const float> residual_of(std::uint32_t r) const { return {residual[r].data, n}; }
    /// Each step a pass over memory, in the same vectorised loops as the fused ones.
    void steps(const gs::member& self, std::uint32_t r, std::size_t count, std::span<const float> more) const {
        const auto pass = [&](const float* from) { return gs::reduced(std::span(from, count), width); };
        gs::run(self, pass(a[r].data) | gs::add(more), std::span(b[r].data, count));
        gs::run(self, pass(b[r].data) | gs::rms_norm(weight, 1e-6F), std::span(c[r].data, count));
        gs::run(self, pass(c[r].data) | gs::cast<gs::bfloat16>(), std::span(out[r]).first(count));
    }

    gs::communicator group;
    std::vector<gs::communicator> alone;  // a group of one for each rank, whose steps are passes over its own memory
    std::size_t n;
    std::vector<float> weight;
    std::vector<aligned_floats> x, residual, a, b, c;
    mutable std::vector<std::vector<gs::bfloat16>> out;
};

void fused_gains(bench::report& r) {
    std::vector<double> replicated, field, sharded, sharded_steps;
    const auto keep_least = [](std::vector<double>& least, std::vector<double> now) {
        std::ranges::sort(now);
        if (least.empty() || now[now.size() / 2] < least[least.size() / 2]) least = std::move(now);
    };
    std::printf("# tokens: us fused, gain over (a), over (b); us sharded, gain over its steps, over (a)\n");
    for (const std::size_t tokens : {16U, 64U, 256U, 1024U, 2048U}) {
        const transformer_step s(tokens);
        std::vector<double> a, b, c, d;
        double fused = 0, sharded_us = 0;
        for (std::size_t k = 0; k < rounds; ++k) {
            fused = s.fused();
            a.push_back(s.one_by_one() / fused);
            b.push_back(s.field() / fused);
            sharded_us = s.sharded();
            c.push_back(s.sharded_one_by_one() / sharded_us);
            d.push_back(s.one_by_one() / sharded_us);
        }
        std::ranges::sort(a);
        std::ranges::sort(b);
        std::ranges::sort(c);
        std::ranges::sort(d);
        std::printf("# %5zu %9.1f %6.2f %6.2f %9.1f %6.2f %6.2f\n", tokens, fused, a[rounds / 2], b[rounds / 2],
                    sharded_us, c[rounds / 2], d[rounds / 2]);
        keep_least(replicated, a);
        keep_least(field, b);
        keep_least(sharded_steps, c);
        keep_least(sharded, d);
    }
    r.figure("collective.fused_gain_min", replicated, "x");
    r.figure("collective.fused_gain_field_min", field, "x");
    r.figure("collective.fused_gain_sharded_min", sharded, "x");
    r.figure("collective.fused_gain_sharded_over_reduce_scatter_min", sharded_steps, "x");
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
    const bench::arguments asked(argc, argv, {"two", "four", "copy", "types", "fused", "streams", "abort", "tune"});
    bench::report r(
        "collective: float32, one communicator per measurement; beside peers the table that `tune` finds in this "
        "run, else the default one; OpenMPI with shared memory between processes, Gloo over TCP on the loopback");
    bench::start_a_second_thread();
    if (asked.wants_only("tune")) {
        for (const unsigned ranks : {2U, 4U}) std::printf("%s", tuned(ranks, true).save().c_str());
        return 0;
    }
    if (asked.wants("two")) compare(r, 2);
    if (asked.wants("four")) compare(r, 4);
    if (asked.wants("copy")) copy_fraction(r);
    if (asked.wants("types")) types(r);
    if (asked.wants("fused")) fused_gains(r);
    if (asked.wants("streams")) streams(r);
    if (asked.wants("abort")) aborts(r);
    r.write(asked.json());
} catch (const std::exception& e) {
    std::fprintf(stderr, "bench_collective: %s\n", e.what());
    return 1;
}
