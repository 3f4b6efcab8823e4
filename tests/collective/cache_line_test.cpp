// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, optimised
// Cache lines combined by every vector width of the processor: the bits equal those of single
// numbers combined one by one, at any allowed address, and no memory beside the lines is touched.
#include <gpushare/collective/detail/simd/cache_line.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/reduce_ops.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace cache_line_test {

#if defined(__x86_64__)

namespace {

namespace detail = gpushare::detail;
using detail::vector_width;

constexpr std::size_t line = detail::cache_line_bytes;

/// Bytes of which `at(i)` begins at a line and `at(i) + shift` doesn't, and a border that nobody
/// may write to.
struct guarded {
    static constexpr std::size_t border = 4 * line;
    explicit guarded(std::size_t bytes) : all(bytes + 2 * border + line, std::byte{0x5a}) {
        begin = all.data() + border + (line - reinterpret_cast<std::uintptr_t>(all.data()) % line) % line;
    }
    std::vector<std::byte> all;
    std::byte* begin;
};

template <class T>
T any_number(support::random& any) {
    if constexpr (std::is_floating_point_v<T>) {
        if (any.one_in(16)) return std::numeric_limits<T>::quiet_NaN();
        return (static_cast<T>(any.below(2000)) - 1000) / 7;
    } else if constexpr (detail::is_stored_number<T>) {
        // Any pattern: NaN, infinities and subnormal numbers, too; sums of the largest overflow.
        if (any.one_in(4)) return T::from_bits(static_cast<typename T::bits_type>(any.below(0x10000)));
        return T{(static_cast<float>(any.below(2000)) - 1000) / 7};
    } else {
        if (any.one_in(4)) return static_cast<T>(std::numeric_limits<T>::max() - static_cast<T>(any.below(3)));
        if (any.one_in(4)) return static_cast<T>(std::numeric_limits<T>::min() + static_cast<T>(any.below(3)));
        return static_cast<T>(any.below(std::numeric_limits<std::uint64_t>::max()));
    }
}

template <class T, class Op>
void check(vector_width by, std::uint32_t ranks, std::size_t lines, std::size_t shift, detail::line_stores stores,
           std::size_t ahead, std::size_t places) {
    using A = gpushare::accumulator_t<T, Op>;
    constexpr std::size_t each = line / sizeof(T);
    support::random any(lines * 31 + ranks);
    std::vector<guarded> in, out;
    std::vector<detail::peer_signal> told(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r) {
        in.emplace_back(lines * line + 2 * line);
        out.emplace_back(lines * line + 2 * line);
    }
    for (std::uint32_t r = 0; r < ranks; ++r) {
        for (std::size_t i = 0; i < lines * each; ++i) {
            const T x = any_number<T>(any);
            std::memcpy(in[r].begin + line + shift + i * sizeof(T), &x, sizeof x);
        }
        told[r].in = in[r].begin;
        told[r].out = out[r].begin;
    }
    std::vector<std::vector<std::byte>> expected;
    for (const guarded& g : out) expected.push_back(g.all);
    for (std::size_t i = 0; i < lines * each; ++i) {
        const auto of = [&](std::uint32_t r) {
            T x;
            std::memcpy(&x, in[r].begin + line + shift + i * sizeof(T), sizeof x);
            return static_cast<A>(x);
        };
        const Op op;
        A x = of(0);
        for (std::uint32_t r = 1; r < ranks; ++r) x = op(x, of(r));
        if constexpr (requires { op.finish(x, x); }) x = op.finish(x, static_cast<A>(ranks));
        const T result = static_cast<T>(x);
        for (std::uint32_t r = 0; r < ranks; ++r) {
            const auto at = static_cast<std::size_t>(out[r].begin - out[r].all.data()) + line + i * sizeof(T);
            std::memcpy(expected[r].data() + at, &result, sizeof result);
        }
    }
    detail::combine_lines<T>(by, Op{}, {told.data(), ranks, line + shift, line, ahead, places}, lines, stores);
    gpushare::finish_streaming();
    if (stores == detail::line_stores::cached && ranks > 1) {  // the same again, to one place alone
        const std::vector<std::byte> before = out[1].all;
        out[0].all.assign(out[0].all.size(), std::byte{0x5a});
        detail::line_ends ends{told.data(), ranks, line + shift, line, ahead, places};
        ends.only = told[0].out;
        detail::combine_lines<T>(by, Op{}, ends, lines, stores);
        CHECK(out[1].all == before);
    }
    for (std::uint32_t r = 0; r < ranks; ++r) {
        INFO("rank " << r << " of " << ranks << ", " << lines << " lines, width " << static_cast<int>(by));
        CHECK(out[r].all == expected[r]);
    }
}

template <class T, class Op>
void check_all() {
    static_assert(detail::combines_lines<T, Op>);
    for (const auto by : {detail::least_for_lines, vector_width::avx512}) {
        if (by > detail::widest_vectors()) continue;
        const auto at_all_places = [&](detail::line_stores stores, std::size_t ahead, std::size_t places) {
            for (const std::size_t lines : {0UL, 1UL, 2UL, 7UL, 8UL, 9UL, 15UL, 16UL, 17UL, 33UL, 64UL}) {
                check<T, Op>(by, 2, lines, 0, stores, ahead, places);
                check<T, Op>(by, 2, lines, sizeof(T), stores, ahead, places);
                check<T, Op>(by, 3, lines, sizeof(T), stores, ahead, places);
                check<T, Op>(by, 5, lines, 0, stores, ahead, places);
                check<T, Op>(by, 1, lines, 0, stores, ahead, places);
            }
        };
        for (const std::size_t ahead : {0U, 1U, 16U, 255U}) at_all_places(detail::line_stores::cached, ahead, 1);
        for (const std::size_t places : {1U, 2U}) at_all_places(detail::line_stores::past_caches, 0, places);
    }
}

/// Results that are looked at: as they are without that, and one that isn't finite is seen at every
/// place.
template <class T>
void check_looks() {
    constexpr std::size_t each = line / sizeof(T), lines = 9;
    for (const auto by : {detail::least_for_lines, vector_width::avx512}) {
        if (by > detail::widest_vectors()) continue;
        for (const std::uint32_t ranks : {1U, 2U, 3U}) {
            std::vector<guarded> memory;
            for (std::uint32_t r = 0; r < ranks; ++r) memory.emplace_back(lines * line);
            std::vector<detail::peer_signal> told(ranks);
            for (std::uint32_t r = 0; r < ranks; ++r) told[r].in = told[r].out = memory[r].begin;
            const auto at = [&](std::uint32_t r, std::size_t i) { return memory[r].begin + i * sizeof(T); };
            for (std::size_t planted = 0; planted <= lines * each; ++planted) {
                for (std::uint32_t r = 0; r < ranks; ++r)
                    for (std::size_t i = 0; i < lines * each; ++i) {
                        T x = std::numeric_limits<T>::max() / static_cast<T>(2 * ranks);
                        if (i == planted && r == ranks - 1)
                            x = i % 2 == 0 ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::quiet_NaN();
                        std::memcpy(at(r, i), &x, sizeof x);
                    }
                const bool finite =
                    detail::combine_finite_lines<T>(by, gpushare::average{}, {told.data(), ranks, 0, 0, 0, 1}, lines);
                CAPTURE(static_cast<int>(by), ranks, planted);
                CHECK(finite == (planted == lines * each));
                T first, last;
                std::memcpy(&first, at(0, planted == 0 ? 1 : 0), sizeof first);
                std::memcpy(&last, at(ranks - 1, lines * each - (planted + 1 == lines * each ? 2 : 1)), sizeof last);
                CHECK(first == last);
                CHECK(std::isfinite(first));
            }
        }
    }
}

struct by_value {
    template <class A>
    A operator()(const A& a, const A& b) const {
        return a + b;
    }
};

}  // namespace

TEMPLATE_TEST_CASE("lines give the same bits as single numbers", "[collective]", float, double, std::int32_t,
                   std::uint32_t, std::uint64_t, std::int8_t, std::uint8_t, std::int16_t, std::uint16_t,
                   gpushare::bfloat16, gpushare::float16, gpushare::fp8_e4m3, gpushare::fp8_e5m2) {
    check_all<TestType, gpushare::sum>();
    check_all<TestType, gpushare::product>();
    check_all<TestType, gpushare::minimum>();
    check_all<TestType, gpushare::maximum>();
    if constexpr (!std::is_integral_v<TestType> || sizeof(TestType) <= 4) check_all<TestType, gpushare::average>();
}

TEMPLATE_TEST_CASE("a look finds a result that isn't finite anywhere in a line", "[collective]", float, double) {
    check_looks<TestType>();
}

TEMPLATE_TEST_CASE("averages of integers are exact up to the most ranks that lines support", "[collective]",
                   std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t) {
    using gpushare::average;
    constexpr std::uint32_t most = detail::most_ranks_for_lines<TestType, average>;
    for (const std::uint32_t ranks : {most, most - 1, most - 3, most / 2 + 1, 7U})
        check<TestType, average>(detail::least_for_lines, ranks, 9, 0, detail::line_stores::cached, 0, 1);
}

TEST_CASE("elements that can't be combined in place aren't combined by lines", "[collective]") {
    STATIC_REQUIRE_FALSE(detail::combines_lines<float, by_value>);
    STATIC_REQUIRE_FALSE(detail::combines_lines<gpushare::fp8_e4m3, by_value>);
    STATIC_REQUIRE_FALSE(detail::combines_lines<gpushare::bfloat16, by_value>);
    STATIC_REQUIRE_FALSE(detail::combines_lines<std::int8_t, by_value>);
    STATIC_REQUIRE_FALSE(detail::combines_lines<std::int64_t, gpushare::average>);
}

TEST_CASE("shards are cut at the beginnings of lines", "[collective]") {
    constexpr std::size_t grain = 16;
    for (const std::size_t lead : {0U, 1U, 4U, 15U})
        for (const std::size_t count : {0U, 1U, 12U, 15U, 16U, 17U, 100U, 256U, 1000U})
            for (const std::uint32_t parts : {1U, 2U, 3U, 8U}) {
                std::size_t at = 0;
                for (std::uint32_t p = 0; p < parts; ++p) {
                    const auto r = gpushare::detail::shard_of_shifted(count, lead, p, parts, grain);
                    CHECK(r.begin == at);
                    CHECK((r.end == count || (r.end + lead) % grain == 0));
                    at = r.end;
                }
                CHECK(at == count);
            }
}

#endif

}  // namespace cache_line_test
