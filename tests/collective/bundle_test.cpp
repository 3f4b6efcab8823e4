// SPDX-License-Identifier: Apache-2.0
// Vector conversions have the bits of the single ones, for every number and at every point where rounding is decided.
#include <gpushare/collective/detail/simd/bundle.hpp>

#include <bit>
#include <cstdint>
#include <vector>

#include "support/catch.hpp"
#include "support/number_inputs.hpp"

namespace {

constexpr std::uint32_t width = 16;

template <class T>
void check_all(std::vector<float> from) {
    from.resize((from.size() + width - 1) / width * width);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < from.size(); i += width) {
        T narrow[width];
        using plain = gpushare::detail::bundle<float, width>;
        // A bundle of T made of these floats: what is loaded as zeros is replaced.
        for (auto& n : narrow) n = T{0.0F};
        plain b = plain::load(narrow);
        b.each([&](float, std::uint32_t lane) { return from[i + lane]; });
        b.store(narrow);
        for (std::uint32_t j = 0; j < width; ++j) wrong += narrow[j].bits() != T{from[i + j]}.bits();
        plain back = plain::load(narrow);
        back.each([&](float x, std::uint32_t lane) {
            wrong += std::bit_cast<std::uint32_t>(x) != std::bit_cast<std::uint32_t>(static_cast<float>(narrow[lane]));
            return x;
        });
    }
    CHECK(wrong == 0);
}

}  // namespace

TEMPLATE_TEST_CASE("a bundle converts as single numbers do", "[collective]", gpushare::float16, gpushare::bfloat16,
                   gpushare::fp8_e4m3, gpushare::fp8_e5m2) {
    std::vector<float> decisive;
    support::for_each_decisive_float<TestType>([&](float f) { decisive.push_back(f); });
    for (const std::uint32_t bits : {0x7fc0'0000U, 0xffc0'0001U, 0x7f80'0001U, 0x7fff'ffffU})
        decisive.push_back(std::bit_cast<float>(bits));
    check_all<TestType>(decisive);
    // Every pattern of the type, NaNs included.
    std::size_t wrong = 0;
    for (std::uint32_t p = 0; p < 1U << (8 * sizeof(TestType)); p += width) {
        TestType all[width];
        for (std::uint32_t i = 0; i < width; ++i)
            all[i] = TestType::from_bits(static_cast<typename TestType::bits_type>(p + i));
        auto b = gpushare::detail::bundle<float, width>::load(all);
        b.each([&](float x, std::uint32_t lane) {
            wrong += std::bit_cast<std::uint32_t>(x) != std::bit_cast<std::uint32_t>(static_cast<float>(all[lane]));
            return x;
        });
    }
    CHECK(wrong == 0);
}
