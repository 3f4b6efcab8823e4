// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, optimised
// A few floats at once, in registers of both widths: each lane has the bits that the same operation
// gives on one float.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gpushare/collective/floats.hpp>
#include <gpushare/numbers.hpp>

#include "support/catch.hpp"
#include "support/number_inputs.hpp"
#include "support/random.hpp"

namespace floats_test {

namespace gs = gpushare;

namespace {

/// Calls `f.operator()<V>()` for registers of each width that this processor has.
template <class F>
void for_each_width(const F& f) {
    f.template operator()<gs::floats<16, 4>>();
#if defined(__x86_64__)
    if (gs::detail::widest_vectors() >= gs::detail::vector_width::avx2) f.template operator()<gs::floats<16, 8>>();
#endif
}

constexpr float lost = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
std::uint32_t bits(auto x) { return static_cast<std::uint8_t>(x); }
template <int E, int M>
std::uint32_t bits(gs::stored_number<E, M> x) {
    return x.bits();
}

template <std::uint32_t W>
std::vector<float> lanes_of(const gs::floats<16, W>& x) {
    std::vector<float> lanes(16);
    gs::store_floats(lanes.data(), x);
    return lanes;
}

/// Any bits: numbers of all sizes, subnormal ones, infinities and NaN.
std::vector<float> random_floats(std::size_t n, std::uint64_t seed) {
    support::random any(seed);
    std::vector<float> values(n);
    for (float& x : values) x = std::bit_cast<float>(static_cast<std::uint32_t>(any.below(1ULL << 32)));
    return values;
}

std::int8_t nearest_byte(float x) {
    if (std::isnan(x)) return 0;
    return static_cast<std::int8_t>(std::nearbyint(std::fmin(std::fmax(x, -128.0F), 127.0F)));
}

template <class T>
T one_by_one(float x) {
    if constexpr (std::same_as<T, std::int8_t>)
        return nearest_byte(x);
    else
        return T{x};
}

template <class T>
void check_store(const std::vector<float>& in) {
    for_each_width([&]<class V>() {
        std::vector<T> out(in.size() + 1, T{});
        for (std::size_t i = 0; i + 16 <= in.size(); i += 16) {
            const V x = gs::load_floats<V>(in.data() + i);
            gs::store_floats(out.data() + i, x);
            const auto rounded = lanes_of(gs::rounded_to<T>(x));
            for (std::size_t j = i; j < i + 16; ++j) {
                const T one = one_by_one<T>(in[j]);
                // A REQUIRE for each would take seconds.
                if (bits(out[j]) == bits(one) && bits(rounded[j - i]) == bits(static_cast<float>(one))) continue;
                CAPTURE(V::width, j, in[j], bits(in[j]));
                REQUIRE(bits(out[j]) == bits(one));
                REQUIRE(bits(rounded[j - i]) == bits(static_cast<float>(one)));
            }
        }
    });
}

}  // namespace

TEMPLATE_TEST_CASE("floats are rounded many at a time as they are one by one", "", gs::bfloat16, gs::float16,
                   gs::fp8_e4m3, gs::fp8_e5m2) {
    std::vector<float> in;
    support::for_each_decisive_float<TestType>([&](float x) { in.push_back(x); });
    for (const float x : {lost, -lost, infinity, -infinity, 0.0F, -0.0F, std::bit_cast<float>(0x7f80'0001U),
                          std::bit_cast<float>(0xffff'ffffU)})
        in.push_back(x);
    in.resize((in.size() + 15) / 16 * 16);
    check_store<TestType>(in);
    const auto seed = support::seed(1);
    CAPTURE(seed);
    check_store<TestType>(random_floats(1 << 16, seed));
}

TEST_CASE("floats become the nearest byte") {
    std::vector<float> in;
    for (int n = -260; n <= 260; ++n)
        for (const float x : {static_cast<float>(n) / 2, std::nextafterf(static_cast<float>(n) / 2, infinity),
                              std::nextafterf(static_cast<float>(n) / 2, -infinity)})
            in.push_back(x);
    for (const float x : {lost, -lost, infinity, -infinity, 1e30F, -1e30F}) in.push_back(x);
    in.resize((in.size() + 15) / 16 * 16);
    check_store<std::int8_t>(in);
    check_store<std::int8_t>(random_floats(1 << 16, support::seed(2)));
}

TEMPLATE_TEST_CASE("a load gives the value of each element", "", float, gs::bfloat16, gs::float16, gs::fp8_e4m3,
                   gs::fp8_e5m2, std::int8_t) {
    constexpr std::uint32_t patterns = sizeof(TestType) == 1 ? 256 : 65536;
    std::vector<TestType> in(patterns);
    for (std::uint32_t p = 0; p < patterns; ++p) {
        if constexpr (std::same_as<TestType, float>)
            in[p] = std::bit_cast<float>(p << 16);
        else if constexpr (std::same_as<TestType, std::int8_t>)
            in[p] = static_cast<std::int8_t>(p);
        else
            in[p] = TestType::from_bits(static_cast<typename TestType::bits_type>(p));
    }
    for_each_width([&]<class V>() {
        for (std::uint32_t p = 0; p < patterns; p += 16) {
            const auto lanes = lanes_of(gs::load_floats<V>(in.data() + p));
            for (std::uint32_t i = 0; i < 16; ++i) {
                if (bits(lanes[i]) == bits(static_cast<float>(in[p + i]))) continue;
                CAPTURE(V::width, p, i);
                REQUIRE(bits(lanes[i]) == bits(static_cast<float>(in[p + i])));
            }
        }
    });
}

TEMPLATE_TEST_CASE("a part is loaded and stored, and nothing beside it", "", float, gs::bfloat16, std::int8_t) {
    std::vector<TestType> from(40), to(40);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = one_by_one<TestType>(static_cast<float>(i + 1));
    for_each_width([&]<class V>() {
        for (std::uint32_t n = 0; n <= 16; ++n)
            for (std::uint32_t at = 0; at < 9; ++at) {
                CAPTURE(V::width, n, at);
                for (TestType& t : to) t = one_by_one<TestType>(-1.0F);
                const V x = gs::load_floats<V>(from.data() + at, n);
                const auto lanes = lanes_of(x);
                for (std::uint32_t i = 0; i < 16; ++i)
                    REQUIRE(lanes[i] == (i < n ? static_cast<float>(at + i + 1) : 0.0F));
                gs::store_floats(to.data() + at, x, n);
                for (std::uint32_t i = 0; i < to.size(); ++i)
                    REQUIRE(static_cast<float>(to[i]) == (i >= at && i < at + n ? static_cast<float>(i + 1) : -1.0F));
            }
    });
}

TEMPLATE_TEST_CASE("streaming stores what storing does, wherever", "", float, gs::bfloat16, gs::fp8_e4m3, std::int8_t) {
    const auto in = random_floats(16, support::seed(3));
    alignas(64) TestType streamed[32], stored[32];
    for_each_width([&]<class V>() {
        const V x = gs::load_floats<V>(in.data());
        for (std::size_t at = 0; at < 16; ++at) {
            gs::stream_floats(streamed + at, x);
            gs::finish_streaming();
            gs::store_floats(stored + at, x);
            for (std::size_t i = at; i < at + 16; ++i) REQUIRE(bits(streamed[i]) == bits(stored[i]));
        }
    });
}

TEST_CASE("arithmetic goes lane by lane and isn't contracted") {
    const auto seed = support::seed(4);
    CAPTURE(seed);
    const auto a = random_floats(1024, seed), b = random_floats(1024, seed + 1), c = random_floats(1024, seed + 2);
    const auto same = [](float x, float y) { return bits(x) == bits(y) || (std::isnan(x) && std::isnan(y)); };
    for_each_width([&]<class V>() {
        for (std::size_t i = 0; i < a.size(); i += 16) {
            const V x = gs::load_floats<V>(a.data() + i), y = gs::load_floats<V>(b.data() + i),
                    z = gs::load_floats<V>(c.data() + i);
            const auto product_sum = lanes_of(x * y + z), quotient = lanes_of((x - y) / z),
                       largest = lanes_of(max(x, y)), smallest = lanes_of(min(x, y)), magnitude = lanes_of(abs(x));
            for (std::size_t j = 0; j < 16; ++j) {
                const float p = a[i + j], q = b[i + j], r = c[i + j];
                volatile float product = p * q, difference = p - q;  // rounded
                CAPTURE(p, q, r);
                REQUIRE(same(product_sum[j], product + r));
                REQUIRE(same(quotient[j], difference / r));
                const bool none = std::isnan(p) || std::isnan(q);
                REQUIRE(same(largest[j], none ? lost : p < q ? q : p));
                REQUIRE(same(smallest[j], none ? lost : q < p ? q : p));
                REQUIRE(bits(magnitude[j]) == (bits(p) & 0x7fff'ffffU));
            }
        }
    });
}

TEST_CASE("lanes are folded halves first") {
    std::vector<float> in(16);
    for (std::size_t i = 0; i < 16; ++i)
        in[i] = std::ldexp(1.0F + static_cast<float>(i) / 16, static_cast<int>(i * 5 % 16));
    std::vector<float> expected = in;
    for (std::size_t half = 8; half != 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) expected[i] += expected[i + half];
    for_each_width([&]<class V>() {
        const V x = gs::load_floats<V>(in.data());
        REQUIRE(bits(x.folded([](auto a, auto b) { return a + b; })) == bits(expected[0]));
    });
}

TEST_CASE("the exponential is within 2 units in the last place") {
    for_each_width([]<class V>() {
        float worst = 0;
        for (float x = -87.0F; x < 88.7F; x += 0.0013F) {
            const double exact = std::exp(static_cast<double>(x));
            const auto nearest = static_cast<float>(exact);
            const double unit = std::nextafterf(nearest, infinity) - nearest;
            const float got = lanes_of(exp(V(x)))[5];
            worst = std::fmax(worst, static_cast<float>(std::fabs(got - exact) / unit));
        }
        REQUIRE(worst < 2);
        const auto of = [](float y) { return lanes_of(exp(V(y)))[0]; };
        REQUIRE(of(0) == 1);
        REQUIRE(of(-infinity) == 0);
        REQUIRE(of(-200) == 0);
        REQUIRE(of(89) == infinity);
        REQUIRE(of(infinity) == infinity);
        REQUIRE(std::isnan(of(lost)));
        REQUIRE(of(-103) == std::exp(-103.0F));  // subnormal
    });
}

TEST_CASE("floats of narrower registers become wider ones, and parts keep what they are told") {
    std::vector<float> in(16);
    for (std::size_t i = 0; i < 16; ++i) in[i] = static_cast<float>(i) - 5.5F;
    for_each_width([&]<class V>() {
        const V x = gs::load_floats<16>(in.data());
        REQUIRE(lanes_of(x) == in);
        REQUIRE(lanes_of(x + gs::load_floats<16>(in.data()))[7] == 2 * in[7]);
        REQUIRE(bits(lanes_of(V(-0.0F))[9]) == 0x8000'0000U);
        for (std::uint32_t n = 0; n <= 16; ++n) {
            std::vector<float> expected = in;
            std::fill(expected.begin() + n, expected.end(), 3.0F);
            REQUIRE(lanes_of(x.first(n, 3.0F)) == expected);
        }
        const V y = V::map([](const auto& a) { return gs::select(a < 0.0F, a * -2.0F, a); }, x);
        for (std::size_t i = 0; i < 16; ++i) REQUIRE(lanes_of(y)[i] == (in[i] < 0 ? in[i] * -2 : in[i]));
        REQUIRE(lanes_of(x.each([](float a) { return a + 1; }))[15] == in[15] + 1);
    });
}

}  // namespace floats_test
