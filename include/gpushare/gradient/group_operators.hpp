// SPDX-License-Identifier: Apache-2.0
// Operators of a group of ranks, for networks whose layers need the data of several ranks: batch
// normalisation over all ranks' batches, and a softmax over sharded classes.
//
//   gpushare::batch_statistics seen;
//   gpushare::sync_batch_norm(net, shape, x, {weight, bias}, 1e-5F, y, seen, deadline);
//   gpushare::sync_batch_norm_backward(net, shape, x, dy, weight, seen, {dx, dweight, dbias},
//                                      deadline);
//
// For each channel, each rank sends the number of elements of its batch, their mean, and the sum of
// their squared distances from the mean (M2). All ranks merge these moments in the order of ranks.
// Batches may differ in size, and may be empty. The formulae for merging are those of Chan, Golub
// and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
//
//   gpushare::partial_softmax layer(net, 1'000'003, features, {.rate = 0.1});
//   auto fault = layer.step(net, rows, labels, weights, loss, drows, deadline);
//   for (std::size_t k = 0; k < layer.rows().size(); ++k)
//       update(layer.rows()[k], layer.row_gradient(k));
//
// For batches on devices, batch normalisation runs on streams, with a device_batch for each rank:
//
//   gpushare::submit_sync_batch_norm(std::span(streams), batches, 1e-5F, gather);
//   gpushare::submit_sync_batch_norm_backward(std::span(streams), batches, all_reduce);
//
// device_partial_softmax is the softmax for ranks on devices.
//
// The last layer of a network may have more classes than one device can hold. Each rank then has
// the weights of its shard of the classes. All ranks compute one softmax cross-entropy, over all
// classes, or over the labels' classes and a sample of the remaining classes. See An et al.,
// "Killing two birds with one stone: efficient and robust training of face recognition CNNs by
// Partial FC", CVPR 2022.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/device_softmax.hpp>
#include <gpushare/gradient/detail/lent_arrays.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Element p of channel c of sample n is x[(n * channels + c) * positions + p].
struct batch_shape {
    std::size_t samples = 0;    ///< samples of this rank; may be 0
    std::size_t channels = 0;   ///< the same on all ranks
    std::size_t positions = 1;  ///< the same on all ranks
    /// The number of elements.
    [[nodiscard]] GPUSHARE_HD constexpr std::size_t elements() const noexcept { return samples * channels * positions; }
    /// The index of the first element of channel c of sample n.
    [[nodiscard]] GPUSHARE_HD constexpr std::size_t at(std::size_t n, std::size_t c) const noexcept {
        return (n * channels + c) * positions;
    }
};

/// The moments of a channel, or of some ranks' parts of the channel. The mean is a double, because
/// rounding a mean to float32 shifts elements by up to 2^-24 of the mean, which matters for
/// elements close to the mean.
struct channel_moments {
    std::uint64_t count = 0;  ///< the number of elements
    double mean = 0;          ///< the mean of the elements
    double m2 = 0;            ///< the sum of (x - mean)^2
    friend constexpr bool operator==(const channel_moments&, const channel_moments&) = default;

    /// The moments of both together. Empty moments change nothing.
    [[nodiscard]] GPUSHARE_HD static channel_moments merged(const channel_moments& a,
                                                            const channel_moments& b) noexcept {
        if (a.count == 0) return b;
        if (b.count == 0) return a;
        const auto of_a = static_cast<double>(a.count), of_b = static_cast<double>(b.count), all = of_a + of_b;
        const double delta = b.mean - a.mean;
        return {a.count + b.count, a.mean + delta * (of_b / all), a.m2 + b.m2 + delta * delta * (of_a * of_b / all)};
    }
};

/// The result of the forward pass, which the backward pass and running averages need: an entry for
/// each channel, over all ranks.
struct batch_statistics {
    std::vector<channel_moments> of_channel;  ///< count, mean, M2
    std::vector<float> inverse_deviation;     ///< 1 / sqrt(M2 / count + epsilon); 0 if count is 0
};

namespace detail {

/// Computes distances from a mean in float32, with all digits of the mean. The mean is cut into two
/// floats, and x minus the first float is exact if x is close to the mean.
class distance_from {
public:
    GPUSHARE_HD explicit distance_from(double mean) noexcept
        : high_(static_cast<float>(mean)), low_(static_cast<float>(mean - static_cast<double>(high_))) {}
    [[nodiscard]] GPUSHARE_HD float operator()(float x) const noexcept { return (x - high_) - low_; }

private:
    float high_, low_;
};

}  // namespace detail

/// The trained parameters: a weight and a bias for each channel.
struct batch_norm_parameters {
    std::span<const float> weight;  ///< the factors
    std::span<const float> bias;    ///< the summands
};

/// The results of the backward pass. The parameters' gradients cover only this rank's batch:
/// combine them like other gradients.
struct batch_norm_gradients {
    std::span<float> x;       ///< as large as the batch; may be `dy`
    std::span<float> weight;  ///< a number for each channel
    std::span<float> bias;    ///< a number for each channel
};

/// y = (x - mean) * inverse_deviation * weight + bias, with the mean and the deviation of all
/// ranks' batches. `y` may be `x` if no backward pass follows. If a span has the wrong size, only
/// this rank gets errc::mismatch, immediately.
template <host_transport Net>
[[nodiscard]] collective_fault sync_batch_norm(Net& net, const batch_shape& shape, std::span<const float> x,
                                               const batch_norm_parameters& parameters, float epsilon,
                                               std::span<float> y, batch_statistics& seen, instant deadline = never) {
    const std::size_t channels = shape.channels;
    if (x.size() != shape.elements() || y.size() != x.size() || parameters.weight.size() != channels ||
        parameters.bias.size() != channels)
        return {errc::mismatch, collective_kind::all_gather, net.rank(), 0};
    std::vector<channel_moments> all(channels * net.size());
    detail::lent_arrays memory(all);
    const std::span<const channel_moments> own = std::span(all).subspan(net.rank() * channels, channels);
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
        all[net.rank() * channels + c] = {count, mean, m2};
    }
    if (const auto f = memory.to([&] { return net.all_gather(own, std::span(all), deadline); })) return f;
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

/// The backward pass of sync_batch_norm. The ranks all-reduce two sums for each channel. `x` and
/// `seen` are those of the forward pass. Returns errc::mismatch as sync_batch_norm does.
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
    // the sums of dy, then the sums of dy times the normalised x
    std::vector<float> sums(2 * channels);
    detail::lent_arrays memory(sums);
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
    if (const auto f =
            memory.to([&] { return net.all_reduce(std::span<const float>(sums), std::span(sums), sum{}, deadline); }))
        return f;
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

/// One rank's batch, in memory of its device. Arrays have `channels` elements unless a comment says
/// otherwise.
struct device_batch {
    batch_shape shape{};            ///< samples may differ between ranks, and be 0
    const float* x = nullptr;       ///< the batch: shape.elements() elements
    float* y = nullptr;             ///< as large as `x`; may be `x` if no backward pass follows
    const float* weight = nullptr;  ///< the factors
    const float* bias = nullptr;    ///< the summands
    /// The forward pass's result over all ranks, for the backward pass and for running averages.
    channel_moments* moments = nullptr;
    float* inverse_deviation = nullptr;   ///< as in batch_statistics
    channel_moments* of_ranks = nullptr;  ///< scratch: channels * (ranks + 1)
    /// as large as `x`. The members from here on are for the backward pass only
    const float* dy = nullptr;
    float* dx = nullptr;       ///< as large as `x`; may be `dy`
    float* dweight = nullptr;  ///< of this rank's batch alone
    float* dbias = nullptr;    ///< of this rank's batch alone
    float* sums = nullptr;     ///< scratch: 2 * channels
};

namespace detail {

/// A kernel that calls f(context, batch, channel) for each channel, with one block for a channel.
template <class F>
struct of_channels {
    device_batch batch;
    F f;
    [[nodiscard]] grid shape() const noexcept {
        const std::size_t blocks = batch.shape.channels < 1024 ? batch.shape.channels : 1024;
        return {.blocks = static_cast<std::uint32_t>(blocks), .threads = 256, .hold = {}};
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        for (std::size_t c = ctx.block_rank(); c < batch.shape.channels; c += ctx.num_blocks()) f(ctx, batch, c);
    }
};

/// Calls f(index) for each of the channel's elements that this thread has.
GPUSHARE_EXEC_CHECK_DISABLE
template <class C, class F>
GPUSHARE_HD void each_element(const C& ctx, const batch_shape& shape, std::size_t channel, const F& f) {
    const std::size_t all = shape.samples * shape.positions;
    for (std::size_t k = ctx.thread_rank(); k < all; k += ctx.num_threads())
        f(shape.at(k / shape.positions, channel) + k % shape.positions);
}

/// This rank's moments of a channel.
struct own_moments {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C& ctx, const device_batch& b, std::size_t c) const {
        const std::size_t count = b.shape.samples * b.shape.positions;
        channel_moments own;
        if (count != 0) {
            double sum = 0, m2 = 0;
            each_element(ctx, b.shape, c, [&](std::size_t i) { sum += static_cast<double>(b.x[i]); });
            const double mean = ctx.reduce_add(sum) / static_cast<double>(count);
            each_element(ctx, b.shape, c, [&](std::size_t i) {
                const double off = static_cast<double>(b.x[i]) - mean;
                m2 += off * off;
            });
            own.count = count;
            own.mean = mean;
            own.m2 = ctx.reduce_add(m2);
        }
        if (ctx.thread_rank() == 0) b.of_ranks[c] = own;
    }
};
/// Merges all ranks' moments of a channel, and normalises this rank's elements.
struct normalise_channel {
    std::uint32_t ranks;
    float epsilon;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C& ctx, const device_batch& b, std::size_t c) const {
        channel_moments m;
        for (std::uint32_t r = 0; r < ranks; ++r)
            m = channel_moments::merged(m, b.of_ranks[(r + std::size_t{1}) * b.shape.channels + c]);
        float inverse = 0;
        if (m.count != 0)
            inverse =
                static_cast<float>(1.0 / std::sqrt(m.m2 / static_cast<double>(m.count) + static_cast<double>(epsilon)));
        if (ctx.thread_rank() == 0) {
            b.moments[c] = m;
            b.inverse_deviation[c] = inverse;
        }
        const distance_from mean(m.mean);
        const float scale = inverse * b.weight[c];
        each_element(ctx, b.shape, c, [&](std::size_t i) { b.y[i] = mean(b.x[i]) * scale + b.bias[c]; });
    }
};
/// The sums that a channel's gradients need.
struct sums_of_channel {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C& ctx, const device_batch& b, std::size_t c) const {
        double of_dy = 0, of_both = 0;
        const distance_from mean(b.moments[c].mean);
        const float inverse = b.inverse_deviation[c];
        each_element(ctx, b.shape, c, [&](std::size_t i) {
            of_dy += static_cast<double>(b.dy[i]);
            of_both += static_cast<double>(b.dy[i]) * static_cast<double>(mean(b.x[i]) * inverse);
        });
        of_dy = ctx.reduce_add(of_dy);
        of_both = ctx.reduce_add(of_both);
        if (ctx.thread_rank() != 0) return;
        b.sums[c] = b.dbias[c] = static_cast<float>(of_dy);
        b.sums[b.shape.channels + c] = b.dweight[c] = static_cast<float>(of_both);
    }
};
struct gradient_of_channel {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C& ctx, const device_batch& b, std::size_t c) const {
        const channel_moments m = b.moments[c];
        if (m.count == 0) return;
        const auto count = static_cast<float>(m.count);
        const float inverse = b.inverse_deviation[c], scale = inverse * b.weight[c];
        const distance_from mean(m.mean);
        const float mean_dy = b.sums[c] / count, mean_both = b.sums[b.shape.channels + c] / count;
        each_element(ctx, b.shape, c, [&](std::size_t i) {
            b.dx[i] = (b.dy[i] - mean_dy - mean(b.x[i]) * inverse * mean_both) * scale;
        });
    }
};

/// Launches on each rank's stream, or on one stream for all ranks.
template <class Stream, class F>
void launch_on_batches(std::span<Stream> streams, std::span<const device_batch> batches, const F& f) {
    for (std::size_t r = 0; r < batches.size(); ++r) {
        const of_channels<F> kernel{batches[r], f};
        streams[streams.size() == 1 ? 0 : r].launch(kernel.shape(), kernel);
    }
}
template <class Stream>
[[nodiscard]] bool batches_fit(std::span<Stream> streams, std::span<const device_batch> batches) noexcept {
    if (batches.empty() || (streams.size() != batches.size() && streams.size() != 1)) return false;
    for (const device_batch& b : batches)
        if (b.shape.channels != batches[0].shape.channels || b.shape.positions != batches[0].shape.positions)
            return false;
    return true;
}

}  // namespace detail

/// sync_batch_norm for ranks on devices. Enqueues on streams[r] for rank r, or on one stream for
/// all ranks if they share a device. `gather(ins, outs, count)` enqueues an all-gather of 64-bit
/// words, for example submit_all_gather (collective/submit.hpp), and returns its error. No thread
/// waits for the device, so the call can be captured. The bits are those of sync_batch_norm, with
/// two exceptions on a device. The threads of a block share a channel and add its sums in a
/// different order, and the device may round a product and a sum only once. Returns
/// errc::invalid_specification if spans or shapes don't fit.
template <launcher Stream, class Gather>
[[nodiscard]] errc submit_sync_batch_norm(std::span<Stream> streams, std::span<const device_batch> batches,
                                          float epsilon, const Gather& gather) {
    if (!detail::batches_fit(streams, batches)) return errc::invalid_specification;
    const std::size_t channels = batches[0].shape.channels;
    if (channels == 0) return errc::none;
    std::vector<const std::uint64_t*> own;
    std::vector<std::uint64_t*> all;
    for (const device_batch& b : batches) {
        own.push_back(reinterpret_cast<const std::uint64_t*>(b.of_ranks));
        all.push_back(reinterpret_cast<std::uint64_t*>(b.of_ranks + channels));
    }
    detail::launch_on_batches(streams, batches, detail::own_moments{});
    constexpr std::size_t words = sizeof(channel_moments) / sizeof(std::uint64_t);
    if (const errc why =
            gather(std::span<const std::uint64_t* const>(own), std::span<std::uint64_t* const>(all), words * channels);
        why != errc::none)
        return why;
    detail::launch_on_batches(streams, batches,
                              detail::normalise_channel{static_cast<std::uint32_t>(batches.size()), epsilon});
    return errc::none;
}

/// The backward pass of submit_sync_batch_norm, for the same batches. `all_reduce(ins, outs, count,
/// op)` is an engine of buckets (gradient/device_buckets.hpp) for floats and sum. Otherwise works
/// as submit_sync_batch_norm.
template <launcher Stream, class AllReduce>
[[nodiscard]] errc submit_sync_batch_norm_backward(std::span<Stream> streams, std::span<const device_batch> batches,
                                                   const AllReduce& all_reduce) {
    if (!detail::batches_fit(streams, batches)) return errc::invalid_specification;
    if (batches[0].shape.channels == 0) return errc::none;
    std::vector<const float*> ins;
    std::vector<float*> outs;
    for (const device_batch& b : batches) {
        ins.push_back(b.sums);
        outs.push_back(b.sums);
    }
    detail::launch_on_batches(streams, batches, detail::sums_of_channel{});
    if (const errc why = all_reduce(std::span<const float* const>(ins), std::span<float* const>(outs),
                                    2 * batches[0].shape.channels, sum{});
        why != errc::none)
        return why;
    detail::launch_on_batches(streams, batches, detail::gradient_of_channel{});
    return errc::none;
}

/// Which classes take part in a step.
struct partial_softmax_options {
    /// the fraction of each rank's classes that takes part in a step; labels' classes always take
    /// part
    double rate = 1;
    std::uint64_t seed = 0;  ///< the sample's seed; samples also differ by rank and step
};

namespace detail {

/// Chooses which classes of a rank's shard take part, step by step. A plain value.
class class_sample {
public:
    class_sample(const element_range& own, std::uint32_t rank, const partial_softmax_options& options)
        : own_(own), options_(options), any_(options.seed + golden_ratio * (rank + 1)) {}

    /// Chooses all classes that are labels, and random further classes as far as the rate leaves
    /// room.
    void choose(std::span<const std::int64_t> labels, std::vector<std::uint32_t>& rows) {
        std::vector<bool> taken(own_.size());
        std::size_t n = 0;
        const auto take = [&](std::size_t c) {
            n += taken[c] ? 0 : 1;
            taken[c] = true;
        };
        for (const std::int64_t l : labels)
            if (l >= static_cast<std::int64_t>(own_.begin) && l < static_cast<std::int64_t>(own_.end))
                take(static_cast<std::size_t>(l) - own_.begin);
        // a NaN becomes 0, too
        const double rate = options_.rate > 0 ? std::min(options_.rate, 1.0) : 0;
        const auto wanted = static_cast<std::size_t>(std::ceil(static_cast<double>(own_.size()) * rate));
        if (wanted >= own_.size()) {
            taken.assign(own_.size(), true);
        } else {
            // Selection sampling: takes each remaining class with a probability of the number still
            // wanted divided by the number still left. So one pass suffices, and no class comes
            // twice.
            std::size_t left = own_.size() - n;
            for (std::size_t c = 0; c < own_.size() && n < wanted; ++c) {
                if (taken[c]) continue;
                if (any_() % left < wanted - n) take(c);
                --left;
            }
        }
        rows.clear();
        for (std::uint32_t c = 0; c < own_.size(); ++c)
            if (taken[c]) rows.push_back(c);
    }

private:
    element_range own_;
    partial_softmax_options options_;
    std::mt19937_64 any_;
};

}  // namespace detail

/// One rank's shard of the classes, and the results of its last step. All ranks pass batches of the
/// same size, so pad smaller batches with samples of the label `ignored`.
class partial_softmax {
public:
    static constexpr std::int64_t ignored = -1;  ///< the label of a sample that doesn't count

    /// Each sample has `features` numbers.
    template <host_transport Net>
    partial_softmax(const Net& net, std::size_t classes, std::size_t features,
                    const partial_softmax_options& options = {})
        : classes_(classes),
          own_(shard_of(classes, net.rank(), net.size())),
          features_(features),
          sample_(own_, net.rank(), options) {}

    [[nodiscard]] element_range own() const noexcept { return own_; }  ///< the classes of this rank
    /// The classes that took part in the last step, counted from own().begin, ascending.
    [[nodiscard]] std::span<const std::uint32_t> rows() const noexcept { return rows_; }
    /// The gradient of the weights of class rows()[k] in the last step. The gradient is complete:
    /// other ranks have nothing to add.
    [[nodiscard]] std::span<const float> row_gradient(std::size_t k) const noexcept {
        return std::span(gradient_).subspan(k * features_, features_);
    }

    /// Computes the mean loss of all ranks' samples, the same on every rank. Also computes the
    /// loss's gradients with respect to this rank's samples (`dx`) and to its classes' weights
    /// (row_gradient). `x` and `dx` have a row of features for each label, and `weights` has a row
    /// for each class of own(). A label that isn't a class counts as `ignored`. If a span has the
    /// wrong size, only this rank gets errc::mismatch, immediately.
    template <host_transport Net>
    [[nodiscard]] collective_fault step(Net& net, std::span<const float> x, std::span<const std::int64_t> labels,
                                        std::span<const float> weights, float& loss, std::span<float> dx,
                                        instant deadline = never) {
        const std::size_t here = labels.size(), samples = here * net.size();
        if (x.size() != here * features_ || dx.size() != x.size() || weights.size() != own_.size() * features_)
            return {errc::mismatch, collective_kind::all_gather, net.rank(), 0};
        std::vector<float> all_x(samples * features_), most, sums, all_dx;
        std::vector<std::int64_t> all_labels(samples);
        detail::lent_arrays memory(all_x, all_labels, most, sums, all_dx);
        const auto in_place = [&](std::span<float> data, auto op) {
            return memory.to([&] { return net.all_reduce(std::span<const float>(data), data, op, deadline); });
        };
        if (const auto f = memory.to([&] { return net.all_gather(x, std::span(all_x), deadline); })) return f;
        if (const auto f = memory.to([&] { return net.all_gather(labels, std::span(all_labels), deadline); })) return f;
        sample_.choose(all_labels, rows_);

        std::vector<float> logits(samples * rows_.size());
        most = products(samples, all_x, weights, logits);
        if (const auto f = in_place(most, maximum{})) return f;
        sums = exponentials(all_labels, most, logits);
        if (const auto f = in_place(sums, sum{})) return f;
        const std::size_t counted = mean_loss(all_labels, sums, loss);
        all_dx = gradients(all_x, all_labels, weights, logits, sums, counted);
        return memory.to([&] { return net.reduce_scatter(std::span<const float>(all_dx), dx, sum{}, deadline); });
    }

private:
    /// Fills in the logits, a row for each sample, and returns each sample's largest logit.
    std::vector<float> products(std::size_t samples, std::span<const float> x, std::span<const float> weights,
                                std::span<float> logits) const {
        const std::size_t classes = rows_.size();
        std::vector<float> most(samples, -std::numeric_limits<float>::infinity());
        for (std::size_t s = 0; s < samples; ++s)
            for (std::size_t k = 0; k < classes; ++k) {
                const float l = product(x.data() + s * features_, weights.data() + rows_[k] * features_);
                logits[s * classes + k] = l;
                most[s] = std::max(most[s], l);
            }
        return most;
    }
    /// Turns logits into exponentials, relative to the largest logit of all ranks. Returns the sums
    /// for all samples, followed by the logit of each sample's label, which only one rank has.
    std::vector<float> exponentials(std::span<const std::int64_t> labels, std::span<const float> most,
                                    std::span<float> logits) const {
        const std::size_t classes = rows_.size(), samples = labels.size();
        std::vector<float> sums(2 * samples);
        for (std::size_t s = 0; s < samples; ++s) {
            double sum = 0;
            for (std::size_t k = 0; k < classes; ++k) {
                float& l = logits[s * classes + k];
                if (is_label(labels[s], k)) sums[samples + s] = l - most[s];
                l = std::exp(l - most[s]);
                sum += static_cast<double>(l);
            }
            sums[s] = static_cast<float>(sum);
        }
        return sums;
    }
    /// Computes the loss, and returns how many samples count.
    std::size_t mean_loss(std::span<const std::int64_t> labels, std::span<const float> sums, float& loss) const {
        std::size_t counted = 0;
        double total = 0;
        for (std::size_t s = 0; s < labels.size(); ++s)
            if (counts(labels[s])) {
                ++counted;
                total += std::log(static_cast<double>(sums[s])) - static_cast<double>(sums[labels.size() + s]);
            }
        loss = counted == 0 ? 0.0F : static_cast<float>(total / static_cast<double>(counted));
        return counted;
    }
    /// Fills in gradient_, and returns this rank's part of the gradient with respect to all
    /// samples' features.
    std::vector<float> gradients(std::span<const float> x, std::span<const std::int64_t> labels,
                                 std::span<const float> weights, std::span<const float> exponentials,
                                 std::span<const float> sums, std::size_t counted) {
        const std::size_t classes = rows_.size();
        gradient_.assign(classes * features_, 0.0F);
        std::vector<float> dx(x.size());
        for (std::size_t s = 0; s < labels.size(); ++s) {
            if (!counts(labels[s])) continue;
            for (std::size_t k = 0; k < classes; ++k) {
                const float p = exponentials[s * classes + k] / sums[s];
                const float d = (p - (is_label(labels[s], k) ? 1.0F : 0.0F)) / static_cast<float>(counted);
                for (std::size_t i = 0; i < features_; ++i) {
                    gradient_[k * features_ + i] += d * x[s * features_ + i];
                    dx[s * features_ + i] += d * weights[rows_[k] * features_ + i];
                }
            }
        }
        return dx;
    }

    [[nodiscard]] bool is_label(std::int64_t label, std::size_t k) const noexcept {
        return label == static_cast<std::int64_t>(own_.begin + rows_[k]);
    }
    [[nodiscard]] bool counts(std::int64_t label) const noexcept {
        return label >= 0 && label < static_cast<std::int64_t>(classes_);
    }
    [[nodiscard]] float product(const float* a, const float* b) const noexcept {
        float sum = 0;
        for (std::size_t i = 0; i < features_; ++i) sum += a[i] * b[i];
        return sum;
    }

    std::size_t classes_;
    element_range own_;
    std::size_t features_;
    detail::class_sample sample_;
    std::vector<std::uint32_t> rows_;
    std::vector<float> gradient_;
};

/// One rank's arrays of a device_partial_softmax, in memory of its device.
struct device_softmax_rank {
    const float* x = nullptr;              ///< a row of features for each sample of this rank
    const std::int64_t* labels = nullptr;  ///< the labels of these samples
    const float* weights = nullptr;        ///< a row for each class of own(rank)
    float* dx = nullptr;                   ///< the gradient with respect to x, as large as `x`
    float* gradient = nullptr;             ///< a row for each of rows(rank); as large as `weights`
    float* loss = nullptr;                 ///< one number: the mean loss of all ranks' samples
    std::byte* scratch = nullptr;          ///< memory of scratch_bytes(), with an alignment of 16
};

/// partial_softmax of all ranks of this process, on devices. Labels are on the devices. If not all
/// classes take part, the host needs the labels, too, because the host draws the sample. It draws
/// the same classes as partial_softmax. One thread at a time uses the object.
///
///   gpushare::device_partial_softmax layer(ranks, classes, features, samples_of_a_rank,
///                                          {.rate = 0.1});
///   layer.choose(labels);                                            // of all ranks' samples
///   layer.submit_step(std::span(streams), arrays, gather, all_reduce, reduce_scatter);
///
/// The results are those of partial_softmax, with the same bits if a block has one thread. There
/// are three differences on a device. The threads of a block share a sample's logits and add
/// exponentials in a different order; the device may round a product and a sum only once; and exp
/// and log are the device's.
class device_partial_softmax {
public:
    /// Each rank has `samples` samples of `features` numbers.
    device_partial_softmax(std::uint32_t ranks, std::size_t classes, std::size_t features, std::size_t samples,
                           const partial_softmax_options& options = {})
        : classes_(classes), features_(features), samples_(samples), rows_(ranks), all_take_part_(options.rate >= 1) {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            own_.push_back(shard_of(classes, r, ranks));
            sample_.emplace_back(own_[r], r, options);
            if (all_take_part_) sample_[r].choose({}, rows_[r]);
        }
    }

    /// The classes of a rank.
    [[nodiscard]] element_range own(std::uint32_t rank) const { return own_[rank]; }
    /// The rank's classes that take part in the step, counted from own(rank).begin, ascending.
    [[nodiscard]] std::span<const std::uint32_t> rows(std::uint32_t rank) const { return rows_[rank]; }
    /// The memory that a step takes on each rank's device.
    [[nodiscard]] bytes scratch_bytes() const {
        std::size_t most = 0;  // the classes of a rank, at most
        for (const element_range& own : own_) most = std::max(most, own.size());
        const std::size_t all = samples_ * own_.size();
        return bytes{all * sizeof(std::int64_t) + (2 * all * features_ + all * most + 3 * all + 1) * sizeof(float) +
                     most * sizeof(std::uint32_t)};
    }
    /// Chooses the classes of the next step: those of the labels, and random further classes.
    /// `labels` has all ranks' labels, rank by rank. Call choose() before each step, unless all
    /// classes take part. The step copies the choice to the devices, so don't choose again before
    /// the copy is done. Throws operation_error (errc::invalid_specification) for another number of
    /// labels.
    void choose(std::span<const std::int64_t> labels) {
        if (labels.size() != samples_ * own_.size())
            raise({errc::invalid_specification, labels.size(), 0, samples_ * own_.size(), reason::wrong_count}, {},
                  "choosing the classes of a softmax");
        for (std::size_t r = 0; r < own_.size(); ++r) sample_[r].choose(labels, rows_[r]);
        chosen_ = true;
    }

    /// Enqueues a step on streams[r] for rank r, or on one stream for all ranks if they share a
    /// device. The last arguments enqueue collectives, for example those of submit.hpp: gather(ins,
    /// outs, count) of floats and of std::int64_t, and all_reduce(ins, outs, count, op) and
    /// reduce_scatter(ins, outs, count, op) of floats. Returns their errors. Returns
    /// errc::invalid_specification for another number of ranks or streams, or if no classes were
    /// chosen. After a collective's error, the same step may be tried again with the same choice.
    template <launcher Stream, class Gather, class AllReduce, class ReduceScatter>
    requires copier<Stream>
    [[nodiscard]] errc submit_step(std::span<Stream> streams, std::span<const device_softmax_rank> ranks,
                                   const Gather& gather, const AllReduce& all_reduce,
                                   const ReduceScatter& reduce_scatter) {
        if (ranks.empty() || ranks.size() != own_.size() || (streams.size() != ranks.size() && streams.size() != 1) ||
            !(chosen_ || all_take_part_))
            return errc::invalid_specification;
        std::vector<detail::softmax_part> parts;
        for (std::uint32_t r = 0; r < ranks.size(); ++r) parts.push_back(part_of(r, ranks[r]));
        const auto stream_of = [&](std::size_t r) -> Stream& { return streams[streams.size() == 1 ? 0 : r]; };
        const auto on_each = [&](const auto& items_of, const auto& kernel) {
            for (std::size_t r = 0; r < parts.size(); ++r)
                detail::launch_each(stream_of(r), parts[r], items_of(parts[r]), kernel);
        };
        const auto samples = [](const auto& p) { return p.samples; };
        const auto classes = [](const auto& p) { return p.taking_part; };
        const auto once = [](const auto&) { return std::size_t{1}; };
        for (std::uint32_t r = 0; r < parts.size(); ++r)
            if (!rows_[r].empty())
                stream_of(r).copy(parts[r].rows, rows_[r].data(), rows_[r].size() * sizeof(std::uint32_t));
        if (const errc why = gather_all(ranks, parts, gather); why != errc::none) return why;
        on_each(samples, detail::logits_of_sample{});
        if (const errc why = combine(parts, &detail::softmax_part::most, 1, maximum{}, all_reduce); why != errc::none)
            return why;
        on_each(samples, detail::exponentials_of_sample{});
        if (const errc why = combine(parts, &detail::softmax_part::sums, 2, sum{}, all_reduce); why != errc::none)
            return why;
        on_each(once, detail::mean_of_losses{});
        on_each(classes, detail::gradient_of_class{});
        on_each(samples, detail::gradient_of_sample{});
        std::vector<const float*> parts_of_dx;
        std::vector<float*> dx;
        for (std::size_t r = 0; r < parts.size(); ++r) {
            parts_of_dx.push_back(parts[r].dx);
            dx.push_back(ranks[r].dx);
        }
        const errc why = reduce_scatter(std::span<const float* const>(parts_of_dx), std::span<float* const>(dx),
                                        samples_ * features_, sum{});
        if (why == errc::none) chosen_ = false;
        return why;
    }

private:
    [[nodiscard]] detail::softmax_part part_of(std::uint32_t r, const device_softmax_rank& rank) const {
        detail::softmax_part p{.weights = rank.weights,
                               .gradient = rank.gradient,
                               .loss = rank.loss,
                               .samples = samples_ * own_.size(),
                               .taking_part = rows_[r].size(),
                               .features = features_,
                               .first = own_[r].begin,
                               .classes = classes_};
        p.labels = reinterpret_cast<std::int64_t*>(rank.scratch);
        p.x = reinterpret_cast<float*>(p.labels + p.samples);
        p.dx = p.x + p.samples * features_;
        p.most = p.dx + p.samples * features_;
        p.sums = p.most + p.samples;
        p.logits = p.sums + 2 * p.samples + 1;
        p.rows = reinterpret_cast<std::uint32_t*>(p.logits + p.samples * p.taking_part);
        return p;
    }
    template <class Gather>
    [[nodiscard]] errc gather_all(std::span<const device_softmax_rank> ranks,
                                  std::span<const detail::softmax_part> parts, const Gather& gather) const {
        std::vector<const float*> x;
        std::vector<float*> all_x;
        std::vector<const std::int64_t*> labels;
        std::vector<std::int64_t*> all_labels;
        for (std::size_t r = 0; r < parts.size(); ++r) {
            x.push_back(ranks[r].x);
            all_x.push_back(parts[r].x);
            labels.push_back(ranks[r].labels);
            all_labels.push_back(parts[r].labels);
        }
        const errc why = gather(std::span<const float* const>(x), std::span<float* const>(all_x), samples_ * features_);
        if (why != errc::none) return why;
        return gather(std::span<const std::int64_t* const>(labels), std::span<std::int64_t* const>(all_labels),
                      samples_);
    }
    /// Combines `numbers` numbers of each sample, in place.
    template <class Op, class AllReduce>
    [[nodiscard]] static errc combine(std::span<const detail::softmax_part> parts, float* detail::softmax_part::*of,
                                      std::size_t numbers, Op op, const AllReduce& all_reduce) {
        std::vector<const float*> ins;
        std::vector<float*> outs;
        for (const detail::softmax_part& p : parts) {
            ins.push_back(p.*of);
            outs.push_back(p.*of);
        }
        return all_reduce(std::span<const float* const>(ins), std::span<float* const>(outs), numbers * parts[0].samples,
                          op);
    }

    std::size_t classes_, features_, samples_;  // samples of a rank
    std::vector<element_range> own_{};          // of each rank
    std::vector<detail::class_sample> sample_{};
    std::vector<std::vector<std::uint32_t>> rows_;  // streams copy from here until the step is over
    bool all_take_part_;
    bool chosen_ = false;  // whether the classes of the next step are chosen
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
