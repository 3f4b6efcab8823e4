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
//   slice      which slice of each device's SMs: a number from 0, or any
//   cap        the most of the time of each device, as compute; soft_cap: no or yes, for while nobody else wants it
//   slo        how long after its arrival work is due: a whole number of ns, us, ms or s; 0s: no objective
//   longest    the longest kernel, likewise; 0s: learnt
//   group      its class in a tree of policies: a number from 0
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

inline constexpr std::array time_units{text_unit{"ns", 1}, text_unit{"us", 1'000}, text_unit{"ms", 1'000'000},
                                       text_unit{"s", 1'000'000'000}};

[[nodiscard]] inline ns checked_time(std::string_view key, std::string_view value) {
    return ns{checked(parse_scaled(value, time_units), key, value, 0, std::numeric_limits<ns::rep>::max(),
                      "a whole number of ns, us, ms or s, such as 20ms")};
}

// Below any_slice, which no number means.
[[nodiscard]] inline std::uint32_t checked_index(std::string_view key, std::string_view value) {
    return static_cast<std::uint32_t>(
        checked(parse_whole(value), key, value, 0, any_slice - 1, "a whole number from 0 to 4294967294"));
}

[[nodiscard]] inline bool checked_flag(std::string_view key, std::string_view value) {
    if (value == "yes" || value == "no") return value == "yes";
    return checked({0, parse_code::no_number}, key, value, 0, 0, "yes or no") != 0;  // throws
}

[[nodiscard]] inline std::string checked_name(std::string_view key, std::string_view value) {
    if (value.empty() || value.size() > longest_name)
        throw specification_error(specification_error::kind::bad_value, key, "must be 1 to 63 characters");
    return std::string(value);
}

struct plain_key {
    std::string_view name;
    void (*read)(specification_fields&, std::string_view key, std::string_view value);
};
/// Every field of a tenant_spec, in the order in which an error lists them.
inline constexpr std::array plain_keys{
    plain_key{"name", [](auto& f, auto key, auto value) { f.set(f.name, checked_name(key, value), key); }},
    plain_key{"memory", [](auto& f, auto key, auto value) { f.set(f.memory, checked_bytes(key, value, 1), key); }},
    plain_key{"burst", [](auto& f, auto key, auto value) { f.set(f.burst, checked_bytes(key, value, 0), key); }},
    plain_key{"unit", [](auto& f, auto key, auto value) { f.set(f.unit, checked_bytes(key, value, 1), key); }},
    plain_key{"devices", [](auto& f, auto key, auto value) { f.set(f.devices, checked_devices(key, value), key); }},
    plain_key{"on", [](auto& f, auto key, auto value) { f.set(f.on, checked_ids(key, value), key); }},
    plain_key{"compute", [](auto& f, auto key, auto value) { f.set(f.compute, checked_share(key, value), key); }},
    plain_key{"priority", [](auto& f, auto key, auto value) { f.set(f.level, checked_priority(key, value), key); }},
    plain_key{"slice", [](auto& f, auto key,
                          auto value) { f.set(f.slice, value == "any" ? any_slice : checked_index(key, value), key); }},
    plain_key{"cap", [](auto& f, auto key, auto value) { f.set(f.cap, checked_share(key, value), key); }},
    plain_key{"soft_cap", [](auto& f, auto key, auto value) { f.set(f.soft_cap, checked_flag(key, value), key); }},
    plain_key{"slo", [](auto& f, auto key, auto value) { f.set(f.slo, checked_time(key, value), key); }},
    plain_key{"longest", [](auto& f, auto key, auto value) { f.set(f.longest, checked_time(key, value), key); }},
    plain_key{"group", [](auto& f, auto key, auto value) { f.set(f.group, checked_index(key, value), key); }}};

inline void read_plain(specification_fields& f, std::string_view key, std::string_view value) {
    f.see(key);
    for (const auto& k : plain_keys)
        if (k.name == key) return k.read(f, key, value);
    std::string known = "is none of ";
    for (const auto& k : plain_keys) known.append(&k == plain_keys.data() ? "" : ", ").append(k.name);
    throw specification_error(specification_error::kind::unknown_key, key.substr(0, longest_name), known);
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
