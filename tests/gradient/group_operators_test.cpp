// SPDX-License-Identifier: Apache-2.0
// Operators over a group: batch normalisation over all ranks' batches, a softmax whose classes lie
// on several ranks, and the largest elements of a gradient. Each is compared with the same on one
// rank, computed in double.
#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/gradient/group_operators.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace group_operators_test {

namespace gs = gpushare;

float number(support::random& any) { return static_cast<float>(any.below(20001)) / 10000.0F - 1.0F; }
std::vector<float> numbers(std::size_t n, support::random& any, float shift = 0) {
    std::vector<float> all(n);
    for (float& x : all) x = number(any) + shift;
    return all;
}
/// Relative to the largest: what cancels is as inexact as what it came from.
double error(std::span<const float> got, const std::vector<double>& expected) {
    double most = 1e-30, off = 0;
    for (const double x : expected) most = std::max(most, std::abs(x));
    for (std::size_t i = 0; i < got.size(); ++i)
        off = std::max(off, std::abs(static_cast<double>(got[i]) - expected[i]));
    return off / most;
}

namespace {

/// The arrays of a rank's device_batch.
struct arrays_of_batch {
    arrays_of_batch(const gs::batch_shape& shape, std::uint32_t ranks, support::random& any)
        : x(numbers(shape.elements(), any, 30)),
          dy(numbers(shape.elements(), any)),
          y(x.size()),
          dx(x.size()),
          dweight(shape.channels),
          dbias(shape.channels),
          inverse(shape.channels),
          sums(2 * shape.channels),
          moments(shape.channels),
          of_ranks(shape.channels * (ranks + std::size_t{1})),
          of_shape(shape) {}
    [[nodiscard]] gs::device_batch batch(std::span<const float> weight, std::span<const float> bias) {
        return {of_shape,        x.data(),  y.data(),  weight.data(),  bias.data(),  moments.data(), inverse.data(),
                of_ranks.data(), dy.data(), dx.data(), dweight.data(), dbias.data(), sums.data()};
    }
    std::vector<float> x, dy, y, dx, dweight, dbias, inverse, sums;
    std::vector<gs::channel_moments> moments, of_ranks;
    gs::batch_shape of_shape;
};

/// By threads: what the device's arrays must hold.
void check_by_threads(const std::vector<arrays_of_batch>& on_devices, std::span<const float> weight,
                      std::span<const float> bias, float epsilon) {
    const auto ranks = static_cast<std::uint32_t>(on_devices.size());
    const gs::communicator group(ranks);
    std::vector<arrays_of_batch> by_threads = on_devices;
    std::vector<gs::batch_statistics> seen(ranks);
    std::vector<gs::collective_fault> faults(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        auto& a = by_threads[r];
        faults[r] = gs::sync_batch_norm(net, a.of_shape, a.x, {weight, bias}, epsilon, a.y, seen[r]);
        if (!faults[r])
            faults[r] =
                gs::sync_batch_norm_backward(net, a.of_shape, a.x, a.dy, weight, seen[r], {a.dx, a.dweight, a.dbias});
    });
    for (std::uint32_t r = 0; r < ranks; ++r) {
        const auto &a = on_devices[r], &b = by_threads[r];
        CHECK_FALSE(faults[r]);
        CHECK(a.y == b.y);
        CHECK(a.dx == b.dx);
        CHECK(a.dweight == b.dweight);
        CHECK(a.dbias == b.dbias);
        CHECK(a.moments == seen[r].of_channel);
        CHECK(a.inverse == seen[r].inverse_deviation);
    }
}

}  // namespace

TEST_CASE("batch normalisation of batches on devices has the bits of ranks that are threads", "[gradient][operators]") {
    const auto seed = support::seed(GENERATE(range(1U, 9U)));
    CAPTURE(seed);
    support::random any(seed);
    const auto ranks = static_cast<std::uint32_t>(1 + any.below(3));
    const bool together = any.one_in(2);
    const std::size_t channels = any.below(6);
    const auto weight = numbers(channels, any), bias = numbers(channels, any);
    gs::host::node node({.devices = together ? 1 : ranks, .sms = 4});
    const gs::communicator group(ranks);
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<arrays_of_batch> arrays;
    std::vector<gs::device_batch> batches;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        members.push_back(group.rank(r));
        arrays.emplace_back(gs::batch_shape{any.one_in(3) ? 0 : any.below(9), channels, 5}, ranks, any);
        batches.push_back(arrays.back().batch(weight, bias));
        if (together && r != 0) continue;
        devices.push_back({r});
        streams.push_back(node.make_stream(devices[r]));
    }
    const std::span<const gs::member> who(members);
    const std::span<const gs::device_id> on(devices);
    const auto gather = [&](auto ins, auto outs, std::size_t n) {
        return together
                   ? gs::submit_shared_all_gather<std::uint64_t>(node.gangs(), on[0], streams[0], who, ins, outs, n)
                   : gs::submit_all_gather<std::uint64_t>(node.gangs(), on, std::span(streams), who, ins, outs, n);
    };
    const auto all_reduce = [&](auto ins, auto outs, std::size_t n, auto op) {
        return together ? gs::submit_shared_all_reduce<float>(node.gangs(), on[0], streams[0], who, ins, outs, n, op)
                        : gs::submit_all_reduce<float>(node.gangs(), on, std::span(streams), who, ins, outs, n, op);
    };
    constexpr float epsilon = 1e-5F;
    CHECK(gs::submit_sync_batch_norm(std::span(streams), std::span<const gs::device_batch>(batches), epsilon, gather) ==
          gs::errc::none);
    CHECK(gs::submit_sync_batch_norm_backward(std::span(streams), std::span<const gs::device_batch>(batches),
                                              all_reduce) == gs::errc::none);
    for (auto& s : streams) s.record().wait(gs::never);
    check_by_threads(arrays, weight, bias, epsilon);
    batches.push_back(batches.back());
    batches.back().shape.channels = channels + 1;
    CHECK(gs::submit_sync_batch_norm(std::span(streams).first(1), std::span<const gs::device_batch>(batches), epsilon,
                                     gather) == gs::errc::invalid_specification);
}

TEST_CASE("batch normalisation over unequal and empty batches is that over one batch, there and back",
          "[gradient][operators]") {
    const auto seed = support::seed(GENERATE(range(1U, 7U)));
    CAPTURE(seed);
    support::random any(seed);
    const std::uint32_t ranks = 3;
    constexpr std::size_t channels = 3, positions = 5;
    std::vector<gs::batch_shape> shapes(ranks, {0, channels, positions});
    for (auto& s : shapes) s.samples = any.one_in(3) ? 0 : any.below(9);
    std::size_t samples = 0;
    for (const auto& s : shapes) samples += s.samples;
    const gs::batch_shape whole{samples, channels, positions};
    const auto x = numbers(whole.elements(), any, 30), dy = numbers(whole.elements(), any),
               weight = numbers(channels, any), bias = numbers(channels, any);
    constexpr float epsilon = 1e-5F;

    std::vector<double> y(x.size()), dx(x.size()), dweight(channels), dbias(channels), means(channels);
    const auto count = static_cast<double>(samples * positions);
    for (std::size_t c = 0; c < channels && samples != 0; ++c) {
        double mean = 0, m2 = 0, both = 0;
        const auto each = [&](const auto& f) {
            for (std::size_t n = 0; n < samples; ++n)
                for (std::size_t p = 0; p < positions; ++p) f(whole.at(n, c) + p);
        };
        each([&](std::size_t i) { mean += static_cast<double>(x[i]) / count; });
        each([&](std::size_t i) { m2 += (static_cast<double>(x[i]) - mean) * (static_cast<double>(x[i]) - mean); });
        const double inverse = 1 / std::sqrt(m2 / count + static_cast<double>(epsilon));
        const auto normal = [&](std::size_t i) { return (static_cast<double>(x[i]) - mean) * inverse; };
        each([&](std::size_t i) {
            y[i] = normal(i) * static_cast<double>(weight[c]) + static_cast<double>(bias[c]);
            dbias[c] += static_cast<double>(dy[i]);
            both += static_cast<double>(dy[i]) * normal(i);
        });
        dweight[c] = both;
        means[c] = mean;
        each([&](std::size_t i) {
            dx[i] = (static_cast<double>(dy[i]) - dbias[c] / count - normal(i) * both / count) * inverse *
                    static_cast<double>(weight[c]);
        });
    }

    const gs::communicator group(ranks);
    std::vector<float> got_y(x.size()), got_dx(x.size()), got_dweight(channels), got_dbias(channels);
    std::vector<std::vector<float>> dweights(ranks, std::vector<float>(channels)), dbiases = dweights;
    std::vector<gs::batch_statistics> seen(ranks);
    std::vector<gs::collective_fault> faults(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        std::size_t first = 0;
        for (unsigned q = 0; q < r; ++q) first += shapes[q].elements();
        const auto mine = [&](auto& all) { return std::span(all).subspan(first, shapes[r].elements()); };
        faults[r] = gs::sync_batch_norm(net, shapes[r], mine(x), {weight, bias}, epsilon, mine(got_y), seen[r]);
        if (!faults[r])
            faults[r] = gs::sync_batch_norm_backward(net, shapes[r], mine(x), mine(dy), weight, seen[r],
                                                     {mine(got_dx), dweights[r], dbiases[r]});
    });
    for (std::uint32_t r = 0; r < ranks; ++r) {
        CHECK_FALSE(faults[r]);
        CHECK(seen[r].of_channel == seen[0].of_channel);
        CHECK(seen[r].of_channel[0].count == samples * positions);
        for (std::size_t c = 0; c < channels; ++c) {
            got_dweight[c] += dweights[r][c];
            got_dbias[c] += dbiases[r][c];
            CHECK(std::abs(seen[r].of_channel[c].mean - means[c]) <= 1e-12 * std::abs(means[c]));
        }
    }
    CHECK(error(got_y, y) < 1e-6);
    CHECK(error(got_dx, dx) < 2e-5);
    CHECK(error(got_dweight, dweight) < 2e-5);
    CHECK(error(got_dbias, dbias) < 1e-6);
}

TEST_CASE("batch normalisation where elements lie close to a large mean is exact to 1e-6", "[gradient][operators]") {
    const double mean = GENERATE(1.0, 100.0, 1000.0);
    constexpr std::uint32_t ranks = 3;
    constexpr std::size_t each = 500;
    std::vector<float> x(ranks * each), dy(x.size()), y(x.size()), dx(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = static_cast<float>(mean + 0.05 * std::sin(static_cast<double>(i)));
        dy[i] = std::cos(static_cast<float>(i));
    }
    const gs::communicator group(ranks);
    std::vector<gs::errc> codes(ranks), without_deviation(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        const gs::batch_shape shape{each, 1, 1};
        const auto mine = [&](auto& all) { return std::span(all).subspan(r * each, each); };
        const std::vector<float> weight{1}, bias{0};
        std::vector<float> dweight(1), dbias(1);
        gs::batch_statistics seen;
        codes[r] = gs::sync_batch_norm(net, shape, mine(x), {weight, bias}, 0.0F, mine(y), seen).code;
        const gs::batch_norm_gradients out{mine(dx), dweight, dbias};
        const auto back = [&] {
            return gs::sync_batch_norm_backward(net, shape, mine(x), mine(dy), weight, seen, out);
        };
        if (codes[r] == gs::errc::none) codes[r] = back().code;
        seen.inverse_deviation.clear();
        without_deviation[r] = back().code;
    });
    CHECK(codes == std::vector<gs::errc>(ranks, gs::errc::none));
    CHECK(without_deviation == std::vector<gs::errc>(ranks, gs::errc::mismatch));
    const auto n = static_cast<double>(x.size());
    double middle = 0, m2 = 0, of_dy = 0, of_both = 0;
    for (const float v : x) middle += static_cast<double>(v) / n;
    for (const float v : x) m2 += (static_cast<double>(v) - middle) * (static_cast<double>(v) - middle);
    const double inverse = 1 / std::sqrt(m2 / n);
    std::vector<double> exact(x.size()), exact_dx(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
        exact[i] = (static_cast<double>(x[i]) - middle) * inverse;
        of_dy += static_cast<double>(dy[i]) / n;
        of_both += static_cast<double>(dy[i]) * exact[i] / n;
    }
    for (std::size_t i = 0; i < x.size(); ++i)
        exact_dx[i] = (static_cast<double>(dy[i]) - of_dy - exact[i] * of_both) * inverse;
    CHECK(error(y, exact) < 1e-6);
    CHECK(error(dx, exact_dx) < 1e-6);
}

TEST_CASE("moments of parts are those of the whole", "[gradient][operators]") {
    support::random any(support::seed(1));
    gs::channel_moments all;
    double sum = 0, squares = 0;
    std::size_t n = 0;
    for (int part = 0; part < 300; ++part) {
        double mean = 0, m2 = 0;
        const auto x = numbers(any.below(50), any, 0.5F);
        for (const float v : x) mean += static_cast<double>(v) / static_cast<double>(x.size());
        for (const float v : x) {
            m2 += (static_cast<double>(v) - mean) * (static_cast<double>(v) - mean);
            sum += static_cast<double>(v);
            squares += static_cast<double>(v) * static_cast<double>(v);
        }
        n += x.size();
        all = gs::channel_moments::merged(all, {x.size(), mean, m2});
    }
    const double mean = sum / static_cast<double>(n), m2 = squares - sum * mean;
    CHECK(all.count == n);
    CHECK(std::abs(all.mean / mean - 1) < 1e-12);
    CHECK(std::abs(all.m2 / m2 - 1) < 1e-12);
    constexpr std::uint64_t most = std::uint64_t{1} << 33;  // more than 32 bits count
    CHECK(gs::channel_moments::merged({most, 1, 0}, {most, 1, 0}) == gs::channel_moments{2 * most, 1, 0});
}

struct softmax_case {
    std::uint32_t ranks;
    std::size_t classes, features, here;
    double rate;
};

TEST_CASE("a softmax over sharded classes is that over all of them, and of a sample keeps every label",
          "[gradient][operators]") {
    const auto s = GENERATE(softmax_case{3, 10, 4, 5, 1}, softmax_case{4, 7, 3, 2, 1}, softmax_case{3, 2, 3, 4, 1},
                            softmax_case{1, 9, 8, 6, 1}, softmax_case{3, 301, 6, 4, 0.1}, softmax_case{2, 40, 5, 3, 0});
    support::random any(support::seed(s.classes));
    const std::size_t samples = s.here * s.ranks, d = s.features;
    const auto x = numbers(samples * d, any, 0.3F), weights = numbers(s.classes * d, any);
    std::vector<std::int64_t> labels(samples);
    for (auto& l : labels)
        l = any.one_in(6) ? gs::partial_softmax::ignored : static_cast<std::int64_t>(any.below(s.classes));
    labels[0] = static_cast<std::int64_t>(s.classes);  // no class: ignored, too
    std::vector<std::vector<std::uint32_t>> rows(s.ranks);
    std::vector<std::vector<float>> gradients(s.ranks);
    std::vector<float> losses(s.ranks), got_dx(x.size());
    std::vector<gs::collective_fault> faults(s.ranks);
    std::vector<std::size_t> firsts(s.ranks);
    const gs::communicator group(s.ranks);
    support::together(s.ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        gs::partial_softmax layer(net, s.classes, d, {.rate = s.rate, .seed = 3});
        firsts[r] = layer.own().begin;
        const auto own = std::span<const float>(weights).subspan(layer.own().begin * d, layer.own().size() * d);
        for (int step = 0; step < 2 && !faults[r]; ++step)
            faults[r] = layer.step(net, std::span<const float>(x).subspan(r * s.here * d, s.here * d),
                                   std::span<const std::int64_t>(labels).subspan(r * s.here, s.here), own, losses[r],
                                   std::span(got_dx).subspan(r * s.here * d, s.here * d));
        rows[r].assign(layer.rows().begin(), layer.rows().end());
        for (std::size_t k = 0; k < rows[r].size(); ++k)
            gradients[r].insert(gradients[r].end(), layer.row_gradient(k).begin(), layer.row_gradient(k).end());
    });
    std::vector<std::size_t> active;  // classes that took part, over all ranks
    std::vector<float> got_dw;
    for (std::uint32_t r = 0; r < s.ranks; ++r) {
        REQUIRE_FALSE(faults[r]);
        CHECK(losses[r] == losses[0]);
        CHECK(std::is_sorted(rows[r].begin(), rows[r].end()));
        for (const auto row : rows[r]) active.push_back(firsts[r] + row);
        got_dw.insert(got_dw.end(), gradients[r].begin(), gradients[r].end());
    }
    if (s.rate >= 1) CHECK(active.size() == s.classes);
    if (s.rate == 0.1) CHECK((active.size() >= 31 && active.size() <= 50));
    const auto counts = [&](std::int64_t l) { return l >= 0 && l < static_cast<std::int64_t>(s.classes); };
    double loss = 0, counted = 0;
    for (const auto l : labels) {
        counted += counts(l) ? 1 : 0;
        if (counts(l)) CHECK(std::count(active.begin(), active.end(), static_cast<std::size_t>(l)) == 1);
    }
    std::vector<double> dx(x.size()), dw(active.size() * d);
    for (std::size_t i = 0; i < samples; ++i) {
        if (!counts(labels[i])) continue;
        std::vector<double> p(active.size());
        double sum = 0;
        for (std::size_t k = 0; k < active.size(); ++k) {
            double logit = 0;
            for (std::size_t j = 0; j < d; ++j)
                logit += static_cast<double>(x[i * d + j]) * static_cast<double>(weights[active[k] * d + j]);
            sum += p[k] = std::exp(logit);
        }
        for (std::size_t k = 0; k < active.size(); ++k) {
            const bool right = active[k] == static_cast<std::size_t>(labels[i]);
            if (right) loss -= std::log(p[k] / sum) / counted;
            const double g = (p[k] / sum - (right ? 1 : 0)) / counted;
            for (std::size_t j = 0; j < d; ++j) {
                dx[i * d + j] += g * static_cast<double>(weights[active[k] * d + j]);
                dw[k * d + j] += g * static_cast<double>(x[i * d + j]);
            }
        }
    }
    CHECK(std::abs(static_cast<double>(losses[0]) - loss) <= 1e-5 * std::max(loss, 1e-3));
    CHECK(error(got_dx, dx) < 1e-5);
    CHECK(error(got_dw, dw) < 1e-5);
}

namespace {

/// Ranks of a softmax over sharded classes, on a device each or all on one, and what threads get.
struct softmax_rig {
    softmax_rig(const softmax_case& of, bool together_, support::random& any)
        : s(of),
          together(together_),
          node({.devices = together ? 1 : s.ranks, .sms = 4}),
          group(s.ranks, {.blocks = 2}),
          layer(s.ranks, s.classes, s.features, s.here, options()),
          ranks(s.ranks) {
        for (std::uint32_t r = 0; r < s.ranks; ++r) {
            members.push_back(group.rank(r));
            of_rank& mine = ranks[r];
            mine.weights = numbers(layer.own(r).size() * s.features, any);
            mine.dx.resize(s.here * s.features);
            mine.gradient.resize(mine.weights.size());
            mine.scratch.resize((layer.scratch_bytes().count() + 7) / 8);
            if (together && r != 0) continue;
            devices.push_back({r});
            streams.push_back(node.make_stream(devices[r]));
        }
    }
    [[nodiscard]] gs::partial_softmax_options options() const { return {.rate = s.rate, .seed = 5}; }
    void fill(support::random& any) {
        labels.clear();
        for (of_rank& mine : ranks) {
            mine.x = numbers(s.here * s.features, any, 0.3F);
            for (std::size_t i = 0; i < s.here; ++i)
                labels.push_back(any.one_in(6) ? gs::partial_softmax::ignored
                                               : static_cast<std::int64_t>(any.below(s.classes + 1)));
        }
    }
    [[nodiscard]] gs::errc step() {
        const std::span<const gs::member> who(members);
        const std::span<const gs::device_id> on(devices);
        const auto gather = [&]<class T>(std::span<const T* const> ins, std::span<T* const> outs, std::size_t n) {
            if (std::exchange(refuses, false)) return gs::errc::too_many_blocks;
            return together ? gs::submit_shared_all_gather<T>(node.gangs(), on[0], streams[0], who, ins, outs, n)
                            : gs::submit_all_gather<T>(node.gangs(), on, std::span(streams), who, ins, outs, n);
        };
        const auto all_reduce = [&](auto ins, auto outs, std::size_t n, auto op) {
            return together
                       ? gs::submit_shared_all_reduce<float>(node.gangs(), on[0], streams[0], who, ins, outs, n, op)
                       : gs::submit_all_reduce<float>(node.gangs(), on, std::span(streams), who, ins, outs, n, op);
        };
        const auto scatter = [&](auto ins, auto outs, std::size_t n, auto op) {
            return together
                       ? gs::submit_shared_reduce_scatter<float>(node.gangs(), on[0], streams[0], who, ins, outs, n, op)
                       : gs::submit_reduce_scatter<float>(node.gangs(), on, std::span(streams), who, ins, outs, n, op);
        };
        std::vector<gs::device_softmax_rank> arrays;
        for (std::uint32_t r = 0; r < s.ranks; ++r) {
            of_rank& mine = ranks[r];
            arrays.push_back({mine.x.data(), labels.data() + r * s.here, mine.weights.data(), mine.dx.data(),
                              mine.gradient.data(), &mine.loss, reinterpret_cast<std::byte*>(mine.scratch.data())});
        }
        const auto code = layer.submit_step(std::span(streams), std::span<const gs::device_softmax_rank>(arrays),
                                            gather, all_reduce, scatter);
        for (auto& stream : streams) stream.record().wait(gs::never);
        return code;
    }

    struct of_rank {
        std::vector<float> x{}, weights{}, dx{}, gradient{};
        float loss = 0;
        std::vector<std::uint64_t> scratch{};
    };
    softmax_case s;
    bool together;
    bool refuses = false;  // the next gather
    gs::host::node node;
    gs::communicator group;
    gs::device_partial_softmax layer;
    std::vector<of_rank> ranks;
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<std::int64_t> labels;
};

}  // namespace

TEST_CASE("a softmax of no features takes all classes as alike", "[gradient][operators]") {
    const gs::communicator group(2);
    std::vector<float> losses(2);
    support::together(2, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        gs::partial_softmax layer(net, 5, 0);
        const std::vector<std::int64_t> labels{4, 0, gs::partial_softmax::ignored};
        const auto fault = layer.step(net, {}, labels, {}, losses[r], {});
        if (fault) losses[r] = -1;
    });
    for (const float loss : losses) CHECK(loss == Approx(std::log(5.0F)));
}

TEST_CASE("a softmax of no ranks is refused", "[gradient][operators]") {
    gs::device_partial_softmax layer(0, 5, 2, 3);
    std::vector<gs::host::stream> none;
    const auto anything = [](const auto&...) { return gs::errc::none; };
    CHECK(layer.submit_step(std::span(none), std::span<const gs::device_softmax_rank>(), anything, anything,
                            anything) == gs::errc::invalid_specification);
}

TEST_CASE("a softmax over sharded classes on devices has the bits of ranks that are threads", "[gradient][operators]") {
    const auto s = GENERATE(softmax_case{3, 10, 4, 5, 1}, softmax_case{3, 2, 3, 4, 1}, softmax_case{1, 9, 8, 6, 1},
                            softmax_case{3, 301, 6, 4, 0.1}, softmax_case{2, 40, 5, 3, 0});
    const auto seed = support::seed(400 + s.classes);
    CAPTURE(seed, s.ranks, s.classes);
    support::random any(seed);
    softmax_rig rig(s, any.one_in(2), any);
    if (s.rate < 1) {
        rig.fill(any);
        CHECK(rig.step() == gs::errc::invalid_specification);  // nothing was chosen
        CHECK_THROWS_AS(rig.layer.choose(std::span<const std::int64_t>(rig.labels).subspan(1)), gs::operation_error);
    }
    std::vector<gs::partial_softmax> by_threads;
    const gs::communicator group(s.ranks);
    for (std::uint32_t r = 0; r < s.ranks; ++r)
        by_threads.emplace_back(gs::thread_transport(group.rank(r)), s.classes, s.features, rig.options());
    for (int step = 0; step < 3; ++step) {
        rig.fill(any);
        if (s.rate < 1 || step == 1) rig.layer.choose(rig.labels);
        rig.refuses = step == 1;
        if (rig.refuses) CHECK(rig.step() == gs::errc::too_many_blocks);  // and is tried again
        REQUIRE(rig.step() == gs::errc::none);
        if (s.rate < 1) CHECK(rig.step() == gs::errc::invalid_specification);  // the choice was of one step
        std::vector<std::vector<float>> dx(s.ranks, std::vector<float>(s.here * s.features));
        std::vector<float> losses(s.ranks, -1);
        support::together(s.ranks, [&](unsigned r) {
            gs::thread_transport net(group.rank(r));
            (void)by_threads[r].step(net, rig.ranks[r].x,
                                     std::span<const std::int64_t>(rig.labels).subspan(r * s.here, s.here),
                                     rig.ranks[r].weights, losses[r], dx[r]);
        });
        for (std::uint32_t r = 0; r < s.ranks; ++r) {
            const auto rows = rig.layer.rows(r), expected = by_threads[r].rows();
            CHECK(std::equal(rows.begin(), rows.end(), expected.begin(), expected.end()));
            CHECK(rig.ranks[r].loss == losses[r]);
            CHECK(rig.ranks[r].dx == dx[r]);
            for (std::size_t k = 0; k < rows.size(); ++k) {
                const auto row = by_threads[r].row_gradient(k);
                CHECK(std::equal(row.begin(), row.end(),
                                 rig.ranks[r].gradient.begin() + static_cast<std::ptrdiff_t>(k * s.features)));
            }
        }
    }
}

TEST_CASE("the k largest go, what stays comes later, and nothing is lost", "[gradient][operators]") {
    gs::top_k_feedback mine(5, 2);
    const std::vector<float> g{1, -3, 0, 2, 2};
    mine.select(g);
    CHECK(std::vector(mine.indices().begin(), mine.indices().end()) == std::vector<std::uint32_t>{1, 3});
    CHECK(std::vector(mine.values().begin(), mine.values().end()) == std::vector<float>{-3, 2});
    mine.select(g);  // 2, -3, 0, 2, 4 are owed
    CHECK(std::vector(mine.indices().begin(), mine.indices().end()) == std::vector<std::uint32_t>{1, 4});
    CHECK(std::vector(mine.residual().begin(), mine.residual().end()) == std::vector<float>{2, 0, 0, 2, 0});
    CHECK(mine.wire_bytes() == gs::bytes{16});
    gs::top_k_feedback all(3, 9);
    all.select(std::vector<float>{1, std::nanf(""), 3});
    CHECK(all.indices().size() == 3);
    gs::top_k_feedback one(3, 1);
    one.select(std::vector<float>{1, std::nanf(""), 3});
    CHECK(one.indices()[0] == 1);
}

TEST_CASE("sums over many steps of what top-k sent, and what is owed, are those of the gradients",
          "[gradient][operators]") {
    constexpr std::uint32_t ranks = 3;
    constexpr std::size_t n = 200, k = 7;
    const gs::communicator group(ranks);
    std::vector<std::vector<double>> given(ranks, std::vector<double>(n)), got = given, owed = given;
    std::vector<std::uint64_t> carried(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        gs::top_k_feedback mine(n, k);
        support::random any(r + 1);
        for (int step = 0; step < 50; ++step) {
            auto g = numbers(n, any);
            for (std::size_t i = 0; i < n; ++i) given[r][i] += static_cast<double>(g[i]);
            if (gs::all_reduce_top_k(net, mine, g)) return;
            for (std::size_t i = 0; i < n; ++i) got[r][i] += static_cast<double>(g[i]);
        }
        for (std::size_t i = 0; i < n; ++i) owed[r][i] = static_cast<double>(mine.residual()[i]);
        carried[r] = net.carried().count();
    });
    for (std::uint32_t r = 0; r < ranks; ++r) {
        CHECK(carried[r] == 50 * k * 8);
        CHECK(got[r] == got[0]);
    }
    for (std::size_t i = 0; i < n; ++i) {
        double all = 0, left = 0;
        for (std::uint32_t r = 0; r < ranks; ++r) {
            all += given[r][i];
            left += owed[r][i];
        }
        CHECK(std::abs(got[0][i] * ranks + left - all) < 1e-4);
    }
}

TEST_CASE("gossip goes to the mean of all ranks, and keeps their sum", "[gradient][averaging]") {
    constexpr std::uint32_t ranks = 5;
    const auto among = GENERATE(0, 1, 2);
    const std::vector<std::pair<std::uint32_t, std::uint32_t>> star{{3, 0}, {3, 1}, {3, 2}, {3, 4}, {0, 3}};
    const gs::neighbour_graph graph = among == 0   ? gs::neighbour_graph::ring(ranks)
                                      : among == 1 ? gs::neighbour_graph::hypercube(ranks)
                                                   : gs::neighbour_graph(ranks, star);
    for (std::uint32_t r = 0; r < ranks; ++r) {
        float row = 0, column = 0;
        for (std::uint32_t q = 0; q < ranks; ++q) {
            row += graph.weight(r, q);
            column += graph.weight(q, r);
            CHECK(graph.weight(r, q) >= -1e-6F);
        }
        CHECK(std::abs(row - 1) < 1e-6F);
        CHECK(std::abs(column - 1) < 1e-6F);
    }
    const gs::communicator group(ranks);
    std::vector<std::vector<float>> x(ranks);
    std::vector<gs::collective_fault> faults(ranks);
    std::vector<std::uint64_t> carried(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        x[r].assign(33, static_cast<float>(r * r));
        for (int step = 0; step < 100 && !faults[r]; ++step) faults[r] = gs::gossip_average(net, graph, x[r]);
        carried[r] = net.carried().count();
        if (!faults[r] && gs::gossip_average(net, gs::neighbour_graph::ring(2), x[r]).code != gs::errc::mismatch)
            faults[r].code = gs::errc::stuck;
    });
    for (std::uint32_t r = 0; r < ranks; ++r) {
        CHECK_FALSE(faults[r]);
        CHECK(std::abs(x[r][32] - 6.0F) < 1e-4F);  // of 0, 1, 4, 9, 16
        CHECK(carried[r] == 100 * 33 * 4);
    }
}

TEST_CASE("a topology of ranks that aren't there is refused", "[gradient][averaging]") {
    using edges = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
    for (const edges& wrong : {edges{{0, 3}}, edges{{1, 1}}}) {
        bool refused = false;
        try {
            const gs::neighbour_graph t(3, wrong);
        } catch (const gs::operation_error& e) {
            refused = e.code() == gs::errc::invalid_specification;
        }
        CHECK(refused);
    }
    CHECK(gs::neighbour_graph::ring(1).neighbours(0).empty());
    CHECK(gs::neighbour_graph::ring(2).neighbours(0).size() == 1);
}

TEST_CASE("local steps: all ranks have the mean every so many steps", "[gradient][averaging]") {
    constexpr gs::local_steps local{.every = 3};
    const gs::communicator group(2);
    std::vector<std::vector<float>> seen(2);
    support::together(2, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        std::vector<float> x{0}, y{1, 2};
        const std::vector<std::span<float>> list{x, y};
        for (std::uint64_t step = 0; step < 6; ++step) {
            x[0] += static_cast<float>(1 + 2 * r);
            if (local.due(step) && gs::average_all(net, std::span<const std::span<float>>(list))) return;
            seen[r].push_back(x[0]);
        }
    });
    CHECK(seen[0] == std::vector<float>{1, 2, 6, 7, 8, 12});
    CHECK(seen[1] == std::vector<float>{3, 6, 6, 9, 12, 12});
}

TEST_CASE("a step of top-k that isn't finite is skipped, and the next one is as if it hadn't been",
          "[gradient][operators]") {
    constexpr std::uint32_t ranks = 2;
    const gs::communicator group(ranks);
    std::vector<std::string> wrong(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        gs::top_k_feedback mine(6, 2);
        std::vector<float> a{1, 2, 3, 4, 5, 6};
        if (gs::all_reduce_top_k(net, mine, a) || a != std::vector<float>{0, 0, 0, 0, 5, 6}) wrong[r] = "the first";
        a.assign(6, r == 0 ? std::nanf("") : 1.0F);
        if (gs::all_reduce_top_k(net, mine, a) || gs::all_finite(a)) wrong[r] = "NaN isn't seen";
        a.assign(6, 0.0F);
        if (gs::all_reduce_top_k(net, mine, a) || a != std::vector<float>{0, 0, 3, 4, 0, 0}) wrong[r] = "the next";
        std::vector<float> longer(7);
        if (gs::all_reduce_top_k(net, mine, longer).code != gs::errc::mismatch) wrong[r] = "another size";
    });
    CHECK(wrong == std::vector<std::string>(ranks));
}

TEST_CASE("a step of top-k is skipped once", "[gradient][top_k]") {
    gs::top_k_feedback mine(3, 1);
    const auto owed = [&] { return std::vector(mine.residual().begin(), mine.residual().end()); };
    mine.skip();
    CHECK(owed() == std::vector<float>{0, 0, 0});  // there was no step
    mine.select(std::vector<float>{1, 2, 3});
    mine.select(std::vector<float>{1, 2, 4});  // of 2, 4, 4
    for (int i = 0; i < 3; ++i) {
        mine.skip();
        CHECK(owed() == std::vector<float>{1, 2, 0});
    }
    const gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    std::vector<float> g{1, std::nanf(""), 1};
    CHECK_FALSE(gs::all_reduce_top_k(net, mine, g));  // which skips
    mine.skip();
    CHECK(owed() == std::vector<float>{1, 2, 0});
}

TEST_CASE("top-k of more elements than 32 bits count is refused before it takes memory", "[gradient][top_k]") {
    CHECK(support::code_of([] { gs::top_k_feedback(~std::size_t{0} / 8, 1); }) == gs::errc::size_overflow);
}

TEST_CASE("a fault while the largest are sent leaves the gradient, and what was owed", "[gradient][top_k]") {
    const bool at_once = GENERATE(false, true);
    const gs::communicator group(2);
    std::vector<std::string> wrong(2);
    support::together(2, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        gs::top_k_feedback mine(3, 1);
        std::vector<float> g{1.0F, 2.0F, 3.0F};
        if (gs::all_reduce_top_k(net, mine, g)) wrong[r] = "a fault";
        g = {4.0F, 0.0F, 0.0F};
        std::vector<std::uint32_t> others(2);
        if (r == 1 && at_once) return net.abort(1, gs::errc::stopped);
        if (r == 1) {  // between the two collectives
            const std::uint32_t index = 0;
            if (net.all_gather(std::span<const std::uint32_t>(&index, 1), std::span(others), gs::never))
                wrong[r] = "a fault too early";
            return net.abort(1, gs::errc::stopped);
        }
        if (gs::all_reduce_top_k(net, mine, g).code != gs::errc::stopped) wrong[r] = "no fault";
        if (g != std::vector<float>{4.0F, 0.0F, 0.0F}) wrong[r] = "another gradient";
        const auto owed = mine.residual();
        if (owed[0] != 1.0F || owed[1] != 2.0F || owed[2] != 0.0F) wrong[r] = "something is lost";
    });
    CHECK(wrong == std::vector<std::string>(2));
}

}  // namespace group_operators_test
