// SPDX-License-Identifier: Apache-2.0
// Tags: slow
// All-reduce: exact sums of every type by every algorithm, all small sizes, odd addresses, in
// place, and always the same bits.
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/detail/ring.hpp>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "collective/rig.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace all_reduce_test {

using gpushare::algorithm;
using gpushare::bfloat16;
using gpushare::communicator;
using gpushare::float16;
using gpushare::tuning_table;

namespace {

constexpr std::array every_algorithm{algorithm::one_shot, algorithm::two_shot, algorithm::ring};

template <class T>
T number(double x) {
    if constexpr (gpushare::detail::is_stored_number<T>)
        return T{static_cast<float>(x)};
    else
        return static_cast<T>(x);
}
template <class T>
double value(T x) {
    if constexpr (gpushare::detail::is_stored_number<T>)
        return double{static_cast<float>(x)};
    else
        return static_cast<double>(x);
}

/// Small whole numbers: sums, averages and products of four are exact in every type.
double input(unsigned rank, std::size_t i) {
    return static_cast<double>((i * 7 + rank * 3) % 4) * (i % 3 == 0 ? -1 : 1);
}
double positive(unsigned rank, std::size_t i) { return static_cast<double>((i * 7 + rank * 3) % 4); }

template <class T>
double given(unsigned rank, std::size_t i) {
    return std::is_unsigned_v<T> ? positive(rank, i) : input(rank, i);
}

struct widest {  // a user's operator: not associative, so that the order shows
    template <class A>
    A operator()(A a, A b) const {
        return static_cast<A>(a + a + b);
    }
};

template <class T, class Op>
double expected(unsigned ranks, std::size_t i, Op) {
    double x = given<T>(0, i);
    for (unsigned r = 1; r < ranks; ++r) {
        const double y = given<T>(r, i);
        if constexpr (std::is_same_v<Op, gpushare::product>)
            x *= y;
        else if constexpr (std::is_same_v<Op, gpushare::minimum>)
            x = std::min(x, y);
        else if constexpr (std::is_same_v<Op, gpushare::maximum>)
            x = std::max(x, y);
        else if constexpr (std::is_same_v<Op, widest>)
            x = x + x + y;
        else
            x += y;
    }
    if constexpr (std::is_same_v<Op, gpushare::average>) {
        x /= ranks;
        if constexpr (std::is_integral_v<T>) x = std::trunc(x);
    }
    return x;
}

/// Whether all ranks got what they should. `shift` moves the buffers off their alignment, by
/// elements.
template <class T, class Op>
bool right(const communicator& group, std::size_t n, Op op, bool in_place, std::size_t shift = 0) {
    std::atomic<unsigned> wrong{0};
    support::together(group.size(), [&](unsigned rank) {
        const auto me = group.rank(rank);
        std::vector<T> in(n + shift + 1), out(n + shift + 1, number<T>(1));
        for (std::size_t i = 0; i < n; ++i) in[i + shift] = number<T>(given<T>(rank, i));
        const std::span<T> from(in.data() + shift, n), to = in_place ? from : std::span<T>(out.data() + shift, n);
        if (gpushare::try_all_reduce(me, from, to, op)) ++wrong;
        for (std::size_t i = 0; i < n; ++i)
            if (value(to[i]) != value(number<T>(expected<T>(group.size(), i, op)))) {
                ++wrong;
                break;
            }
    });
    return wrong == 0;
}

}  // namespace

TEMPLATE_TEST_CASE("every type, operator and algorithm is exact", "[collective]", double, float, float16, bfloat16,
                   gpushare::fp8_e4m3, gpushare::fp8_e5m2, std::int8_t, std::uint8_t, std::int16_t, std::uint16_t,
                   std::int32_t, std::uint32_t, std::int64_t, std::uint64_t) {
    for (const algorithm how : every_algorithm)
        for (const unsigned ranks : {1U, 2U, 3U}) {
            const communicator group(ranks, {.tuning = tuning_table::always(how)});
            for (const std::size_t n : {1U, 63U, 257U, 1500U}) {
                CAPTURE(to_string(how), ranks, n);
                CHECK(right<TestType>(group, n, gpushare::sum{}, n % 2 == 0));
                // Every operator with a few types: what the others add is in values_test.cpp.
                if constexpr (std::is_same_v<TestType, float> || std::is_same_v<TestType, std::int32_t> ||
                              std::is_same_v<TestType, bfloat16>) {
                    CHECK(right<TestType>(group, n, gpushare::minimum{}, true));
                    CHECK(right<TestType>(group, n, gpushare::maximum{}, false));
                    CHECK(right<TestType>(group, n, gpushare::product{}, true));
                    if (ranks != 3 || std::is_integral_v<TestType>)
                        CHECK(right<TestType>(group, n, gpushare::average{}, true));
                    CHECK(right<TestType>(group, n, widest{}, false));
                }
            }
        }
}

TEST_CASE("every size from 0 to 4096 elements", "[collective]") {
    for (const algorithm how : every_algorithm) {
        const communicator group(2, {.tuning = tuning_table::always(how)});
        std::atomic<unsigned> wrong{0};
        support::together(2, [&](unsigned rank) {
            const auto me = group.rank(rank);
            std::vector<float> in(4096), out(4097);
            for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i + rank);
            for (std::size_t n = 0; n <= 4096; ++n) {
                out[n] = -1;
                if (gpushare::try_all_reduce(me, std::span(in.data(), n), std::span(out.data(), n))) ++wrong;
                for (std::size_t i = n < 70 ? 0 : n - 70; i < n; ++i)
                    if (out[i] != static_cast<float>(2 * i + 1)) ++wrong;
                if (out[n] != -1) ++wrong;  // one too many
            }
        });
        CAPTURE(to_string(how));
        CHECK(wrong == 0);
    }
}

TEST_CASE("sizes that nothing divides, odd addresses, around the slot and the look-out", "[collective]") {
    const communicator group(3);  // the measured table: sizes around its rows go through every algorithm
    for (const std::size_t n : {1023U, 1025U, 2047U, 8191U, 8193U, 65535U, 65537U, 196'609U})
        for (const std::size_t shift : {0U, 1U, 3U}) {
            CAPTURE(n, shift);
            CHECK(right<float>(group, n, gpushare::sum{}, true, shift));
            CHECK(right<std::int8_t>(group, n, gpushare::sum{}, false, shift));
        }
}

TEST_CASE("around every boundary of every algorithm", "[collective]") {
    constexpr std::size_t slot = 1024, of = sizeof(float), look = gpushare::detail::look_every / of;
    constexpr std::size_t ring = slot / (2 * gpushare::detail::ring_depth) / of;  // elements of a chunk
    for (const algorithm how : every_algorithm)
        for (const unsigned ranks : {2U, 3U}) {
            const communicator group(ranks, {.slot = gpushare::bytes{slot}, .tuning = tuning_table::always(how)});
            const std::size_t boundaries[] = {16,                       // a vector
                                              64 * std::size_t{ranks},  // a grain for each rank
                                              slot / of,                // a slot
                                              ring,
                                              ring * gpushare::detail::ring_lag,
                                              ring * gpushare::detail::ring_depth,
                                              look * ranks};  // between two looks at whether it goes on
            for (const std::size_t boundary : boundaries) {
                if (boundary == look * ranks && how != algorithm::two_shot) continue;  // the others don't look between
                for (std::size_t n = boundary - 2; n <= boundary + 2; ++n) {
                    CAPTURE(to_string(how), ranks, n);
                    CHECK(right<float>(group, n, gpushare::sum{}, n % 2 == 0));
                }
            }
        }
}

TEMPLATE_TEST_CASE("random data: within the bound of adding one after the other", "[collective]", double, float,
                   float16, bfloat16) {
    // Each of R - 1 additions is off by u of what it gives, which is at most the sum of all
    // magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 4.2); numbers of 16 bits
    // are added in float, and rounded once more.
    using wide = gpushare::accumulator_t<TestType, gpushare::sum>;
    constexpr unsigned ranks = 7;
    constexpr std::size_t n = 3000;
    const long double u = std::numeric_limits<wide>::epsilon() / 2.0L;
    const long double last = std::is_same_v<TestType, float16>    ? 0x1p-11L
                             : std::is_same_v<TestType, bfloat16> ? 0x1p-8L
                                                                  : 0.0L;
    const auto seed = support::seed(6);
    CAPTURE(seed);
    support::random any(seed);
    std::vector<std::vector<TestType>> in(ranks, std::vector<TestType>(n));
    for (auto& of_rank : in)
        for (auto& x : of_rank) x = number<TestType>((static_cast<double>(any.below(2'000'001)) - 1e6) * 1.3e-3);
    for (const algorithm how : every_algorithm) {
        const communicator group(ranks, {.tuning = tuning_table::always(how)});
        std::vector<std::vector<TestType>> out(ranks, std::vector<TestType>(n));
        std::atomic<unsigned> failed{0};
        support::together(ranks, [&](unsigned r) {
            if (gpushare::try_all_reduce(group.rank(r), in[r], std::span(out[r]))) ++failed;
        });
        REQUIRE(failed == 0);
        for (std::size_t i = 0; i < n; ++i) {
            long double exact = 0, magnitudes = 0;
            for (const auto& of_rank : in) {
                exact += value(of_rank[i]);
                magnitudes += std::abs(value(of_rank[i]));
            }
            const long double gamma = (ranks - 1) * u / (1 - (ranks - 1) * u) * magnitudes;
            const long double bound = gamma + last * (std::abs(exact) + gamma);
            if (std::abs(value(out[ranks - 1][i]) - exact) > bound) FAIL(to_string(how) << " at " << i);
        }
    }
}

TEST_CASE("any rank count from 1", "[collective]") {
    for (unsigned ranks = 1; ranks <= 17; ++ranks)
        for (const algorithm how : every_algorithm) {
            const communicator group(ranks, {.tuning = tuning_table::always(how)});
            CAPTURE(ranks, to_string(how));
            CHECK(right<float>(group, 1000, gpushare::sum{}, true));
        }
}

TEST_CASE("however results are stored, they are the same, at any address and in place", "[collective]") {
    using plan = gpushare::all_reduce_plan;
    for (const plan& how : {plan{algorithm::two_shot, true}, plan{algorithm::two_shot, true, 2, 16},
                            plan{algorithm::two_shot, false, 1, 16}, plan{algorithm::two_shot, false, 1, 255}})
        for (const unsigned ranks : {2U, 3U}) {
            const communicator group(ranks, {.tuning = tuning_table::always(how)});
            CAPTURE(group.tuning().save(), ranks);
            for (const std::size_t shift : {0U, 1U})
                for (const bool in_place : {false, true}) {
                    CHECK(right<float>(group, 10'007, gpushare::sum{}, in_place, shift));
                    CHECK(right<bfloat16>(group, 10'007, gpushare::sum{}, in_place, shift));
                    CHECK(right<double>(group, 10'007, gpushare::sum{}, in_place, shift));
                    CHECK(right<std::int8_t>(group, 10'007, gpushare::sum{}, in_place, shift));
                }
        }
}

TEMPLATE_TEST_CASE("the bits depend on neither algorithm, size, place nor run", "[collective]", float, bfloat16) {
    constexpr unsigned ranks = 4;
    constexpr std::size_t n = 999;
    const auto seed = support::seed(1);
    CAPTURE(seed);
    support::random any(seed);
    std::vector<std::vector<TestType>> in(ranks, std::vector<TestType>(n));
    for (auto& of_rank : in)
        for (auto& x : of_rank) x = number<TestType>((static_cast<double>(any.below(2'000'001)) - 1e6) * 1.7e-4);
    // The order that the documentation promises: ranks one after the other, in float or wider,
    // rounded once.
    std::vector<TestType> reference(n);
    for (std::size_t i = 0; i < n; ++i) {
        using wide = gpushare::accumulator_t<TestType, gpushare::sum>;
        wide x = gpushare::detail::widened<wide>(in[0][i]);
        for (unsigned r = 1; r < ranks; ++r) x = x + gpushare::detail::widened<wide>(in[r][i]);
        reference[i] = gpushare::detail::narrowed<TestType>(x);
    }
    for (const algorithm how : every_algorithm)
        for (const bool streaming : {false, true})
            for (const std::size_t bucket : {n, std::size_t{100}, std::size_t{17}}) {
                const communicator group(ranks, {.tuning = tuning_table::always({how, streaming})});
                std::atomic<unsigned> wrong{0};
                support::together(ranks, [&](unsigned r) {
                    std::vector<TestType> out(n);
                    for (std::size_t at = 0; at < n; at += bucket) {
                        const std::size_t size = std::min(bucket, n - at);
                        if (gpushare::try_all_reduce(group.rank(r), std::span<const TestType>(in[r]).subspan(at, size),
                                                     std::span(out).subspan(at, size)))
                            ++wrong;
                    }
                    if (std::memcmp(out.data(), reference.data(), n * sizeof(TestType)) != 0) ++wrong;
                });
                CAPTURE(to_string(how), streaming, bucket);
                CHECK(wrong == 0);
            }
}

TEST_CASE("16-bit numbers are added in float and rounded once", "[collective]") {
    constexpr unsigned ranks = 16;
    for (const algorithm how : every_algorithm) {
        const communicator group(ranks, {.tuning = tuning_table::always(how)});
        std::atomic<unsigned> wrong{0};
        support::together(ranks, [&](unsigned rank) {
            // 256 + 15 halves: added in bfloat16, whose numbers are 2 apart there, it would
            // stay 256.
            std::vector<bfloat16> x(100, bfloat16{rank == 0 ? 256.0F : 0.5F});
            if (gpushare::try_all_reduce(group.rank(rank), x, std::span(x))) ++wrong;
            if (static_cast<float>(x[99]) != 264.0F) ++wrong;  // of 263.5, to nearest even
        });
        CHECK(wrong == 0);
    }
}

TEMPLATE_TEST_CASE("averages of integers are rounded towards zero, by any number of ranks", "[collective]",
                   std::int32_t, std::int64_t, std::uint64_t) {
    using limits = std::numeric_limits<TestType>;
    support::random any(1);
    for (TestType n = 1; n <= 33; ++n)
        for (unsigned i = 0; i < 200; ++i) {
            const auto near_end = static_cast<TestType>(i % 40);
            const TestType x = i < 40    ? static_cast<TestType>(limits::min() + near_end)
                               : i < 80  ? static_cast<TestType>(limits::max() - near_end)
                               : i < 120 ? static_cast<TestType>(near_end - 20)
                                         : static_cast<TestType>(any.below(limits::max()));
            using four [[gnu::vector_size(4 * sizeof(TestType))]] = TestType;
            four several = {x, static_cast<TestType>(x / 2), static_cast<TestType>(x / 3), 0};
            const four expected = several / n;
            gpushare::average::finish_into(several, n);
            REQUIRE(gpushare::average{}.finish(x, n) == x / n);
            REQUIRE(std::memcmp(&several, &expected, sizeof several) == 0);
        }
}

TEST_CASE("integers wrap around in a sum and don't overflow in an average", "[collective]") {
    const communicator group(2);
    std::atomic<unsigned> wrong{0};
    support::together(2, [&](unsigned rank) {
        constexpr auto most = std::numeric_limits<std::int32_t>::max();
        std::vector<std::int32_t> x(40, most), y(40);
        if (gpushare::try_all_reduce(group.rank(rank), x, std::span(y))) ++wrong;
        if (y[0] != -2 || y[39] != -2) ++wrong;
        if (gpushare::try_all_reduce(group.rank(rank), x, std::span(y), gpushare::average{})) ++wrong;
        if (y[0] != most || y[39] != most) ++wrong;
    });
    CHECK(wrong == 0);
}

TEST_CASE("a NaN of any rank is the minimum and the maximum", "[collective]") {
    for (unsigned who = 0; who < 3; ++who) {
        const communicator group(3);
        std::atomic<unsigned> wrong{0};
        support::together(3, [&](unsigned rank) {
            std::vector<float> x(33, rank == who ? std::numeric_limits<float>::quiet_NaN() : 1.0F), y(33);
            if (gpushare::try_all_reduce(group.rank(rank), x, std::span(y), gpushare::minimum{})) ++wrong;
            if (!std::isnan(y[0]) || !std::isnan(y[32])) ++wrong;
            if (gpushare::try_all_reduce(group.rank(rank), x, std::span(y), gpushare::maximum{})) ++wrong;
            if (!std::isnan(y[0]) || !std::isnan(y[32])) ++wrong;
        });
        CHECK(wrong == 0);
    }
}

TEST_CASE("ranks may mix in place and out of place", "[collective]") {
    const communicator group(2, {.tuning = tuning_table::always(algorithm::two_shot)});
    std::atomic<unsigned> wrong{0};
    support::together(2, [&](unsigned rank) {
        std::vector<float> x(1000, 1), y(1000);
        const std::span<float> to = rank == 0 ? std::span(x) : std::span(y);
        if (gpushare::try_all_reduce(group.rank(rank), x, to)) ++wrong;
        for (const float f : to)
            if (f != 2) ++wrong;
    });
    CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("delayed and shuffled, with several blocks", "[collective]", float) {
    constexpr unsigned ranks = 3, rounds = 12;
    const auto seed = support::seed(2);
    CAPTURE(seed);
    support::random any(seed);
    const communicator group(ranks, {.blocks = 3});
    for (unsigned round = 0; round < rounds; ++round) {
        const algorithm how = any.of(every_algorithm);
        const auto blocks = static_cast<std::uint32_t>(1 + any.below(3));  // changes from one launch to the next
        const std::size_t n = any.below(3000);
        std::vector<std::vector<TestType>> data(ranks, std::vector<TestType>(n));
        for (unsigned r = 0; r < ranks; ++r)
            for (std::size_t i = 0; i < n; ++i) data[r][i] = number<TestType>(input(r, i));
        const auto fault = collective_test::run_delayed(
            group, blocks, any.below(1U << 30), gpushare::collective_kind::all_reduce, [&](auto& t) {
                TestType* const x = data[t.rank()].data();
                return gpushare::detail::all_reduce_body<TestType, gpushare::sum>{x, x, n, {}, {how, false}}(t, blocks);
            });
        CAPTURE(round, to_string(how), blocks, n);
        REQUIRE(!fault);
        for (unsigned r = 0; r < ranks; ++r)
            for (std::size_t i = 0; i < n; ++i)
                if (value(data[r][i]) != expected<TestType>(ranks, i, gpushare::sum{}))
                    FAIL("rank " << r << " at " << i);
    }
}

TEMPLATE_TEST_CASE("blocks of several threads, as on a device", "[collective]", bfloat16, std::int8_t) {
    constexpr unsigned ranks = 2, threads = 3;
    const communicator group(ranks);
    for (const algorithm how : every_algorithm)
        for (const std::size_t n : {0U, 1U, 5U, 100U, 1501U}) {
            std::vector<std::vector<TestType>> data(ranks, std::vector<TestType>(n));
            for (unsigned r = 0; r < ranks; ++r)
                for (std::size_t i = 0; i < n; ++i) data[r][i] = number<TestType>(input(r, i));
            const auto fault =
                collective_test::run_blocks(group, threads, gpushare::collective_kind::all_reduce, [&](auto& t) {
                    TestType* const x = data[t.rank()].data();
                    return gpushare::detail::all_reduce_body<TestType, gpushare::sum>{x, x, n, {}, {how, false}}(t, 1);
                });
            CAPTURE(to_string(how), n);
            REQUIRE(!fault);
            for (unsigned r = 0; r < ranks; ++r)
                for (std::size_t i = 0; i < n; ++i)
                    if (value(data[r][i]) != expected<TestType>(ranks, i, gpushare::sum{}))
                        FAIL("rank " << r << " at " << i);
        }
}

}  // namespace all_reduce_test
