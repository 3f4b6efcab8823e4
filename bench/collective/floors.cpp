// SPDX-License-Identifier: Apache-2.0
// Compares all-reduces with their floors. For large data, the floor is a copy of the same bytes.
// For small data, the floor is two exchanges of flags and the copies. Also measures the price of
// adding the ranks' values in rank order, whichever rank does the adding.
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/detail/tuner.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collective/copies.hpp"
#include "collective/group.hpp"
#include "collective/measurements.hpp"

namespace bench::collective {

namespace {

namespace gs = gpushare;

constexpr std::size_t rounds = 5;

/// Each rank's thread touches the rank's arrays first, so that they lie in memory near the thread.
/// The floor is the copy with the best median over all rounds.
void copy_fraction(report& r) {
    const gs::communicator group(2);
    constexpr std::size_t n = std::size_t{16} << 20;
    std::vector<std::optional<aligned_floats>> in(2), out(2);
    on_ranks(group, [&](const gs::member& me) {
        in[me.rank()].emplace(n);
        out[me.rank()].emplace(n);
    });
    const auto ways = copies();
    std::vector<std::vector<double>> copying(ways.size());
    std::vector<double> reducing;
    for (std::size_t k = 0; k < rounds; ++k) {
        for (std::size_t w = 0; w < ways.size(); ++w)
            copying[w].push_back(timed(group, 5, [&](const gs::member& me) {
                ways[w].call(out[me.rank()]->data, in[me.rank()]->data, n);
                read_result(out[me.rank()]->data, n);
            }));
        reducing.push_back(timed(group, 5, [&](const gs::member& me) {
            gs::all_reduce(me, std::span(in[me.rank()]->data, n), std::span(out[me.rank()]->data, n));
            read_result(out[me.rank()]->data, n);
        }));
    }
    const auto middle = [](const std::vector<double>& v) { return value_of(statistic::median, v); };
    const auto best = static_cast<std::size_t>(std::ranges::min_element(copying, {}, middle) - copying.begin());
    std::vector<double> fractions;
    for (std::size_t k = 0; k < rounds; ++k) fractions.push_back(copying[best][k] / reducing[k]);
    r.figure("collective.copy_64mib_us", copying[best], "us");
    std::printf("#   %s\n", ways[best].name);
    r.figure("collective.all_reduce_64mib_us", reducing, "us");
    r.figure("collective.copy_fraction_64mib", fractions, "of a copy");
}

/// Two threads that exchange flags twice. Between the exchanges, each thread copies a half of each
/// input to the same half of each output. An all-reduce must also add, and a library must also
/// check its calls.
class flags_and_copies {
public:
    explicit flags_and_copies(std::size_t bytes) : half_(bytes / sizeof(float) / 2) {
        for (int rank = 0; rank < 2; ++rank) {
            in_.emplace_back(2 * half_);
            out_.emplace_back(2 * half_);
        }
    }

    void operator()(std::uint32_t rank) {
        const std::uint32_t call = ++ranks_[rank].calls;
        tell_and_wait(rank, 2 * call - 1);
        for (const std::uint32_t r : {0U, 1U})
            std::memcpy(out_[r].data + rank * half_, in_[r].data + rank * half_, half_ * sizeof(float));
        tell_and_wait(rank, 2 * call);
        read_result(out_[rank].data, 2 * half_);
    }

private:
    struct alignas(128) of_rank {
        std::atomic<std::uint32_t> told{0};
        std::uint32_t calls = 0;
    };

    /// Release and acquire order: after the wait, a thread sees everything that the other thread
    /// wrote before its flag.
    void tell_and_wait(std::uint32_t rank, std::uint32_t what) {
        ranks_[rank].told.store(what, std::memory_order_release);
        while (static_cast<std::int32_t>(ranks_[1 - rank].told.load(std::memory_order_acquire) - what) < 0) {
        }
    }

    std::size_t half_;  // in floats
    std::vector<aligned_floats> in_, out_;
    std::array<of_rank, 2> ranks_;
};

void small_floor(report& r) {
    constexpr std::size_t bytes = 1024, turns = 21, batches = 21, batch = 200;
    const gs::communicator group(2);
    flags_and_copies floor(bytes);
    std::vector<aligned_floats> in, out;
    for (int rank = 0; rank < 2; ++rank) {
        in.emplace_back(bytes / sizeof(float));
        out.emplace_back(bytes / sizeof(float));
    }
    std::vector<double> floor_ns, ours_ns;
    const auto gains = ratios(
        turns,
        [&] {
            ours_ns.push_back(1e3 * timed(
                                        group, batches,
                                        [&](const gs::member& me) {
                                            constexpr std::size_t n = bytes / sizeof(float);
                                            const auto rank = me.rank();
                                            gs::all_reduce(me, std::span<const float>(in[rank].data, n),
                                                           std::span(out[rank].data, n));
                                            read_result(out[rank].data, n);
                                        },
                                        batch));
            return ours_ns.back();
        },
        [&] {
            floor_ns.push_back(1e3 * timed(
                                         group, batches, [&](const gs::member& me) { floor(me.rank()); }, batch));
            return floor_ns.back();
        });
    r.figure("collective.small_floor_ns", floor_ns, "ns");
    r.figure("collective.small_ns", ours_ns, "ns");
    r.figure("collective.small_vs_floor", gains, "x");
}

/// A two-shot that may add in any order. Each rank starts with its own values, which its caches may
/// still hold. The bits of the result then depend on the rank that adds an element, and so on the
/// size of the call and on how the call is divided.
struct any_order_body {
    const float* in;
    float* out;
    std::size_t count;
    gs::all_reduce_plan plan;

    static constexpr auto kind = gs::collective_kind::all_reduce;
    static constexpr bool through_slots = false;

    template <class Context>
    gs::collective_fault operator()(gs::detail::session<Context>& t, std::uint32_t) const {
        constexpr std::size_t grain = gs::detail::cache_line_bytes / sizeof(float);
        if (!t.meet(gs::detail::call_signature(kind, 0, 0, count, 1), in, out)) return t.fault();
        std::array<gs::detail::peer_signal, 8> own_first;
        for (std::uint32_t r = 0; r < t.ranks(); ++r) own_first[r] = t.signal_from((t.rank() + r) % t.ranks());
        // Assumes arrays that start on cache lines and consist of whole lines.
        const auto mine = gs::shard_of(count / grain, t.rank(), t.ranks());
        const std::size_t first = mine.begin * gs::detail::cache_line_bytes;
        gs::detail::combine_lines<float>(
            gs::detail::widest_vectors(), gs::sum{},
            gs::detail::line_ends{own_first.data(), t.ranks(), first, first, plan.ahead, plan.places}, mine.size(),
            plan.streaming ? gs::detail::line_stores::past_caches : gs::detail::line_stores::cached);
        if (plan.streaming) gs::finish_streaming();
        return t.finish_if(true);
    }
};

std::string name_of(const gs::all_reduce_plan& p) {
    std::string name(to_string(p.how));
    if (p.streaming) name += " past the caches, places " + std::to_string(p.places);
    if (p.ahead != 0) name += ", " + std::to_string(p.ahead) + " ahead";
    return name;
}

/// Compares the default, whose bits depend on the elements alone, with the fastest method whose
/// bits may depend on more: two-shots of all plans that add in any order, and every other
/// algorithm. `order_cost` isolates the price of the order: the library's fastest two-shot, forced
/// by a tuning table, divided by the same two-shot in any order. Both figures are the worst of the
/// sizes from 1 KiB to 64 MiB.
void invariance(report& r, std::uint32_t ranks, const std::string& tail) {
    const gs::communicator group(ranks);
    const auto by = [&](const gs::all_reduce_plan& p) {
        using table = gs::tuning_table;
        const std::vector<table::row> always{{table::any_ranks, table::any_bytes, p}};
        return gs::communicator(ranks, {.tuning = table(always)});
    };
    const gs::communicator one_shot = by({gs::algorithm::one_shot}), ring = by({gs::algorithm::ring});
    std::vector<double> worst, worst_of_order;
    const auto keep_worse = [](std::vector<double>& most, const std::vector<double>& cost) {
        if (most.empty() || value_of(statistic::median, cost) > value_of(statistic::median, most)) most = cost;
    };
    std::printf("# %u ranks: bytes, us in the order of ranks, over the fastest that needn't be, the order's part\n",
                ranks);
    for (const std::size_t bytes : sweep_sizes) {
        const std::size_t n = bytes / sizeof(float);
        std::vector<aligned_floats> in, out;
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
            in.emplace_back(n);
            out.emplace_back(n);
        }
        const std::size_t batch = bytes <= 65536 ? 32 : 1, all = bytes <= std::size_t{4} << 20 ? 31 : 5;
        std::vector<double> us;
        const auto by_default = [&](const gs::communicator& on, std::size_t batches) {
            return timed(
                on, batches,
                [&](const gs::member& me) {
                    const auto rank = me.rank();
                    gs::all_reduce(me, std::span<const float>(in[rank].data, n), std::span(out[rank].data, n));
                    read_result(out[rank].data, n);
                },
                batch);
        };
        const auto by_plan = [&](const gs::all_reduce_plan& plan, std::size_t batches) {
            if (plan.how != gs::algorithm::two_shot)
                return by_default(plan.how == gs::algorithm::ring ? ring : one_shot, batches);
            return timed(
                group, batches,
                [&](const gs::member& me) {
                    const auto rank = me.rank();
                    gs::raise_fault(gs::detail::run_in_thread(
                        me, any_order_body{in[rank].data, out[rank].data, n, plan}, gs::never));
                    read_result(out[rank].data, n);
                },
                batch);
        };
        // Tries each plan three times in turn, then compares the fastest plan with the default.
        constexpr auto& plans = gs::detail::tuner::plans;
        std::array<double, std::size(plans)> looks{};
        for (std::size_t look = 0; look < 3; ++look)
            for (std::size_t p = 0; p < looks.size(); ++p) {
                const double took = by_plan(plans[p], all / 4);
                looks[p] = look == 0 ? took : std::min(looks[p], took);
            }
        const auto& best = plans[static_cast<std::size_t>(std::ranges::min_element(looks) - looks.begin())];
        const auto cost = ratios(
            11,
            [&] {
                us.push_back(by_default(group, all));
                return us.back();
            },
            [&] { return by_plan(best, all); });
        for (std::size_t p = 0; p < looks.size(); ++p)
            if (plans[p].how != gs::algorithm::two_shot) looks[p] = std::numeric_limits<double>::infinity();
        const auto& two_shot = plans[static_cast<std::size_t>(std::ranges::min_element(looks) - looks.begin())];
        const gs::communicator in_order = by(two_shot);
        const auto of_order = ratios(
            11, [&] { return by_default(in_order, all); }, [&] { return by_plan(two_shot, all); });
        std::printf("# %9zu %10.2f %6.3f %6.3f  %s\n", bytes, value_of(statistic::median, us),
                    value_of(statistic::median, cost), value_of(statistic::median, of_order), name_of(best).c_str());
        keep_worse(worst, cost);
        keep_worse(worst_of_order, of_order);
    }
    r.figure("collective.invariance_cost" + tail, worst, "x");
    r.figure("collective.order_cost" + tail, worst_of_order, "x");
}

}  // namespace

void floors(report& r) {
    copy_fraction(r);
    small_floor(r);
    invariance(r, 2, "");
    invariance(r, 4, "_4_ranks");
}

}  // namespace bench::collective
