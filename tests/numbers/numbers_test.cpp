// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, optimised, alone
// The number types against their definition: values are computed from sign, exponent and mantissa
// in double, and rounding from the two neighbours. cuda_toolkit_test.cpp compares them with the
// toolkit's own conversions.
#include <gpushare/numbers.hpp>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>

#include "support/catch.hpp"
#include "support/number_inputs.hpp"

using namespace gpushare;

namespace {

using all = std::tuple<float16, bfloat16, fp8_e4m3, fp8_e5m2>;

template <class Number>
struct format_of;
template <int Exponent, int Mantissa>
struct format_of<stored_number<Exponent, Mantissa>> {
    static constexpr int exponent = Exponent, mantissa = Mantissa, bits = 1 + Exponent + Mantissa;
    static constexpr bool ieee = Exponent != 4;
};

/// What the pattern means, by the definition of the format.
template <class Number>
double defined_value(std::uint32_t pattern) {
    using format = format_of<Number>;
    const std::uint32_t mantissa = pattern & ((1U << format::mantissa) - 1);
    const std::uint32_t exponent = pattern >> format::mantissa & ((1U << format::exponent) - 1);
    const std::uint32_t top = (1U << format::exponent) - 1;
    const double sign = pattern >> (format::bits - 1) != 0 ? -1 : 1;
    constexpr int bias = (1 << (format::exponent - 1)) - 1;
    if (format::ieee && exponent == top)
        return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
    if (!format::ieee && exponent == top && mantissa == (1U << format::mantissa) - 1) return std::nan("");
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - format::mantissa);
    return sign * std::ldexp(mantissa + (1U << format::mantissa), static_cast<int>(exponent) - bias - format::mantissa);
}

/// Nearest, ties to even, decided from the two neighbours that enclose |x|.
template <class Number>
std::uint32_t defined_rounding(float x) {
    using format = format_of<Number>;
    constexpr std::uint32_t largest = support::largest_pattern<Number>;
    const std::uint32_t sign = std::signbit(x) ? 1U << (format::bits - 1) : 0;
    const double abs = std::fabs(static_cast<double>(x));
    std::uint32_t low = 0, end = largest + 1;  // the last pattern whose value is at most |x|, by bisection
    while (end - low > 1) {
        const std::uint32_t middle = (low + end) / 2;
        (defined_value<Number>(middle) <= abs ? low : end) = middle;
    }
    const double below = defined_value<Number>(low);
    const double above =
        low < largest ? defined_value<Number>(low + 1) : below + (below - defined_value<Number>(low - 1));
    const bool up = abs - below > above - abs || (abs - below == above - abs && low % 2 == 1);
    const std::uint32_t nearest = low + (up ? 1 : 0);
    // One step above the largest is infinity's pattern, where there is one.
    return sign | (nearest > largest && format::bits == 8 ? largest : nearest);
}

template <class Number>
bool is_nan(Number n) {
    return std::isnan(static_cast<float>(n));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("every pattern has the value that its format defines", "[numbers]", all) {
    for (std::uint32_t p = 0; p < 1U << (8 * sizeof(TestType)); ++p) {
        const auto value = static_cast<double>(support::value_of<TestType>(p)), defined = defined_value<TestType>(p);
        if (std::isnan(defined) ? !std::isnan(value)
                                : value != defined || std::signbit(value) != std::signbit(defined)) {
            CAPTURE(p, value, defined);
            FAIL("another value");
        }
    }
}

TEMPLATE_LIST_TEST_CASE("every number comes back from float with its bits", "[numbers]", all) {
    for (std::uint32_t p = 0; p < 1U << (8 * sizeof(TestType)); ++p) {
        const auto n = TestType::from_bits(static_cast<typename TestType::bits_type>(p));
        const float value{n};
        const TestType back{value};
        // 8-bit types saturate, infinity too.
        const bool cut = sizeof(TestType) == 1 && std::isinf(value);
        if (is_nan(n) ? !is_nan(back) : !cut && back.bits() != p) FAIL("pattern " << p << " became " << back.bits());
    }
}

TEMPLATE_LIST_TEST_CASE("floats round to the nearest number, ties to even, wherever that is decided", "[numbers]",
                        all) {
    std::uint64_t checked = 0;
    support::for_each_decisive_float<TestType>([&](float f) {
        ++checked;
        const TestType n{f};
        if (std::isinf(f)) return;
        if (n.bits() != defined_rounding<TestType>(f)) {
            CAPTURE(f, std::bit_cast<std::uint32_t>(f), n.bits(), defined_rounding<TestType>(f));
            FAIL("rounded otherwise");
        }
    });
    CHECK(checked > support::largest_pattern<TestType> * 12);
}

TEMPLATE_LIST_TEST_CASE("the widest floats, infinity and NaN go where the documentation says", "[numbers]", all) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr std::uint32_t sign = 1U << (8 * sizeof(TestType) - 1);
    const bool saturates = sizeof(TestType) == 1;
    const std::uint32_t largest = support::largest_pattern<TestType>;
    const std::uint32_t overflow = saturates ? largest : largest + 1;
    CHECK(TestType{std::numeric_limits<float>::max()}.bits() == overflow);
    CHECK(TestType{infinity}.bits() == overflow);
    CHECK(TestType{-infinity}.bits() == (sign | overflow));
    for (const std::uint32_t nan : {0x7f80'0001U, 0x7fc0'0000U, 0x7fff'ffffU, 0xff80'0001U, 0xffff'ffffU})
        CHECK(TestType{std::bit_cast<float>(nan)}.bits() == sign - 1);
    CHECK(TestType{-0.0F}.bits() == sign);
}

TEST_CASE("constants are what the formats are known for", "[numbers]") {
    STATIC_REQUIRE(static_cast<float>(float16::max()) == 65504.0F);
    STATIC_REQUIRE(static_cast<float>(fp8_e4m3::max()) == 448.0F);
    STATIC_REQUIRE(static_cast<float>(fp8_e5m2::max()) == 57344.0F);
    STATIC_REQUIRE(bfloat16::max().bits() == 0x7f7f);
    STATIC_REQUIRE(float16{1.0F}.bits() == 0x3c00);
    STATIC_REQUIRE(bfloat16{1.0F}.bits() == 0x3f80);
    STATIC_REQUIRE(fp8_e4m3{-1.0F}.bits() == 0xb8);
    STATIC_REQUIRE(fp8_e5m2{0.0F}.bits() == 0);
}

TEMPLATE_LIST_TEST_CASE("they are equal as numbers are", "[numbers]", all) {
    STATIC_REQUIRE(TestType{1.0F} == TestType{1.0F});
    STATIC_REQUIRE(TestType{1.0F} != TestType{2.0F});
    STATIC_REQUIRE(TestType{0.0F} == TestType{-0.0F});
    constexpr TestType nan{std::numeric_limits<float>::quiet_NaN()};
    STATIC_REQUIRE(nan != nan);
}

TEST_CASE("nothing but a float becomes one of these numbers, and never unasked", "[numbers]") {
    STATIC_REQUIRE(std::is_constructible_v<float16, float>);
    STATIC_REQUIRE_FALSE(std::is_convertible_v<float, float16>);
    STATIC_REQUIRE_FALSE(std::is_convertible_v<float16, float>);
    STATIC_REQUIRE_FALSE(std::is_constructible_v<float16, double>);
    STATIC_REQUIRE_FALSE(std::is_constructible_v<float16, int>);
    STATIC_REQUIRE_FALSE(std::is_constructible_v<bfloat16, float16>);
}
