// SPDX-License-Identifier: Apache-2.0
// Parses numbers: whole numbers, numbers with a unit, in percent, or as Kubernetes writes them. The
// whole text must be the number, and the parser guesses nothing. A number that is too large and a
// text that is no number have different results.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

enum class parse_code : std::uint8_t { ok, no_number, overflow };

struct parsed {
    std::uint64_t value = 0;
    parse_code code = parse_code::ok;
};

/// A whole number: only digits, without a sign, blanks or hexadecimal digits.
[[nodiscard]] constexpr parsed parse_whole(std::string_view text) noexcept {
    if (text.empty()) return {0, parse_code::no_number};
    constexpr auto most = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t n = 0;
    bool fits = true;
    for (const char c : text) {
        if (c < '0' || c > '9') return {0, parse_code::no_number};
        const auto digit = static_cast<std::uint64_t>(c - '0');
        fits = fits && n <= (most - digit) / 10;
        if (fits) n = n * 10 + digit;
    }
    return fits ? parsed{n, parse_code::ok} : parsed{0, parse_code::overflow};
}

struct text_unit {
    std::string_view name{};
    std::uint64_t factor = 1;
};

/// A whole number directly followed by one of the units. If there is a unit with an empty name, the
/// number alone is valid, too.
[[nodiscard]] constexpr parsed parse_scaled(std::string_view text, std::span<const text_unit> units) noexcept {
    std::size_t digits = 0;
    while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
    const auto number = parse_whole(text.substr(0, digits));
    if (number.code == parse_code::no_number) return number;
    for (const auto& u : units) {
        if (text.substr(digits) != u.name) continue;
        if (number.code == parse_code::overflow || number.value > std::numeric_limits<std::uint64_t>::max() / u.factor)
            return {0, parse_code::overflow};
        return {number.value * u.factor, parse_code::ok};
    }
    return {0, parse_code::no_number};
}

/// "30" or "30.5": hundredths, in steps of a tenth, as thousandths.
[[nodiscard]] constexpr parsed parse_percent(std::string_view text) noexcept {
    const auto dot = text.find('.');
    const auto whole = parse_whole(text.substr(0, dot));
    const auto tenths = dot == std::string_view::npos ? parsed{} : parse_whole(text.substr(dot + 1));
    if (whole.code == parse_code::no_number || tenths.code == parse_code::no_number ||
        (dot != std::string_view::npos && text.size() - dot != 2))
        return {0, parse_code::no_number};
    if (whole.code == parse_code::overflow || whole.value > std::numeric_limits<std::uint64_t>::max() / 10 - 1)
        return {0, parse_code::overflow};
    return {whole.value * 10 + tenths.value, parse_code::ok};
}

/// `n` x 2^`twos` x 5^`fives`; no_number if that isn't whole.
[[nodiscard]] constexpr parsed whole_product(std::uint64_t n, std::int64_t twos, std::int64_t fives) noexcept {
    if (n == 0) return {};
    for (; twos < 0; ++twos, n /= 2)
        if (n % 2 != 0) return {0, parse_code::no_number};
    for (; fives < 0; ++fives, n /= 5)
        if (n % 5 != 0) return {0, parse_code::no_number};
    for (const auto& [prime, times] : {std::pair{2U, twos}, std::pair{5U, fives}})
        for (auto left = times; left > 0; --left, n *= prime)
            if (n > std::numeric_limits<std::uint64_t>::max() / prime) return {0, parse_code::overflow};
    return {n, parse_code::ok};
}

/// Reads the suffix of a Kubernetes quantity, after its digits: powers of two and of ten. False for
/// any other text.
[[nodiscard]] constexpr bool parse_suffix(std::string_view suffix, std::int64_t& twos, std::int64_t& tens) noexcept {
    struct power {
        std::string_view name{};
        std::int64_t twos = 0, tens = 0;
    };
    constexpr std::array<power, 16> powers{{{""},
                                            {"n", 0, -9},
                                            {"u", 0, -6},
                                            {"m", 0, -3},
                                            {"k", 0, 3},
                                            {"M", 0, 6},
                                            {"G", 0, 9},
                                            {"T", 0, 12},
                                            {"P", 0, 15},
                                            {"E", 0, 18},
                                            {"Ki", 10, 0},
                                            {"Mi", 20, 0},
                                            {"Gi", 30, 0},
                                            {"Ti", 40, 0},
                                            {"Pi", 50, 0},
                                            {"Ei", 60, 0}}};
    for (const auto& p : powers) {
        if (p.name != suffix) continue;
        twos += p.twos;
        tens += p.tens;
        return true;
    }
    if (suffix.size() < 2 || (suffix[0] != 'e' && suffix[0] != 'E')) return false;
    const bool negative = suffix[1] == '-';
    const auto exponent = parse_whole(suffix.substr(negative || suffix[1] == '+' ? 2 : 1));
    if (exponent.code == parse_code::no_number) return false;
    // Beyond all numbers, either way: no text has enough zeros to make up for it.
    constexpr auto far = std::uint64_t{1} << 62U;
    const auto by = exponent.code == parse_code::ok && exponent.value < far ? exponent.value : far;
    tens += negative ? -static_cast<std::int64_t>(by) : static_cast<std::int64_t>(by);
    return true;
}

/// A quantity in any form that Kubernetes writes: "3k", "1.5Gi", "1e3", "3000m", "+2". A quantity
/// that isn't whole or is below 0 counts as no number. The grammar is that of apimachinery's
/// pkg/api/resource/quantity.go.
[[nodiscard]] constexpr parsed parse_quantity(std::string_view text) noexcept {
    if (text.starts_with('+')) text.remove_prefix(1);
    constexpr auto most = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t n = 0;
    // zeros that stand behind `n`, and count only if another digit follows
    std::int64_t twos = 0, tens = 0, zeros = 0;
    bool digits = false, point = false, fits = true;
    std::size_t at = 0;
    for (; at < text.size() && (text[at] == '.' || (text[at] >= '0' && text[at] <= '9')); ++at) {
        if (text[at] == '.') {
            if (std::exchange(point, true)) return {0, parse_code::no_number};
            continue;
        }
        digits = true;
        tens -= point ? 1 : 0;
        ++zeros;
        if (text[at] == '0') continue;
        for (; zeros > 0; --zeros) {
            fits = fits && n <= most / 10;
            if (fits) n *= 10;
        }
        const auto digit = static_cast<std::uint64_t>(text[at] - '0');
        fits = fits && n <= most - digit;
        if (fits) n += digit;
    }
    if (!digits || !parse_suffix(text.substr(at), twos, tens)) return {0, parse_code::no_number};
    if (!fits) return {0, parse_code::overflow};
    return whole_product(n, twos + tens + zeros, tens + zeros);
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
