// SPDX-License-Identifier: Apache-2.0
// Pipelines, compared with the same steps one after the other, each in its own pass of plain loops.
#include <gpushare/collective/fused_all_reduce.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "collective/rig.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace fused_test {

namespace gs = gpushare;

namespace {

std::vector<float> numbers(std::uint64_t seed, std::size_t n) {
    support::random any(seed);
    std::vector<float> all(n);
    for (float& x : all) x = (static_cast<float>(any.below(20'001)) - 10'000.0F) / 997.0F;
    return all;
}

/// What all ranks work on.
struct problem {
    problem(unsigned ranks, std::size_t rows_, std::size_t width_)
        : rows(rows_),
          width(width_),
          residual(numbers(7, rows * width)),
          weight(numbers(8, width)),
          shift(numbers(9, width)) {
        for (unsigned r = 0; r < ranks; ++r) in.push_back(numbers(r + 20, rows * width));
    }
    [[nodiscard]] std::vector<float> reduced() const {
        std::vector<float> x = in[0];
        for (std::size_t r = 1; r < in.size(); ++r)
            for (std::size_t i = 0; i < x.size(); ++i) x[i] += in[r][i];
        return x;
    }
    std::size_t rows, width;
    std::vector<float> residual, weight, shift;
    std::vector<std::vector<float>> in;
};

/// Calls run(me, pipeline, out) on every rank and hands each rank's output to `check`; replicated,
/// then sharded.
template <class Out, class Make, class Check>
void both_ways_by(gs::algorithm how, const problem& p, const Make& make, const Check& check) {
    const gs::communicator group(static_cast<std::uint32_t>(p.in.size()), {.tuning = gs::tuning_table::always(how)});
    std::atomic<unsigned> wrong{0};
    support::together(group.size(), [&](unsigned rank) {
        const auto me = group.rank(rank);
        std::vector<Out> out(p.rows * p.width);
        std::vector<float> scales(p.rows);
        if (gs::try_run(me, make(rank, std::span<const float>(p.residual), std::span(scales)), out)) ++wrong;
        if (!check(out, scales, std::size_t{0})) ++wrong;
        const auto own = gs::shard_of(p.rows, rank, group.size());
        std::vector<Out> part(own.size() * p.width);
        scales.assign(own.size(), 0);
        const auto residual = std::span<const float>(p.residual).subspan(own.begin * p.width, part.size());
        if (gs::try_run_sharded(me, make(rank, residual, std::span(scales)), part)) ++wrong;
        if (!check(part, scales, own.begin)) ++wrong;
    });
    CAPTURE(p.rows, p.width, group.size(), gs::to_string(how));
    CHECK(wrong == 0);
}
template <class Out, class Make, class Check>
void both_ways(const problem& p, const Make& make, const Check& check) {
    for (const auto how : {gs::algorithm::two_shot, gs::algorithm::one_shot}) both_ways_by<Out>(how, p, make, check);
}

bool near(float a, float b) { return std::abs(a - b) <= 4e-5F * (1.0F + std::abs(b)); }

}  // namespace

TEST_CASE("add, rms_norm, cast: as one after the other", "[collective]") {
    for (const unsigned ranks : {1U, 2U, 3U})
        for (const std::size_t width : {1U, 7U, 16U, 100U, 4096U, 9001U}) {  // the last doesn't fit into the slot
            const problem p(ranks, 5, width);
            auto want = p.reduced();
            for (std::size_t i = 0; i < want.size(); ++i) want[i] += p.residual[i];
            for (std::size_t r = 0; r < p.rows; ++r) {
                double squares = 0;
                for (std::size_t c = 0; c < width; ++c)
                    squares += static_cast<double>(want[r * width + c]) * static_cast<double>(want[r * width + c]);
                const auto norm = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(width) + 1e-6));
                for (std::size_t c = 0; c < width; ++c) want[r * width + c] *= norm * p.weight[c];
            }
            const auto steps = [&](unsigned rank, std::span<const float> residual, std::span<float>) {
                return gs::reduced(p.in[rank], width) | gs::add(residual) | gs::rms_norm(p.weight, 1e-6F);
            };
            both_ways<float>(p, steps, [&](const auto& got, const auto&, std::size_t row) {
                for (std::size_t i = 0; i < got.size(); ++i)
                    if (!near(got[i], want[row * width + i])) return false;
                return true;
            });
            both_ways<gs::bfloat16>(
                p,
                [&](unsigned rank, auto residual, auto scales) {
                    return steps(rank, residual, scales) | gs::cast<gs::bfloat16>();
                },
                [&](const auto& got, const auto&, std::size_t row) {
                    for (std::size_t i = 0; i < got.size(); ++i)
                        if (std::abs(static_cast<float>(got[i]) - want[row * width + i]) >
                            0.0041F * (0.01F + std::abs(want[row * width + i])))
                            return false;
                    return true;
                });
        }
}

TEST_CASE("elementwise stages have the bits of the single steps", "[collective]") {
    const problem p(3, 4, 53);
    auto want = p.reduced();
    for (std::size_t i = 0; i < want.size(); ++i) {
        want[i] = want[i] * 0.3F;
        want[i] = want[i] + p.shift[i % p.width];
        want[i] = std::max(want[i], 0.0F);
        want[i] = want[i] * want[i] + 1.0F;
    }
    both_ways<float>(
        p,
        [&](unsigned rank, auto, auto) {
            return gs::reduced(p.in[rank], p.width) | gs::scale(0.3F) | gs::bias(p.shift) | gs::relu() |
                   gs::map([](float x) { return x * x + 1.0F; });
        },
        [&](const auto& got, const auto&, std::size_t row) {
            return std::memcmp(got.data(), want.data() + row * p.width, got.size() * sizeof(float)) == 0;
        });
}

TEST_CASE("layer_norm", "[collective]") {
    for (const std::size_t width : {2U, 33U, 9001U}) {
        const problem p(2, 3, width);
        auto want = p.reduced();
        for (std::size_t r = 0; r < p.rows; ++r) {
            float* const x = want.data() + r * width;
            double mean = 0, variance = 0;
            for (std::size_t c = 0; c < width; ++c) mean += static_cast<double>(x[c]) / static_cast<double>(width);
            for (std::size_t c = 0; c < width; ++c)
                variance += (static_cast<double>(x[c]) - mean) * (static_cast<double>(x[c]) - mean) /
                            static_cast<double>(width);
            for (std::size_t c = 0; c < width; ++c)
                x[c] =
                    static_cast<float>((static_cast<double>(x[c]) - mean) / std::sqrt(variance + 1e-5)) * p.weight[c] +
                    p.shift[c];
        }
        both_ways<float>(
            p,
            [&](unsigned rank, auto, auto) {
                return gs::reduced(p.in[rank], width) | gs::layer_norm(p.weight, p.shift, 1e-5F);
            },
            [&](const auto& got, const auto&, std::size_t row) {
                for (std::size_t i = 0; i < got.size(); ++i)
                    if (std::abs(got[i] - want[row * width + i]) > 1e-3F) return false;
                return true;
            });
    }
}

TEMPLATE_TEST_CASE("quantised with a scale per row", "[collective]", std::int8_t, gs::fp8_e4m3, gs::fp8_e5m2) {
    const problem p(2, 5, 70);
    const auto want = p.reduced();
    constexpr bool whole = std::is_same_v<TestType, std::int8_t>;
    constexpr float limit = gs::largest_quantum<TestType>();
    both_ways<TestType>(
        p,
        [&](unsigned rank, auto, std::span<float> scales) {
            return gs::reduced(p.in[rank], p.width) | gs::quantise<TestType>(scales);
        },
        [&](const auto& got, const auto& scales, std::size_t row) {
            for (std::size_t i = 0; i < got.size(); ++i) {
                const std::size_t r = i / p.width;
                float largest = 0;
                for (std::size_t c = 0; c < p.width; ++c)
                    largest = std::max(largest, std::abs(want[(row + r) * p.width + c]));
                const float scale = largest / limit;
                if (scales[r] != scale) return false;
                const float x = want[row * p.width + i], q = static_cast<float>(got[i]) * scale;
                if (std::abs(q - x) > (whole ? 0.5001F * scale : 0.13F * std::abs(x) + scale)) return false;
            }
            return true;
        });
}

TEST_CASE("a residual is updated on every rank, and what follows sees it as it is stored", "[collective]") {
    for (const auto& [width, how] : std::vector<std::pair<std::size_t, gs::algorithm>>{
             {31, gs::algorithm::two_shot},
             {31, gs::algorithm::one_shot},
             {9001, gs::algorithm::two_shot}}) {  // this doesn't fit into the slot: elements are combined anew
        const problem p(3, 4, width);
        const auto x = p.reduced();
        const gs::communicator group(3, {.tuning = gs::tuning_table::always(how)});
        std::atomic<unsigned> wrong{0};
        support::together(3, [&](unsigned rank) {
            std::vector<gs::bfloat16> residual(x.size());
            for (std::size_t i = 0; i < x.size(); ++i) residual[i] = gs::bfloat16{p.residual[i]};
            const auto before = residual;
            std::vector<std::int8_t> out(x.size());
            std::vector<float> scales(p.rows);
            gs::run(
                group.rank(rank),
                gs::reduced(p.in[rank], width) | gs::add_to(residual) | gs::quantise<std::int8_t>(std::span(scales)),
                out);
            for (std::size_t i = 0; i < x.size(); ++i) {
                const gs::bfloat16 want{x[i] + static_cast<float>(before[i])};
                if (residual[i].bits() != want.bits()) ++wrong;
                const float scale = scales[i / width];
                if (std::abs(static_cast<float>(out[i]) * scale - static_cast<float>(want)) > 0.501F * scale) ++wrong;
            }
        });
        CAPTURE(width, gs::to_string(how));
        CHECK(wrong == 0);
    }
}

namespace {
/// Waits until a flag is set, or too long.
struct waiting_for {
    const std::atomic<bool>* flag;
    gs::instant patience;
    float operator()(float x) const {
        while (!*flag && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
        return x;
    }
};
}  // namespace

TEST_CASE("with one shot, no rank waits for another rank's stages", "[collective]") {
    const problem p(2, 3, 20);
    const gs::communicator group(2, {.tuning = gs::tuning_table::always(gs::algorithm::one_shot)});
    const gs::instant patience = std::chrono::steady_clock::now() + std::chrono::minutes(5);
    std::atomic<bool> over{false}, never_waits{true};
    std::atomic<unsigned> wrong{0};
    support::together(2, [&](unsigned rank) {
        const waiting_for stage{rank == 0 ? &never_waits : &over, patience};
        std::vector<float> out(p.in[rank].size());
        const auto steps = gs::reduced(p.in[rank], p.width) | gs::relu() | gs::map(stage);
        if (gs::try_run(group.rank(rank), steps, out, patience)) ++wrong;
        if (rank == 0) over = true;
        if (std::chrono::steady_clock::now() >= patience) ++wrong;
    });
    CHECK(wrong == 0);
}

namespace {
/// A user's stage that doesn't say whether it cares about the rank.
struct numbering {
    float* of_shard;
    template <class V>
    void store(const V&, const gs::place& at) const {
        of_shard[at.shard_row] = static_cast<float>(at.row);
    }
};
static_assert(gs::sink_stage<numbering> && !gs::any_row_stage<numbering>);
static_assert(gs::epilogue<>::any_row && decltype(gs::relu() | gs::rms_norm(1e-6F))::any_row);
static_assert(!decltype(gs::relu() | gs::into(gs::shard(static_cast<float*>(nullptr))))::any_row);
}  // namespace

TEST_CASE("stages that keep a shard see the rows of their rank, whatever the table says", "[collective]") {
    const problem p(3, 7, 20);
    const gs::communicator group(3, {.tuning = gs::tuning_table::always(gs::algorithm::one_shot)});
    std::atomic<unsigned> wrong{0};
    support::together(3, [&](unsigned rank) {
        const auto own = gs::shard_of(p.rows, rank, 3);
        std::vector<float> out(p.rows * p.width), part(own.size() * p.width), rows(own.size());
        const auto steps = gs::reduced(p.in[rank], p.width);
        gs::run(group.rank(rank), steps | gs::into(gs::shard(part.data())), out);
        const auto all = p.reduced();
        if (out != all || !std::ranges::equal(part, std::span(all).subspan(own.begin * p.width, part.size()))) ++wrong;
        gs::run(group.rank(rank), steps | gs::relu() | numbering{rows.data()}, out);
        for (std::size_t i = 0; i < rows.size(); ++i) wrong += rows[i] == static_cast<float>(own.begin + i) ? 0 : 1;
    });
    CHECK(wrong == 0);
}

TEST_CASE("quantised by one scale: to nearest even, and saturated", "[collective]") {
    const gs::communicator group(1);
    const std::vector<float> in{0.5F, 1.5F, 2.5F, -0.5F, -1.5F, 126.5F, 127.5F, 1e9F, -1e9F};
    std::vector<std::int8_t> out(in.size());
    gs::run(group.rank(0), gs::reduced(in, in.size()) | gs::quantise<std::int8_t>(1.0F), out);
    CHECK(out == std::vector<std::int8_t>{0, 2, 2, 0, -2, 126, 127, 127, -127});
}

TEST_CASE("shapes that don't fit are refused", "[collective]") {
    const gs::communicator group(1);
    std::vector<float> in(10), out(10);
    CHECK(gs::try_run(group.rank(0), gs::reduced(in, 3), out).code == gs::errc::mismatch);
    CHECK(gs::try_run(group.rank(0), gs::reduced(in, 0), out).code == gs::errc::mismatch);
    CHECK(gs::try_run(group.rank(0), gs::reduced(in, 5), std::span(out).first(5)).code == gs::errc::mismatch);
    CHECK_THROWS_AS(gs::run(group.rank(0), gs::reduced(in, 3), out), gs::operation_error);
}

TEST_CASE("ranks with different pipelines are told", "[collective]") {
    const std::vector<float> weight(8, 1.0F);
    // Only ends a test that fails.
    const gs::instant until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    const auto told = [](const auto& call) {
        const gs::communicator group(2);
        std::vector<gs::collective_fault> faults(2);
        support::together(2, [&](unsigned rank) { faults[rank] = call(group.rank(rank), rank); });
        return faults[0].code == gs::errc::mismatch && faults[1] == faults[0];
    };
    CHECK(told([&](const gs::member& me, unsigned rank) {
        std::vector<float> in(32, 1.0F), out(32);
        const auto p = gs::reduced(in, 8);
        return rank == 0 ? gs::try_run(me, p, std::span(out), until)
                         : gs::try_run_sharded(me, p, std::span(out).first(16), until);
    }));
    CHECK(told([&](const gs::member& me, unsigned rank) {
        std::vector<float> in(32, 1.0F);
        std::vector<gs::bfloat16> some(32);
        std::vector<gs::float16> others(32);
        const auto p = gs::reduced(in, 8);
        return rank == 0 ? gs::try_run(me, p | gs::cast<gs::bfloat16>(), std::span(some), until)
                         : gs::try_run(me, p | gs::cast<gs::float16>(), std::span(others), until);
    }));
    CHECK(told([&](const gs::member& me, unsigned rank) {
        std::vector<float> in(32, 1.0F), out(32);
        const auto p = gs::reduced(in, 8);
        return rank == 0 ? gs::try_run(me, p, std::span(out), until)
                         : gs::try_run(me, p | gs::rms_norm(weight, 1e-6F), std::span(out), until);
    }));
}

TEST_CASE("a pipeline in blocks of several threads", "[collective]") {
    const problem p(2, 3, 57);
    const gs::communicator group(2);
    std::vector<std::vector<float>> out(2, std::vector<float>(p.rows * p.width)), single = out;
    const auto steps = [&](unsigned rank) {
        return gs::reduced(p.in[rank], p.width) | gs::add(p.residual) | gs::rms_norm(p.weight, 1e-6F);
    };
    support::together(2, [&](unsigned rank) { gs::run(group.rank(rank), steps(rank), single[rank]); });
    using body = gs::detail::fused_body<float, gs::sum, false, gs::detail::adding<gs::matrix<const float, false>>,
                                        gs::detail::rms_normalising<float>>;
    CHECK(!collective_test::run_blocks(group, 3, gs::collective_kind::all_reduce, [&](auto& t) {
        return body{steps(t.rank()), out[t.rank()].data(), {false}}(t, 1);
    }));
    for (std::size_t i = 0; i < out[0].size(); ++i) REQUIRE(near(out[1][i], single[1][i]));
}

}  // namespace fused_test
