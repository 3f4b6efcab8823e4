// SPDX-License-Identifier: Apache-2.0
// The kernels of a softmax over sharded classes on devices (device_partial_softmax in
// gradient/group_operators.hpp). They compute a rank's part of a step, between the collectives.
//
//   launch_each(stream, part, part.samples, logits_of_sample{});
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The arrays that a rank's kernels read and write, in memory of its device.
struct softmax_part {
    const float* weights = nullptr;  // a row for each class of the shard
    float* gradient = nullptr;       // a row for each class that takes part
    float* loss = nullptr;
    std::int64_t* labels = nullptr;  // the labels of all ranks' samples
    float* x = nullptr;              // a row for each of these samples
    float* dx = nullptr;             // the gradient with respect to x
    float* most = nullptr;           // the largest logit of each sample
    /// The sums of exponentials, then the logits of labels, then the number of samples that count.
    float* sums = nullptr;
    float* logits = nullptr;        // a row for each sample; later their exponentials
    std::uint32_t* rows = nullptr;  // the classes that take part, counted from `first`
    std::size_t samples = 0, taking_part = 0, features = 0, first = 0, classes = 0;

    [[nodiscard]] GPUSHARE_HD bool is_label(std::int64_t label, std::size_t k) const noexcept {
        return label == static_cast<std::int64_t>(first + rows[k]);
    }
    [[nodiscard]] GPUSHARE_HD bool counts(std::int64_t label) const noexcept {
        return label >= 0 && label < static_cast<std::int64_t>(classes);
    }
    /// The derivative of the loss with respect to a logit.
    [[nodiscard]] GPUSHARE_HD float slope(std::size_t s, std::size_t k) const noexcept {
        const float p = logits[s * taking_part + k] / sums[s];
        return (p - (is_label(labels[s], k) ? 1.0F : 0.0F)) / sums[2 * samples];
    }
};

/// Calls f(context, part, item) for each item, with one block for an item.
template <class F>
struct of_softmax {
    softmax_part part;
    std::size_t items;
    F f;
    [[nodiscard]] grid shape() const noexcept {
        return {.blocks = static_cast<std::uint32_t>(items < 1024 ? items : 1024), .threads = 256, .hold = {}};
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        for (std::size_t i = ctx.block_rank(); i < items; i += ctx.num_blocks()) f(ctx, part, i);
    }
};
template <class Stream, class F>
void launch_each(Stream& stream, const softmax_part& part, std::size_t items, const F& f) {
    if (items == 0) return;
    const of_softmax<F> kernel{part, items, f};
    stream.launch(kernel.shape(), kernel);
}

struct larger_number {
    GPUSHARE_HD float operator()(float a, float b) const noexcept { return a < b ? b : a; }
};

/// The logits of a sample, and the largest of them.
struct logits_of_sample {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C& ctx, const softmax_part& p, std::size_t s) const {
        float most = __builtin_bit_cast(float, 0xff80'0000U);  // minus infinity
        for (std::size_t k = ctx.thread_rank(); k < p.taking_part; k += ctx.num_threads()) {
            float sum = 0;
            for (std::size_t i = 0; i < p.features; ++i)
                sum += p.x[s * p.features + i] * p.weights[p.rows[k] * p.features + i];
            p.logits[s * p.taking_part + k] = sum;
            most = larger_number{}(most, sum);
        }
        most = ctx.reduce(most, larger_number{});
        if (ctx.thread_rank() == 0) p.most[s] = most;
    }
};
/// Computes exponentials relative to all ranks' largest logit, their sum, and the label's logit if
/// this rank has the label's class.
struct exponentials_of_sample {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C& ctx, const softmax_part& p, std::size_t s) const {
        double sum = 0;
        float of_label = 0;
        for (std::size_t k = ctx.thread_rank(); k < p.taking_part; k += ctx.num_threads()) {
            float& l = p.logits[s * p.taking_part + k];
            if (p.is_label(p.labels[s], k)) of_label = l - p.most[s];
            l = std::exp(l - p.most[s]);
            sum += static_cast<double>(l);
        }
        sum = ctx.reduce_add(sum);
        of_label = ctx.reduce_add(of_label);  // at most one thread has it
        if (ctx.thread_rank() != 0) return;
        p.sums[s] = static_cast<float>(sum);
        p.sums[p.samples + s] = of_label;
    }
};
/// Computes the mean loss, in one block.
struct mean_of_losses {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C& ctx, const softmax_part& p, std::size_t) const {
        std::uint64_t counted = 0;
        double total = 0;
        for (std::size_t s = ctx.thread_rank(); s < p.samples; s += ctx.num_threads())
            if (p.counts(p.labels[s])) {
                ++counted;
                total += std::log(static_cast<double>(p.sums[s])) - static_cast<double>(p.sums[p.samples + s]);
            }
        counted = ctx.reduce_add(counted);
        total = ctx.reduce_add(total);
        if (ctx.thread_rank() != 0) return;
        *p.loss = counted == 0 ? 0.0F : static_cast<float>(total / static_cast<double>(counted));
        p.sums[2 * p.samples] = static_cast<float>(counted);
    }
};
/// Computes the gradient with respect to a class's weights. Each thread computes some elements.
struct gradient_of_class {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C& ctx, const softmax_part& p, std::size_t k) const {
        for (std::size_t i = ctx.thread_rank(); i < p.features; i += ctx.num_threads()) {
            float sum = 0;
            for (std::size_t s = 0; s < p.samples; ++s)
                if (p.counts(p.labels[s])) sum += p.slope(s, k) * p.x[s * p.features + i];
            p.gradient[k * p.features + i] = sum;
        }
    }
};
/// Computes this rank's part of the gradient with respect to a sample's features.
struct gradient_of_sample {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C& ctx, const softmax_part& p, std::size_t s) const {
        const bool counts = p.counts(p.labels[s]);
        for (std::size_t i = ctx.thread_rank(); i < p.features; i += ctx.num_threads()) {
            float sum = 0;
            for (std::size_t k = 0; counts && k < p.taking_part; ++k)
                sum += p.slope(s, k) * p.weights[p.rows[k] * p.features + i];
            p.dx[s * p.features + i] = sum;
        }
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
