// SPDX-License-Identifier: Apache-2.0
// Measures and compares plans of an all-reduce, for tune() and tune_submitted().
//
//   tuner measuring(me, options);    auto worst = tuner::regrets(measuring.measure(size));
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/all_reduce.hpp>
#include <gpushare/collective/detail/collectives.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The sizes to measure, and how to measure them.
struct tune_options {
    bytes smallest{64};      ///< the smallest size, of each rank
    bytes largest = 64_MiB;  ///< the largest size, of each rank
    /// The memory from which cold buffers are taken in turn: more than the caches hold. Each rank
    /// allocates twice this memory, or twice `largest` if that is more.
    bytes arena = 64_MiB;
    ns per_plan{5'000'000};  ///< roughly how long one plan is measured in one way at one size
    /// Whether each rank reads its results within the measured time, as most programs do. Results
    /// that were stored past the caches are slower to read.
    bool results_are_read = true;
    instant deadline = never;  ///< a deadline for all measurements together
    /// For tune_submitted(): the most blocks of a rank. The number of blocks is then measured, too,
    /// and goes into the table. 0 leaves the number out.
    std::uint32_t most_blocks = 0;
};

namespace detail {

/// Whether `how` works for `of_block` bytes of a block with a slot of `slot` bytes. Data that
/// doesn't fit takes another algorithm, so its time would count for the wrong algorithm.
[[nodiscard]] constexpr bool fits_slot(algorithm how, std::uint64_t of_block, std::size_t slot) noexcept {
    if (how == algorithm::one_shot) return of_block <= slot;
    return how != algorithm::ring || slot >= smallest_ring_slot;
}

/// The plan with the least cost. If that plan gains less than 10 % over the plan of the next
/// smaller size, the answer is the smaller size's plan, so that noise adds no row.
[[nodiscard]] inline std::size_t cheapest(std::span<const all_reduce_plan> plans, std::span<const double> cost,
                                          const all_reduce_plan* below) {
    const auto best = static_cast<std::size_t>(std::min_element(cost.begin(), cost.end()) - cost.begin());
    if (below == nullptr) return best;
    const auto same = static_cast<std::size_t>(std::find(plans.begin(), plans.end(), *below) - plans.begin());
    return same < plans.size() && cost[same] <= cost[best] * 1.1 ? same : best;
}

/// How the buffers of a call are used.
enum class buffer_use : std::uint8_t { warm, cold, in_place };

/// One rank's part in measuring all candidates.
class tuner {
public:
    static constexpr std::size_t uses = 3, samples = 7;
    static constexpr std::array<all_reduce_plan, 8> plans{{{algorithm::one_shot},
                                                           {algorithm::two_shot},
                                                           {algorithm::two_shot, false, 1, 16},
                                                           {algorithm::two_shot, true, 1},
                                                           {algorithm::two_shot, true, 2},
                                                           {algorithm::two_shot, true, 1, 16},
                                                           {algorithm::two_shot, true, 2, 16},
                                                           {algorithm::ring}}};
    /// Nanoseconds of a call, for each plan and each use of buffers.
    using times = std::array<std::array<std::int64_t, uses>, plans.size()>;

    tuner(const member& me, const tune_options& options)
        : me_(me),
          options_(options),
          // Zeros, because repeated in-place sums of other numbers would leave the numbers' range.
          in_(std::max(options.largest, options.arena).count() / sizeof(float)),
          out_(in_.size()) {}

    /// Measures all candidates. They take turns, sample by sample, so that other work on the
    /// machine affects all of them alike. Every rank returns the same times.
    [[nodiscard]] times measure(std::uint64_t size) {
        std::array<std::array<std::array<std::int64_t, samples>, uses>, plans.size()> took{};
        std::array<std::array<std::int64_t, uses>, plans.size()> repeats{};
        for (std::size_t s = 0; s <= samples; ++s)
            for (std::size_t u = 0; u < uses; ++u)
                for (std::size_t p = 0; p < plans.size(); ++p) {
                    if (!fits(plans[p], size) || alike(p, buffer_use(u)) != p) continue;
                    // The first sample only determines how many calls the other samples make.
                    const auto each = sample(plans[p], buffer_use(u), size, std::max<std::int64_t>(repeats[p][u], 1));
                    if (s == 0)
                        repeats[p][u] = std::clamp<std::int64_t>(
                            options_.per_plan.count() / std::int64_t{samples} / std::max<std::int64_t>(each, 1), 1,
                            10'000);
                    else
                        took[p][u][s - 1] = each;
                }
        times medians{};
        for (std::size_t p = 0; p < plans.size(); ++p)
            for (std::size_t u = 0; u < uses; ++u) {
                auto t = took[alike(p, buffer_use(u))][u];
                std::nth_element(t.begin(), t.begin() + samples / 2, t.end());
                medians[p][u] = fits(plans[p], size) ? std::max<std::int64_t>(t[samples / 2], 1) : unusable;
            }
        return medians;
    }

    /// The best plan for a size. `below` is the plan of the next smaller size, if there is one.
    [[nodiscard]] all_reduce_plan best(std::uint64_t size, const all_reduce_plan* below) {
        return plans[cheapest(plans, regrets(measure(size)), below)];
    }

    /// For each plan, its largest ratio to the best plan, over all uses of buffers.
    [[nodiscard]] static std::array<double, plans.size()> regrets(const times& took) noexcept {
        std::array<double, plans.size()> worst{};
        for (std::size_t u = 0; u < uses; ++u) {
            std::int64_t best = unusable;
            for (const auto& t : took) best = std::min(best, t[u]);
            for (std::size_t p = 0; p < plans.size(); ++p)
                worst[p] = std::max(worst[p], static_cast<double>(took[p][u]) / static_cast<double>(best));
        }
        return worst;
    }

    static constexpr std::int64_t unusable = std::numeric_limits<std::int64_t>::max() / 64;

private:
    /// The number of the plan that does the same as plan p with this use of buffers. In place,
    /// results aren't streamed; out of place, a plan that streams doesn't prefetch.
    [[nodiscard]] static std::size_t alike(std::size_t p, buffer_use use) noexcept {
        all_reduce_plan plan = plans[p];
        if (!plan.streaming) return p;
        if (use == buffer_use::in_place)
            plan = {plan.how, false, 1, plan.ahead};
        else
            plan.ahead = 0;
        return static_cast<std::size_t>(std::find(plans.begin(), plans.end(), plan) - plans.begin());
    }

    [[nodiscard]] bool fits(const all_reduce_plan& plan, std::uint64_t size) const noexcept {
        return fits_slot(plan.how, size, me_.view().slot);
    }

    /// Nanoseconds of one call, measured over `repeats` calls. Every rank returns the same number.
    [[nodiscard]] std::int64_t sample(const all_reduce_plan& plan, buffer_use use, std::uint64_t size,
                                      std::int64_t repeats) {
        const auto once = [&] {
            constexpr std::size_t page = 4096 / sizeof(float);
            const std::size_t n = size / sizeof(float), step = std::max(n, page);
            if (use == buffer_use::cold) at_ = at_ + 2 * step <= in_.size() ? at_ + step : 0;
            const std::size_t at = use == buffer_use::cold ? at_ : 0;
            float* const out = (use == buffer_use::in_place ? in_ : out_).data() + at;
            raise_fault(
                run_in_thread(me_, all_reduce_body<float, sum>{in_.data() + at, out, n, {}, plan}, options_.deadline));
            if (options_.results_are_read) read(out, n);
        };
        if (use != buffer_use::cold) once();  // the previous measurement has used the caches
        raise_fault(run_in_thread(me_, barrier_body{}, options_.deadline));
        const std::int64_t begin = thread_context::now();
        for (std::int64_t i = 0; i < repeats; ++i) once();
        std::int64_t each = (thread_context::now() - begin) / repeats;
        raise_fault(run_in_thread(me_, broadcast_body<std::int64_t>{&each, 1, 0}, options_.deadline));
        return each;
    }

    static void read(const float* from, std::size_t n) noexcept {
        const volatile float* const seen = from;
        for (std::size_t i = 0; i < n; i += cache_line_bytes / sizeof(float)) (void)seen[i];
    }

    const member& me_;
    const tune_options& options_;
    std::vector<float> in_, out_;
    std::size_t at_ = 0;  // the position of the latest cold buffers
};

/// Checks that the doubling of sizes comes to an end, and that each size holds a float.
inline void check_sizes(const tune_options& options) {
    const std::uint64_t largest = std::max(options.largest, options.arena).count();
    if (options.smallest < bytes{sizeof(float)} || largest > std::uint64_t{1} << 62)
        raise({.code = errc::invalid_specification,
               .asked = options.smallest.count(),
               .limit = largest,
               .because = reason::tuned_sizes},
              {}, "tuning a communicator");
}

/// The next number of blocks after `n`: four times as many, but at most `most`; after `most` a
/// larger number, which ends the loop.
[[nodiscard]] constexpr std::uint32_t next_count(std::uint32_t n, std::uint32_t most) noexcept {
    return n < most ? std::min(n * 4, most) : most + 1;
}

/// Makes the table from `choose(size, plan of the next smaller size)`. `choose` may return no plan,
/// and gets null if there is no smaller size.
template <class Choose>
[[nodiscard]] tuning_table merged(std::uint32_t ranks, const tune_options& options, const Choose& choose) {
    std::vector<tuning_table::row> rows;
    for (std::uint64_t size = options.smallest.count(); size <= options.largest.count(); size *= 2) {
        const std::optional<all_reduce_plan> plan = choose(size, rows.empty() ? nullptr : &rows.back().plan);
        if (!plan) continue;
        if (!rows.empty() && rows.back().plan == *plan)
            rows.back().bytes = size;
        else
            rows.push_back({ranks, size, *plan});
    }
    if (!rows.empty()) rows.back().bytes = tuning_table::any_bytes;
    return tuning_table(std::move(rows));
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
