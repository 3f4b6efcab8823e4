// SPDX-License-Identifier: Apache-2.0
// Parses numbers: whole ones, with a unit, in percent. All of the text must be the number; nothing is guessed, and a
// number that is too large is told apart from text that is no number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

enum class parse_code : std::uint8_t { ok, no_number, overflow };

struct parsed {
    std::uint64_t value = 0;
    parse_code code = parse_code::ok;
};

/// Digits and nothing else: no sign, no blanks, no hexadecimal.
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

/// A whole number and right behind it one of the units; with a unit of no name, the number alone will do.
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

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
