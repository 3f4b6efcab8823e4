// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Each instruction that only computes, against a reference that finds the result another way: bit
// by bit, byte by byte, or by looking for the nearest neighbour.
#include "standins/ptx/arithmetic.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace {

using ptx::word;

__extension__ using wide = unsigned __int128;
__extension__ using wide_signed = __int128;
__extension__ using quad = __float128;

/// The opcodes that tests have compared with a reference so far.
std::set<std::string, std::less<>>& compared() {
    static std::set<std::string, std::less<>> names;
    return names;
}
word run(const std::string& opcode, word a, word b = 0, word c = 0) {
    const ptx::pure* const p = ptx::find_pure(opcode);
    INFO(opcode);
    REQUIRE(p != nullptr);
    if (compared().find(opcode) == compared().end()) compared().insert(opcode);
    return p->compute(a, b, c);
}
word bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
float float_of(word w) { return std::bit_cast<float>(static_cast<std::uint32_t>(w)); }

/// Words with few or many bits, at the ends and in the middle.
std::vector<word> words() {
    std::vector<word> all{0, 1, 2, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fff'ffff, 0x8000'0000, 0xffff'ffff};
    for (word w : {word{1} << 32, ~word{0} >> 1, word{1} << 63, ~word{0}}) all.push_back(w);
    word state = 88172645463325252;
    for (int i = 0; i < 40; ++i) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        all.push_back(state >> state % 60);
    }
    return all;
}
/// Floats of every exponent, with mantissas that round both ways.
std::vector<float> floats() {
    std::vector<float> all;
    for (std::uint32_t exponent = 0; exponent < 256; ++exponent)
        for (const std::uint32_t mantissa : {0U, 1U, 0x40'0000U, 0x55'5555U, 0x7f'ffffU})
            for (const std::uint32_t sign : {0U, 1U})
                all.push_back(std::bit_cast<float>(sign << 31 | exponent << 23 | mantissa));
    return all;
}

bool bit(word w, unsigned n) { return (w >> n & 1) != 0; }

}  // namespace

TEST_CASE("shifts move bits one by one, and everything out beyond the width", "[ptx]") {
    for (const unsigned width : {16U, 32U, 64U})
        for (const word a : words())
            for (word amount = 0; amount < 70; ++amount) {
                word left = 0, right = 0, arithmetic = 0;
                for (unsigned n = 0; n < width; ++n) {
                    if (n >= amount && bit(a, n - static_cast<unsigned>(amount))) left |= word{1} << n;
                    const word from = n + amount;
                    if (from < width && bit(a, static_cast<unsigned>(from))) right |= word{1} << n;
                    if (bit(a, static_cast<unsigned>(std::min<word>(from, width - 1)))) arithmetic |= word{1} << n;
                }
                const std::string w = std::to_string(width);
                const word mask = width == 64 ? ~word{0} : (word{1} << width) - 1;
                REQUIRE((run("shl.b" + w, a, amount) & mask) == left);
                REQUIRE((run("shr.u" + w, a, amount) & mask) == right);
                REQUIRE((run("shr.b" + w, a, amount) & mask) == right);
                REQUIRE((run("shr.s" + w, a, amount) & mask) == arithmetic);
            }
    CHECK(run("shl.b32", 1, 0x1'0000'0000) == 1);  // the low 32 bits of the amount count
    CHECK(run("shl.b32", 1, 0x8000'0001) == 0);
}

TEST_CASE("fields of bits are moved one by one", "[ptx]") {
    for (const unsigned width : {32U, 64U})
        for (const word a : {word{0x1234'5678'9abc'def0}, ~word{0}})
            for (word first = 0; first < 256; first += first < 70 ? 1 : 37)
                for (word length = 0; length < 256; length += length < 70 ? 1 : 37) {
                    const word b = 0x0f0f'5a5a'c3c3'8181;
                    word inserted = b, extracted = 0, extended = 0;
                    const word last = std::min<word>(first + length - 1, width - 1);
                    for (unsigned n = 0; n < width; ++n) {
                        if (n >= first && n < first + length) {
                            inserted &= ~(word{1} << n);
                            if (bit(a, static_cast<unsigned>(n - first))) inserted |= word{1} << n;
                        }
                        const bool inside = n < length && n + first < width;
                        if (inside && bit(a, static_cast<unsigned>(n + first))) extracted |= word{1} << n;
                        const bool sign = length != 0 && bit(a, static_cast<unsigned>(last));
                        if (inside ? bit(a, static_cast<unsigned>(n + first)) : sign) extended |= word{1} << n;
                    }
                    const word mask = width == 64 ? ~word{0} : 0xffff'ffff;
                    const std::string w = std::to_string(width);
                    REQUIRE((run("bfi.b" + w, a, b, first | length << 8) & mask) == (inserted & mask));
                    REQUIRE((run("bfe.u" + w, a, first, length) & mask) == extracted);
                    REQUIRE((run("bfe.s" + w, a, first, length) & mask) == extended);
                }
}

TEST_CASE("prmt picks bytes, for every selection", "[ptx]") {
    const std::uint8_t bytes[8] = {0x10, 0x91, 0x22, 0xb3, 0x44, 0xd5, 0x66, 0xf7};
    for (word selection = 0; selection < 0x10000; ++selection) {
        word expected = 0;
        for (unsigned n = 4; n-- > 0;) {
            const word nibble = selection >> 4 * n & 0xf;
            const std::uint8_t chosen = bytes[nibble & 7];
            expected = expected << 8 | (nibble < 8 ? chosen : chosen < 0x80 ? 0x00 : 0xff);
        }
        REQUIRE(run("prmt.b32", 0xb322'9110, 0xf766'd544, selection) == expected);
    }
}

TEST_CASE("products have all their bits", "[ptx]") {
    for (const word a : words())
        for (const word b : words()) {
            const wide whole = wide{a} * b;
            REQUIRE(run("mul.lo.u64", a, b) == static_cast<word>(whole));
            REQUIRE(run("mul.hi.u64", a, b) == static_cast<word>(whole >> 64));
            const auto signed_whole = wide_signed{static_cast<std::int64_t>(a)} * static_cast<std::int64_t>(b);
            REQUIRE(run("mul.hi.s64", a, b) == static_cast<word>(signed_whole >> 64));
            const word x = a & 0xffff'ffff, y = b & 0xffff'ffff;
            REQUIRE(run("mul.hi.u32", a, b) == x * y >> 32);
            REQUIRE(run("mul.wide.u32", a, b) == x * y);
            const auto both = std::int64_t{static_cast<std::int32_t>(x)} * static_cast<std::int32_t>(y);
            REQUIRE(run("mul.wide.s32", a, b) == static_cast<word>(both));
            REQUIRE(run("mul.hi.s32", a, b) == (static_cast<word>(both) >> 32 & 0xffff'ffff));
            REQUIRE(run("mad.lo.s32", a, b, 77) == ((x * y + 77) & 0xffff'ffff));
        }
}

namespace {

word cut(unsigned width, wide w) { return static_cast<word>(width == 64 ? w : w & ((wide{1} << width) - 1)); }
wide_signed exact(unsigned width, bool sign, word w) {
    const auto x = static_cast<wide_signed>(cut(width, w));
    return sign && bit(w, width - 1) ? x - (wide_signed{1} << width) : x;
}

}  // namespace

TEST_CASE("integers of every type, against numbers of 128 bits", "[ptx]") {
    for (const bool sign : {false, true})
        for (const unsigned width : {16U, 32U, 64U}) {
            const std::string type = (sign ? "s" : "u") + std::to_string(width);
            for (const word a : words())
                for (const word b : words()) {
                    INFO(type << " " << a << " " << b);
                    const wide_signed x = exact(width, sign, a), y = exact(width, sign, b), z = exact(width, sign, ~b);
                    const wide product = static_cast<wide>(x) * static_cast<wide>(y);
                    const auto is = [&](const std::string& how, wide_signed wanted) {
                        REQUIRE(run(how + "." + type, a, b, ~b) == cut(width, static_cast<wide>(wanted)));
                    };
                    is("add", x + y);
                    is("sub", x - y);
                    is("min", x < y ? x : y);
                    is("max", x < y ? y : x);
                    is("div", y == 0 ? -1 : x / y);
                    is("rem", y == 0 ? x : x % y);
                    is("mul.lo", static_cast<wide_signed>(product));
                    is("mul.hi", static_cast<wide_signed>(product >> width));
                    is("mad.lo", static_cast<wide_signed>(product + static_cast<wide>(z)));
                    if (sign) is("neg", -x);
                    if (sign) is("abs", x < 0 ? -x : x);
                    if (width < 64) {
                        const wide more = static_cast<wide>(exact(2 * width, sign, ~b));
                        REQUIRE(run("mul.wide." + type, a, b) == cut(2 * width, product));
                        REQUIRE(run("mad.wide." + type, a, b, ~b) == cut(2 * width, product + more));
                    }
                    REQUIRE(run("setp.eq." + type, a, b) == (x == y ? 1 : 0));
                    REQUIRE(run("setp.ne." + type, a, b) == (x != y ? 1 : 0));
                    REQUIRE(run("setp.le." + type, a, b) == (x <= y ? 1 : 0));
                    REQUIRE(run("setp.gt." + type, a, b) == (x > y ? 1 : 0));
                }
        }
}

TEST_CASE("logic, counts, moves and choices, bit by bit", "[ptx]") {
    for (const unsigned width : {16U, 32U, 64U}) {
        const std::string w = std::to_string(width);
        for (const word a : words()) {
            word none = 0, reversed = 0, count = 0, leading = 0;
            for (unsigned n = 0; n < width; ++n) {
                none |= word{bit(a, n) ? 0U : 1U} << n;
                reversed |= word{bit(a, n) ? 1U : 0U} << (width - 1 - n);
                count += bit(a, n) ? 1 : 0;
                leading = bit(a, n) ? 0 : leading + 1;
            }
            REQUIRE(run("not.b" + w, a) == none);
            if (width > 16) {
                REQUIRE(run("popc.b" + w, a) == count);
                REQUIRE(run("clz.b" + w, a) == leading);
                REQUIRE(run("brev.b" + w, a) == reversed);
            }
            for (const word b : words()) {
                word both = 0, either = 0, one = 0;
                for (unsigned n = 0; n < width; ++n) {
                    both |= word{bit(a, n) && bit(b, n) ? 1U : 0U} << n;
                    either |= word{bit(a, n) || bit(b, n) ? 1U : 0U} << n;
                    one |= word{bit(a, n) != bit(b, n) ? 1U : 0U} << n;
                }
                REQUIRE(run("and.b" + w, a, b) == both);
                REQUIRE(run("or.b" + w, a, b) == either);
                REQUIRE(run("xor.b" + w, a, b) == one);
                for (const std::string letter : {"b", "u", "s", "f"}) {
                    if (letter == "f" && width == 16) continue;
                    REQUIRE(run("mov." + letter + w, a) == cut(width, a));
                    REQUIRE(run("selp." + letter + w, a, b, 1) == cut(width, a));
                    REQUIRE(run("selp." + letter + w, a, b, 0) == cut(width, b));
                }
            }
        }
    }
    for (const word a : {word{0}, word{1}})
        for (const word b : {word{0}, word{1}}) {
            CHECK(run("and.pred", a, b) == (a + b == 2 ? 1 : 0));
            CHECK(run("or.pred", a, b) == (a + b == 0 ? 0 : 1));
            CHECK(run("xor.pred", a, b) == (a + b == 1 ? 1 : 0));
            CHECK(run("not.pred", a) == 1 - a);
            CHECK(run("mov.pred", a) == a);
        }
    // An immediate is true where it isn't zero. nvcc writes -1.
    CHECK(run("mov.pred", ~word{0}) == 1);
    CHECK(run("not.pred", ~word{0}) == 0);
    CHECK(run("xor.pred", ~word{0}, 1) == 0);
    CHECK(run("and.pred", ~word{0}, 1) == 1);
    CHECK(run("or.pred", ~word{0}, 0) == 1);
    // All address spaces are parts of one space, so addresses don't change.
    for (const std::string space : {"to.global.", "global.", "param.", "to.param.", "local.", "to.local."})
        CHECK(run("cvta." + space + "u64", 0x1234'5678'9abc) == 0x1234'5678'9abc);
}

TEST_CASE("quotients and remainders, by zero and beyond the range too", "[ptx]") {
    for (const word a : words())
        for (const word b : words()) {
            const auto x = static_cast<std::uint32_t>(a), y = static_cast<std::uint32_t>(b);
            if (y == 0) {
                REQUIRE(run("div.u32", a, b) == 0xffff'ffff);
                continue;
            }
            REQUIRE(run("div.u32", a, b) * y + run("rem.u32", a, b) == x);
            REQUIRE(run("rem.u32", a, b) < y);
            const std::int64_t sx = static_cast<std::int32_t>(x), sy = static_cast<std::int32_t>(y);
            REQUIRE(run("div.s32", a, b) == static_cast<std::uint32_t>(sx / sy));
            REQUIRE(run("rem.s32", a, b) == static_cast<std::uint32_t>(sx % sy));
        }
}

TEST_CASE("integers are extended by their own sign, and cut to the target's width", "[ptx]") {
    for (const word a : words())
        for (const unsigned from : {8U, 16U, 32U, 64U})
            for (const unsigned to : {16U, 32U, 64U})
                for (const bool sign : {false, true}) {
                    word expected = 0;
                    for (unsigned n = 0; n < to; ++n)
                        if (n < from ? bit(a, n) : sign && bit(a, from - 1)) expected |= word{1} << n;
                    for (const std::string target : {"u", "s"}) {
                        const std::string name =
                            "cvt." + target + std::to_string(to) + (sign ? ".s" : ".u") + std::to_string(from);
                        INFO(name);
                        REQUIRE(run(name, a) == expected);
                    }
                }
}

TEST_CASE("integers become the nearest float, ties to even", "[ptx]") {
    const auto check = [](float f, quad exact) {
        // No neighbour is nearer. If a neighbour is as near, the result is even.
        const auto distance = [&](float g) { return g > exact ? g - exact : exact - g; };
        for (const float other : {std::nextafter(f, -INFINITY), std::nextafter(f, INFINITY)}) {
            REQUIRE(distance(f) <= distance(other));
            if (distance(f) == distance(other)) REQUIRE((bits_of(f) & 1) == 0);
        }
    };
    std::vector<word> all = words();
    for (unsigned shift = 24; shift < 64; ++shift)  // at, above and below the middle of two floats
        for (const word rest : {word{0}, word{1}, ~word{0}}) all.push_back((word{0x180'0001} << (shift - 24)) + rest);
    for (const word a : all) {
        check(float_of(run("cvt.rn.f32.u64", a)), static_cast<quad>(a));
        check(float_of(run("cvt.rn.f32.s64", a)), static_cast<quad>(static_cast<std::int64_t>(a)));
        check(float_of(run("cvt.rn.f32.u32", a)), static_cast<quad>(static_cast<std::uint32_t>(a)));
        check(float_of(run("cvt.rn.f32.s32", a)), static_cast<quad>(static_cast<std::int32_t>(a)));
        check(float_of(run("cvt.rn.f32.u16", a)), static_cast<quad>(static_cast<std::uint16_t>(a)));
        check(float_of(run("cvt.rn.f32.s16", a)), static_cast<quad>(static_cast<std::int16_t>(a)));
    }
}

TEST_CASE("floats become integers as the rounding says, or the nearest end of the range", "[ptx]") {
    for (const float x : floats()) {
        const auto clamped = [&](double rounded, double least, double most) {
            return std::isnan(rounded) ? 0.0 : std::min(std::max(rounded, least), most);
        };
        const double d = x, below = std::floor(d), up = std::ceil(d);
        const double nearest = d - below < up - d || (d - below == up - d && std::fmod(below, 2) == 0) ? below : up;
        for (const auto& [how, rounded] : std::vector<std::pair<std::string, double>>{
                 {"rni", nearest}, {"rzi", d < 0 ? up : below}, {"rmi", below}, {"rpi", up}}) {
            const double s = clamped(rounded, -2147483648.0, 2147483647.0), u = clamped(rounded, 0, 4294967295.0);
            INFO(how << " of " << x);
            REQUIRE(run("cvt." + how + ".s32.f32", bits_of(x)) ==
                    static_cast<std::uint32_t>(static_cast<std::int64_t>(s)));
            REQUIRE(run("cvt." + how + ".u32.f32", bits_of(x)) == static_cast<std::uint32_t>(u));
            // Integers of 64 bits, whose limits a double doesn't hold. A NaN becomes the smallest
            // integer (9.7.9.21).
            const auto within = [&](double first_above, word most, double least, word smallest) {
                if (std::isnan(rounded)) return word{1} << 63;
                if (rounded >= first_above) return most;
                if (rounded < least) return smallest;
                return static_cast<word>(static_cast<wide_signed>(rounded));
            };
            REQUIRE(run("cvt." + how + ".s64.f32", bits_of(x)) ==
                    within(0x1p63, ~word{0} >> 1, -0x1p63, word{1} << 63));
            REQUIRE(run("cvt." + how + ".u64.f32", bits_of(x)) == within(0x1p64, ~word{0}, 0, 0));
        }
    }
}

namespace {

/// Every value of a 16-bit format, the middles between neighbours, and the floats just beside all
/// of these.
template <class Check>
void for_each_decisive(const std::string& widening, std::uint32_t infinity, Check check) {
    for (std::uint32_t code = 0; code <= infinity; code += support::stride) {
        const float low = float_of(run(widening, code));
        const float high = code + 1 < infinity ? float_of(run(widening, code + 1)) : INFINITY;
        // The middle of the largest value and infinity is where the next value would be, had the
        // format one.
        const float below = code == 0 ? 0 : float_of(run(widening, code - 1));
        const float middle = code + 1 < infinity ? low + (high - low) / 2 : low + (low - below) / 2;
        for (const float x : {low, middle, std::nextafter(low, INFINITY), std::nextafter(middle, 0.0F),
                              std::nextafter(middle, INFINITY)}) {
            if (code == infinity || std::isinf(x)) continue;
            const std::uint32_t expected = x < middle || (x == middle && code % 2 == 0) ? code : code + 1;
            check(x, expected);
        }
    }
}

}  // namespace

TEST_CASE("fp16 and bf16 are the nearest, ties to even; any NaN is the canonical one", "[ptx]") {
    // All of them, read by the definition of the format.
    for (std::uint32_t code = 0; code < 0x10000; code += support::stride) {
        const bool half_special = (code >> 10 & 0x1f) == 0x1f, wide_special = (code >> 7 & 0xff) == 0xff;
        const double sign = code >> 15 != 0 ? -1 : 1;
        if (!half_special) {
            const int exponent = static_cast<int>(code >> 10 & 0x1f);
            const double value =
                sign * std::ldexp((exponent == 0 ? 0 : 1024) + (code & 0x3ff), std::max(exponent, 1) - 25);
            REQUIRE(run("cvt.f32.f16", code) == bits_of(static_cast<float>(value)));
            REQUIRE(run("cvt.rn.f16.f32", run("cvt.f32.f16", code)) == code);
        }
        if (!wide_special) {
            REQUIRE(run("cvt.f32.bf16", code) == code << 16);
            REQUIRE(run("cvt.rn.bf16.f32", code << 16) == code);
        }
        if (half_special && (code & 0x3ff) != 0) REQUIRE(run("cvt.f32.f16", code) == 0x7fff'ffff);
        if (wide_special && (code & 0x7f) != 0) REQUIRE(run("cvt.rn.bf16.f32", code << 16) == 0x7fff);
    }
    const auto check = [](const std::string& narrowing) {
        return [narrowing](float x, std::uint32_t expected) {
            INFO(narrowing << " of " << x);
            REQUIRE(run(narrowing, bits_of(x)) == expected);
            REQUIRE(run(narrowing, bits_of(-x)) == (expected | 0x8000));
        };
    };
    for_each_decisive("cvt.f32.f16", 0x7c00, check("cvt.rn.f16.f32"));
    for_each_decisive("cvt.f32.bf16", 0x7f80, check("cvt.rn.bf16.f32"));
    CHECK(run("cvt.rn.f16.f32", bits_of(INFINITY)) == 0x7c00);
    CHECK(run("cvt.rn.bf16.f32", bits_of(-INFINITY)) == 0xff80);
    CHECK(run("cvt.rn.f16.f32", bits_of(65520.0F)) == 0x7c00);
    CHECK(run("cvt.rn.f16.f32", 0xff80'0001) == 0x7fff);
}

namespace {

/// The effects of .ftz and .sat on a float, computed from its bits.
word flushed(bool flush, word x) { return flush && (x & 0x7f80'0000) == 0 ? x & 0x8000'0000 : x; }
word saturated(bool saturate, word x) {
    if (!saturate) return x;
    const bool nan = (x & 0x7fff'ffff) > 0x7f80'0000;
    return nan || x >= 0x8000'0000 ? 0 : std::min<word>(x, 0x3f80'0000);
}
word as_word(double x) { return std::bit_cast<word>(x); }
std::string modifiers(bool flush, bool saturate) { return std::string(flush ? ".ftz" : "") + (saturate ? ".sat" : ""); }

/// Doubles at and beside floats, between them, and beyond all.
std::vector<double> doubles() {
    std::vector<double> all{1e300, -1e300, 5e-324, -5e-324, 0x1.ffffffp127, -0x1.ffffffp127, 0x1p-150, -0x1p-150};
    for (const float x : floats())
        for (const double toward : {0.0, HUGE_VAL, -HUGE_VAL})
            for (const double more : {1.0, 1 + 0x1p-25, 1 + 0x1p-24, 1 + 0x1.8p-24})
                all.push_back(std::nextafter(more * static_cast<double>(x), toward));
    for (const float x : floats()) all.push_back(static_cast<double>(x));
    return all;
}

}  // namespace

TEST_CASE("floats are flushed and saturated as the modifiers say", "[ptx]") {
    for (const float x : floats())
        for (const bool flush : {false, true})
            for (const bool saturate : {false, true}) {
                const double d = x, below = std::floor(d), up = std::ceil(d);
                const double nearest =
                    d - below < up - d || (d - below == up - d && std::fmod(below, 2) == 0) ? below : up;
                for (const auto& [how, rounded] : std::vector<std::pair<std::string, double>>{
                         {"", d}, {".rni", nearest}, {".rzi", d < 0 ? up : below}, {".rmi", below}, {".rpi", up}}) {
                    const bool gone = flush && std::fpclassify(x) == FP_SUBNORMAL;  // before it is rounded
                    const word whole = bits_of(static_cast<float>(std::copysign(gone ? 0.0 : rounded, d)));
                    const word wanted = std::isnan(x) ? word{0x7fff'ffff} : whole;
                    const std::string name = "cvt" + how + modifiers(flush, saturate);
                    INFO(name << " of " << x);
                    REQUIRE(run(name + ".f32.f32", bits_of(x)) == saturated(saturate, wanted));
                    if (flush) continue;
                    const word wide = as_word(static_cast<double>(float_of(saturated(saturate, wanted))));
                    REQUIRE((run(name + ".f64.f64", as_word(d)) == wide || (std::isnan(x) && !saturate)));
                }
                const word wanted = saturated(saturate, flushed(flush, bits_of(x)));
                const auto wide =
                    std::bit_cast<double>(run("cvt" + modifiers(flush, saturate) + ".f64.f32", bits_of(x)));
                REQUIRE((std::isnan(x) && !saturate ? std::isnan(wide)
                                                    : as_word(wide) == as_word(static_cast<double>(float_of(wanted)))));
            }
    for (const word nan : {0x7fff'ffffU, 0xffc0'0000U, 0x7f80'0001U}) CHECK(run("cvt.sat.f32.f32", nan) == 0);
    CHECK(run("cvt.sat.f32.f32", bits_of(-0.0F)) == 0);
    CHECK(run("cvt.sat.f64.f64", as_word(-0.0)) == 0);
    CHECK(run("cvt.sat.f64.f64", as_word(std::nan(""))) == 0);
    CHECK(run("cvt.sat.f32.f32", bits_of(-INFINITY)) == 0);
    CHECK(run("cvt.sat.f32.f32", bits_of(INFINITY)) == bits_of(1));
    CHECK(run("cvt.sat.f32.f32", 1) == 1);  // a subnormal
    CHECK(run("cvt.ftz.sat.f32.f32", 1) == 0);
    CHECK(run("cvt.ftz.f32.f32", 0x8000'0001) == 0x8000'0000);
    for (std::uint32_t code = 0; code < 0x10000; ++code) {
        const word wide = run("cvt.f32.f16", code);
        REQUIRE(run("cvt.sat.f32.f16", code) == saturated(true, wide));
        REQUIRE(run("cvt.rn.sat.f16.f32", wide) == run("cvt.rn.f16.f32", saturated(true, wide)));
    }
}

TEST_CASE("doubles become floats in every direction", "[ptx]") {
    for (const double d : doubles()) {
        const auto to = [&](const std::string& how) { return float_of(run("cvt." + how + ".f32.f64", as_word(d))); };
        if (std::isnan(d)) {
            for (const std::string how : {"rn", "rm", "rp", "rz"}) REQUIRE(bits_of(to(how)) == 0x7fff'ffff);
            continue;
        }
        INFO(d);
        const float down = to("rm"), up = to("rp"), nearest = to("rn");
        REQUIRE(static_cast<double>(down) <= d);
        REQUIRE(static_cast<double>(up) >= d);
        REQUIRE((down == up || std::nextafter(down, INFINITY) == up));
        REQUIRE((down == up) == (static_cast<double>(down) == d));
        REQUIRE(bits_of(to("rz")) == bits_of(d < 0 || (d == 0 && std::signbit(d)) ? up : down));
        REQUIRE((nearest == down || nearest == up));
        for (const auto& [how, plain] :
             std::vector<std::pair<std::string, float>>{{"rn", nearest}, {"rm", down}, {"rp", up}, {"rz", to("rz")}}) {
            REQUIRE(bits_of(to(how + ".ftz")) == flushed(true, bits_of(plain)));
            REQUIRE(bits_of(to(how + ".sat")) == saturated(true, bits_of(plain)));
            REQUIRE(bits_of(to(how + ".ftz.sat")) == saturated(true, flushed(true, bits_of(plain))));
        }
    }
}

TEST_CASE("an fma that is rounded down is the greatest float that isn't above", "[ptx]") {
    const auto fma = [](float a, float b, float c) {
        return float_of(run("fma.rm.f32", bits_of(a), bits_of(b), bits_of(c)));
    };
    support::random any(support::seed(2));
    for (int i = 0; i < support::few(40'000); ++i) {
        const auto some = [&](unsigned exponents) {  // so near that 113 bits hold the exact result
            const float x =
                std::ldexp(static_cast<float>(1 + any.below(1U << 24)), static_cast<int>(any.below(exponents)) - 30);
            return any.one_in(2) ? x : -x;
        };
        const float a = some(20), b = some(20);
        const float c = any.one_in(3) ? -a * b : some(50);
        const quad exact = quad{a} * b + c;
        const float got = fma(a, b, c);
        REQUIRE(quad{got} <= exact);
        REQUIRE(quad{std::nextafter(got, INFINITY)} > exact);
    }
    const float most = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
    CHECK(fma(most, 2, 0) == most);
    CHECK(fma(-most, 2, 0) == -INFINITY);
    CHECK(bits_of(fma(least, 0.5F, 0)) == 0);
    CHECK(fma(-least, 0.5F, 0) == -least);
    CHECK(fma(1, 1, -least) == std::nextafter(1.0F, 0.0F));
    CHECK(bits_of(fma(1, 1, -1)) == 0x8000'0000);  // a difference that is zero is -0 when rounded down
    CHECK(bits_of(fma(0, 1, -0.0F)) == 0x8000'0000);
    CHECK(bits_of(fma(0, 1, 0)) == 0);
    CHECK(fma(INFINITY, 1, 1) == INFINITY);
    CHECK(bits_of(fma(INFINITY, 0, 1)) == 0x7fff'ffff);
}

TEST_CASE("approximations are as near as the ISA says, and know the ends", "[ptx]") {
    const auto power = [](float x) { return float_of(run("ex2.approx.ftz.f32", bits_of(x))); };
    for (int i = -126 * 64; i < 128 * 64; ++i) {
        const float x = static_cast<float>(i) / 64 + 0x1.5p-9F;
        const long double exact = std::exp2(static_cast<long double>(x));
        REQUIRE(std::fabs(static_cast<long double>(power(x)) - exact) <= exact * 0x1p-22L);
    }
    CHECK(power(-3) == 0.125F);
    CHECK(bits_of(power(-INFINITY)) == 0);
    CHECK(bits_of(power(-126.5F)) == 0);  // a subnormal
    CHECK(power(128) == INFINITY);
    CHECK(power(0) == 1);
    CHECK(power(-0x1p-140F) == 1);
    CHECK(bits_of(power(std::nanf(""))) == 0x7fff'ffff);

    const auto reciprocal = [](double x) { return std::bit_cast<double>(run("rcp.approx.ftz.f64", as_word(x))); };
    for (const double d : doubles()) {
        if (!(std::fabs(d) > 1e-300 && std::fabs(d) < 1e300)) continue;
        REQUIRE(std::fabs(reciprocal(d) * d - 1) <= 0x1p-19);
        REQUIRE((as_word(reciprocal(d)) & 0xffff'ffff) == 0);
        REQUIRE(as_word(reciprocal(d)) == as_word(reciprocal(std::bit_cast<double>(as_word(d) | 0xffff'ffff))));
    }
    CHECK(as_word(reciprocal(INFINITY)) == 0);
    CHECK(as_word(reciprocal(-INFINITY)) == as_word(-0.0));
    CHECK(reciprocal(-0.0) == -INFINITY);
    CHECK(reciprocal(5e-324) == INFINITY);
    CHECK(as_word(reciprocal(0x1p1023 * 1.5)) == 0);  // a subnormal
    CHECK(std::isnan(reciprocal(std::bit_cast<double>(word{0x7ff0'0000'0000'0001}))));
}

TEST_CASE("sums, products, quotients, roots and fma are rounded once", "[ptx]") {
    // With exponents so near that 113 bits hold the exact result; a quotient and a root are far
    // from any middle there.
    const auto nearest = [](quad exact) { return bits_of(static_cast<float>(exact)); };
    support::random any(support::seed(1));
    for (int i = 0; i < support::few(20'000); ++i) {
        const auto some = [&] {
            const float x =
                std::ldexp(static_cast<float>(1 + any.below(1U << 24)), static_cast<int>(any.below(20)) - 30);
            return any.one_in(2) ? x : -x;
        };
        const float a = some(), b = some(), c = some();
        for (const std::string rounding : {".", ".rn."}) {
            REQUIRE(run("add" + rounding + "f32", bits_of(a), bits_of(b)) == nearest(quad{a} + b));
            REQUIRE(run("sub" + rounding + "f32", bits_of(a), bits_of(b)) == nearest(quad{a} - b));
            REQUIRE(run("mul" + rounding + "f32", bits_of(a), bits_of(b)) == nearest(quad{a} * b));
        }
        REQUIRE(run("div.rn.f32", bits_of(a), bits_of(b)) == nearest(quad{a} / b));
        REQUIRE(run("rcp.rn.f32", bits_of(a)) == nearest(quad{1} / a));
        REQUIRE(run("neg.f32", bits_of(a)) == (bits_of(a) ^ 0x8000'0000));
        REQUIRE(run("abs.f32", bits_of(a)) == (bits_of(a) & 0x7fff'ffff));
        REQUIRE(run("fma.rn.f32", bits_of(a), bits_of(b), bits_of(c)) == nearest(quad{a} * b + c));
        const float root = float_of(run("sqrt.rn.f32", bits_of(std::fabs(a))));
        for (const float other : {std::nextafter(root, 0.0F), std::nextafter(root, INFINITY)}) {
            const quad middle = (quad{root} + other) / 2;
            REQUIRE((root < other ? quad{std::fabs(a)} < middle * middle : quad{std::fabs(a)} > middle * middle));
        }
    }
    for (int i = 0; i < support::few(20'000); ++i) {
        const auto some = [&] {
            const auto x = static_cast<double>(1 + any.below(std::uint64_t{1} << 53)) * 0x1p-40;
            return any.one_in(2) ? x : -x;
        };
        const auto rounded = [&](quad exact) { return as_word(static_cast<double>(exact)); };
        const double a = some(), b = some(), c = some();
        for (const std::string rounding : {".", ".rn."}) {
            REQUIRE(run("add" + rounding + "f64", as_word(a), as_word(b)) == rounded(quad{a} + b));
            REQUIRE(run("sub" + rounding + "f64", as_word(a), as_word(b)) == rounded(quad{a} - b));
            REQUIRE(run("mul" + rounding + "f64", as_word(a), as_word(b)) == rounded(quad{a} * b));
        }
        REQUIRE(run("div.rn.f64", as_word(a), as_word(b)) == rounded(quad{a} / b));
        REQUIRE(run("fma.rn.f64", as_word(a), as_word(b), as_word(c)) == rounded(quad{a} * b + c));
        REQUIRE(run("rcp.rn.f64", as_word(a)) == rounded(quad{1} / a));
        REQUIRE(run("neg.f64", as_word(a)) == rounded(-quad{a}));
        REQUIRE(run("cvt.rn.f32.f64", as_word(a)) == nearest(quad{a}));
        REQUIRE(run("cvt.f64.f32", nearest(quad{a})) == as_word(static_cast<double>(static_cast<float>(a))));
        const word whole = any.below(~word{0}) >> any.below(64);
        REQUIRE(run("cvt.rn.f64.u64", whole) == rounded(static_cast<quad>(whole)));
        const auto root = std::bit_cast<double>(run("sqrt.rn.f64", as_word(std::fabs(a))));
        for (const double other : {std::nextafter(root, 0.0), std::nextafter(root, 1e300)}) {
            const quad middle = (quad{root} + other) / 2;
            REQUIRE((root < other ? quad{std::fabs(a)} < middle * middle : quad{std::fabs(a)} > middle * middle));
        }
    }
    CHECK(run("mul.f32", bits_of(INFINITY), bits_of(0)) == 0x7fff'ffff);
    CHECK(run("add.f32", 0x7f80'0001, 0) == 0x7fff'ffff);                           // a payload doesn't come through
    CHECK(run("mul.rn.f32", bits_of(1e-30F), bits_of(1e-10F)) == bits_of(1e-40F));  // subnormal
}

TEST_CASE("the lesser and the greater of floats: zeroes have an order, a NaN has none", "[ptx]") {
    const auto place = [](std::uint32_t w) {  // among all that are ordered, by their bits
        return (w >> 31) != 0 ? -static_cast<std::int64_t>(w & 0x7fff'ffffU) - 1 : std::int64_t{w};
    };
    const auto all = floats();
    for (std::size_t i = 0; i < all.size(); i += 3)
        for (std::size_t j = 0; j < all.size(); j += 7 * support::stride) {
            const word a = bits_of(all[i]), b = bits_of(all[j]);
            const bool first = place(static_cast<std::uint32_t>(a)) < place(static_cast<std::uint32_t>(b));
            word least = first ? a : b, most = first ? b : a;
            if (std::isnan(all[i])) least = most = b;
            if (std::isnan(all[j])) least = most = std::isnan(all[i]) ? 0x7fff'ffff : a;
            REQUIRE(run("min.f32", a, b) == least);
            REQUIRE(run("max.f32", a, b) == most);
        }
}

TEST_CASE("integers are compared by as many bits as their type has", "[ptx]") {
    for (const word a : words())
        for (const word b : words())
            for (const unsigned width : {16U, 32U, 64U}) {
                const std::string w = std::to_string(width);
                const word x = a << (64 - width), y = b << (64 - width);  // without the bits above the width
                REQUIRE(run("setp.eq.b" + w, a, b) == (x == y ? 1 : 0));
                REQUIRE(run("setp.ne.b" + w, a, b) == (x == y ? 0 : 1));
                REQUIRE(run("setp.lt.u" + w, a, b) == (x < y ? 1 : 0));
                REQUIRE(run("setp.ge.u" + w, a, b) == (x < y ? 0 : 1));
                const bool less = static_cast<std::int64_t>(x) < static_cast<std::int64_t>(y);
                REQUIRE(run("setp.lt.s" + w, a, b) == (less ? 1 : 0));
                REQUIRE(run("setp.ge.s" + w, a, b) == (less ? 0 : 1));
            }
}

TEST_CASE("comparisons of floats know ordered and unordered", "[ptx]") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const float a : {0.0F, -0.0F, 1.0F, -INFINITY, nan})
        for (const float b : {0.0F, 1.0F, INFINITY, nan}) {
            const bool ordered = a == a && b == b;
            const auto holds = [&](const std::string& how) {
                return run("setp." + how + ".f32", bits_of(a), bits_of(b)) != 0;
            };
            CHECK(holds("num") == ordered);
            CHECK(holds("nan") != ordered);
            for (const auto& [how, value] : std::vector<std::pair<std::string, bool>>{
                     {"eq", a == b}, {"lt", a < b}, {"le", a <= b}, {"gt", a > b}, {"ge", a >= b}}) {
                CHECK(holds(how) == (ordered && value));
                CHECK(holds(how + "u") == (!ordered || value));
            }
            CHECK(holds("ne") == (ordered && a != b));
            CHECK(holds("neu") == (!ordered || a != b));
        }
}

TEST_CASE("an instruction that isn't in the table is nobody's guess", "[ptx]") {
    for (const char* name : {"add.rz.f64", "add.rz.f32", "cvt.rn.f16x2.f32", "cvt.s8.s32", "cvt.rn.f32.f32",
                             "ex2.approx.f32", "mul.hi.f32", "add", ""})
        CHECK(ptx::find_pure(name) == nullptr);
    CHECK(ptx::pure_opcodes().size() > 200);
}

/// Comes last: fails for opcodes that no test has compared.
TEST_CASE("zz: every instruction in the table was compared with a reference", "[ptx]") {
    std::string missed;
    for (const auto name : ptx::pure_opcodes())
        if (!compared().contains(name)) missed += std::string(name) + "\n";
    CHECK(missed == "");
}
