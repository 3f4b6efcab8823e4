// SPDX-License-Identifier: Apache-2.0
#include "gradient/quantised.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/numbers.hpp>

#include "collective/group.hpp"

namespace bench {

namespace {

namespace gs = gpushare;

constexpr std::uint32_t ranks = 4;
constexpr std::size_t rounds = 5, per_scale = 128;

void must(const gs::collective_fault& f) {
    if (f) throw std::runtime_error(gs::describe(f).c_str());
}

/// Counts the bytes that `body` changes in the slots of all ranks. The slots start with zeros in
/// one run and with ones in a second run, so that a byte that keeps its old value by chance still
/// counts.
template <class Body>
std::size_t bytes_left(const gs::communicator_options& options, const Body& body) {
    std::vector<std::vector<bool>> written(ranks, std::vector<bool>(2 * options.slot.count()));
    for (const int before : {0x00, 0xff}) {
        const gs::communicator group(ranks, options);
        const auto view = group.rank(0).view();
        for (std::uint32_t r = 0; r < ranks; ++r) std::memset(view.slot_of(r, 0, 0), before, 2 * view.slot);
        on_ranks(group, body);
        for (std::uint32_t r = 0; r < ranks; ++r)
            for (std::size_t i = 0; i < 2 * view.slot; ++i)
                if (view.slot_of(r, 0, 0)[i] != static_cast<std::byte>(before)) written[r][i] = true;
    }
    std::size_t all = 0;
    for (const auto& w : written) all += static_cast<std::size_t>(std::ranges::count(w, true));
    return all;
}

/// The ratio compares the written bytes with four bytes for each element that a rank contributes
/// and four bytes for each element that a rank has summed.
void wire_bytes(report& r) {
    constexpr std::size_t n = ranks * 16 * per_scale;  // one chunk
    std::mt19937 any(1);
    std::normal_distribution<float> normal;
    std::vector<std::vector<float>> x(ranks, std::vector<float>(n)), y = x;
    for (auto& v : x)
        for (float& one : v) one = normal(any);
    const gs::communicator_options options{.slot = gs::bytes{64 << 10}};
    const auto quantised = bytes_left(options, [&](const gs::member& me) {
        must(gs::try_quantised_all_reduce<per_scale>(me, x[me.rank()], std::span(y[me.rank()])));
    });
    gs::communicator_options one_shot = options;
    one_shot.tuning = gs::tuning_table::always(gs::algorithm::one_shot);
    const auto exact = bytes_left(
        one_shot, [&](const gs::member& me) { must(gs::try_all_reduce(me, x[me.rank()], std::span(y[me.rank()]))); });
    const double of_floats = sizeof(float) * static_cast<double>(n * ranks);
    const double ratio = static_cast<double>(quantised) / (of_floats * (1 + 1.0 / ranks));
    r.figure("gradient.device_wire_bytes_ratio", {ratio}, "x",
             {at_most(0.27), static_cast<double>(exact) / of_floats, "floats in the slots"});
}

/// The error of the sums beyond the part that the largest element of a block explains, relative to
/// the sum of the magnitudes.
double error(const std::vector<std::vector<float>>& x, std::span<const float> sums) {
    double worst = 0;
    for (std::size_t i = 0; i < sums.size(); ++i) {
        double exact = 0, magnitudes = 0, largest = 0;
        for (const auto& v : x) {
            exact += static_cast<double>(v[i]);
            magnitudes += std::abs(static_cast<double>(v[i]));
            const std::size_t first = i / per_scale * per_scale, last = std::min(first + per_scale, v.size());
            double most = 0;
            for (std::size_t k = first; k < last; ++k) most = std::max(most, std::abs(static_cast<double>(v[k])));
            largest += most;
        }
        const double beyond = std::abs(static_cast<double>(sums[i]) - exact) - largest / 65536;
        if (beyond > 0) worst = std::max(worst, beyond / magnitudes);
    }
    return worst;
}

/// Draws gradients of similar magnitude, gradients of widely different magnitudes, and gradients
/// that round as badly as possible.
std::vector<std::vector<float>> gradients(std::mt19937& any, std::size_t round) {
    std::normal_distribution<float> normal;
    std::vector<std::vector<float>> x(ranks, std::vector<float>(100'003));
    for (auto& v : x)
        for (float& one : v) {
            one = normal(any);
            if (round % 3 == 1) one *= std::exp(4 * normal(any));
            if (round % 3 == 2) one = std::copysign(std::ldexp(1.0624F, -static_cast<int>(any() % 9)), one);
        }
    return x;
}

void errors(report& r) {
    std::mt19937 any(2);
    const gs::communicator group(ranks);
    std::vector<double> off;
    double planted = 0;
    for (std::size_t round = 0; round < rounds; ++round) {
        const auto x = gradients(any, round);
        auto y = x;
        on_ranks(group, [&](const gs::member& me) {
            must(gs::try_quantised_all_reduce<per_scale>(me, x[me.rank()], std::span(y[me.rank()])));
        });
        for (std::uint32_t q = 1; q < ranks; ++q)
            if (y[q] != y[0]) throw std::runtime_error("ranks have different sums");
        off.push_back(error(x, y[0]));
        const auto coarse = [](float v) { return static_cast<float>(gs::fp8_e5m2(v / 1024)) * 1024; };
        for (std::size_t i = 0; i < y[0].size(); ++i) {
            float sum = 0;
            for (const auto& v : x) sum += coarse(v[i]);
            y[0][i] = coarse(sum);
        }
        planted = std::max(planted, error(x, y[0]));
    }
    r.figure("gradient.quantised_max_rel_error", off, "",
             {at_most(0.129), planted, "codes with a bit less and no scales"}, statistic::most);
}

}  // namespace

void quantised_all_reduces(report& r) {
    wire_bytes(r);
    errors(r);
}

}  // namespace bench
