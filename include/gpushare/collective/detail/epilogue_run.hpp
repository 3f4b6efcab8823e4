// SPDX-License-Identifier: Apache-2.0
// Runs the stages of an epilogue over a row. A few elements at a time go through all stages in
// registers. Each look of a row stage needs one more pass over the row. On a device a group stage
// needs no further pass: the threads that have a group's elements in registers tell each other the
// group's largest magnitude.
//
//   run_widest(ctx, epilogue, source, scratch, outputs, [&](auto&& run) { run(place{...}, end); });
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <gpushare/collective/detail/block_team.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Outputs of a run in which sharing stages write to this rank's arrays only.
struct own_outputs {};

namespace detail {

struct nothing_learnt {};
template <class S>
struct learnt_by {
    using type = nothing_learnt;
};
template <row_stage S>
struct learnt_by<S> {
    using type = typename S::learnt;
};

/// The row stages' state for the current row.
template <class... Stages>
struct known_of {};
template <class First, class... Rest>
struct known_of<First, Rest...> {
    typename learnt_by<First>::type first{};
    known_of<Rest...> rest{};
};
template <std::uint32_t I, class First, class... Rest>
[[nodiscard]] GPUSHARE_HD auto& known_at(known_of<First, Rest...>& k) noexcept {
    if constexpr (I == 0)
        return k.first;
    else
        return known_at<I - 1>(k.rest);
}
template <std::uint32_t I, class First, class... Rest>
[[nodiscard]] GPUSHARE_HD const auto& known_at(const known_of<First, Rest...>& k) noexcept {
    if constexpr (I == 0)
        return k.first;
    else
        return known_at<I - 1>(k.rest);
}

/// The number of elements that a thread takes at once. A block's only thread takes a cache line.
/// Otherwise a thread takes as many elements as one access moves, so that neighbouring threads take
/// neighbouring bytes.
template <class Context>
[[nodiscard]] GPUSHARE_HD constexpr std::uint32_t lanes_for() noexcept {
    if constexpr (requires { typename std::bool_constant<Context::num_threads() == 1>; })
        return Context::num_threads() == 1 ? 16 : 4;
    else
        return 4;
}

/// Whether the next stage is a sink that does this stage's rounding anyway.
template <class S, class Next>
inline constexpr bool is_repeated = false;
template <class S, class Next>
requires requires {
    typename S::rounded_type;
    typename Next::stored_type;
}
inline constexpr bool is_repeated<S, Next> = std::same_as<typename S::rounded_type, typename Next::stored_type>;

/// Works on one row at a time. The run holds copies of all values that it reads repeatedly.
/// Otherwise the compiler would read the values from memory each time, since the sinks' writes may
/// alias anything.
template <std::uint32_t Width, class Context, class Source, class Outputs, class... Stages>
class epilogue_run {
    using whole = epilogue<Stages...>;
    template <std::uint32_t I>
    using stage_type = std::remove_cvref_t<decltype(stage_of<I>(std::declval<const whole&>()))>;
    using known_stages = known_of<Stages...>;
    static constexpr std::uint32_t size = whole::size;
    static constexpr std::uint32_t lanes = lanes_for<Context>();
    using values = floats<lanes, Width>;

public:
    GPUSHARE_HD epilogue_run(Context& ctx, const whole& mine, const Source& source, float* scratch,
                             const Outputs& outputs) noexcept
        : ctx_(ctx), mine_(mine), source_(source), scratch_(scratch), outputs_(outputs) {}

    /// Runs columns [at.column, end) of one row.
    GPUSHARE_HD void operator()(const place& at, std::size_t end) noexcept {
        known_stages known;
        run<0, false>(at, end, known, source_);
    }

private:
    /// The first stage at or after I that looks at a row or a group.
    template <std::uint32_t I>
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t next_looking_stage() noexcept {
        if constexpr (I >= size)
            return size;
        else if constexpr (row_stage<stage_type<I>> || group_stage<stage_type<I>>)
            return I;
        else
            return next_looking_stage<I + 1>();
    }

    /// Some of the stages, to be run on a few elements.
    struct stages {
        whole mine;
        Outputs outputs;
        known_stages known;

        /// Stages [I, End).
        template <std::uint32_t I, std::uint32_t End>
        [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD values through(const values& x, const place& at) const noexcept {
            if constexpr (I == End) {
                return x;
            } else {
                using stage = stage_type<I>;
                if constexpr (I + 2 == size && is_repeated<stage, stage_type<(I + 1) % size>>) {
                    return through<I + 1, End>(x, at);
                } else if constexpr (row_stage<stage>) {
                    return through<I + 1, End>(stage_of<I>(mine).apply(x, at, known_at<I>(known)), at);
                } else if constexpr (element_stage<stage>) {
                    return through<I + 1, End>(stage_of<I>(mine)(x, at), at);
                } else {
                    on_ranks<I>(mine, outputs, [&](const auto& sink) { sink.store(x, at); });
                    return through<I + 1, End>(x, at);
                }
            }
        }
    };

    /// Takes a few elements through the last pass over a row.
    template <std::uint32_t Begin, class Load>
    struct last_pass {
        stages of;
        Load from;

        GPUSHARE_FLAT GPUSHARE_HD void operator()(const place& at) noexcept {
            (void)of.template through<Begin, size>(from.template load<values>(at), at);
        }
    };

    /// Takes a few elements through a pass in which the row stage `Stop` looks at them, after the
    /// stages from Begin on.
    template <std::uint32_t Begin, std::uint32_t Stop, std::uint32_t Look, class Load>
    struct looking_pass {
        using combine = typename stage_type<Stop>::combine;

        stages of;
        Load from;
        float* scratch;
        values all{combine::none};

        GPUSHARE_FLAT GPUSHARE_HD void operator()(const place& at) noexcept {
            values x = from.template load<values>(at);
            if constexpr (Look == 0) {
                x = of.template through<Begin, Stop>(x, at);
                store_floats(scratch + at.column, x, at.count);
            }
            x = stage_of<Stop>(of.mine).template measure<Look>(x, at, known_at<Stop>(of.known));
            if (at.count != lanes) x = x.first(at.count, combine::none);
            all = values::map(combine{}, all, x);
        }
    };

    /// Takes groups of elements through the last pass over a row. A team of threads takes a group
    /// for the group stage `Stop`.
    template <std::uint32_t Begin, std::uint32_t Stop, class Load>
    struct group_pass {
        using stage = stage_type<Stop>;
        static constexpr std::uint32_t pieces = stage::group / lanes;

        stages of;
        Load from;
        float* scratch;

        /// Takes the group that begins at `first`, in a row that ends at `end`.
        GPUSHARE_FLAT GPUSHARE_HD void operator()(const block_team& team, const place& first,
                                                  std::size_t end) const noexcept {
            if constexpr (pieces == 1) {
                in_registers(team, first, end);
            } else {
#ifdef __CUDA_ARCH__
                if (team.lanes() == pieces) return in_registers(team, first, end);
#endif
                in_scratch(first, end < first.column + stage::group ? end : first.column + stage::group);
            }
        }

    private:
        /// Each thread of the team has one piece of the group, or no piece if the row ends earlier.
        GPUSHARE_FLAT GPUSHARE_HD void in_registers(const block_team& team, const place& first,
                                                    std::size_t end) const noexcept {
            const place at = piece(first, first.column + team.lane() * lanes, end);
            values x(0.0F);
            if (at.count != 0) x = of.template through<Begin, Stop>(from.template load<values>(at), at);
            const auto known = learnt_of(team.largest(finite_or_infinite(larger_in(x, at, values(0.0F)))));
            if (at.count != 0) (void)of.template through<Stop + 1, size>(applied(x, at, known), at);
            if (team.lane() == 0) publish(first, known);
        }
        /// One thread has the whole group.
        GPUSHARE_FLAT GPUSHARE_HD void in_scratch(const place& first, std::size_t end) const noexcept {
            values all(0.0F);
            for (std::size_t column = first.column; column < end; column += lanes) {
                const place at = piece(first, column, end);
                const values x = of.template through<Begin, Stop>(from.template load<values>(at), at);
                store_floats(scratch + column, x, at.count);
                all = larger_in(x, at, all);
            }
            const auto known = learnt_of(finite_or_infinite(all));
            for (std::size_t column = first.column; column < end; column += lanes) {
                const place at = piece(first, column, end);
                const values x = load_floats<values>(scratch + column, at.count);
                (void)of.template through<Stop + 1, size>(applied(x, at, known), at);
            }
            publish(first, known);
        }

        [[nodiscard]] GPUSHARE_HD static place piece(const place& first, std::size_t column, std::size_t end) noexcept {
            const std::size_t left = column < end ? end - column : 0;
            const bool whole = left >= lanes;
            const std::uint32_t count = whole ? lanes : static_cast<std::uint32_t>(left);
            return {first.row, first.shard_row, column, first.width, count, first.streams && whole};
        }
        [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD static values larger_in(const values& x, const place& at,
                                                                        const values& before) noexcept {
            const values y = abs(x);
            return values::map(larger_lanes{}, before, at.count == lanes ? y : y.first(at.count, 0.0F));
        }
        [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD static float finite_or_infinite(const values& x) noexcept {
            const float largest = x.folded(larger_lanes{});
            return largest <= 0x1.fffffep127F ? largest : __builtin_huge_valf();
        }
        [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD typename stage::learnt learnt_of(float largest) const noexcept {
            typename stage::learnt known{};
            stage_of<Stop>(of.mine).learn(largest, known);
            return known;
        }
        [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD values applied(const values& x, const place& at,
                                                               const typename stage::learnt& known) const noexcept {
            return stage_of<Stop>(of.mine).apply(x, at, known);
        }
        GPUSHARE_FLAT GPUSHARE_HD void publish(const place& at, const typename stage::learnt& known) const noexcept {
            on_ranks<Stop>(of.mine, of.outputs, [&](const auto& s) { s.publish(at, known); });
        }
    };

    struct scratch_source {
        const float* scratch;
        template <class V>
        [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V load(const place& at) const noexcept {
            return load_floats<V>(scratch + at.column, at.count);
        }
    };

    /// Runs the stages from Begin on, for elements from `from`. `Ready` means that Begin is a row
    /// stage that has finished its looks.
    template <std::uint32_t Begin, bool Ready, class Load>
    GPUSHARE_HD void run(const place& row, std::size_t end, known_stages& known, const Load& from) noexcept {
        constexpr std::uint32_t stop = next_looking_stage<Begin + (Ready ? 1 : 0)>();
        if constexpr (stop == size) {
            (void)each_piece(row, end, last_pass<Begin, Load>{with(known), from});
        } else if constexpr (group_stage<stage_type<stop>>) {
            each_group(row, end, group_pass<Begin, stop, Load>{with(known), from, scratch_});
            // A team's columns in the scratch were left there by other threads, and these threads
            // may already take the next row's columns.
            if constexpr (Ready) ctx_.sync();
        } else {
            look<Begin, stop, 0>(row, end, known, from);
            if constexpr (publishing_stage<stage_type<stop>>) {
                if (ctx_.thread_rank() == 0)
                    on_ranks<stop>(mine_, outputs_, [&](const auto& s) { s.publish(row, known_at<stop>(known)); });
            }
            run<stop, true>(row, end, known, scratch_source{scratch_});
        }
    }

    /// Runs all looks of a row stage from Look on.
    template <std::uint32_t Begin, std::uint32_t Stop, std::uint32_t Look, class Load>
    GPUSHARE_HD void look(const place& row, std::size_t end, known_stages& known, const Load& from) noexcept {
        using combine = typename stage_type<Stop>::combine;
        const auto pass = each_piece(row, end, looking_pass<Begin, Stop, Look, Load>{with(known), from, scratch_});
        const float total = ctx_.reduce(pass.all.folded(combine{}), combine{});
        stage_of<Stop>(mine_).learn(Look, total, row, known_at<Stop>(known));
        if constexpr (Look + 1 < stage_type<Stop>::looks)
            look<Begin, Stop, Look + 1>(row, end, known, scratch_source{scratch_});
    }

    /// Calls `f` with stage I. If the stage is a sharing stage, calls `f` once for each rank, with
    /// the stage that writes to that rank's array.
    template <std::uint32_t I, class F>
    GPUSHARE_FLAT GPUSHARE_HD static void on_ranks(const whole& mine, const Outputs& outputs, const F& f) noexcept {
        const auto& stage = stage_of<I>(mine);
        if constexpr (sharing_stage<stage_type<I>> && !std::same_as<Outputs, own_outputs>) {
            constexpr std::uint32_t k = sharing_before<I>(static_cast<const whole*>(nullptr));
            for (std::uint32_t r = 0; r < outputs.ranks(); ++r) f(stage.with(outputs.of(r, k)));
        } else {
            f(stage);
        }
    }

    [[nodiscard]] GPUSHARE_HD stages with(const known_stages& known) const noexcept { return {mine_, outputs_, known}; }

    /// Calls `pass` with each piece of [row.column, end) that belongs to this thread. A piece is a
    /// few columns; the pieces come in ascending order.
    template <class Pass>
    [[nodiscard]] GPUSHARE_HD Pass each_piece(const place& row, std::size_t end, const Pass& pass) const noexcept {
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
        if constexpr (Width == 8) return pieces_by_avx2(row, end, pass);
#endif
        return pieces(row, end, pass);
    }
    // Flattened, because stages, including a user's, work in registers only where they are inlined.
    template <class Pass>
    [[nodiscard, gnu::flatten]] GPUSHARE_HD Pass pieces(const place& row, std::size_t end, Pass pass) const noexcept {
        return all_pieces(row, end, pass);
    }
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    // Takes a copy of the row. The sinks' writes may alias the original, so the compiler would read
    // and multiply its members again for each piece.
    template <class Pass>
    [[nodiscard, gnu::flatten, gnu::target("avx2,f16c")]] Pass pieces_by_avx2(place row, std::size_t end,
                                                                              Pass pass) const noexcept {
        return all_pieces(row, end, pass);
    }
#endif
    template <class Pass>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD Pass all_pieces(const place& row, std::size_t end,
                                                            Pass pass) const noexcept {
        const std::size_t step = std::size_t{ctx_.num_threads()} * lanes;
        std::size_t column = row.column + std::size_t{ctx_.thread_rank()} * lanes;
        for (; column + lanes <= end; column += step)
            pass(place{row.row, row.shard_row, column, row.width, lanes, row.streams});
        if (column < end) {
            Pass last = pass;  // a copy, so that the address of the original is never needed
            last_piece(last,
                       {row.row, row.shard_row, column, row.width, static_cast<std::uint32_t>(end - column), false});
            return last;
        }
        return pass;
    }
    /// Calls `pass` with this thread's team and each group of [row.column, end) that belongs to the
    /// team.
    template <class Pass>
    GPUSHARE_HD void each_group(const place& row, std::size_t end, const Pass& pass) const noexcept {
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
        if constexpr (Width == 8) return groups_by_avx2(row, end, pass);
#endif
        groups(row, end, pass);
    }
    template <class Pass>
    [[gnu::flatten]] GPUSHARE_HD void groups(const place& row, std::size_t end, const Pass& pass) const noexcept {
        all_groups(row, end, pass);
    }
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    template <class Pass>
    [[gnu::flatten, gnu::target("avx2,f16c")]] void groups_by_avx2(place row, std::size_t end,
                                                                   Pass pass) const noexcept {
        all_groups(row, end, pass);
    }
#endif
    template <class Pass>
    GPUSHARE_FLAT GPUSHARE_HD void all_groups(const place& row, std::size_t end, const Pass& pass) const noexcept {
        constexpr std::uint32_t columns = Pass::pieces * lanes;
        const auto team = block_team::of<Pass::pieces>(ctx_);
        const std::size_t count = (end + columns - 1) / columns;
        for (std::size_t g = team.first(count); g < count; g += team.teams())
            pass(team, {row.row, row.shard_row, g * columns, row.width, columns, row.streams}, end);
    }

    template <class Pass>
    GPUSHARE_RARE GPUSHARE_HD static void last_piece(Pass& pass, const place& at) noexcept {
        pass(at);
    }

    Context& ctx_;
    const whole& mine_;
    const Source& source_;
    float* const scratch_;
    const Outputs& outputs_;
};

/// Calls `f` with a run for the widest registers that the processor has. Wide registers need a
/// context of one thread.
template <class Context, class... Stages, class Source, class Outputs, class F>
GPUSHARE_HD void run_widest(Context& ctx, const epilogue<Stages...>& mine, const Source& source, float* scratch,
                            const Outputs& outputs, const F& f) noexcept {
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    if constexpr (lanes_for<Context>() >= 8) {
        if (widest_vectors() >= vector_width::avx2)
            return f(epilogue_run<8, Context, Source, Outputs, Stages...>(ctx, mine, source, scratch, outputs));
    }
#endif
    f(epilogue_run<4, Context, Source, Outputs, Stages...>(ctx, mine, source, scratch, outputs));
}

/// See gpushare::apply_rows.
template <class Context, class... Stages, class Source, class Outputs>
GPUSHARE_HD void run_rows(Context& ctx, const epilogue<Stages...>& mine, const row_range& range, const Source& source,
                          float* scratch, const Outputs& outputs) noexcept {
    run_widest(ctx, mine, source, scratch, outputs, [&](auto&& run) {
        place at;
        at.width = range.width;
        at.streams = range.streams;
        for (std::size_t i = 0; i < range.rows; ++i) {
            at.row = range.first + i;
            at.shard_row = at.row - range.shard_first;
            run(at, range.width);
        }
    });
    if (range.streams) finish_streaming();
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
