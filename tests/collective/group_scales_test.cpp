// SPDX-License-Identifier: Apache-2.0
// Quantising with a scale for each group of columns: the bits and the error bound of the
// documentation, alone and behind an all-reduce.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/host/kernel_context.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace group_scales_test {

namespace gs = gpushare;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float lost = std::numeric_limits<float>::quiet_NaN();

/// Numbers of many sizes; some groups have none but zeros or denormal numbers.
std::vector<float> some_numbers(std::size_t n, support::random& any) {
    std::vector<float> x(n);
    int size = 0;
    for (std::size_t i = 0; i < n; ++i) {
        if (i % 16 == 0) size = any.one_in(8) ? -140 : any.one_in(8) ? 120 : static_cast<int>(any.below(16)) - 8;
        const float mantissa = static_cast<float>(any.below(1 << 20)) / (1 << 19) - 1;
        x[i] = any.one_in(32) ? 0.0F : std::ldexp(mantissa, size - static_cast<int>(any.below(12)));
    }
    if (n > 300 && any.one_in(2)) std::fill_n(x.begin() + 128, 128, 0.0F);
    return x;
}

std::size_t groups_of(std::size_t width, std::size_t group) { return (width + group - 1) / group; }

/// Calls f(row, group of the row, the group's elements).
template <class F>
void each_group(std::span<const float> x, std::size_t width, std::size_t group, const F& f) {
    for (std::size_t begin = 0; begin < x.size();) {
        const std::size_t column = begin % width, n = std::min(group, width - column);
        f(begin / width, column / group, x.subspan(begin, n));
        begin += n;
    }
}

struct fp8_result {
    std::vector<gs::fp8_e4m3> codes;
    std::vector<float> scales;
};

fp8_result quantised(std::span<const float> x, std::size_t width) {
    fp8_result r{std::vector<gs::fp8_e4m3>(x.size()), std::vector<float>(x.size() / width * groups_of(width, 128), 77)};
    std::vector<float> scratch(width);
    gs::host::kernel_context ctx;
    gs::apply_rows(ctx, gs::epilogue<>{} | gs::quantise_groups<gs::fp8_e4m3>(r.scales) | gs::into(r.codes),
                   {.rows = x.size() / width, .width = width}, gs::from_rows(x.data()), scratch.data());
    return r;
}

/// How many bits differ from what the documentation says, and how many elements are farther off
/// than its bound.
std::size_t wrong_in(const fp8_result& r, std::span<const float> x, std::size_t width) {
    std::size_t wrong = 0;
    each_group(x, width, 128, [&](std::size_t row, std::size_t g, std::span<const float> some) {
        float largest = 0;
        bool finite = true;
        for (const float v : some) finite = finite && std::isfinite(v), largest = std::fmax(largest, std::fabs(v));
        const float scale = r.scales[row * groups_of(width, 128) + g];
        const auto* const code = r.codes.data() + (some.data() - x.data());
        if (!finite) {
            wrong += std::isnan(scale) ? 0 : 1;
            for (std::size_t i = 0; i < some.size(); ++i) wrong += std::isnan(static_cast<float>(code[i])) ? 0 : 1;
            return;
        }
        if (scale != std::fmax(largest / 448, std::numeric_limits<float>::min())) ++wrong;
        const float inverse = 1 / scale;
        for (std::size_t i = 0; i < some.size(); ++i) {
            if (code[i].bits() != gs::fp8_e4m3{some[i] * inverse}.bits()) ++wrong;
            const double v = some[i], q = static_cast<double>(static_cast<float>(code[i])) * scale;
            if (std::fabs(q - v) > std::fmax(std::fabs(v) / 16, scale / 1024.0) + std::fabs(v) * 0x1p-22) ++wrong;
        }
    });
    return wrong;
}

}  // namespace

TEST_CASE("fp8 with a scale for each group has the bits and the bound that are documented", "[collective]") {
    const auto seed = support::seed(1);
    CAPTURE(seed);
    support::random any(seed);
    for (const std::size_t width : {1U, 3U, 16U, 100U, 127U, 128U, 129U, 255U, 256U, 300U, 1024U, 1030U})
        for (int times = 0; times < 8; ++times) {
            CAPTURE(width, times);
            auto x = some_numbers(3 * width, any);
            REQUIRE(wrong_in(quantised(x, width), x, width) == 0);
            for (const float special : {infinity, -infinity, lost, -lost, std::numeric_limits<float>::max()})
                if (any.one_in(3)) any.of(x) = special;
            REQUIRE(wrong_in(quantised(x, width), x, width) == 0);
        }
}

namespace {

/// Makes something large of what lies behind the end of a row.
struct from_a_thousand {
    template <class V>
    V operator()(const V& x, const gs::place&) const {
        return V(1000.0F) - x;
    }
};

}  // namespace

TEST_CASE("groups of any size and of whole numbers have a scale each", "[collective]") {
    const std::size_t width = 83, rows = 3;
    const auto seed = support::seed(2);
    CAPTURE(seed);
    support::random any(seed);
    std::vector<float> x(rows * width), y(x.size());
    for (float& v : x) v = static_cast<float>(100 + any.below(1'400));
    x[width + 40] = lost;
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = 1000 - x[i];
    std::vector<std::int8_t> q(x.size());
    std::vector<float> scales(rows * groups_of(width, 32), 77), scratch(width);
    gs::host::kernel_context ctx;
    gs::apply_rows(ctx,
                   gs::epilogue<>{} | from_a_thousand{} | gs::quantise_groups<std::int8_t, 32>(scales) | gs::into(q),
                   {.rows = rows, .width = width}, gs::from_rows(x.data()), scratch.data());
    each_group(y, width, 32, [&](std::size_t row, std::size_t g, std::span<const float> some) {
        const float scale = scales[row * groups_of(width, 32) + g];
        CAPTURE(row, g, scale);
        float largest = 0;
        for (const float v : some) largest = std::fmax(largest, std::fabs(v));
        REQUIRE(std::isnan(scale) == (row == 1 && g == 1));
        if (std::isnan(scale)) return;
        REQUIRE(scale == std::fmax(largest / 127, std::numeric_limits<float>::min()));
        for (const float& v : some)
            REQUIRE(static_cast<float>(q[static_cast<std::size_t>(&v - y.data())]) == std::nearbyint(v * (1 / scale)));
    });
}

TEST_CASE("behind an all-reduce every rank gets the scales of groups, or its own rows'", "[collective]") {
    const auto seed = support::seed(3);
    CAPTURE(seed);
    support::random any(seed);
    const std::size_t rows = 5;
    for (const auto how : {gs::algorithm::two_shot, gs::algorithm::one_shot})
        for (const std::size_t width : {33U, 128U, 700U}) {
            constexpr unsigned ranks = 3;
            std::vector<std::vector<float>> in;
            for (unsigned r = 0; r < ranks; ++r) in.push_back(some_numbers(rows * width, any));
            // As the steps one by one leave them: sums, and rows that are divided by their largest
            // magnitude.
            auto x = in[0];
            for (unsigned r = 1; r < ranks; ++r)
                for (std::size_t i = 0; i < x.size(); ++i) x[i] += in[r][i];
            std::vector<float> maxima(rows);
            for (std::size_t i = 0; i < x.size(); ++i)
                maxima[i / width] = std::fmax(maxima[i / width], std::fabs(x[i]));
            const fp8_result want = quantised(x, width);
            const gs::communicator group(ranks, {.tuning = gs::tuning_table::always(how)});
            std::atomic<unsigned> wrong{0};
            const std::size_t of_row = groups_of(width, 128);
            const auto same = [&](const fp8_result& r, const std::vector<float>& largest, std::size_t row) {
                const auto equal = [](const auto& a, const auto* b) {
                    return std::equal(a.begin(), a.end(), b, [](auto p, auto q) { return p == q; });
                };
                return equal(r.codes, want.codes.data() + row * width) &&
                       equal(r.scales, want.scales.data() + row * of_row) && equal(largest, maxima.data() + row);
            };
            support::together(ranks, [&](unsigned rank) {
                const auto me = group.rank(rank);
                const auto steps = gs::reduced(in[rank], width);
                std::vector<float> largest(rows);
                fp8_result all{std::vector<gs::fp8_e4m3>(x.size()), std::vector<float>(rows * of_row)};
                if (gs::try_run(me, steps | gs::row_maxima(largest) | gs::quantise_groups<gs::fp8_e4m3>(all.scales),
                                std::span(all.codes)))
                    ++wrong;
                if (!same(all, largest, 0)) ++wrong;
                const auto own = gs::shard_of(rows, rank, ranks);
                fp8_result part{std::vector<gs::fp8_e4m3>(own.size() * width), std::vector<float>(own.size() * of_row)};
                largest.assign(own.size(), 0);
                if (gs::try_run_sharded(me,
                                        steps | gs::row_maxima(gs::shard(largest.data())) |
                                            gs::quantise_groups<gs::fp8_e4m3>(gs::shard(part.scales.data())),
                                        std::span(part.codes)))
                    ++wrong;
                if (!same(part, largest, own.begin)) ++wrong;
            });
            CAPTURE(width, gs::to_string(how));
            CHECK(wrong == 0);
        }
}

namespace {

struct nvfp4_result {
    std::vector<gs::fp4_pair> codes;
    std::vector<gs::fp8_e4m3> scales;

    nvfp4_result(std::size_t rows, std::size_t width) : codes(rows * width / 2), scales(rows * groups_of(width, 16)) {}
    [[nodiscard]] float number(std::size_t i) const {
        return i % 2 == 0 ? codes[i / 2].first() : codes[i / 2].second();
    }
};

/// Of a finite group whose first element is `first` of the result.
std::size_t wrong_in_group(const nvfp4_result& r, std::size_t first, std::span<const float> some, gs::fp8_e4m3 scale,
                           float whole) {
    float largest = 0;
    for (const float v : some) largest = std::fmax(largest, std::fabs(v));
    const gs::fp8_e4m3 near{largest * (1 / (6 * whole))};
    std::size_t wrong = scale.bits() == std::max<std::uint8_t>(near.bits(), 1) ? 0 : 1;
    const float s = static_cast<float>(scale), inverse = 1 / (s * whole);
    const double step = static_cast<double>(s) * static_cast<double>(whole);
    const double most = 6.0 * 448 * static_cast<double>(whole), small = s < 0x1p-6F ? whole * 6.0 / 1024 : 0;
    for (std::size_t i = 0; i < some.size(); ++i) {
        const float q = r.number(first + i);
        if (q != gs::fp4_pair(some[i] * inverse, 0).first()) ++wrong;
        const double x = std::fabs(static_cast<double>(some[i]));
        const double off = std::fabs(static_cast<double>(q) * step - static_cast<double>(some[i]));
        if (x <= most && off > std::fmax(x / 5, step / 4) + small + x * 0x1p-20) ++wrong;
        if (x > most && (std::fabs(q) != 6 || s != 448)) ++wrong;
    }
    return wrong;
}

std::size_t wrong_in(const nvfp4_result& r, std::span<const float> x, std::size_t width, float whole) {
    std::size_t wrong = 0;
    each_group(x, width, 16, [&](std::size_t row, std::size_t g, std::span<const float> some) {
        const gs::fp8_e4m3 scale = r.scales[row * groups_of(width, 16) + g];
        const std::size_t first = row * width + g * 16;
        if (std::all_of(some.begin(), some.end(), [](float v) { return std::isfinite(v); })) {
            wrong += wrong_in_group(r, first, some, scale, whole);
            return;
        }
        wrong += scale.bits() == 0x7f ? 0 : 1;
        for (std::size_t i = 0; i < some.size(); ++i) wrong += r.number(first + i) == 0 ? 0 : 1;
    });
    return wrong;
}

}  // namespace

TEST_CASE("4 bits hold the nearest of their numbers, an even one of two", "[collective]") {
    constexpr std::array<float, 8> numbers{0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    const auto code = [](float x) { return gs::fp4_pair(x, 0).bits(); };
    for (std::uint8_t i = 0; i < numbers.size(); ++i) {
        const gs::fp4_pair two(numbers[i], -numbers[i]);
        CAPTURE(numbers[i]);
        CHECK(two.bits() == (i | (i + 8) << 4));
        CHECK((two.first() == numbers[i] && two.second() == -numbers[i]));
        if (i + 1U == numbers.size()) break;
        const float middle = (numbers[i] + numbers[i + 1U]) / 2;
        CHECK(code(std::nextafter(middle, 0.0F)) == i);
        CHECK(code(middle) == i + i % 2);
        CHECK(code(std::nextafter(middle, 7.0F)) == i + 1);
    }
    for (const float x : {7.0F, infinity, lost}) CHECK(code(x) == 7);
}

TEST_CASE("nvfp4 has the bits and the bound that are documented", "[collective]") {
    const auto seed = support::seed(4);
    CAPTURE(seed);
    support::random any(seed);
    for (const std::size_t width : {2U, 14U, 16U, 18U, 100U, 256U, 1030U})
        for (int times = 0; times < 8; ++times) {
            CAPTURE(width, times);
            auto x = some_numbers(2 * width, any);
            for (const float special : {infinity, -infinity, lost, -lost})
                if (any.one_in(4)) x[any.below(x.size())] = special;
            const float whole = std::ldexp(1.1F, static_cast<int>(any.below(20)) - 16);
            nvfp4_result r(2, width);
            std::vector<float> scratch(width);
            gs::host::kernel_context ctx;
            gs::apply_rows(ctx, gs::epilogue<>{} | gs::quantise_nvfp4(r.scales, whole) | gs::into(r.codes),
                           {.rows = 2, .width = width}, gs::from_rows(x.data()), scratch.data());
            REQUIRE(wrong_in(r, x, width, whole) == 0);
        }
}

TEST_CASE("an invalid scale of a tensor, such as 0 or a negative number, counts as one in range", "[collective]") {
    const auto from_whole = [](std::vector<float> x, float whole) {
        nvfp4_result r(1, x.size());
        std::vector<float> scratch(x.size());
        gs::host::kernel_context ctx;
        CHECK(gs::apply_rows(ctx, gs::epilogue<>{} | gs::quantise_nvfp4(r.scales, whole) | gs::into(r.codes),
                             {.rows = 1, .width = x.size()}, gs::from_rows(x.data()), scratch.data()));
        return r;
    };
    const std::vector<float> zeros(32, 0.0F), numbers{1, -2, 3e38F, 0, 1e-20F, -3e38F};
    for (const float none : {0.0F, -0.0F, -1.0F, 0x1p-149F, -infinity}) {
        CAPTURE(none);
        const auto empty = from_whole(zeros, none), full = from_whole(numbers, none);
        CHECK(wrong_in(empty, zeros, zeros.size(), 0x1p-100F) == 0);
        for (std::size_t i = 0; i < zeros.size(); ++i) CHECK(empty.number(i) == 0);
        CHECK(empty.scales == from_whole(zeros, 0x1p-100F).scales);
        CHECK(full.scales[0] == gs::fp8_e4m3(448.0F));
        for (std::size_t i = 0; i < numbers.size(); ++i)
            CHECK(full.number(i) == (numbers[i] == 0 ? 0.0F : std::copysign(6.0F, numbers[i])));
    }
    for (const auto& [given, taken] : {std::pair(lost, 1.0F), std::pair(-lost, 1.0F), std::pair(infinity, 0x1p100F),
                                       std::pair(0x1p101F, 0x1p100F), std::pair(0x1p-101F, 0x1p-100F)}) {
        CAPTURE(given, taken);
        const auto one = from_whole(numbers, given), other = from_whole(numbers, taken);
        CHECK(one.scales == other.scales);
        for (std::size_t i = 0; i < numbers.size(); ++i) CHECK(one.number(i) == other.number(i));
    }
}

TEST_CASE("pairs of rows with an odd width are refused, and nothing is written", "[collective]") {
    const std::size_t width = GENERATE(1U, 3U, 15U, 17U, 25U, 33U, 49U);
    CAPTURE(width);
    const std::vector<float> x(4 * width, 1.0F);
    std::vector<gs::fp8_e4m3> scales(4 * groups_of(width, 16));
    const auto canary = gs::fp4_pair::from_bits(0xa5);
    std::vector<gs::fp4_pair> codes(2 * width + 8, canary);
    std::vector<float> scratch(width), sums(x.size());
    const auto untouched = [&] {
        return std::all_of(codes.begin(), codes.end(), [&](auto c) { return c.bits() == canary.bits(); });
    };
    gs::host::kernel_context ctx;
    const auto pairs = gs::epilogue<>{} | gs::into(codes);
    const auto quantised = gs::epilogue<>{} | gs::quantise_nvfp4(scales, 0.25F) | gs::into(codes);
    const auto from = gs::from_rows(x.data());
    CHECK(!gs::apply_rows(ctx, quantised, {.rows = 3, .width = width}, from, scratch.data()));
    CHECK(!gs::apply_rows(ctx, pairs, {.rows = 3, .width = width}, from));
    CHECK(!gs::apply_elements(ctx, pairs, {.width = width}, 0, 2 * width, from));
    CHECK(!gs::apply_elements(ctx, pairs, {.width = 2 * width}, 1, width - 1, from));
    CHECK(!gs::apply_elements(ctx, pairs, {.width = 2 * width}, 0, width, from));
    (gs::elements(std::span(x).first(3 * width), width) | gs::into(codes))(ctx);
    (gs::elements(std::span(x).first(3 * width), 2 * width) | gs::into(codes))(ctx);
    CHECK(untouched());
    // A sink within a pipeline whose result has one element a column.
    const gs::communicator group(1);
    const auto sunk = gs::reduced(std::span(x), width) | gs::into(codes);
    CHECK(gs::try_run(group.rank(0), sunk, std::span(sums)).code == gs::errc::mismatch);
    CHECK(untouched());
    CHECK(gs::apply_elements(ctx, pairs, {.width = 2 * width}, 0, 2 * width, from));
    CHECK(std::count_if(codes.begin(), codes.end(), [&](auto c) { return c.bits() != canary.bits(); }) ==
          static_cast<std::ptrdiff_t>(width));
}

TEST_CASE("nvfp4 behind an all-reduce: half a byte an element, on every rank, of rows with an even width",
          "[collective]") {
    constexpr std::size_t rows = 5, width = 50;
    const auto seed = support::seed(5);
    CAPTURE(seed);
    support::random any(seed);
    const std::vector<std::vector<float>> in{some_numbers(rows * width, any), some_numbers(rows * width, any)};
    std::vector<float> x(rows * width);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = in[0][i] + in[1][i];
    const gs::communicator group(2);
    std::atomic<unsigned> wrong{0};
    support::together(2, [&](unsigned rank) {
        const auto me = group.rank(rank);
        nvfp4_result all(rows, width);
        const auto steps = gs::reduced(in[rank], width) | gs::quantise_nvfp4(all.scales, 0.25F);
        if (gs::try_run(me, steps, std::span(all.codes))) ++wrong;
        if (wrong_in(all, x, width, 0.25F) != 0) ++wrong;
        const auto own = gs::shard_of(rows, rank, 2);
        nvfp4_result part(own.size(), width);
        if (gs::try_run_sharded(me,
                                gs::reduced(in[rank], width) | gs::quantise_nvfp4(gs::shard(part.scales.data()), 0.25F),
                                std::span(part.codes)))
            ++wrong;
        if (wrong_in(part, std::span(x).subspan(own.begin * width, own.size() * width), width, 0.25F) != 0) ++wrong;
        auto odd = steps;
        odd.width = 25;
        if (gs::try_run(me, odd, std::span(all.codes)).code != gs::errc::mismatch) ++wrong;
        if (gs::try_run(me, steps, std::span(all.codes).first(1)).code != gs::errc::mismatch) ++wrong;
    });
    CHECK(wrong == 0);
}

}  // namespace group_scales_test
