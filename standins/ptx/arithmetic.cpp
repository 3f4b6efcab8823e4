// SPDX-License-Identifier: Apache-2.0
// Sections are those of the PTX ISA 9.0.
#include "arithmetic.hpp"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <type_traits>

namespace ptx {

namespace {

// ---- values in registers

template <class T>
T get(word w) {
    if constexpr (std::same_as<T, float>)
        return std::bit_cast<float>(static_cast<std::uint32_t>(w));
    else
        return static_cast<T>(w);
}

/// Every arithmetic instruction gives the same NaN, whatever the operands' payloads were (9.7.3).
template <class T>
word put(T x) {
    if constexpr (std::same_as<T, float>)
        return std::isnan(x) ? word{0x7fff'ffff} : word{std::bit_cast<std::uint32_t>(x)};
    else
        return static_cast<word>(static_cast<std::make_unsigned_t<T>>(x));
}

template <class T>
constexpr unsigned bits = std::numeric_limits<std::make_unsigned_t<T>>::digits;

__extension__ using signed_128 = __int128;
__extension__ using unsigned_128 = unsigned __int128;

/// A type into which a product of two T fits.
template <class T>
using twice = std::conditional_t<
    sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, signed_128, unsigned_128>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>>>;

/// Unsigned arithmetic, which wraps as the ISA requires.
template <class T>
using wrapping = std::make_unsigned_t<T>;

// ---- the table

using table = std::map<std::string, pure, std::less<>>;

void define(table& t, const std::string& opcode, std::uint8_t sources, word (*f)(word, word, word)) {
    [[maybe_unused]] const bool added = t.emplace(opcode, pure{f, sources}).second;
    assert(added);  // no opcode is defined twice
}

// ---- 9.7.1: integers

template <class T>
void integers(table& t, const std::string& type) {
    using u = wrapping<T>;
    define(t, "add." + type, 2, [](word a, word b, word) { return put<u>(static_cast<u>(get<u>(a) + get<u>(b))); });
    define(t, "sub." + type, 2, [](word a, word b, word) { return put<u>(static_cast<u>(get<u>(a) - get<u>(b))); });
    define(t, "min." + type, 2, [](word a, word b, word) { return put<T>(std::min(get<T>(a), get<T>(b))); });
    define(t, "max." + type, 2, [](word a, word b, word) { return put<T>(std::max(get<T>(a), get<T>(b))); });

    define(t, "mul.lo." + type, 2,
           [](word a, word b, word) { return put<T>(static_cast<T>(twice<T>{get<T>(a)} * twice<T>{get<T>(b)})); });
    define(t, "mul.hi." + type, 2, [](word a, word b, word) {
        return put<T>(static_cast<T>((twice<T>{get<T>(a)} * twice<T>{get<T>(b)}) >> bits<T>));
    });
    define(t, "mad.lo." + type, 3, [](word a, word b, word c) {
        return put<u>(static_cast<u>(static_cast<u>(twice<T>{get<T>(a)} * twice<T>{get<T>(b)}) + get<u>(c)));
    });
    if constexpr (sizeof(T) < 8) {
        define(t, "mul.wide." + type, 2,
               [](word a, word b, word) { return put<twice<T>>(twice<T>{get<T>(a)} * twice<T>{get<T>(b)}); });
        define(t, "mad.wide." + type, 3, [](word a, word b, word c) {
            using wide = wrapping<twice<T>>;
            return put<wide>(static_cast<wide>(twice<T>{get<T>(a)} * twice<T>{get<T>(b)}) + get<wide>(c));
        });
    }
    // Division by zero gives "an unspecified, machine-specific value": on all machines so far, all
    // ones.
    define(t, "div." + type, 2, [](word a, word b, word) {
        const T x = get<T>(a), y = get<T>(b);
        if (y == 0) return put<u>(static_cast<u>(~u{0}));
        if (std::is_signed_v<T> && static_cast<u>(y) == static_cast<u>(~u{0}))  // -1: the smallest value wraps
            return put<u>(static_cast<u>(u{0} - static_cast<u>(x)));
        return put<T>(static_cast<T>(x / y));
    });
    define(t, "rem." + type, 2, [](word a, word b, word) {
        const T x = get<T>(a), y = get<T>(b);
        if (y == 0) return put<T>(x);
        if (std::is_signed_v<T> && static_cast<u>(y) == static_cast<u>(~u{0})) return put<T>(T{0});
        return put<T>(static_cast<T>(x % y));
    });
    if constexpr (std::is_signed_v<T>) {
        define(t, "neg." + type, 1, [](word a, word, word) { return put<u>(static_cast<u>(u{0} - get<u>(a))); });
        define(t, "abs." + type, 1,
               [](word a, word, word) { return put<u>(get<T>(a) < 0 ? static_cast<u>(u{0} - get<u>(a)) : get<u>(a)); });
    }
    // 9.7.8.8. Amounts are 32 bits wide, and an amount beyond the width shifts everything out.
    define(t, "shr." + type, 2, [](word a, word b, word) {
        const auto amount = get<std::uint32_t>(b);
        if (amount < bits<T>) return put<T>(static_cast<T>(get<T>(a) >> amount));
        return put<T>(get<T>(a) < T{0} ? static_cast<T>(-1) : T{0});
    });
}

/// The bit counts and bit fields of 9.7.1.13 ff, of 32 and 64 bits.
template <class T>
void fields(table& t, const std::string& width) {
    define(t, "popc.b" + width, 1,
           [](word a, word, word) { return static_cast<word>(static_cast<unsigned>(std::popcount(get<T>(a)))); });
    define(t, "clz.b" + width, 1,
           [](word a, word, word) { return static_cast<word>(static_cast<unsigned>(std::countl_zero(get<T>(a)))); });
    define(t, "brev.b" + width, 1, [](word a, word, word) {
        T x = get<T>(a), y = 0;
        for (unsigned bit = 0; bit < bits<T>; ++bit, x >>= 1) y = static_cast<T>(y << 1 | (x & 1));
        return put<T>(y);
    });
}

// ---- 9.7.8: logic, of every width

template <class T>
void logic(table& t, const std::string& type) {
    define(t, "and." + type, 2, [](word a, word b, word) { return put<T>(static_cast<T>(get<T>(a) & get<T>(b))); });
    define(t, "or." + type, 2, [](word a, word b, word) { return put<T>(static_cast<T>(get<T>(a) | get<T>(b))); });
    define(t, "xor." + type, 2, [](word a, word b, word) { return put<T>(static_cast<T>(get<T>(a) ^ get<T>(b))); });
    define(t, "not." + type, 1, [](word a, word, word) { return put<T>(static_cast<T>(~get<T>(a))); });
    define(t, "shl." + type, 2, [](word a, word b, word) {
        const auto amount = get<std::uint32_t>(b);
        return put<T>(amount < bits<T> ? static_cast<T>(get<T>(a) << amount) : T{0});
    });
    define(t, "shr." + type, 2, [](word a, word b, word) {
        const auto amount = get<std::uint32_t>(b);
        return put<T>(amount < bits<T> ? static_cast<T>(get<T>(a) >> amount) : T{0});
    });
}

void predicates(table& t) {
    // A nonzero immediate is true: nvcc writes `mov.pred %p1, -1`.
    define(t, "and.pred", 2, [](word a, word b, word) { return word{a != 0 && b != 0}; });
    define(t, "or.pred", 2, [](word a, word b, word) { return word{a != 0 || b != 0}; });
    define(t, "xor.pred", 2, [](word a, word b, word) { return word{(a != 0) != (b != 0)}; });
    define(t, "not.pred", 1, [](word a, word, word) { return word{a == 0}; });
    define(t, "mov.pred", 1, [](word a, word, word) { return word{a != 0}; });
}

// ---- 9.7.6: comparisons; 9.7.9.1: moves and selections

template <class T, class Compare>
void comparison(table& t, const std::string& opcode, Compare) {
    define(t, opcode, 2, [](word a, word b, word) { return word{Compare{}(get<T>(a), get<T>(b))}; });
}

template <class T>
void equalities(table& t, const std::string& type) {
    comparison<T>(t, "setp.eq." + type, std::equal_to<T>{});
    comparison<T>(t, "setp.ne." + type, std::not_equal_to<T>{});
}

template <class T>
void comparisons(table& t, const std::string& type) {
    equalities<T>(t, type);
    comparison<T>(t, "setp.lt." + type, std::less<T>{});
    comparison<T>(t, "setp.le." + type, std::less_equal<T>{});
    comparison<T>(t, "setp.gt." + type, std::greater<T>{});
    comparison<T>(t, "setp.ge." + type, std::greater_equal<T>{});
}

/// Ordered comparisons are false for a NaN; each has an unordered counterpart that is true.
void float_comparisons(table& t) {
    comparison<float>(t, "setp.eq.f32", std::equal_to<float>{});
    comparison<float>(t, "setp.lt.f32", std::less<float>{});
    comparison<float>(t, "setp.le.f32", std::less_equal<float>{});
    comparison<float>(t, "setp.gt.f32", std::greater<float>{});
    comparison<float>(t, "setp.ge.f32", std::greater_equal<float>{});
    comparison<float>(t, "setp.ne.f32", [](float a, float b) { return a < b || a > b; });
    comparison<float>(t, "setp.equ.f32", [](float a, float b) { return !(a < b || a > b); });
    comparison<float>(t, "setp.neu.f32", [](float a, float b) { return !(a == b); });
    comparison<float>(t, "setp.ltu.f32", [](float a, float b) { return !(a >= b); });
    comparison<float>(t, "setp.leu.f32", [](float a, float b) { return !(a > b); });
    comparison<float>(t, "setp.gtu.f32", [](float a, float b) { return !(a <= b); });
    comparison<float>(t, "setp.geu.f32", [](float a, float b) { return !(a < b); });
    comparison<float>(t, "setp.num.f32", [](float a, float b) { return !std::isunordered(a, b); });
    comparison<float>(t, "setp.nan.f32", [](float a, float b) { return std::isunordered(a, b); });
}

template <class T>
void moves(table& t, const std::string& type) {
    define(t, "mov." + type, 1, [](word a, word, word) { return put<T>(get<T>(a)); });
    define(t, "selp." + type, 3, [](word a, word b, word p) { return put<T>(p != 0 ? get<T>(a) : get<T>(b)); });
}

// ---- 9.7.3: floats. The host also rounds to nearest even, and -O2 contracts no operations.

float minimum(float a, float b) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? a : b;  // -0 is less than +0
    return a < b ? a : b;
}

/// The greatest float that isn't above `x` plus `rest`. `rest` is the rounding error of `x`.
float rounded_down(double x, double rest = 0) {
    const auto nearest = static_cast<float>(x);
    const auto again = static_cast<double>(nearest);
    const bool above = again > x || (again == x && rest < 0);
    return above ? std::nextafter(nearest, -std::numeric_limits<float>::infinity()) : nearest;
}

/// a * b + c, rounded down once. The product of two floats is exact in double, and so is a sum in
/// two parts.
float multiplied_and_added_down(float a, float b, float c) {
    if (!std::isfinite(a) || !std::isfinite(b) || !std::isfinite(c)) return std::fma(a, b, c);
    const double product = static_cast<double>(a) * static_cast<double>(b), addend = static_cast<double>(c);
    const double all = product + addend, of_addend = all - product;
    const double rest = (product - (all - of_addend)) + (addend - of_addend);
    // The result is zero only if it is exact, and then positive if both parts are positive.
    if (all == 0) return std::signbit(product) || std::signbit(addend) ? -0.0F : 0.0F;
    return rounded_down(all, rest);
}

/// Flushes a subnormal float of 32 bits to a zero of the same sign. Other widths aren't flushed.
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x; }

void floats(table& t) {
    // Without a rounding modifier, ptxas may contract a multiplication and an addition to an fma;
    // the executor never does.
    for (const std::string rounding : {"", "rn."}) {
        define(t, "add." + rounding + "f32", 2,
               [](word a, word b, word) { return put(get<float>(a) + get<float>(b)); });
        define(t, "sub." + rounding + "f32", 2,
               [](word a, word b, word) { return put(get<float>(a) - get<float>(b)); });
        define(t, "mul." + rounding + "f32", 2,
               [](word a, word b, word) { return put(get<float>(a) * get<float>(b)); });
    }
    define(t, "fma.rn.f32", 3,
           [](word a, word b, word c) { return put(std::fma(get<float>(a), get<float>(b), get<float>(c))); });
    define(t, "fma.rm.f32", 3, [](word a, word b, word c) {
        return put(multiplied_and_added_down(get<float>(a), get<float>(b), get<float>(c)));
    });
    define(t, "div.rn.f32", 2, [](word a, word b, word) { return put(get<float>(a) / get<float>(b)); });
    define(t, "rcp.rn.f32", 1, [](word a, word, word) { return put(1.0F / get<float>(a)); });
    define(t, "sqrt.rn.f32", 1, [](word a, word, word) { return put(std::sqrt(get<float>(a))); });
    define(t, "min.f32", 2, [](word a, word b, word) { return put(minimum(get<float>(a), get<float>(b))); });
    define(t, "max.f32", 2, [](word a, word b, word) { return put(-minimum(-get<float>(a), -get<float>(b))); });
    define(t, "neg.f32", 1, [](word a, word, word) { return put(-get<float>(a)); });
    define(t, "abs.f32", 1, [](word a, word, word) { return put(std::fabs(get<float>(a))); });
}

/// 9.7.3: the ISA bounds the error of approximations and doesn't specify their bits. The executor
/// returns the nearest result.
void approximations(table& t) {
    define(t, "ex2.approx.ftz.f32", 1, [](word a, word, word) {
        return put(flushed(static_cast<float>(std::exp2(static_cast<double>(flushed(get<float>(a)))))));
    });
    // Reads and writes only the upper 32 bits; the lower bits of the result are 0.
    define(t, "rcp.approx.ftz.f64", 1, [](word a, word, word) {
        constexpr word upper = 0xffff'ffff'0000'0000;
        const auto flush = [](double x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0, x) : x; };
        if (std::isnan(std::bit_cast<double>(a))) return word{0x7fff'ffff'0000'0000};
        return std::bit_cast<word>(flush(1.0 / flush(std::bit_cast<double>(a & upper)))) & upper;
    });
}

/// Operations on doubles, whose NaNs may have any bits.
void doubles(table& t) {
    const auto two = [&]<class F>(const std::string& name, F) {
        for (const std::string rounding : {"", "rn."})
            define(t, name + "." + rounding + "f64", 2, [](word a, word b, word) {
                return std::bit_cast<word>(F{}(std::bit_cast<double>(a), std::bit_cast<double>(b)));
            });
    };
    two("add", std::plus<double>{});
    two("sub", std::minus<double>{});
    two("mul", std::multiplies<double>{});
    define(t, "div.rn.f64", 2, [](word a, word b, word) {
        return std::bit_cast<word>(std::bit_cast<double>(a) / std::bit_cast<double>(b));
    });
    define(t, "fma.rn.f64", 3, [](word a, word b, word c) {
        return std::bit_cast<word>(
            std::fma(std::bit_cast<double>(a), std::bit_cast<double>(b), std::bit_cast<double>(c)));
    });
    define(t, "rcp.rn.f64", 1, [](word a, word, word) { return std::bit_cast<word>(1.0 / std::bit_cast<double>(a)); });
    define(t, "neg.f64", 1, [](word a, word, word) { return a ^ word { 1 } << 63; });
    define(t, "sqrt.rn.f64", 1,
           [](word a, word, word) { return std::bit_cast<word>(std::sqrt(std::bit_cast<double>(a))); });
    define(t, "cvt.rn.f64.u64", 1, [](word a, word, word) { return std::bit_cast<word>(static_cast<double>(a)); });
}

// ---- 9.7.9.21: conversions

/// Conversions between integers: extended by the source's sign, and cut to the target's width.
template <class To, class From>
void conversion(table& t, const std::string& to, const std::string& from) {
    define(t, "cvt." + to + "." + from, 1, [](word a, word, word) { return put<To>(static_cast<To>(get<From>(a))); });
}

template <class To>
void conversions_to(table& t, const std::string& to) {
    conversion<To, std::uint8_t>(t, to, "u8");
    conversion<To, std::int8_t>(t, to, "s8");
    conversion<To, std::uint16_t>(t, to, "u16");
    conversion<To, std::int16_t>(t, to, "s16");
    conversion<To, std::uint32_t>(t, to, "u32");
    conversion<To, std::int32_t>(t, to, "s32");
    conversion<To, std::uint64_t>(t, to, "u64");
    conversion<To, std::int64_t>(t, to, "s64");
}

/// Float to integer: a value that doesn't fit becomes the nearest integer that fits. A NaN becomes
/// 0, or the smallest integer of 64 bits.
template <class To, class Round>
word to_integer(word a, Round round) {
    const float x = round(get<float>(a));
    constexpr int digits = std::numeric_limits<To>::digits;
    if (std::isnan(x)) return put<To>(sizeof(To) == 8 ? static_cast<To>(To{1} << (bits<To> - 1)) : To{0});
    if (x >= std::ldexp(1.0F, digits)) return put(std::numeric_limits<To>::max());
    if (x < (std::is_signed_v<To> ? -std::ldexp(1.0F, digits) : 0.0F)) return put(std::numeric_limits<To>::min());
    return put(static_cast<To>(x));
}

template <class I>
void to_nearest_float(table& t, const std::string& type) {
    define(t, "cvt.rn.f32." + type, 1, [](word a, word, word) { return put(static_cast<float>(get<I>(a))); });
}

template <class I>
void between_floats_and(table& t, const std::string& type) {
    to_nearest_float<I>(t, type);
    const auto define_rounded = [&]<class Round>(const std::string& how, Round) {
        define(t, "cvt." + how + "." + type + ".f32", 1, [](word a, word, word) { return to_integer<I>(a, Round{}); });
    };
    define_rounded("rni", [](float x) { return std::nearbyint(x); });
    define_rounded("rzi", [](float x) { return std::trunc(x); });
    define_rounded("rmi", [](float x) { return std::floor(x); });
    define_rounded("rpi", [](float x) { return std::ceil(x); });
}

/// A float of 16 bits with so many bits of exponent: rounds to nearest, ties to even. A value
/// beyond the largest becomes infinity, and any NaN 0x7fff.
template <unsigned Exponent>
word narrow(word a) {
    constexpr unsigned mantissa = 15 - Exponent, dropped = 23 - mantissa;
    constexpr int bias = (1 << (Exponent - 1)) - 1;
    const auto all = get<std::uint32_t>(a);
    const word sign = all >> 16 & 0x8000U;
    const std::uint32_t rest = all & 0x7fff'ffffU;
    if (rest > 0x7f80'0000U) return 0x7fff;
    if (rest == 0x7f80'0000U) return sign | ((1U << Exponent) - 1) << mantissa;
    if (rest == 0) return sign;
    // The value is `whole` units in the last place of the result; `step` is the exponent of that
    // place.
    const float x = std::bit_cast<float>(rest);
    const int exponent = std::max(std::ilogb(x), 1 - bias), step = exponent - static_cast<int>(mantissa);
    static_assert(dropped >= 13);  // so many bits that the next line is exact in double
    const auto whole = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(static_cast<double>(x), -step)));
    // A carry out of the mantissa increments the exponent, also from subnormal to normal and to
    // infinity.
    const std::uint32_t implicit = 1U << mantissa;
    const word encoded = whole < implicit ? whole : static_cast<word>(exponent + bias - 1) * implicit + whole;
    return sign | std::min<word>(encoded, ((1U << Exponent) - 1) << mantissa);
}

/// Exact. A NaN becomes the canonical one.
template <unsigned Exponent>
word widen(word a) {
    constexpr unsigned mantissa = 15 - Exponent;
    constexpr int bias = (1 << (Exponent - 1)) - 1;
    const auto all = get<std::uint16_t>(a);
    const int exponent = all >> mantissa & ((1 << Exponent) - 1);
    const int fraction = all & ((1 << mantissa) - 1);
    if (exponent == (1 << Exponent) - 1 && fraction != 0) return 0x7fff'ffff;
    float magnitude = std::numeric_limits<float>::infinity();
    if (exponent == 0)
        magnitude = std::ldexp(static_cast<float>(fraction), 1 - bias - static_cast<int>(mantissa));
    else if (exponent != (1 << Exponent) - 1)
        magnitude =
            std::ldexp(static_cast<float>(fraction + (1 << mantissa)), exponent - bias - static_cast<int>(mantissa));
    return put((all & 0x8000U) != 0 ? -magnitude : magnitude);
}

double flushed(double x) { return x; }

/// Clamps to [+0, 1]. A NaN becomes +0, and so does -0.
template <class F>
F saturated(F x) {
    return x > 0 ? std::min(x, F{1}) : F{0};
}

template <class To, class From, class Round, bool Flush, bool Saturate>
word converted(word a, word, word) {
    From x{};
    if constexpr (std::same_as<From, float>)
        x = get<float>(a);
    else
        x = std::bit_cast<double>(a);
    To y = Round{}(Flush ? flushed(x) : x);
    if constexpr (Flush) y = flushed(y);
    if constexpr (Saturate) y = saturated(y);
    if constexpr (std::same_as<To, float>)
        return put(y);
    else
        return std::bit_cast<word>(y);
}

/// `rounding`: empty, or a modifier that begins with a dot.
template <class To, class From, class Round>
void between_floats(table& t, const std::string& rounding, const std::string& types, Round) {
    define(t, "cvt" + rounding + "." + types, 1, converted<To, From, Round, false, false>);
    define(t, "cvt" + rounding + ".sat." + types, 1, converted<To, From, Round, false, true>);
    if constexpr (std::same_as<To, float> || std::same_as<From, float>) {
        define(t, "cvt" + rounding + ".ftz." + types, 1, converted<To, From, Round, true, false>);
        define(t, "cvt" + rounding + ".ftz.sat." + types, 1, converted<To, From, Round, true, true>);
    }
}

/// Conversions to the same width, which round to an integer.
template <class F>
void to_same_floats(table& t, const std::string& type) {
    const std::string types = type + "." + type;
    between_floats<F, F>(t, "", types, [](F x) { return x; });
    between_floats<F, F>(t, ".rni", types, [](F x) { return std::nearbyint(x); });
    between_floats<F, F>(t, ".rzi", types, [](F x) { return std::trunc(x); });
    between_floats<F, F>(t, ".rmi", types, [](F x) { return std::floor(x); });
    between_floats<F, F>(t, ".rpi", types, [](F x) { return std::ceil(x); });
}

void float_conversions(table& t) {
    to_same_floats<float>(t, "f32");
    to_same_floats<double>(t, "f64");
    between_floats<double, float>(t, "", "f64.f32", [](float x) { return static_cast<double>(x); });
    between_floats<float, double>(t, ".rn", "f32.f64", [](double x) { return static_cast<float>(x); });
    between_floats<float, double>(t, ".rm", "f32.f64", [](double x) { return rounded_down(x); });
    between_floats<float, double>(t, ".rp", "f32.f64", [](double x) { return -rounded_down(-x); });
    between_floats<float, double>(t, ".rz", "f32.f64",
                                  [](double x) { return x < 0 ? -rounded_down(-x) : rounded_down(x); });
    define(t, "cvt.rn.sat.f16.f32", 1, [](word a, word, word) { return narrow<5>(put(saturated(get<float>(a)))); });
    define(t, "cvt.sat.f32.f16", 1, [](word a, word, word) { return put(saturated(get<float>(widen<5>(a)))); });
}

void conversions(table& t) {
    // Conversions to 8 bits aren't supported: no register is that narrow, so the other bits would
    // be undefined.
    conversions_to<std::uint16_t>(t, "u16");
    conversions_to<std::int16_t>(t, "s16");
    conversions_to<std::uint32_t>(t, "u32");
    conversions_to<std::int32_t>(t, "s32");
    conversions_to<std::uint64_t>(t, "u64");
    conversions_to<std::int64_t>(t, "s64");
    to_nearest_float<std::uint16_t>(t, "u16");
    to_nearest_float<std::int16_t>(t, "s16");
    between_floats_and<std::uint32_t>(t, "u32");
    between_floats_and<std::int32_t>(t, "s32");
    between_floats_and<std::uint64_t>(t, "u64");
    between_floats_and<std::int64_t>(t, "s64");
    define(t, "cvt.rn.f16.f32", 1, [](word a, word, word) { return narrow<5>(a); });
    define(t, "cvt.rn.bf16.f32", 1, [](word a, word, word) { return narrow<8>(a); });
    define(t, "cvt.f32.f16", 1, [](word a, word, word) { return widen<5>(a); });
    define(t, "cvt.f32.bf16", 1, [](word a, word, word) { return widen<8>(a); });
    // 9.7.9.20: all addresses are generic here; see memory.hpp.
    for (const std::string space : {"to.global.", "global.", "param.", "to.param.", "local.", "to.local."})
        define(t, "cvta." + space + "u64", 1, [](word a, word, word) { return a; });
}

// ---- 9.7.9.7: permuted bytes, without a mode

word permuted(word a, word b, word selection) {
    const word both = (a & 0xffff'ffff) | b << 32;
    word result = 0;
    for (unsigned byte = 0; byte < 4; ++byte) {
        const word choice = selection >> 4 * byte & 0xf;
        word chosen = both >> 8 * (choice & 7) & 0xff;
        if ((choice & 8) != 0) chosen = (chosen & 0x80) != 0 ? 0xff : 0;  // its sign, over all bits
        result |= chosen << 8 * byte;
    }
    return result;
}

// ---- 9.7.1.18 and 9.7.1.19: fields of bits

/// `place`: the field's first bit plus 256 times its length, combined by decode.cpp.
template <class T>
word inserted(word a, word b, word place) {
    const word first = place & 0xff, length = place >> 8;
    const T low = length < bits<T> ? static_cast<T>((T{1} << length) - 1) : static_cast<T>(~T{0});
    if (first >= bits<T> || length == 0) return put(get<T>(b));
    const T mask = static_cast<T>(low << first);
    return put(static_cast<T>((static_cast<T>(get<T>(a) << first) & mask) | (get<T>(b) & static_cast<T>(~mask))));
}

/// Bits beyond the word are the field's sign, or 0.
template <class T>
word extracted(word a, word place, word length_operand) {
    const unsigned first = place & 0xff, length = length_operand & 0xff;
    const T x = get<T>(a);
    if (length == 0) return put(T{0});
    const T shifted = first < bits<T> ? static_cast<T>(x >> first) : static_cast<T>(x < T{0} ? -1 : 0);
    if (length >= bits<T>) return put(shifted);
    using u = wrapping<T>;
    const unsigned rest = bits<T> - length;
    return put(static_cast<T>(static_cast<T>(static_cast<u>(shifted) << rest) >> rest));
}

table make_table() {
    table t;
    integers<std::uint16_t>(t, "u16");
    integers<std::int16_t>(t, "s16");
    integers<std::uint32_t>(t, "u32");
    integers<std::int32_t>(t, "s32");
    integers<std::uint64_t>(t, "u64");
    integers<std::int64_t>(t, "s64");
    fields<std::uint32_t>(t, "32");
    fields<std::uint64_t>(t, "64");
    logic<std::uint16_t>(t, "b16");
    logic<std::uint32_t>(t, "b32");
    logic<std::uint64_t>(t, "b64");
    predicates(t);
    equalities<std::uint16_t>(t, "b16");
    equalities<std::uint32_t>(t, "b32");
    equalities<std::uint64_t>(t, "b64");
    comparisons<std::uint16_t>(t, "u16");
    comparisons<std::int16_t>(t, "s16");
    comparisons<std::uint32_t>(t, "u32");
    comparisons<std::int32_t>(t, "s32");
    comparisons<std::uint64_t>(t, "u64");
    comparisons<std::int64_t>(t, "s64");
    for (const std::string letter : {"b", "u", "s"}) {
        moves<std::uint16_t>(t, letter + "16");
        moves<std::uint32_t>(t, letter + "32");
        moves<std::uint64_t>(t, letter + "64");
    }
    moves<std::uint32_t>(t, "f32");  // a move keeps all bits
    float_comparisons(t);
    moves<std::uint64_t>(t, "f64");
    floats(t);
    approximations(t);
    doubles(t);
    conversions(t);
    float_conversions(t);
    define(t, "prmt.b32", 3, permuted);
    define(t, "bfi.b32", 3, inserted<std::uint32_t>);
    define(t, "bfi.b64", 3, inserted<std::uint64_t>);
    define(t, "bfe.u32", 3, extracted<std::uint32_t>);
    define(t, "bfe.s32", 3, extracted<std::int32_t>);
    define(t, "bfe.u64", 3, extracted<std::uint64_t>);
    define(t, "bfe.s64", 3, extracted<std::int64_t>);
    return t;
}

const table& all() {
    static const table t = make_table();
    return t;
}

}  // namespace

const pure* find_pure(std::string_view opcode) {
    const auto at = all().find(opcode);
    return at == all().end() ? nullptr : &at->second;
}

std::vector<std::string_view> pure_opcodes() {
    std::vector<std::string_view> names;
    for (const auto& [name, f] : all()) names.push_back(name);
    return names;
}

}  // namespace ptx
