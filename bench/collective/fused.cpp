// SPDX-License-Identifier: Apache-2.0
// A transformer step: all-reduce, add and write back the residual, RMSNorm, and conversion to the
// type of the next layer. Compares the fused step with one pass over memory for each part, and with
// an all-reduce followed by one pass.
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collective/group.hpp"
#include "collective/measurements.hpp"

namespace bench::collective {

namespace {

namespace gs = gpushare;

constexpr std::size_t rounds = 5;

/// The last part of the step writes the type that the next layer reads.
struct to_bfloat16 {
    using type = gs::bfloat16;
    static auto stage(float*) { return gs::cast<gs::bfloat16>(); }
};
/// Converts to 8 bits with a scale for each row. The conversion computes the scale.
struct to_int8 {
    using type = std::int8_t;
    static auto stage(float* scales) { return gs::quantise<std::int8_t>(gs::rows(scales, 1)); }
};

/// `tokens` rows of 4096 elements on two ranks. Each rank has the whole residual, or, in the
/// sharded case, only its own rows.
template <class Last>
class transformer_step {
public:
    explicit transformer_step(std::size_t tokens) : group(2), n(tokens * width), weight(width, 1.1F) {
        for (int r = 0; r < 2; ++r) {
            alone.emplace_back(1U);
            x.emplace_back(n);
            residual.emplace_back(n);
            a.emplace_back(n);
            b.emplace_back(n);
            scales.emplace_back(tokens);
            out.emplace_back(n);
        }
    }
    [[nodiscard]] double fused() {
        return step([&](const gs::member& me, std::uint32_t r) {
            gs::run(me, head(x[r].data, n) | gs::add_to(all_of(r)) | last(r), out[r]);
            return n;
        });
    }
    /// An all-reduce, then one pass over memory for each part. The passes use the same vectorised
    /// loops as the fused step.
    [[nodiscard]] double one_by_one() {
        return step([&](const gs::member& me, std::uint32_t r) {
            gs::all_reduce(me, std::span<const float>(x[r].data, n), std::span(a[r].data, n));
            passes(r, n);
            return n;
        });
    }
    /// An all-reduce, then one pass for all other parts.
    [[nodiscard]] double field() {
        return step([&](const gs::member& me, std::uint32_t r) {
            gs::all_reduce(me, std::span<const float>(x[r].data, n), std::span(a[r].data, n));
            gs::run(alone[r].rank(0), head(a[r].data, n) | gs::add_to(all_of(r)) | last(r), out[r]);
            return n;
        });
    }
    [[nodiscard]] double sharded() {
        return step([&](const gs::member& me, std::uint32_t r) {
            gs::run_sharded(me, head(x[r].data, n) | gs::add_to(all_of(r)) | last(r), std::span(out[r]).first(n / 2));
            return n / 2;
        });
    }
    /// A reduce_scatter, then passes over the rank's own rows.
    [[nodiscard]] double sharded_one_by_one() {
        return step([&](const gs::member& me, std::uint32_t r) {
            gs::reduce_scatter(me, std::span<const float>(x[r].data, n), std::span(a[r].data, n / 2));
            passes(r, n / 2);
            return n / 2;
        });
    }

private:
    static constexpr std::size_t width = 4096;

    static auto head(const float* from, std::size_t count) { return gs::reduced(std::span(from, count), width); }
    auto all_of(std::uint32_t r) { return gs::rows(residual[r].data); }
    auto last(std::uint32_t r) { return gs::rms_norm(weight, 1e-6F) | Last::stage(scales[r].data()); }

    void passes(std::uint32_t r, std::size_t count) {
        const gs::member self = alone[r].rank(0);
        gs::run(self, head(a[r].data, count) | gs::add(all_of(r)), std::span(residual[r].data, count));
        gs::run(self, head(residual[r].data, count) | gs::rms_norm(weight, 1e-6F), std::span(b[r].data, count));
        gs::run(self, head(b[r].data, count) | Last::stage(scales[r].data()), std::span(out[r]).first(count));
    }

    /// Microseconds per call. After each call, every rank reads as many elements of its result as
    /// `f` returns.
    template <class F>
    double step(const F& f) {
        const std::size_t times = n > (std::size_t{1} << 20) ? 9 : 51;
        return timed(group, times, [&](const gs::member& me) {
            const std::size_t mine = f(me, me.rank());
            read_result(out[me.rank()].data(), mine);
        });
    }

    gs::communicator group;
    std::vector<gs::communicator> alone;  // a group of one for each rank; runs passes over the rank's own memory
    std::size_t n;
    std::vector<float> weight;
    std::vector<aligned_floats> x, residual, a, b;
    std::vector<std::vector<float>> scales;
    std::vector<std::vector<typename Last::type>> out;
};

/// Reports the lowest gain among all numbers of tokens.
template <class Last>
void gains(report& r, const std::string& tail) {
    std::vector<double> replicated, field, sharded;
    const auto keep_least = [](std::vector<double>& least, std::vector<double> now) {
        if (least.empty() || value_of(statistic::median, now) < value_of(statistic::median, least))
            least = std::move(now);
    };
    std::printf("# tokens: us fused, gain over (a), over (b); us sharded, gain over its steps\n");
    for (const std::size_t tokens : {16U, 64U, 256U, 1024U, 2048U}) {
        transformer_step<Last> s(tokens);
        std::vector<double> a, b, c, fused_us, sharded_us;
        for (std::size_t k = 0; k < rounds; ++k) {
            fused_us.push_back(s.fused());
            a.push_back(s.one_by_one() / fused_us.back());
            b.push_back(s.field() / fused_us.back());
            sharded_us.push_back(s.sharded());
            c.push_back(s.sharded_one_by_one() / sharded_us.back());
        }
        const auto median = [](const std::vector<double>& v) { return value_of(statistic::median, v); };
        std::printf("# %5zu %9.1f %6.2f %6.2f %9.1f %6.2f\n", tokens, median(fused_us), median(a), median(b),
                    median(sharded_us), median(c));
        keep_least(replicated, a);
        keep_least(field, b);
        keep_least(sharded, c);
    }
    r.figure("collective.fused_gain" + tail + "_min", replicated, "x");
    r.figure("collective.fused_gain" + tail + "_field_min", field, "x");
    r.figure("collective.fused_gain" + tail + "_sharded_min", sharded, "x");
}

}  // namespace

void fused_gains(report& r) {
    gains<to_bfloat16>(r, "");
    gains<to_int8>(r, "_int8");
}

}  // namespace bench::collective
