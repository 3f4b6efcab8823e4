// SPDX-License-Identifier: Apache-2.0
// Collectives of every kind, type and epilogue as values. The same job runs on devices, compiled by
// nvcc (jobs.cu), and on the host backend, compiled by g++ (compiled_test.cpp), and must leave the
// same bytes.
//
//   const jobs::job j{.which = 3, .ranks = 4, .count = 100};
//   // arenas[r]: jobs::arena bytes of rank r
//   jobs::launch_on_devices(node, devices, streams, members, j, arenas);
//
// Each rank has an arena of a few regions: what it brings, what it gets, and what the stages of an
// epilogue read and write. A job goes some rounds without the host between: refill what the rank
// brings, then the collective.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/quantised.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace jobs {

namespace gs = gpushare;
namespace detail = gpushare::detail;

inline constexpr std::size_t region = 8192, regions = 6, arena = regions * region;
/// One more than a thread of a fused collective has addresses of; random jobs have 2 to 8.
inline constexpr std::uint32_t most_ranks = 9;
/// Where in the arena: what a rank brings, what it gets, a residual, weights by column, scales by
/// row, and what it brings next. Lengths of unequal parts are in the place of a residual.
enum part : std::uint8_t { in, out, residual, columns, scales, refill };

/// One of the element-wise stages, chosen when the kernel runs.
struct step {
    std::uint32_t what = 0;
    float factor = 1;
};
inline constexpr std::uint32_t kinds_of_steps = 9;
inline constexpr std::uint32_t makes_something_of_zeros = 8;
inline constexpr std::size_t most_steps = 5;

struct job {
    std::uint32_t which = 0;  // of `every_kind`
    bool medley = false;      // each round is a collective of another kind: see kind_of_round
    std::uint32_t ranks = 2;
    std::size_t count = 0, width = 1;  // elements of a part; of a row
    std::uint32_t root = 0;
    std::uint32_t in_shift = 0, out_shift = 0;  // elements by which arrays lie beside the beginning of their region
    std::uint32_t blocks = 1, threads = 64, rounds = 1;
    gs::algorithm how = gs::algorithm::two_shot;
    bool pinned = false;                   // workspaces in the host's memory, where the collective works with that
    std::uint32_t first_epoch = 0;         // near its largest number, to see it wrap around
    std::uint32_t odd = most_ranks;        // this rank calls for a row or an element less
    std::uint32_t cut = 0;                 // elements by which arrays are shorter than the unequal parts in them
    std::array<step, most_steps> steps{};  // of the chain in a pipeline
    gs::ns patience = std::chrono::milliseconds(300);
};

template <class T>
[[nodiscard]] T* array(std::byte* of_rank, part p, std::uint32_t shift = 0) {
    return reinterpret_cast<T*>(of_rank + p * region) + shift;
}

/// Up to most_steps stages, of the library's but one, one after the other.
struct chain {
    static constexpr bool any_row = true;

    step steps[most_steps];
    const float* other;
    const float* by_column;

    template <class V>
    [[nodiscard]] GPUSHARE_HD V operator()(const V& x, const gs::place& at) const {
        V y = x;
        for (std::size_t i = 0; i < most_steps; ++i) y = one(steps[i], y, at);
        return y;
    }

private:
    template <class V>
    [[nodiscard]] GPUSHARE_HD V one(const step& s, const V& x, const gs::place& at) const {
        switch (s.what) {
            case 1: return detail::adding<gs::matrix<const float, false>>{{other, 0}}(x, at);
            case 2: return detail::biasing<float>{by_column}(x, at);
            case 3: return detail::scaling{s.factor}(x, at);
            case 4: return detail::rectifying{}(x, at);
            case 5: return detail::sigmoid_weighting{}(x, at);
            case 6: return detail::gaussian_gating{}(x, at);
            case 7: return detail::rounding<gs::bfloat16>{}(x, at);
            case makes_something_of_zeros: return V(s.factor) - abs(x);  // as a user's stage may
            default: return x;
        }
    }
};

// ---- the kinds of jobs: which body each rank runs, whether in one launch for all ranks, and what
// it brings

/// `Shared`: the ranks are on one device.
template <class T, bool Shared>
struct kind {
    using in_type = T;
    static constexpr bool shared = Shared;
    static constexpr bool by_rows = false;     // count is rows * width
    static constexpr bool in_pairs = false;    // rows have an even width
    static constexpr bool wide = false;        // `count` elements for each rank
    static constexpr bool exact = false;       // wants sums that floats hold, whatever their order
    static constexpr bool unequal = false;     // parts differ in length
    static constexpr std::uint32_t block = 0;  // numbers that share a scale
};

template <class T, class Op, bool Shared>
struct all_reduce : kind<T, Shared> {
    static auto body(const job& j, std::uint32_t, std::byte* a) {
        return detail::all_reduce_body<T, Op>{
            array<T>(a, in, j.in_shift), array<T>(a, out, j.out_shift), j.count, {}, gs::all_reduce_plan{j.how, false}};
    }
};
/// Of fp8 blocks through the slots.
template <class T, class Op, std::uint32_t Block, bool Shared>
struct coded_all_reduce : kind<T, Shared> {
    static constexpr std::uint32_t block = Block;
    static auto body(const job& j, std::uint32_t, std::byte* a) {
        return detail::quantised_body<T, Op, Block>{
            array<T>(a, in, j.in_shift), array<T>(a, out, j.out_shift), j.count, {}};
    }
};
template <class T, class Op, bool Shared>
struct reduce_scatter : kind<T, Shared> {
    static constexpr bool wide = true;
    static auto body(const job& j, std::uint32_t, std::byte* a) {
        return detail::reduce_scatter_body<T, Op>{
            array<T>(a, in, j.in_shift), array<T>(a, out, j.out_shift), j.count, {}};
    }
};
template <class T, class Op, bool Shared>
struct reduce : kind<T, Shared> {
    static auto body(const job& j, std::uint32_t, std::byte* a) {
        return detail::reduce_body<T, Op>{
            array<T>(a, in, j.in_shift), array<T>(a, out, j.out_shift), j.count, {}, j.root};
    }
};
template <class T, bool Shared>
struct all_gather : kind<T, Shared> {
    static constexpr bool wide = true;
    static auto body(const job& j, std::uint32_t, std::byte* a) {
        return detail::all_gather_body<T>{array<T>(a, in, j.in_shift), array<T>(a, out, j.out_shift), j.count};
    }
};
template <class T, bool Shared>
struct broadcast : kind<T, Shared> {
    static auto body(const job& j, std::uint32_t, std::byte* a) {
        return detail::broadcast_body<T>{array<T>(a, in, j.in_shift), j.count, j.root};
    }
};
template <class T, bool Shared>
struct all_to_all : kind<T, Shared> {
    static constexpr bool wide = true;
    static auto body(const job& j, std::uint32_t, std::byte* a) {
        return detail::all_to_all_body<T>{array<T>(a, in, j.in_shift), array<T>(a, out, j.out_shift), j.count};
    }
};
template <class T, bool Shared>
struct all_to_all_in_place : kind<T, Shared> {
    static constexpr bool wide = true;
    static auto body(const job& j, std::uint32_t, std::byte* a) {
        return detail::all_to_all_body<T>{array<T>(a, in, j.in_shift), array<T>(a, in, j.in_shift), j.count};
    }
};

/// What rank r has for rank q is length(j, r + q): so ranks that go on without the first one or the
/// last agree as well. Some parts are empty, and none is as long in a job of another count.
[[nodiscard]] inline std::uint64_t length(const job& j, std::uint32_t k) { return k % 4 == 3 ? 0 : j.count + k % 2; }
/// The lengths of this rank's parts, or of all ranks', of which there are two rows in memory: for
/// j.count, and for one element less.
[[nodiscard]] inline std::uint64_t* lengths(const job& j, std::byte* a) {
    return array<std::uint64_t>(a, residual) + j.count % 2 * std::size_t{most_ranks};
}
[[nodiscard]] inline std::size_t all_lengths(const job& j, std::uint32_t first) {
    std::size_t sum = 0;
    for (std::uint32_t r = 0; r < j.ranks; ++r) sum += length(j, first + r);
    return sum - j.cut;
}
/// `ByPair`: a rank's lengths are its own.
template <class T, bool Shared, bool ByPair>
struct unequal_kind : kind<T, Shared> {
    static constexpr bool wide = true;
    static constexpr bool unequal = true;
    static void write_lengths(const job& j, std::uint32_t rank, std::byte* a) {
        for (std::uint32_t r = 0; r < j.ranks; ++r) lengths(j, a)[r] = length(j, ByPair ? rank + r : r);
        if (j.ranks < most_ranks) lengths(j, a)[j.ranks] = rank;  // who reads it sees something else on each rank
    }
};
template <class T, bool Shared>
struct all_gatherv : unequal_kind<T, Shared, false> {
    static auto body(const job& j, std::uint32_t r, std::byte* a) {
        return detail::all_gatherv_body<T>{array<T>(a, in, j.in_shift), length(j, r), array<T>(a, out, j.out_shift),
                                           all_lengths(j, 0), lengths(j, a)};
    }
};
template <class T, class Op, bool Shared>
struct reduce_scatterv : unequal_kind<T, Shared, false> {
    static auto body(const job& j, std::uint32_t r, std::byte* a) {
        return detail::reduce_scatterv_body<T, Op>{array<T>(a, in, j.in_shift),
                                                   all_lengths(j, 0),
                                                   array<T>(a, out, j.out_shift),
                                                   length(j, r),
                                                   lengths(j, a),
                                                   {}};
    }
};
template <class T, bool Shared>
struct all_to_allv : unequal_kind<T, Shared, true> {
    static auto body(const job& j, std::uint32_t r, std::byte* a) {
        return detail::all_to_allv_body<T>{
            array<T>(a, in, j.in_shift), all_lengths(j, r), array<T>(a, out, j.out_shift),
            all_lengths(j, r),           lengths(j, a),     lengths(j, a)};
    }
};
template <bool Shared>
struct barrier : kind<float, Shared> {
    static auto body(const job&, std::uint32_t, std::byte*) { return detail::barrier_body{}; }
};

/// `Stages`: makes a pipeline of a job and an arena.
template <class T, class Stages, bool Sharded, bool Shared>
struct fused : kind<T, Shared> {
    static constexpr bool by_rows = true;
    static constexpr bool in_pairs = requires { Stages::in_pairs; };
    static constexpr bool exact = Stages::exact;
    static auto body(const job& j, std::uint32_t, std::byte* a) { return of(Stages::template pipeline<T>(j, a), j, a); }

private:
    template <class Op, class... S>
    static auto of(const gs::pipeline<T, Op, S...>& p, const job& j, std::byte* a) {
        using result = typename gs::pipeline<T, Op, S...>::out_type;
        return detail::fused_body<T, Op, Sharded, S...>{
            p, array<result>(a, out, j.out_shift), {.one_shot = j.how == gs::algorithm::one_shot}};
    }
};
inline auto reduced_of(const auto* x, const job& j, auto op) { return gs::reduced(std::span(x, j.count), j.width, op); }
inline chain chain_of(const job& j, std::byte* a) {
    chain c{{}, array<float>(a, residual), array<float>(a, columns)};
    for (std::size_t i = 0; i < most_steps; ++i) c.steps[i] = j.steps[i];
    return c;
}

/// Any chain of element-wise stages.
struct chained {
    static constexpr bool exact = false;
    template <class T>
    static auto pipeline(const job& j, std::byte* a) {
        return reduced_of(array<const T>(a, in, j.in_shift), j, gs::sum{}) | chain_of(j, a) | gs::cast<float>();
    }
};
/// What follows an attention block: a residual that is updated, a norm, a cast.
struct normed {
    static constexpr bool exact = true;
    template <class T>
    static auto pipeline(const job& j, std::byte* a) {
        return reduced_of(array<const T>(a, in, j.in_shift), j, gs::sum{}) |
               gs::add_to(array<gs::bfloat16>(a, residual)) | gs::rms_norm(array<const float>(a, columns), 1e-6F) |
               gs::cast<gs::bfloat16>();
    }
};
/// Scales that every rank gets.
struct quantised {
    static constexpr bool exact = false;
    template <class T>
    static auto pipeline(const job& j, std::byte* a) {
        return reduced_of(array<const T>(a, in, j.in_shift), j, gs::average{}) | chain_of(j, a) |
               gs::quantise<gs::fp8_e4m3>(array<float>(a, scales));
    }
};
/// Two looks at a row, and scales of the rank's own rows.
struct twice_quantised {
    static constexpr bool exact = false;
    template <class T>
    static auto pipeline(const job& j, std::byte* a) {
        return reduced_of(array<const T>(a, in, j.in_shift), j, gs::sum{}) |
               gs::row_maxima(gs::shard(array<float>(a, scales))) | chain_of(j, a) |
               gs::quantise<std::int8_t>(gs::shard(array<float>(a, columns, 1024)));
    }
};
/// What follows an attention block whose next product takes fp8: a scale for each 128 columns, that
/// every rank gets.
struct grouped {
    static constexpr bool exact = true;
    template <class T>
    static auto pipeline(const job& j, std::byte* a) {
        return reduced_of(array<const T>(a, in, j.in_shift), j, gs::sum{}) |
               gs::add_to(array<gs::bfloat16>(a, residual)) | gs::rms_norm(array<const float>(a, columns), 1e-6F) |
               gs::quantise_groups<gs::fp8_e4m3>(array<float>(a, scales));
    }
};
/// Two numbers a byte. With the scale of the tensor some numbers of some jobs are too large.
struct in_four_bits {
    static constexpr bool exact = false, in_pairs = true;
    template <class T>
    static auto pipeline(const job& j, std::byte* a) {
        return reduced_of(array<const T>(a, in, j.in_shift), j, gs::average{}) | chain_of(j, a) |
               gs::quantise_nvfp4(array<gs::fp8_e4m3>(a, scales), 0.004F);
    }
};
struct layered {
    static constexpr bool exact = true;
    template <class T>
    static auto pipeline(const job& j, std::byte* a) {
        return reduced_of(array<const T>(a, in, j.in_shift), j, gs::sum{}) |
               gs::layer_norm(array<const float>(a, columns), array<const float>(a, columns), 1e-6F);
    }
};

using every_kind = std::tuple<
    // every type
    reduce_scatter<float, gs::sum, false>, reduce_scatter<double, gs::sum, true>,
    reduce_scatter<gs::float16, gs::sum, false>, reduce_scatter<gs::bfloat16, gs::sum, true>,
    reduce_scatter<gs::fp8_e4m3, gs::sum, false>, reduce_scatter<gs::fp8_e5m2, gs::sum, true>,
    reduce_scatter<std::int8_t, gs::sum, false>, reduce_scatter<std::uint8_t, gs::maximum, true>,
    reduce_scatter<std::int16_t, gs::average, false>, reduce_scatter<std::uint16_t, gs::sum, true>,
    reduce_scatter<std::int32_t, gs::average, false>, reduce_scatter<std::uint32_t, gs::minimum, true>,
    reduce_scatter<std::int64_t, gs::average, false>, reduce_scatter<std::uint64_t, gs::product, true>,
    // every collective
    reduce<float, gs::maximum, false>, reduce<gs::float16, gs::average, true>, all_gather<gs::bfloat16, false>,
    all_gather<std::uint8_t, true>, broadcast<float, false>, broadcast<std::uint64_t, true>, all_to_all<float, false>,
    all_to_all<std::uint8_t, true>, barrier<false>, barrier<true>, all_reduce<float, gs::sum, false>,
    all_reduce<gs::bfloat16, gs::sum, true>,
    // epilogues
    fused<float, chained, false, false>, fused<gs::bfloat16, chained, true, true>,
    fused<gs::bfloat16, normed, false, false>, fused<gs::bfloat16, quantised, false, true>,
    fused<float, twice_quantised, true, false>, fused<float, layered, false, true>,
    // in place, and of unequal parts
    all_to_all_in_place<float, false>, all_to_all_in_place<std::uint8_t, true>, all_gatherv<float, false>,
    all_gatherv<std::uint8_t, true>, reduce_scatterv<float, gs::sum, false>,
    reduce_scatterv<gs::bfloat16, gs::average, true>, all_to_allv<float, false>, all_to_allv<std::uint16_t, true>,
    // coded
    coded_all_reduce<float, gs::sum, 128, false>, coded_all_reduce<gs::bfloat16, gs::average, 32, true>,
    // scales of groups
    fused<gs::bfloat16, grouped, false, false>, fused<float, in_four_bits, false, true>>;
inline constexpr std::uint32_t kinds = std::tuple_size_v<every_kind>;

/// Calls f(a value of this kind's type).
template <class F>
constexpr void with_kind(std::uint32_t which, const F& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
        (void)((I == which && (f(std::tuple_element_t<I, every_kind>{}), true)) || ...);
    }
    (std::make_index_sequence<kinds>{});
}
/// The index of a kind; `kinds` where it is none.
template <class Kind>
[[nodiscard]] constexpr std::uint32_t number_of() {
    std::uint32_t which = 0;
    for (bool same = false; which < kinds; ++which) {
        with_kind(which, [&](auto k) { same = std::is_same_v<decltype(k), Kind>; });
        if (same) break;
    }
    return which;
}
[[nodiscard]] constexpr bool is_shared(std::uint32_t which) {
    bool yes = false;
    with_kind(which, [&](auto k) { yes = decltype(k)::shared; });
    return yes;
}

/// Those that bring one type, on a device for each rank or on one for all: a round of a medley is
/// the next one of these.
inline constexpr std::array<std::uint32_t, 8> with_floats_apart{24, 0, 20, 26, 14, 22, 18, 30};
inline constexpr std::array<std::uint32_t, 5> with_bfloats_together{25, 3, 27, 23, 29};

[[nodiscard]] constexpr std::uint32_t kind_of_round(const job& j, std::uint32_t round) {
    const auto in = [&](const auto& list) {
        std::size_t first = 0;
        while (list[first] != j.which) ++first;
        return list[(first + round) % list.size()];
    };
    if (!j.medley) return j.which;
    return is_shared(j.which) ? in(with_bfloats_together) : in(with_floats_apart);
}

/// What a rank brings to the next round.
struct bring {
    std::uint32_t* to;
    const std::uint32_t* from;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <gs::kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        for (std::size_t i = ctx.thread_rank(); i < region / sizeof *to; i += ctx.num_threads()) to[i] = from[i];
    }
};

/// All rounds of a job, on any backend's streams.
template <class Gangs, class Stream>
[[nodiscard]] gs::errc launch(Gangs& gangs, std::span<const gs::device_id> devices, std::span<Stream> streams,
                              std::span<const gs::member> members, const job& j, std::span<std::byte* const> arenas) {
    gs::errc code = gs::errc::none;
    const gs::launch_options options{.blocks = j.blocks, .threads = j.threads, .patience = j.patience};
    for (std::uint32_t round = 0; round < j.rounds && code == gs::errc::none; ++round) {
        for (std::uint32_t r = 0; r < j.ranks && round != 0; ++r)
            streams[is_shared(j.which) ? 0 : r].launch(
                {.blocks = 1, .threads = j.threads, .hold = {}},
                bring{array<std::uint32_t>(arenas[r], in), array<const std::uint32_t>(arenas[r], refill)});
        with_kind(kind_of_round(j, round), [&](auto k) {
            using kind = decltype(k);
            job less = j;
            if (kind::unequal && j.root % 2 != 0)
                less.cut = 1;
            else
                less.count -= kind::by_rows ? j.width : 1;
            const auto body_of = [&](std::size_t r) {
                return kind::body(r == j.odd ? less : j, static_cast<std::uint32_t>(r), arenas[r]);
            };
            if constexpr (kind::shared)
                code = detail::submit_shared_each(gangs, devices[0], streams[0], members, body_of, options);
            else
                code = detail::submit_each(gangs, devices, streams, members, body_of, options);
        });
    }
    return code;
}

/// On devices, by the kernels in jobs.cu.
[[nodiscard]] gs::errc launch_on_devices(gs::cuda::node& node, std::span<const gs::device_id> devices,
                                         std::span<gs::cuda::stream> streams, std::span<const gs::member> members,
                                         const job& j, std::span<std::byte* const> arenas);
/// The ways to launch a kernel of CUDA's own: kernel<<<...>>>, and the runtime's functions.
enum class form : std::uint8_t { chevrons, function, cooperative_function };
/// Adds 1 to each of n words, by two blocks.
void add_one(form how, gs::cuda::stream& s, std::uint32_t* words, std::uint32_t n);

/// What a device makes of numbers: the float of each of 2^bits patterns, and of each of n floats
/// the pattern.
enum class format : std::uint8_t { float16, bfloat16, fp8_e4m3, fp8_e5m2 };
void convert_on_device(format f, gs::cuda::stream& s, float* widened, const float* floats, std::uint16_t* narrowed,
                       std::uint32_t n);

/// What a kernel costs for each element of a rank: the difference between two sizes, so that
/// meeting and leaving aren't in it.
struct cost {
    std::string name{};
    double instructions = 0, bytes = 0;  // of global memory, read and written
    double least_bytes = 0;              // that any algorithm must move
};

/// Something else that writes to buffers.
void reuse_on_device(gs::cuda::stream& s, std::uint32_t* to, const std::uint32_t* from, std::uint32_t threads);

}  // namespace jobs
