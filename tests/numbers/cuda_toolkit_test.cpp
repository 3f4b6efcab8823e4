// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// The number types against the toolkit's types: the same layout, and the same bits from the same
// floats.
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/numbers.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#if __has_include(<cuda_fp4.h>)
#include <cuda_fp4.h>
#endif

#include <bit>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "support/catch.hpp"
#include "support/number_inputs.hpp"
#include "support/random.hpp"

using namespace gpushare;

namespace {

using pairs = std::tuple<std::pair<float16, __half>, std::pair<bfloat16, __nv_bfloat16>,
                         std::pair<fp8_e4m3, __nv_fp8_e4m3>, std::pair<fp8_e5m2, __nv_fp8_e5m2>>;

template <class Pair>
void check_rounding(float f) {
    using ours = typename Pair::first_type;
    using theirs = typename Pair::second_type;
    const auto expected = std::bit_cast<typename ours::bits_type>(theirs(f));
    if (ours{f}.bits() != expected) {
        CAPTURE(f, std::bit_cast<std::uint32_t>(f), ours{f}.bits(), expected);
        FAIL("rounded otherwise");
    }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("number types have the toolkit's layout", "[numbers]", pairs) {
    using ours = typename TestType::first_type;
    using theirs = typename TestType::second_type;
    STATIC_REQUIRE(sizeof(ours) == sizeof(theirs));
    STATIC_REQUIRE(alignof(ours) == alignof(theirs));
    STATIC_REQUIRE(std::is_trivially_copyable_v<ours> && std::is_trivially_copyable_v<theirs>);
}

TEMPLATE_LIST_TEST_CASE("every pattern becomes the float that the toolkit makes of it, NaNs included", "[numbers]",
                        pairs) {
    using ours = typename TestType::first_type;
    using theirs = typename TestType::second_type;
    for (std::uint32_t p = 0; p < 1U << (8 * sizeof(ours)); ++p) {
        const auto n = ours::from_bits(static_cast<typename ours::bits_type>(p));
        const auto value = std::bit_cast<std::uint32_t>(static_cast<float>(n)),
                   expected = std::bit_cast<std::uint32_t>(static_cast<float>(std::bit_cast<theirs>(n)));
        if (value != expected) {
            CAPTURE(p, value, expected);
            FAIL("another value");
        }
    }
}

TEMPLATE_LIST_TEST_CASE("floats round as the toolkit rounds them", "[numbers]", pairs) {
    support::for_each_decisive_float<typename TestType::first_type>(check_rounding<TestType>);
    // NaNs, quiet and signalling, with both signs.
    for (std::uint32_t payload = 1; payload < 1U << 23; payload <<= 1)
        for (const std::uint32_t head : {0x7f80'0000U, 0xff80'0000U})
            check_rounding<TestType>(std::bit_cast<float>(head | payload));
    const auto seed = support::seed(1);
    CAPTURE(seed);
    support::random any(seed);
    for (int i = 0; i < 1'000'000; ++i)
        check_rounding<TestType>(std::bit_cast<float>(static_cast<std::uint32_t>(any.below(1ULL << 32))));
}

TEMPLATE_LIST_TEST_CASE("all floats round as the toolkit rounds them", "[.long][numbers]", pairs) {
    for (std::uint64_t p = 0; p < 1ULL << 32; ++p)
        check_rounding<TestType>(std::bit_cast<float>(static_cast<std::uint32_t>(p)));
}

#if __has_include(<cuda_fp4.h>)
namespace {

std::size_t pairs_rounded_otherwise(float first, float second) {
    const __nv_fp4x2_e2m1 theirs(float2{first, second});
    return fp4_pair(first, second).bits() == std::bit_cast<std::uint8_t>(theirs) ? 0 : 1;
}

}  // namespace

TEST_CASE("pairs of 4 bits are the toolkit's", "[numbers]") {
    STATIC_REQUIRE(sizeof(fp4_pair) == sizeof(__nv_fp4x2_e2m1));
    for (std::uint32_t p = 0; p < 256; ++p) {
        const auto ours = fp4_pair::from_bits(static_cast<std::uint8_t>(p));
        const auto theirs = static_cast<float2>(std::bit_cast<__nv_fp4x2_e2m1>(ours));
        CAPTURE(p);
        REQUIRE(std::bit_cast<std::uint32_t>(ours.first()) == std::bit_cast<std::uint32_t>(theirs.x));
        REQUIRE(std::bit_cast<std::uint32_t>(ours.second()) == std::bit_cast<std::uint32_t>(theirs.y));
    }
    std::size_t wrong = 0;
    for (const float middle : {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F, 6.0F})
        for (const std::uint32_t beside : {~0U, 0U, 1U})
            for (const std::uint32_t sign : {0U, 1U << 31}) {
                const float x = std::bit_cast<float>((std::bit_cast<std::uint32_t>(middle) + beside) | sign);
                wrong += pairs_rounded_otherwise(x, 1.0F) + pairs_rounded_otherwise(-1.0F, x);
            }
    const auto seed = support::seed(2);
    CAPTURE(seed);
    support::random any(seed);
    for (int i = 0; i < 200'000; ++i) {
        const auto word = std::bit_cast<float>(static_cast<std::uint32_t>(any.below(1ULL << 32)));
        const auto usual = (static_cast<float>(any.below(1 << 16)) - (1 << 15)) / (1 << 12);
        wrong += pairs_rounded_otherwise(word, usual) + pairs_rounded_otherwise(usual, word);
    }
    CHECK(wrong == 0);
}
#else
TEST_CASE("pairs of 4 bits are the toolkit's", "[numbers]") { WARN("not checked: the toolkit has no cuda_fp4.h"); }
#endif
