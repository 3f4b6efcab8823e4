// SPDX-License-Identifier: Apache-2.0
// Tenant specifications as plain text, for configuration files and command lines.
//
//   auto chat = gpushare::parse_specification("name=chat memory=12GiB devices=4 compute=30% priority=2");
//
// Pairs of key=value, with blanks or line ends between; where a # stands instead of a key, the rest of the line is a
// comment. Keys:
//   name       anything without blanks, up to 63 characters
//   memory     of all devices together: a whole number of B, KiB, MiB, GiB or TiB
//   burst      likewise
//   unit       in which memory and burst are whole on each device
//   devices    how many, 1 to 1024
//   on         which: device numbers with commas between
//   compute    of the time of each device: 0.1% to 100%, in steps of 0.1%
//   priority   -1000 to 1000; 0 is ordinary
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/parse.hpp>
#include <gpushare/interop/detail/specification_fields.hpp>
#include <gpushare/interop/specification_error.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

inline constexpr std::array iec_units{text_unit{"B", 1}, text_unit{"KiB", 1ULL << 10}, text_unit{"MiB", 1ULL << 20},
                                      text_unit{"GiB", 1ULL << 30}, text_unit{"TiB", 1ULL << 40}};

[[nodiscard]] inline bytes checked_bytes(std::string_view key, std::string_view value, std::uint64_t least) {
    return bytes{checked(parse_scaled(value, iec_units), key, value, least,
                         std::numeric_limits<std::uint64_t>::max() - 1,
                         "a whole number of B, KiB, MiB, GiB or TiB, such as 12GiB")};
}

[[nodiscard]] inline share checked_share(std::string_view key, std::string_view value) {
    constexpr std::string_view allowed = "0.1% to 100%, in steps of 0.1%";
    const auto number =
        value.ends_with('%') ? parse_percent(value.substr(0, value.size() - 1)) : parsed{0, parse_code::no_number};
    return share::of_permille(checked(number, key, value, 1, 1000, allowed));
}

[[nodiscard]] inline priority checked_priority(std::string_view key, std::string_view value) {
    const bool negative = value.starts_with('-');
    const auto n =
        checked(parse_whole(value.substr(negative ? 1 : 0)), key, value, 0, 1000, "a whole number from -1000 to 1000");
    return {negative ? -static_cast<std::int32_t>(n) : static_cast<std::int32_t>(n)};
}

inline void read_plain(specification_fields& f, std::string_view key, std::string_view value) {
    using kind = specification_error::kind;
    f.see(key);
    if (key == "name") {
        if (value.empty() || value.size() > longest_name)
            throw specification_error(kind::bad_value, key, "must be 1 to 63 characters");
        f.set(f.name, std::string(value), key);
    } else if (key == "memory") {
        f.set(f.memory, checked_bytes(key, value, 1), key);
    } else if (key == "burst") {
        f.set(f.burst, checked_bytes(key, value, 0), key);
    } else if (key == "unit") {
        f.set(f.unit, checked_bytes(key, value, 1), key);
    } else if (key == "devices") {
        f.set(f.devices, checked_devices(key, value), key);
    } else if (key == "on") {
        f.set(f.on, checked_ids(key, value), key);
    } else if (key == "compute") {
        f.set(f.compute, checked_share(key, value), key);
    } else if (key == "priority") {
        f.set(f.level, checked_priority(key, value), key);
    } else {
        throw specification_error(kind::unknown_key, key.substr(0, longest_name),
                                  "is none of name, memory, burst, unit, devices, on, compute, priority");
    }
}

}  // namespace detail

/// The keys at the top of the file, as pairs. What isn't given is as in `defaults`. Throws specification_error.
template <key_values Pairs>
[[nodiscard]] tenant_spec read_specification(Pairs&& pairs, tenant_spec defaults = {}) {
    detail::specification_fields f;
    for (auto&& pair : pairs) detail::read_plain(f, pair.first, pair.second);
    return f.finish(std::move(defaults));
}

/// The same from text. A word without `=` is an unknown key.
[[nodiscard]] inline tenant_spec parse_specification(std::string_view text, tenant_spec defaults = {}) {
    constexpr std::string_view blanks = " \t\r\n";
    detail::specification_fields f;
    while (!text.empty()) {
        const auto begin = text.find_first_not_of(blanks);
        if (begin == std::string_view::npos) break;
        text.remove_prefix(begin);
        if (text.front() == '#') {
            text.remove_prefix(std::min(text.find('\n'), text.size()));
            continue;
        }
        const auto word = text.substr(0, text.find_first_of(blanks));
        text.remove_prefix(word.size());
        const auto equals = word.find('=');
        if (equals == std::string_view::npos)
            throw specification_error(specification_error::kind::unknown_key, word.substr(0, detail::longest_name),
                                      "must be a key, '=' and a value, without blanks");
        detail::read_plain(f, word.substr(0, equals), word.substr(equals + 1));
    }
    return f.finish(std::move(defaults));
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
