// SPDX-License-Identifier: Apache-2.0
// The last layer of a network with more classes than one device can hold: each rank has the weights
// of its shard of the classes, and all ranks compute one softmax cross-entropy, over all classes,
// or over the labels' classes and a sample of the others.
//
//   gpushare::partial_softmax layer(net, 1'000'003, features, {.rate = 0.1});     // any number of classes
//   auto fault = layer.step(net, x, labels, weights, loss, dx, deadline);         // weights: layer.own().size() rows
//   for (std::size_t k = 0; k < layer.rows().size(); ++k) update(layer.rows()[k], layer.row_gradient(k));
//
// An et al., "Killing two birds with one stone: efficient and robust training of face recognition
// CNNs by Partial FC", CVPR 2022.
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
#include <gpushare/collective/shard.hpp>
#include <gpushare/config.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Which classes take part in a step.
struct partial_softmax_options {
    double rate = 1;         ///< of each rank's classes, labels among them; labels take part in any case
    std::uint64_t seed = 0;  ///< what the sample depends on, with the rank and the step
};

/// One rank's shard of the classes, and what its last step left. Batches are as large on all ranks;
/// what is missing has the label `ignored`.
class partial_softmax {
public:
    static constexpr std::int64_t ignored = -1;  ///< the label of a sample that doesn't count

    /// `features` numbers a sample.
    template <host_transport Net>
    partial_softmax(const Net& net, std::size_t classes, std::size_t features,
                    const partial_softmax_options& options = {})
        : classes_(classes),
          own_(shard_of(classes, net.rank(), net.size())),
          features_(features),
          options_(options),
          any_(options.seed + 0x9e37'79b9'7f4a'7c15U * (net.rank() + 1)) {}

    [[nodiscard]] element_range own() const noexcept { return own_; }  ///< the classes of this rank
    /// The classes that took part in the last step, counted from own().begin, ascending.
    [[nodiscard]] std::span<const std::uint32_t> rows() const noexcept { return rows_; }
    /// The gradient of the weights of class rows()[k] in the last step, complete: other ranks add
    /// nothing.
    [[nodiscard]] std::span<const float> row_gradient(std::size_t k) const noexcept {
        return std::span(gradient_).subspan(k * features_, features_);
    }

    /// The mean loss of all ranks' samples, the same on every rank, and its gradient by this
    /// rank's. `x` and `dx`: a row of features for each label; `weights`: one for each of own(). A
    /// label that is no class counts as `ignored`. errc::mismatch, at once and on this rank alone,
    /// where a span isn't as large as it should be.
    template <host_transport Net>
    [[nodiscard]] collective_fault step(Net& net, std::span<const float> x, std::span<const std::int64_t> labels,
                                        std::span<const float> weights, float& loss, std::span<float> dx,
                                        instant deadline = never) {
        const std::size_t here = labels.size(), samples = here * net.size();
        if (x.size() != here * features_ || dx.size() != x.size() || weights.size() != own_.size() * features_)
            return {errc::mismatch, collective_kind::all_gather, net.rank(), 0};
        std::vector<float> all_x(samples * features_);
        std::vector<std::int64_t> all_labels(samples);
        if (const auto f = net.all_gather(x, std::span(all_x), deadline)) return f;
        if (const auto f = net.all_gather(labels, std::span(all_labels), deadline)) return f;
        choose(all_labels);

        std::vector<float> logits(samples * rows_.size());
        std::vector<float> most = products(all_x, weights, logits);
        if (const auto f = net.all_reduce(std::span<const float>(most), std::span(most), maximum{}, deadline)) return f;
        std::vector<float> sums = exponentials(all_labels, most, logits);
        if (const auto f = net.all_reduce(std::span<const float>(sums), std::span(sums), sum{}, deadline)) return f;
        const std::size_t counted = mean_loss(all_labels, sums, loss);
        const std::vector<float> all_dx = gradients(all_x, all_labels, weights, logits, sums, counted);
        return net.reduce_scatter(std::span<const float>(all_dx), dx, sum{}, deadline);
    }

private:
    /// Fills in the logits, a row for each sample, and returns the largest of each.
    std::vector<float> products(std::span<const float> x, std::span<const float> weights,
                                std::span<float> logits) const {
        const std::size_t classes = rows_.size(), samples = x.size() / features_;
        std::vector<float> most(samples, -std::numeric_limits<float>::infinity());
        for (std::size_t s = 0; s < samples; ++s)
            for (std::size_t k = 0; k < classes; ++k) {
                const float l = product(&x[s * features_], &weights[rows_[k] * features_]);
                logits[s * classes + k] = l;
                most[s] = std::max(most[s], l);
            }
        return most;
    }
    /// Turns logits into exponentials, relative to the largest of all ranks. Returns the sum for
    /// each sample and, behind all sums, the logit of each sample's label, which one rank has.
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
    /// Returns how many samples count.
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
    /// Fills in gradient_, and returns this rank's part of the gradient by all samples' features.
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

    /// All classes that are labels, and as many others at random as the rate leaves room for.
    void choose(std::span<const std::int64_t> labels) {
        std::vector<bool> taken(own_.size());
        std::size_t n = 0;
        const auto take = [&](std::size_t c) {
            n += taken[c] ? 0 : 1;
            taken[c] = true;
        };
        for (const std::int64_t l : labels)
            if (l >= static_cast<std::int64_t>(own_.begin) && l < static_cast<std::int64_t>(own_.end))
                take(static_cast<std::size_t>(l) - own_.begin);
        const double rate = options_.rate > 0 ? std::min(options_.rate, 1.0) : 0;  // also if it is no number
        const auto wanted = static_cast<std::size_t>(std::ceil(static_cast<double>(own_.size()) * rate));
        if (wanted >= own_.size()) {
            taken.assign(own_.size(), true);
        } else {
            // Takes each other class with a probability of the number still wanted over the number
            // still left: none twice, and in one pass.
            std::size_t left = own_.size() - n;
            for (std::size_t c = 0; c < own_.size() && n < wanted; ++c) {
                if (taken[c]) continue;
                if (any_() % left < wanted - n) take(c);
                --left;
            }
        }
        rows_.clear();
        for (std::uint32_t c = 0; c < own_.size(); ++c)
            if (taken[c]) rows_.push_back(c);
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
    partial_softmax_options options_;
    std::mt19937_64 any_;
    std::vector<std::uint32_t> rows_;
    std::vector<float> gradient_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
