// SPDX-License-Identifier: Apache-2.0
// Measures gradients between the threads of one process, with these comparisons: buckets with one
// call per gradient and with one large all-reduce, the tuner with every choice, negotiation with a
// coordinator, and group operators with one rank in double precision. gradient/link.hpp measures
// gradients between processes, over a link.
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/bucket_plan.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/group_operators.hpp>
#include <gpushare/gradient/negotiation.hpp>
#include <gpushare/gradient/transport.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "arguments.hpp"
#include "collective/group.hpp"
#include "gradient/devices.hpp"
#include "gradient/link.hpp"
#include "gradient/quantised.hpp"
#include "harness.hpp"

namespace {

namespace gs = gpushare;
using namespace gs::literals;
using bench::timed;

constexpr std::size_t rounds = 5;
constexpr std::uint32_t ranks = 2;

void must(const gs::collective_fault& f) {
    if (f) throw std::runtime_error(gs::describe(f).c_str());
}

/// `n` gradients of `each` floats on each rank. The first gradient starts on a cache line.
struct gradients {
    gradients(std::size_t n, std::size_t each) {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            memory.emplace_back(n * each + 16);
            float* at = memory.back().data();
            while (reinterpret_cast<std::uintptr_t>(at) % 64 != 0) ++at;
            for (std::size_t i = 0; i < n; ++i) of[r].emplace_back(at + i * each, each);
        }
    }
    std::vector<std::vector<float>> memory;
    std::vector<std::span<float>> of[ranks];
};

/// Compares three ways to combine 1000 gradients of 4 KiB: one call per gradient, buckets of the
/// default size, and one all-reduce of the same total size.
void fusion(bench::report& r) {
    const gs::communicator group(ranks);
    gradients g(1000, 1024);
    std::vector<gs::gradient_buckets<>> buckets(ranks);
    for (std::uint32_t q = 0; q < ranks; ++q)
        for (std::size_t i = 0; i < g.of[q].size(); ++i) buckets[q].add(std::to_string(i), g.of[q][i]);
    const auto one_by_one = [&] {
        return timed(group, 31, [&](const gs::member& me) {
            for (const auto& x : g.of[me.rank()]) gs::all_reduce(me, std::span<const float>(x), x, gs::average{});
        });
    };
    const auto fused = [&] {
        return timed(group, 31, [&](const gs::member& me) {
            gs::thread_transport net(me);
            auto& mine = buckets[me.rank()];
            for (std::uint32_t i = 0; i < mine.size(); ++i) (void)mine.ready(i);
            must(mine.reduce(net));
        });
    };
    const auto whole = [&] {
        return timed(group, 31, [&](const gs::member& me) {
            const std::span all(g.of[me.rank()].front().data(), std::size_t{1000} * 1024);
            gs::all_reduce(me, std::span<const float>(all), all, gs::average{});
        });
    };
    r.figure("gradient.fusion_gain", bench::ratios(rounds, one_by_one, fused), "x");
    r.figure("gradient.bucket_efficiency", bench::ratios(rounds, whole, fused), "x");
    std::vector<double> wire;
    double as_is_ratio = 0;
    {
        gs::gradient_buckets<> as_is, again, halves;
        for (const auto& x : g.of[0]) {
            as_is.add("", x);
            again.add("", x);
            halves.add("", x, {.wire = gs::wire_format::fp16});
        }
        const gs::communicator alone(1);
        gs::thread_transport a(alone.rank(0)), b(alone.rank(0)), c(alone.rank(0));
        for (auto [set, net] : {std::pair{&as_is, &a}, std::pair{&halves, &b}, std::pair{&again, &c}}) {
            for (std::uint32_t i = 0; i < set->size(); ++i) (void)set->ready(i);
            must(set->reduce(*net));
        }
        const auto over_as_is = [&](const gs::thread_transport& net) {
            return static_cast<double>(net.carried().count()) / static_cast<double>(a.carried().count());
        };
        wire.push_back(over_as_is(b));
        as_is_ratio = over_as_is(c);
    }
    r.figure("gradient.wire_bytes_ratio", wire, "x", {bench::at_most(0.5), as_is_ratio, "float32 on both wires"});
}

/// Measures a backward pass of 64 layers with growing gradients, for every choice of the tuner.
/// Each rank has one thread for computing and one for combining.
void tuner(bench::report& r) {
    gs::communicator group(ranks);
    struct rank_state {
        std::vector<std::vector<float>> of;
        gs::gradient_buckets<> buckets;
    };
    std::vector<rank_state> state(ranks);
    for (auto& s : state)
        for (std::size_t l = 0; l < 64; ++l) s.of.emplace_back(std::size_t{256} << (l / 8));
    for (auto& s : state)
        for (auto& g : s.of) s.buckets.add("", g);
    const auto step = [&](const gs::bucket_choice& choice) {
        for (auto& s : state) s.buckets.arrange(choice);
        std::vector<std::jthread> threads;
        const auto begin = std::chrono::steady_clock::now();
        for (std::uint32_t q = 0; q < ranks; ++q) {
            threads.emplace_back([&, q] {
                gs::thread_transport net(group.rank(q));
                must(state[q].buckets.reduce(net));
            });
            threads.emplace_back([&, q] {
                auto& s = state[q];
                for (std::size_t l = s.of.size(); l-- > 0;) {
                    for (int pass = 0; pass < 4; ++pass)
                        for (float& x : s.of[l]) x = x * 0.5F + 1.0F;
                    (void)s.buckets.ready(static_cast<std::uint32_t>(l));
                }
                must(s.buckets.wait());
            });
        }
        threads.clear();
        return std::chrono::duration_cast<gs::ns>(std::chrono::steady_clock::now() - begin);
    };
    std::vector<double> gaps, gaps_of_worst;
    for (std::size_t round = 0; round < rounds; ++round) {
        gs::bucket_tuner tuner;
        while (!tuner.settled()) tuner.step_took(step(tuner.choice()));
        std::vector<gs::bucket_choice> all{tuner.choice()};
        for (std::uint64_t size = 128 << 10; size <= 64 << 20; size *= 2) all.push_back({gs::bytes{size}, 1});
        std::vector<std::vector<double>> took(all.size());
        for (int again = 0; again < 31; ++again)
            for (std::size_t c = 0; c < all.size(); ++c) took[c].push_back(static_cast<double>(step(all[c]).count()));
        std::vector<double> medians;
        for (auto& t : took) medians.push_back(bench::value_of(bench::statistic::median, t));
        const auto gap = [&](double of) { return 100 * (of / std::ranges::min(medians) - 1); };
        gaps.push_back(gap(medians.front()));
        gaps_of_worst.push_back(gap(std::ranges::max(medians)));
    }
    r.figure("gradient.tuner_gap_pct", gaps, "%",
             {bench::at_most(5), bench::value_of(bench::statistic::median, gaps_of_worst), "the worst of all sizes"});
}

/// Measures a step of 1024 gradients between two ranks: marking all gradients, taking from the
/// board until everything is complete, and ending the step.
///
/// Then measures the work of the busiest of 256 ranks in two ways. With bits, the rank ANDs all
/// vectors and reads the result. With names, the rank acts as a coordinator: the rank receives the
/// names of ready gradients, counts the names and writes the list of those that every rank has
/// ready.
void negotiation(bench::report& r) {
    constexpr std::uint32_t gradients = 1024, many = 256;
    const gs::communicator group(ranks);
    r.figure("gradient.negotiate_us",
             bench::repeated(rounds,
                             [&] {
                                 gs::ready_board board(gradients, ranks);
                                 std::vector<std::vector<std::uint32_t>> next(ranks);
                                 for (auto& n : next) n.reserve(gradients);
                                 return timed(
                                     group, 51,
                                     [&](const gs::member& me) {
                                         const std::uint32_t q = me.rank();
                                         next[q].clear();
                                         for (std::uint32_t g = 0; g < gradients; ++g) (void)board.mark(q, g);
                                         while (!board.complete(q)) board.take(q, next[q]);
                                         (void)board.end_step(q);
                                     },
                                     100);
                             }),
             "us");
    std::vector<std::string> names;
    for (std::uint32_t g = 0; g < gradients; ++g)
        names.push_back("transformer.layers." + std::to_string(g / 8) + ".attention.weight." + std::to_string(g % 8));
    std::vector<gs::ready_bits> bits(many, gs::ready_bits(gradients));
    for (auto& b : bits)
        for (std::uint32_t g = 0; g < gradients; ++g) (void)b.mark(g);
    const auto by_bits = [&] {
        return bench::ns_per_call(20, [&] {
            gs::ready_bits coordinator = bits[0];
            std::vector<std::uint64_t> all(bits[0].words().begin(), bits[0].words().end());
            for (const auto& b : bits)
                for (std::size_t w = 0; w < all.size(); ++w) all[w] &= b.words()[w];
            std::vector<std::uint32_t> next;
            if (coordinator.take(all, next) || next.size() != gradients) throw std::runtime_error("not all are ready");
            bench::keep(next.data());
        });
    };
    const auto by_names = [&] {
        return bench::ns_per_call(1, [&] {
            std::unordered_map<std::string, std::uint32_t> counts;
            std::string ready;
            for (std::uint32_t rank = 0; rank < many; ++rank)
                for (const auto& n : names)
                    if (++counts[n] == many) ready += n + '\n';
            bench::keep(ready.data());
        });
    };
    r.figure("gradient.negotiation_gain", bench::ratios(rounds, by_names, by_bits), "x");
}

/// The largest difference, relative to the largest expected number.
double error(std::span<const float> got, const std::vector<double>& expected) {
    double most = 0, off = 0;
    for (const double x : expected) most = std::max(most, std::abs(x));
    for (std::size_t i = 0; i < got.size(); ++i)
        off = std::max(off, std::abs(static_cast<double>(got[i]) - expected[i]));
    return off / most;
}

/// Runs batch normalisation forwards and backwards over 64 samples, of which rank 0 has `first`,
/// and compares the outcome with one batch in double precision. Returns the worst error among the
/// results, the input gradients and the parameter gradients. With `together` false, each rank
/// normalises its own samples only; the error must then show.
double batch_norm_error(const gs::communicator& group, std::size_t first, std::mt19937& any, bool together = true) {
    constexpr std::size_t samples = 64, channels = 8, positions = 49;
    constexpr float epsilon = 1e-5F;
    const gs::batch_shape all{samples, channels, positions};
    const std::size_t begin[]{0, first, samples};
    std::normal_distribution<float> normal;
    const auto numbers = [&](std::size_t n) {
        std::vector<float> x(n);
        for (float& v : x) v = normal(any);
        return x;
    };
    const auto x = numbers(all.elements()), dy = numbers(x.size()), weight = numbers(channels),
               bias = numbers(channels);
    std::vector<float> y(x.size()), dx(x.size()), dweight(ranks * channels), dbias(dweight.size());
    bench::on_ranks(group, [&](const gs::member& me) {
        const gs::communicator alone(1);
        gs::thread_transport net(together ? me : alone.rank(0));
        const std::uint32_t q = me.rank();
        const gs::batch_shape mine{begin[q + 1] - begin[q], channels, positions};
        const auto of_batch = [&](auto& v) { return std::span(v).subspan(all.at(begin[q], 0), mine.elements()); };
        const auto of_rank = [&](auto& v) { return std::span(v).subspan(q * channels, channels); };
        gs::batch_statistics seen;
        must(gs::sync_batch_norm(net, mine, of_batch(x), {weight, bias}, epsilon, of_batch(y), seen));
        must(gs::sync_batch_norm_backward(net, mine, of_batch(x), of_batch(dy), weight, seen,
                                          {of_batch(dx), of_rank(dweight), of_rank(dbias)}));
    });
    std::vector<double> expected_y(x.size()), expected_dx(x.size()), expected_dweight(dweight.size()),
        expected_dbias(dbias.size());
    constexpr auto count = static_cast<double>(samples * positions);
    for (std::size_t c = 0; c < channels; ++c) {
        const auto each = [&](const auto& f) {
            for (std::size_t n = 0; n < samples; ++n)
                for (std::size_t p = 0; p < positions; ++p) f(all.at(n, c) + p, n < first ? c : channels + c);
        };
        double mean = 0, m2 = 0;
        each([&](std::size_t i, std::size_t) { mean += static_cast<double>(x[i]) / count; });
        each([&](std::size_t i, std::size_t) { m2 += std::pow(static_cast<double>(x[i]) - mean, 2); });
        const double inverse = 1 / std::sqrt(m2 / count + static_cast<double>(epsilon));
        const auto normalised = [&](std::size_t i) { return (static_cast<double>(x[i]) - mean) * inverse; };
        each([&](std::size_t i, std::size_t parameter) {
            expected_y[i] = normalised(i) * static_cast<double>(weight[c]) + static_cast<double>(bias[c]);
            expected_dbias[parameter] += static_cast<double>(dy[i]);
            expected_dweight[parameter] += static_cast<double>(dy[i]) * normalised(i);
        });
        const double mean_dy = (expected_dbias[c] + expected_dbias[channels + c]) / count;
        const double mean_both = (expected_dweight[c] + expected_dweight[channels + c]) / count;
        each([&](std::size_t i, std::size_t) {
            expected_dx[i] = (static_cast<double>(dy[i]) - mean_dy - normalised(i) * mean_both) * inverse *
                             static_cast<double>(weight[c]);
        });
    }
    return std::max(std::max(error(y, expected_y), error(dx, expected_dx)),
                    std::max(error(dweight, expected_dweight), error(dbias, expected_dbias)));
}

void operators(bench::report& r) {
    std::mt19937 any(1);
    std::normal_distribution<float> normal;
    const gs::communicator group(ranks);
    // How many of the 64 samples rank 0 has.
    constexpr std::size_t firsts[rounds]{32, 1, 0, 51, 63};
    std::vector<double> norm, softmax;
    double softmax_planted = 0;
    for (std::size_t round = 0; round <= rounds; ++round) {
        const bool planted = round == rounds;  // the reference uses one wrong label
        if (!planted) norm.push_back(batch_norm_error(group, firsts[round], any));

        constexpr std::size_t classes = 1009, features = 32, here = 16;
        std::vector<float> in(ranks * here * features), weights(classes * features), dx(in.size());
        std::vector<std::int64_t> labels(ranks * here);
        for (float& v : in) v = normal(any);
        for (float& v : weights) v = normal(any) * 0.2F;
        for (auto& l : labels) l = static_cast<std::int64_t>(any() % classes);
        float loss = 0;
        bench::on_ranks(group, [&](const gs::member& me) {
            gs::thread_transport net(me);
            gs::partial_softmax layer(net, classes, features);
            float mine = 0;
            const std::size_t at = me.rank() * here;
            must(layer.step(
                net, std::span<const float>(in).subspan(at * features, here * features),
                std::span<const std::int64_t>(labels).subspan(at, here),
                std::span<const float>(weights).subspan(layer.own().begin * features, layer.own().size() * features),
                mine, std::span(dx).subspan(at * features, here * features)));
            if (me.rank() == 0) loss = mine;
        });
        if (planted) labels[0] = (labels[0] + 1) % static_cast<std::int64_t>(classes);
        std::vector<double> wanted(in.size());
        double total = 0;
        for (std::size_t s = 0; s < labels.size(); ++s) {
            std::vector<double> p(classes);
            double sum = 0;
            for (std::size_t k = 0; k < classes; ++k) {
                double logit = 0;
                for (std::size_t j = 0; j < features; ++j)
                    logit += static_cast<double>(in[s * features + j]) * static_cast<double>(weights[k * features + j]);
                sum += p[k] = std::exp(logit);
            }
            for (std::size_t k = 0; k < classes; ++k) {
                const bool right = static_cast<std::int64_t>(k) == labels[s];
                if (right) total -= std::log(p[k] / sum) / static_cast<double>(labels.size());
                const double g = (p[k] / sum - (right ? 1 : 0)) / static_cast<double>(labels.size());
                for (std::size_t j = 0; j < features; ++j)
                    wanted[s * features + j] += g * static_cast<double>(weights[k * features + j]);
            }
        }
        const double off = std::max(error(dx, wanted), std::abs(static_cast<double>(loss) / total - 1));
        if (planted)
            softmax_planted = off;
        else
            softmax.push_back(off);
    }
    r.figure("gradient.syncbn_max_rel_error", norm, "",
             {bench::at_most(1e-6), batch_norm_error(group, firsts[0], any, false), "ranks that don't know each other"},
             bench::statistic::most);
    r.figure("gradient.partial_fc_max_rel_error", softmax, "", {bench::at_most(1e-5), softmax_planted, "a wrong label"},
             bench::statistic::most);
}

/// Measures all-reduces of 1 MiB: fp8 and float.
void fp8(bench::report& r) {
    const gs::communicator group(ranks);
    const auto us_of = [&]<class T>(T) {
        std::vector<std::vector<T>> x(ranks, std::vector<T>((std::size_t{1} << 20) / sizeof(T))), y = x;
        return timed(group, 51, [&](const gs::member& me) {
            gs::all_reduce(me, std::span<const T>(x[me.rank()]), std::span(y[me.rank()]));
        });
    };
    r.figure("gradient.fp8_vs_float",
             bench::ratios(
                 rounds, [&] { return us_of(gs::fp8_e4m3{}); }, [&] { return us_of(float{}); }),
             "x");
}

}  // namespace

int main(int argc, char** argv) try {
    const bench::arguments asked(
        argc, argv, {"fusion", "tuner", "negotiation", "operators", "fp8", "quantised", "devices", "link", "training"});
    bench::start_a_second_thread();
    bench::report r(
        "averages of float32; in the process 2 ranks, its threads; between processes a link of two network namespaces");
    if (asked.wants("fusion")) fusion(r);
    if (asked.wants("negotiation")) negotiation(r);
    if (asked.wants("operators")) operators(r);
    if (asked.wants("fp8")) fp8(r);
    if (asked.wants("quantised")) bench::quantised_all_reduces(r);
    if (asked.wants("devices")) bench::gradients_on_devices(r);
    if (asked.wants("tuner")) tuner(r);
    if (asked.wants("link")) bench::all_reduces_over_a_link(r);
    if (asked.wants("training")) bench::training_over_a_link(r);
    r.write(asked.json());
} catch (const std::exception& e) {
    std::fprintf(stderr, "bench_gradient: %s\n", e.what());
    return 1;
}
