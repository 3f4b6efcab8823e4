// SPDX-License-Identifier: Apache-2.0
// Sends of a gradient the k elements that matter most, and keeps the rest for later steps (error
// feedback): nothing is lost, it comes late.
//
//   gpushare::top_k_feedback mine(gradient.size(), gradient.size() / 100);
//   if (auto fault = gpushare::all_reduce_top_k(net, mine, gradient, deadline)) ...     // the average of all ranks' elements
//
// Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The elements of one gradient that one rank sends, and the remainder that it still owes. A plain
/// value.
class top_k_feedback {
public:
    /// `k` of `elements`, at most all of them.
    top_k_feedback(std::size_t elements, std::size_t k)
        : residual_(elements), order_(elements), indices_(std::min(k, elements)), values_(indices_.size()) {
        if (elements > std::size_t{0xffff'ffff})
            raise({errc::size_overflow, elements, 0, 0xffff'ffff, reason::count_limit}, {},
                  "choosing the largest elements of a gradient");
    }

    /// Chooses: adds `gradient`, of as many elements, to what is owed, and takes the k largest out
    /// of it, by their absolute value; of equals the first. NaN counts as the largest of all, so
    /// that it arrives and is noticed.
    void select(std::span<const float> gradient) {
        owed_before_ = residual_;
        for (std::size_t i = 0; i < residual_.size(); ++i) residual_[i] += gradient[i];
        std::iota(order_.begin(), order_.end(), 0U);
        const auto before = [&](std::uint32_t a, std::uint32_t b) {
            const float x = weight(residual_[a]), y = weight(residual_[b]);
            return x != y ? x > y : a < b;
        };
        if (indices_.size() < order_.size())
            std::nth_element(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(indices_.size()),
                             order_.end(), before);
        std::copy_n(order_.begin(), indices_.size(), indices_.begin());
        std::sort(indices_.begin(), indices_.end());
        for (std::size_t j = 0; j < indices_.size(); ++j) {
            values_[j] = residual_[indices_[j]];
            residual_[indices_[j]] = 0;
        }
    }
    /// The step is skipped: what select() chose isn't applied, and what was owed before it is owed again.
    void skip() noexcept { residual_.swap(owed_before_); }
    [[nodiscard]] std::span<const std::uint32_t> indices() const noexcept { return indices_; }  ///< rising
    [[nodiscard]] std::span<const float> values() const noexcept { return values_; }            ///< of these
    [[nodiscard]] std::span<const float> residual() const noexcept { return residual_; }        ///< what is owed
    /// The bytes of the two collectives of one step.
    [[nodiscard]] bytes wire_bytes() const noexcept {
        return bytes{indices_.size() * (sizeof(std::uint32_t) + sizeof(float))};
    }

private:
    [[nodiscard]] static float weight(float x) noexcept { return std::isnan(x) ? HUGE_VALF : std::abs(x); }

    std::vector<float> residual_, owed_before_;
    std::vector<std::uint32_t> order_;
    std::vector<std::uint32_t> indices_;
    std::vector<float> values_;
};

/// `gradient` becomes the average of what all ranks sent of theirs, added in the order of ranks.
/// The same sizes on all ranks. If it isn't finite, the step is to be skipped (all_finite, with the
/// same answer on all ranks), and `mine` has skipped it. So it has after a fault, or if the
/// transport throws: then `gradient` is as it was, and nothing of it is owed.
template <host_transport Net>
[[nodiscard]] collective_fault all_reduce_top_k(Net& net, top_k_feedback& mine, std::span<float> gradient,
                                                instant deadline = never) {
    if (gradient.size() != mine.residual().size()) return {errc::mismatch, collective_kind::all_gather, net.rank(), 0};
    const std::size_t k = mine.indices().size();
    std::vector<std::uint32_t> indices(k * net.size());
    std::vector<float> values(k * net.size());
    mine.select(gradient);
    struct undo {
        top_k_feedback* of;
        ~undo() {
            if (of != nullptr) of->skip();
        }
    } unless_sent{&mine};
    if (const auto f = net.all_gather(mine.indices(), std::span(indices), deadline)) return f;
    if (const auto f = net.all_gather(mine.values(), std::span(values), deadline)) return f;
    std::fill(gradient.begin(), gradient.end(), 0.0F);
    for (std::size_t i = 0; i < indices.size(); ++i)
        if (indices[i] < gradient.size()) gradient[indices[i]] += values[i];
    const auto ranks = static_cast<float>(net.size());
    for (float& x : gradient) x /= ranks;
    if (all_finite(gradient)) unless_sent.of = nullptr;
    return {};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
