// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, optimised
// The values that a thread combines at once. Vectors convert to the bits of single numbers, for
// every number and at every point where rounding is decided. Vectors, arrays and single numbers
// combine to the same bits. Non-finite numbers are found among any number of others.
#include <gpushare/collective/detail/values.hpp>
#include <gpushare/collective/floats.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/number_inputs.hpp"

namespace values_test {

using gpushare::detail::float_values;
using gpushare::detail::number_values;

namespace {

constexpr std::uint32_t width = 16;

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

template <class T>
void check_all(std::vector<float> from) {
    from.resize((from.size() + width - 1) / width * width);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < from.size(); i += width) {
        T narrow[width];
        float back[width];
        float_values<width>::load(from.data() + i).store(narrow);
        float_values<width>::load(narrow).store(back);
        for (std::uint32_t j = 0; j < width; ++j) {
            wrong += narrow[j].bits() != T{from[i + j]}.bits();
            wrong += bits(back[j]) != bits(static_cast<float>(narrow[j]));
        }
    }
    CHECK(wrong == 0);
}

}  // namespace

TEMPLATE_TEST_CASE("values convert as single numbers do", "[collective]", gpushare::float16, gpushare::bfloat16,
                   gpushare::fp8_e4m3, gpushare::fp8_e5m2) {
    std::vector<float> decisive;
    support::for_each_decisive_float<TestType>([&](float f) { decisive.push_back(f); });
    for (const std::uint32_t nan : {0x7fc0'0000U, 0xffc0'0001U, 0x7f80'0001U, 0x7fff'ffffU})
        decisive.push_back(std::bit_cast<float>(nan));
    check_all<TestType>(decisive);
    // Every pattern of the type, NaNs included.
    std::size_t wrong = 0;
    for (std::uint32_t p = 0; p < 1U << (8 * sizeof(TestType)); p += width) {
        TestType all[width];
        float wide[width];
        for (std::uint32_t i = 0; i < width; ++i)
            all[i] = TestType::from_bits(static_cast<typename TestType::bits_type>(p + i));
        float_values<width>::load(all).store(wide);
        for (std::uint32_t i = 0; i < width; ++i) wrong += bits(wide[i]) != bits(static_cast<float>(all[i]));
    }
    CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("vectors and arrays of floats combine to the same bits", "[collective]", gpushare::sum,
                   gpushare::product, gpushare::minimum, gpushare::maximum, gpushare::average) {
    constexpr std::uint32_t ranks = 3;
    std::vector<float> some;
    support::for_each_decisive_float<gpushare::float16>([&](float f) { some.push_back(f); });
    some.resize(some.size() / (ranks * width) * (ranks * width));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < some.size(); i += ranks * width) {
        const float* const at = some.data() + i;
        const auto combined = [&](auto v, float* to) {
            v = v.load(at);
            for (std::uint32_t r = 1; r < ranks; ++r) v.combine(TestType{}, v.load(at + r * width));
            v.finish(TestType{}, ranks);
            v.store(to);
        };
        float vectors[width], array[width];
        combined(float_values<width>{}, vectors);
        combined(number_values<float, width>{}, array);
        for (std::uint32_t j = 0; j < width; ++j) {
            float one = at[j];
            for (std::uint32_t r = 1; r < ranks; ++r) one = TestType{}(one, at[j + r * width]);
            if constexpr (requires { TestType{}.finish(one, one); }) one = TestType{}.finish(one, float{ranks});
            // Which of two NaNs a sum keeps is the processor's choice, by the order of its
            // operands.
            if (one != one) {
                wrong += vectors[j] == vectors[j] || array[j] == array[j];
                continue;
            }
            wrong += bits(vectors[j]) != bits(one);
            wrong += bits(array[j]) != bits(one);
        }
    }
    CHECK(wrong == 0);
}

/// A word's bits as a number.
template <class T, class Word>
T number_of(Word word) {
    if constexpr (std::same_as<T, float>)
        return std::bit_cast<float>(word);
    else
        return T::from_bits(word);
}

TEMPLATE_TEST_CASE("a value that isn't finite is found anywhere", "[collective]", float, gpushare::float16,
                   gpushare::bfloat16) {
    namespace detail = gpushare::detail;
    using in = detail::exponent_of<TestType>;
    using word = typename in::word;
    const auto of = [](auto bits) { return number_of<TestType>(static_cast<word>(bits)); };
    constexpr unsigned sign = word{1} << (8 * sizeof(word) - 1), one = 1, infinity = in::mask, quiet = in::least / 2;
    std::size_t wrong = 0;
    for (std::size_t first = 0; first < 3; ++first)  // at addresses of any kind
        for (std::size_t n = 0; n < 100; ++n) {
            std::vector<TestType> memory(n + 4, of(in::mask));  // infinities around it
            const std::span<TestType> x = std::span(memory).subspan(first + 1, n);
            const std::span<const TestType> seen = x;
            const auto found = [&] {
                const bool all = !gpushare::all_finite(seen);
                wrong += all == detail::all_finite_one_by_one(seen);
                const std::size_t lines = n / (detail::finite_line / sizeof(TestType));
                const auto rest = seen.subspan(lines * (detail::finite_line / sizeof(TestType)));
                wrong +=
                    all == (detail::all_finite_lines<16>(seen.data(), lines) && detail::all_finite_one_by_one(rest));
                return all;
            };
            for (std::size_t i = 0; i < n; ++i)
                x[i] = i % 2 == 0 ? of(in::mask - 1) : of(sign | one);  // the largest, the least below 0
            wrong += found();
            for (TestType& at : x) {
                const TestType was = at;
                for (const unsigned y :
                     {infinity, infinity | sign, infinity | quiet, infinity | sign | quiet, infinity | one}) {
                    at = of(y);
                    wrong += !found();
                }
                at = was;
            }
        }
    CHECK(wrong == 0);
}

}  // namespace values_test
