// SPDX-License-Identifier: Apache-2.0
// The formats of gradients between ranks: unchanged, or 16 bits. Gradients in 16 bits are combined
// in float32. Each rank's gradient is rounded once before it is sent, and the result is rounded
// once. With two levels, the result of each process is rounded as well.
//
//   gpushare::to_wire(gradient, std::span(halves), residual);  // keeps the rounding error
//   net.all_reduce<gpushare::bfloat16>(halves, halves, gpushare::average{}, deadline);
//   gpushare::from_wire(std::span(std::as_const(halves)), gradient);
//   if (!gpushare::all_finite(gradient)) skip_this_step();  // all ranks have the same bits
//
// A rank can also send only the k largest elements of a gradient, and keep the rest for later steps
// (error feedback). Elements then come late, but none is lost. See Stich, Cordonnier and Jaggi,
// "Sparsified SGD with memory", NeurIPS 2018.
//
//   gpushare::top_k_feedback mine(gradient.size(), gradient.size() / 100);
//   if (auto fault = gpushare::all_reduce_top_k(net, mine, gradient, deadline)) ...  // the average
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/lent_arrays.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The format of a gradient between ranks.
enum class wire_format : std::uint8_t {
    as_is,  ///< unchanged
    fp16,   ///< more digits than bf16; a value of 65520 or more becomes infinite: skip the step
    bf16,   ///< the range of float32
};

/// The format's name.
[[nodiscard]] constexpr std::string_view to_string(wire_format f) noexcept {
    switch (f) {
        case wire_format::as_is: return "as_is";
        case wire_format::fp16: return "fp16";
        case wire_format::bf16: return "bf16";
    }
    return "unknown format";
}

/// The bytes that `elements` elements of `element` bytes take on the wire.
[[nodiscard]] constexpr bytes bytes_on_wire(wire_format f, std::size_t elements, std::size_t element = 4) noexcept {
    return bytes{elements * (f == wire_format::as_is ? element : 2)};
}

/// Picks 16 bits for large gradients. Gradients of fewer than `least` elements, such as most norms
/// and biases, stay unchanged, because they are sensitive and cost little. A caller that knows
/// which gradients are sensitive should exclude them itself, as torch_gradients excludes gradients
/// of one dimension.
struct mixed_format {
    wire_format large = wire_format::bf16;  ///< for gradients of at least `least` elements
    std::size_t least = 4096;               ///< smaller gradients stay unchanged
    /// The format of a gradient.
    [[nodiscard]] constexpr wire_format of(std::size_t elements) const noexcept {
        return elements < least ? wire_format::as_is : large;
    }
};

namespace detail {

/// Converts the elements that fill whole vectors, and returns their number.
template <class V, class From, class To>
[[gnu::always_inline]] inline std::size_t convert_vectors(const From* from, To* to, std::size_t n) noexcept {
    std::size_t i = 0;
    for (; i + V::lanes <= n; i += V::lanes) store_floats(to + i, load_floats<V>(from + i));
    return i;
}
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
template <class From, class To>
[[nodiscard, gnu::flatten, gnu::target("avx2,f16c"), gnu::noinline]] std::size_t convert_by_f16c(
    const From* from, To* to, std::size_t n) noexcept {
    return convert_vectors<floats<16, 8>>(from, to, n);
}
#endif
/// The bits are the same as if elements were converted one at a time. Float16 uses the processor's
/// own instructions where they exist. bfloat16 is as fast as memory even without such instructions.
template <class From, class To>
void convert(const From* from, To* to, std::size_t n) noexcept {
    std::size_t i = 0;
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    if constexpr (std::same_as<From, float16> || std::same_as<To, float16>)
        if (widest_vectors() != vector_width::narrow) i = convert_by_f16c(from, to, n);
#endif
    i += convert_vectors<floats<16>>(from + i, to + i, n - i);
    for (; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

}  // namespace detail

/// Rounds to nearest even. `to` is as long as `from`; `residual` is as long, or empty. Adds the
/// residual, which is the earlier rounding error, to `from`, rounds the sum and keeps the new
/// error. So small gradients add up and aren't lost. A sum leaves no residual if it isn't finite or
/// if rounding makes it infinite.
template <class Wire>
requires detail::is_half<Wire>
void to_wire(std::span<const float> from, std::span<Wire> to, std::span<float> residual = {}) noexcept {
    if (residual.empty()) return detail::convert(from.data(), to.data(), from.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
        const float x = from[i] + residual[i];
        to[i] = Wire(x);
        const float rest = x - static_cast<float>(to[i]);
        residual[i] = std::isfinite(rest) ? rest : 0.0F;
    }
}

/// Converts exactly. `to` is as long as `from`.
template <class Wire>
requires detail::is_half<Wire>
void from_wire(std::span<const Wire> from, std::span<float> to) noexcept {
    detail::convert(from.data(), to.data(), from.size());
}

/// The elements of a gradient that one rank sends, and the rest that it owes. A plain value.
class top_k_feedback {
public:
    /// Sends `k` of `elements` elements at each step, or all elements if `k` is larger. Throws
    /// operation_error (errc::size_overflow) for more than 2^32 - 1 elements.
    top_k_feedback(std::size_t elements, std::size_t k)
        : residual_(checked(elements)), order_(elements), indices_(std::min(k, elements)), values_(indices_.size()) {}

    /// Adds `gradient`, of the same length, to the residuals, and chooses the k sums with the
    /// largest absolute values. Among equal sums, the earlier sums win. NaN counts as infinity, so
    /// that it is sent and noticed.
    void select(std::span<const float> gradient) {
        owed_before_ = residual_;
        may_skip_ = true;
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
    /// Skips the step: the chosen elements aren't applied, and the residuals are again as before
    /// the step. A second call does nothing, nor does a call before the first select().
    void skip() noexcept {
        if (std::exchange(may_skip_, false)) residual_.swap(owed_before_);
    }
    /// The places of the chosen elements, in ascending order.
    [[nodiscard]] std::span<const std::uint32_t> indices() const noexcept { return indices_; }
    /// The values of the chosen elements, in the order of indices().
    [[nodiscard]] std::span<const float> values() const noexcept { return values_; }
    /// The residual of each element: what this rank still owes.
    [[nodiscard]] std::span<const float> residual() const noexcept { return residual_; }
    /// The bytes that this rank brings to the two collectives of one step.
    [[nodiscard]] bytes wire_bytes() const noexcept {
        return bytes{indices_.size() * (sizeof(std::uint32_t) + sizeof(float))};
    }

private:
    [[nodiscard]] static std::size_t checked(std::size_t elements) {
        if (elements > std::size_t{0xffff'ffff})
            raise({errc::size_overflow, elements, 0, 0xffff'ffff, reason::count_limit}, {},
                  "choosing the largest elements of a gradient");
        return elements;
    }
    [[nodiscard]] static float weight(float x) noexcept { return std::isnan(x) ? HUGE_VALF : std::abs(x); }

    std::vector<float> residual_, owed_before_;
    bool may_skip_ = false;  // the last select() can be taken back
    std::vector<std::uint32_t> order_;
    std::vector<std::uint32_t> indices_;
    std::vector<float> values_;
};

/// `gradient` becomes the average of the elements that all ranks sent, added in the order of ranks.
/// All ranks pass the same sizes. If the average isn't finite, `mine` has skipped the step: don't
/// apply the average (all_finite has the same answer on all ranks). After a fault, or an exception
/// of the transport, `mine` has skipped the step and keeps nothing of `gradient`, which is
/// unchanged.
template <host_transport Net>
[[nodiscard]] collective_fault all_reduce_top_k(Net& net, top_k_feedback& mine, std::span<float> gradient,
                                                instant deadline = never) {
    if (gradient.size() != mine.residual().size()) return {errc::mismatch, collective_kind::all_gather, net.rank(), 0};
    const std::size_t k = mine.indices().size();
    std::vector<std::uint32_t> indices(k * net.size());
    std::vector<float> values(k * net.size());
    detail::lent_arrays memory(indices, values);
    mine.select(gradient);
    struct undo {
        top_k_feedback* of;
        ~undo() {
            if (of != nullptr) of->skip();
        }
    } unless_sent{&mine};
    // Works in place, so that the transport touches no memory of `mine`.
    const auto gather = [&]<class E>(std::span<const E> own, std::span<E> all) {
        const std::span<E> here = all.subspan(net.rank() * k, k);
        std::copy(own.begin(), own.end(), here.begin());
        return memory.to([&] { return net.all_gather(std::span<const E>(here), all, deadline); });
    };
    if (const auto f = gather(mine.indices(), std::span(indices))) return f;
    if (const auto f = gather(mine.values(), std::span(values))) return f;
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
