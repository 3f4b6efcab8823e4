// SPDX-License-Identifier: Apache-2.0
// Batch normalisation over the batches of all ranks of a group: each tells how many elements it
// has, their mean and the sum of their squared distances from it (M2), and these are merged in the
// order of ranks. Batches may differ, and be empty.
//
//   gpushare::batch_statistics seen;
//   gpushare::sync_batch_norm(net, shape, x, {weight, bias}, 1e-5F, y, seen, deadline);
//   gpushare::sync_batch_norm_backward(net, shape, x, dy, weight, seen, {dx, dweight, dbias}, deadline);
//
// Merging: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// x[(n * channels + c) * positions + p]: samples, their channels, and the places of each.
struct batch_shape {
    std::size_t samples = 0;    ///< of this rank; may be 0
    std::size_t channels = 0;   ///< the same on all ranks
    std::size_t positions = 1;  ///< the same on all ranks
    /// How many elements that is.
    [[nodiscard]] constexpr std::size_t elements() const noexcept { return samples * channels * positions; }
    /// Where those of a sample's channel begin.
    [[nodiscard]] constexpr std::size_t at(std::size_t n, std::size_t c) const noexcept {
        return (n * channels + c) * positions;
    }
};

/// The moments of a channel, or of several ranks' parts of it. In double: a mean rounded to float32
/// shifts every element by up to 2^-24 of the mean, which is a lot where elements lie close to it.
struct channel_moments {
    std::uint64_t count = 0;  ///< of elements
    double mean = 0;          ///< of these
    double m2 = 0;            ///< the sum of (x - mean)^2
    friend constexpr bool operator==(const channel_moments&, const channel_moments&) = default;

    /// The moments of both. An empty one changes nothing.
    [[nodiscard]] static channel_moments merged(const channel_moments& a, const channel_moments& b) noexcept {
        if (a.count == 0) return b;
        if (b.count == 0) return a;
        const auto of_a = static_cast<double>(a.count), of_b = static_cast<double>(b.count), all = of_a + of_b;
        const double delta = b.mean - a.mean;
        return {a.count + b.count, a.mean + delta * (of_b / all), a.m2 + b.m2 + delta * delta * (of_a * of_b / all)};
    }
};

/// The forward pass's result for the backward pass, and for running averages: a channel each, over
/// all ranks.
struct batch_statistics {
    std::vector<channel_moments> of_channel;  ///< count, mean, M2
    std::vector<float> inverse_deviation;     ///< 1 / sqrt(M2 / count + epsilon); 0 where there is no element
};

namespace detail {

/// Distances from a mean, in float32 and yet from all of its digits: the mean is cut into two
/// floats, and x minus the first is exact where x lies close to it.
class distance_from {
public:
    explicit distance_from(double mean) noexcept
        : high_(static_cast<float>(mean)), low_(static_cast<float>(mean - static_cast<double>(high_))) {}
    [[nodiscard]] float operator()(float x) const noexcept { return (x - high_) - low_; }

private:
    float high_, low_;
};

}  // namespace detail

/// The trained parameters, a number for each channel.
struct batch_norm_parameters {
    std::span<const float> weight;  ///< factors
    std::span<const float> bias;    ///< added
};

/// The results of the backward pass. The parameters' gradients are of this rank's batch alone:
/// combine them like any others.
struct batch_norm_gradients {
    std::span<float> x;       ///< as large as the batch; may be `dy`
    std::span<float> weight;  ///< a number for each channel
    std::span<float> bias;    ///< a number for each channel
};

/// y = (x - mean) * inverse_deviation * weight + bias, with mean and deviation of all ranks'
/// batches. `y` may be `x` if no backward pass follows. The fault's code is errc::mismatch, at once
/// and on this rank alone, where a span isn't as large as it should be.
template <host_transport Net>
[[nodiscard]] collective_fault sync_batch_norm(Net& net, const batch_shape& shape, std::span<const float> x,
                                               const batch_norm_parameters& parameters, float epsilon,
                                               std::span<float> y, batch_statistics& seen, instant deadline = never) {
    const std::size_t channels = shape.channels;
    if (x.size() != shape.elements() || y.size() != x.size() || parameters.weight.size() != channels ||
        parameters.bias.size() != channels)
        return {errc::mismatch, collective_kind::all_gather, net.rank(), 0};
    std::vector<channel_moments> own(channels), all(channels * net.size());
    const std::size_t count = shape.samples * shape.positions;
    for (std::size_t c = 0; c < channels && count != 0; ++c) {
        double sum = 0, m2 = 0;
        const auto each = [&](const auto& f) {
            for (std::size_t n = 0; n < shape.samples; ++n)
                for (std::size_t p = 0; p < shape.positions; ++p) f(static_cast<double>(x[shape.at(n, c) + p]));
        };
        each([&](double v) { sum += v; });
        const double mean = sum / static_cast<double>(count);
        each([&](double v) { m2 += (v - mean) * (v - mean); });
        own[c] = {count, mean, m2};
    }
    if (const auto f = net.all_gather(std::span<const channel_moments>(own), std::span(all), deadline)) return f;
    seen.of_channel.assign(channels, {});
    seen.inverse_deviation.assign(channels, 0.0F);
    for (std::size_t c = 0; c < channels; ++c) {
        for (std::uint32_t r = 0; r < net.size(); ++r)
            seen.of_channel[c] = channel_moments::merged(seen.of_channel[c], all[r * channels + c]);
        const channel_moments& m = seen.of_channel[c];
        if (m.count != 0)
            seen.inverse_deviation[c] =
                static_cast<float>(1.0 / std::sqrt(m.m2 / static_cast<double>(m.count) + static_cast<double>(epsilon)));
        const detail::distance_from mean(m.mean);
        const float scale = seen.inverse_deviation[c] * parameters.weight[c];
        for (std::size_t n = 0; n < shape.samples; ++n)
            for (std::size_t p = 0; p < shape.positions; ++p) {
                const std::size_t i = shape.at(n, c) + p;
                y[i] = mean(x[i]) * scale + parameters.bias[c];
            }
    }
    return {};
}

/// The gradients of that: two sums a channel go to all ranks. `x` and `seen` are those of the
/// forward pass. Errors as there.
template <host_transport Net>
[[nodiscard]] collective_fault sync_batch_norm_backward(Net& net, const batch_shape& shape, std::span<const float> x,
                                                        std::span<const float> dy, std::span<const float> weight,
                                                        const batch_statistics& seen, const batch_norm_gradients& out,
                                                        instant deadline = never) {
    const std::size_t channels = shape.channels;
    if (x.size() != shape.elements() || dy.size() != x.size() || out.x.size() != x.size() ||
        weight.size() != channels || out.weight.size() != channels || out.bias.size() != channels ||
        seen.of_channel.size() != channels || seen.inverse_deviation.size() != channels)
        return {errc::mismatch, collective_kind::all_reduce, net.rank(), 0};
    std::vector<float> sums(2 * channels);  // of dy, then of dy times the normalised x
    for (std::size_t c = 0; c < channels; ++c) {
        double of_dy = 0, of_both = 0;
        const detail::distance_from mean(seen.of_channel[c].mean);
        for (std::size_t n = 0; n < shape.samples; ++n)
            for (std::size_t p = 0; p < shape.positions; ++p) {
                const std::size_t i = shape.at(n, c) + p;
                of_dy += static_cast<double>(dy[i]);
                of_both += static_cast<double>(dy[i]) * static_cast<double>(mean(x[i]) * seen.inverse_deviation[c]);
            }
        sums[c] = out.bias[c] = static_cast<float>(of_dy);
        sums[channels + c] = out.weight[c] = static_cast<float>(of_both);
    }
    if (const auto f = net.all_reduce(std::span<const float>(sums), std::span(sums), sum{}, deadline)) return f;
    for (std::size_t c = 0; c < channels; ++c) {
        const channel_moments& m = seen.of_channel[c];
        if (m.count == 0) continue;
        const auto count = static_cast<float>(m.count);
        const float inverse = seen.inverse_deviation[c], scale = inverse * weight[c];
        const detail::distance_from mean(m.mean);
        const float mean_dy = sums[c] / count, mean_both = sums[channels + c] / count;
        for (std::size_t n = 0; n < shape.samples; ++n)
            for (std::size_t p = 0; p < shape.positions; ++p) {
                const std::size_t i = shape.at(n, c) + p;
                out.x[i] = (dy[i] - mean_dy - mean(x[i]) * inverse * mean_both) * scale;
            }
    }
    return {};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
