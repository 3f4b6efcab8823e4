// SPDX-License-Identifier: Apache-2.0
// Tenant specifications as plain text, for configuration files and command lines.
//
//   auto chat = gpushare::parse_specification("name=chat memory=12GiB devices=4 compute=30% priority=2");
//   for (auto& spec : gpushare::parse_specifications(text_of_a_file)) ...
//
// Pairs of key=value, with blanks or line ends between; where a # stands instead of a key, the rest of the line is a
// comment. Keys:
//  name       anything without blanks, up to 63 characters
//  memory     of all devices together: a whole number of B, KiB, MiB, GiB or TiB
//  burst      bytes beyond that, while others don't use them: as memory, or all: as much as its devices have
//  unit       in which memory and burst are whole on each device
//  devices    how many, 1 to 1024
//  on         which: device numbers with commas between
//  compute    of the time of each device: 0.1% to 100%, in steps of 0.1%; without it none is promised
//  priority   -1000 to 1000; 0 is ordinary
//  narrowest  the least part of the SMs that calls are believed to fill that declare one: 0.1% to 100%
//  ceiling    the highest priority that its requests may have: -1000 to 1000; its own
//  slice      where a device's SMs are sliced (tenancy::slice), in which slice: a number from 0, or any
//  stack      what its memory is made of: pool, direct, arena or stream_ordered (memory_stack); the tenancy's default
//  scrub      when its memory is overwritten: on_hand_over, on_free or off; the tenancy's default
//  wait       how long an allocation waits for bytes: a whole number of ns, us, ms or s; 0s: not at all
//  spill      how much may be on the host when bytes lack: as memory; 0B: nothing
//  lends_asleep  no or yes: what its guarantee leaves free while it sleeps is lent to others
//  cap        the most of the time of each device: 0.1% to 100%
//  soft_cap   no or yes: the cap holds only while others want the device
//  slo        how long after its arrival work is due: a whole number of ns, us, ms or s; 0s: no objective
//  longest    the longest kernel: a whole number of ns, us, ms or s; 0s: learnt
//  yields_within  how often its work yields at least: a whole number of ns, us, ms or s; 0s: it doesn't
//  keeps      the part of the SMs that its level keeps free of long work below: 0.1% to 100%
//  back_within  that part is lent to what gives it back within this: a whole number of ns, us, ms or s; 0s: to what is short
//  group      which class of a policy_tree it is in: a number from 0
//  streams    on each device, 1 to 1024
//  queue_limit  how many submissions may wait: a number; 0: as the limiter has it
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/parse.hpp>
#include <gpushare/interop/detail/specification_fields.hpp>
#include <gpushare/memory/scrub.hpp>
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

[[nodiscard]] inline memory_stack checked_stack(std::string_view key, std::string_view value) {
    for (const auto s : {memory_stack::pool, memory_stack::direct, memory_stack::arena, memory_stack::stream_ordered})
        if (to_string(s) == value) return s;
    return static_cast<memory_stack>(
        checked({0, parse_code::no_number}, key, value, 0, 0, "pool, direct, arena or stream_ordered"));  // throws
}

[[nodiscard]] inline scrub_policy checked_scrub(std::string_view key, std::string_view value) {
    for (const auto s : {scrub_policy::on_hand_over, scrub_policy::on_free, scrub_policy::off})
        if (to_string(s) == value) return s;
    return static_cast<scrub_policy>(
        checked({0, parse_code::no_number}, key, value, 0, 0, "on_hand_over, on_free or off"));  // throws
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
    plain_key{"burst",
              [](auto& f, auto key, auto value) {
                  f.set(f.burst, value == "all" ? all_burst : checked_bytes(key, value, 0), key);
              }},
    plain_key{"unit", [](auto& f, auto key, auto value) { f.set(f.unit, checked_bytes(key, value, 1), key); }},
    plain_key{"devices", [](auto& f, auto key, auto value) { f.set(f.devices, checked_devices(key, value), key); }},
    plain_key{"on", [](auto& f, auto key, auto value) { f.set(f.on, checked_ids(key, value), key); }},
    plain_key{"compute", [](auto& f, auto key, auto value) { f.set(f.compute, checked_share(key, value), key); }},
    plain_key{"priority", [](auto& f, auto key, auto value) { f.set(f.level, checked_priority(key, value), key); }},
    plain_key{"narrowest", [](auto& f, auto key, auto value) { f.set(f.narrowest, checked_share(key, value), key); }},
    plain_key{"ceiling", [](auto& f, auto key, auto value) { f.set(f.ceiling, checked_priority(key, value), key); }},
    plain_key{"slice", [](auto& f, auto key,
                          auto value) { f.set(f.slice, value == "any" ? any_slice : checked_index(key, value), key); }},
    plain_key{"stack", [](auto& f, auto key, auto value) { f.set(f.stack, checked_stack(key, value), key); }},
    plain_key{"scrub", [](auto& f, auto key, auto value) { f.set(f.scrub, checked_scrub(key, value), key); }},
    plain_key{"wait", [](auto& f, auto key, auto value) { f.set(f.wait, checked_time(key, value), key); }},
    plain_key{"spill", [](auto& f, auto key, auto value) { f.set(f.spill, checked_bytes(key, value, 0), key); }},
    plain_key{"lends_asleep",
              [](auto& f, auto key, auto value) { f.set(f.lends_asleep, checked_flag(key, value), key); }},
    plain_key{"cap", [](auto& f, auto key, auto value) { f.set(f.cap, checked_share(key, value), key); }},
    plain_key{"soft_cap", [](auto& f, auto key, auto value) { f.set(f.soft_cap, checked_flag(key, value), key); }},
    plain_key{"slo", [](auto& f, auto key, auto value) { f.set(f.slo, checked_time(key, value), key); }},
    plain_key{"longest", [](auto& f, auto key, auto value) { f.set(f.longest, checked_time(key, value), key); }},
    plain_key{"yields_within",
              [](auto& f, auto key, auto value) { f.set(f.yields_within, checked_time(key, value), key); }},
    plain_key{"keeps", [](auto& f, auto key, auto value) { f.set(f.keeps, checked_share(key, value), key); }},
    plain_key{"back_within",
              [](auto& f, auto key, auto value) { f.set(f.back_within, checked_time(key, value), key); }},
    plain_key{"group", [](auto& f, auto key, auto value) { f.set(f.group, checked_index(key, value), key); }},
    plain_key{"streams", [](auto& f, auto key, auto value) { f.set(f.streams, checked_devices(key, value), key); }},
    plain_key{"queue_limit",
              [](auto& f, auto key, auto value) { f.set(f.queue_limit, checked_index(key, value), key); }}};

inline void read_plain(specification_fields& f, std::string_view key, std::string_view value) {
    f.see(key);
    for (const auto& k : plain_keys)
        if (k.name == key) return k.read(f, key, value);
    std::string known = "is none of ";
    for (const auto& k : plain_keys) known.append(&k == plain_keys.data() ? "" : ", ").append(k.name);
    throw specification_error(specification_error::kind::unknown_key, key.substr(0, longest_name), known);
}

}  // namespace detail

/// The keys at the top of the file, as pairs. Values that aren't given come from `defaults`. Throws
/// specification_error.
template <key_values Pairs>
[[nodiscard]] tenant_spec read_specification(Pairs&& pairs, tenant_spec defaults = {}) {
    detail::specification_fields f;
    for (auto&& pair : pairs) detail::read_plain(f, pair.first, pair.second);
    return f.finish(std::move(defaults));
}

namespace detail {

/// Calls `read(key, value, line)` for each pair of the text; lines count from 1. Throws
/// specification_error (unknown_key) for a word without `=`, by way of `fail(error, line)`, as for
/// what `read` throws.
template <class Read, class Fail>
void for_each_pair(std::string_view text, Read read, Fail fail) {
    constexpr std::string_view blanks = " \t\r\n";
    std::size_t line = 1;
    const auto skip = [&](std::size_t length) {
        line += static_cast<std::size_t>(std::ranges::count(text.substr(0, length), '\n'));
        text.remove_prefix(length);
    };
    for (;;) {
        const auto begin = text.find_first_not_of(blanks);
        if (begin == std::string_view::npos) return;
        skip(begin);
        if (text.front() == '#') {
            skip(std::min(text.find('\n'), text.size()));
            continue;
        }
        const auto word = text.substr(0, text.find_first_of(blanks));
        const auto equals = word.find('=');
        try {
            if (equals == std::string_view::npos)
                throw specification_error(specification_error::kind::unknown_key, word.substr(0, longest_name),
                                          "must be a key, '=' and a value, without blanks");
            read(word.substr(0, equals), word.substr(equals + 1), line);
        } catch (const specification_error& e) {
            fail(e, line);
        }
        skip(word.size());
    }
}

/// The same error, with the place in the file.
[[noreturn]] inline void fail_at(const specification_error& e, std::string_view tenant, std::size_t line) {
    const std::string_view what(e.what());
    std::string text(what.substr(std::min(what.size(), e.key().size() + 2)));  // without the key
    text.append(" (line ").append(std::to_string(line));
    if (!tenant.empty()) text.append(", tenant '").append(tenant).append("'");
    throw specification_error(e.why(), e.key(), text.append(")"));
}

}  // namespace detail

/// The same from text. A word without `=` is an unknown key.
[[nodiscard]] inline tenant_spec parse_specification(std::string_view text, tenant_spec defaults = {}) {
    detail::specification_fields f;
    detail::for_each_pair(
        text, [&](std::string_view key, std::string_view value, std::size_t) { detail::read_plain(f, key, value); },
        [](const specification_error& e, std::size_t) { throw e; });
    return f.finish(std::move(defaults));
}

/// Several tenants from one text, in its order: each begins with its name. Settings before the
/// first name hold for all tenants that don't set them. Throws specification_error, whose text has
/// the line and the tenant: all as parse_specification, and duplicate for a name that is there
/// twice.
///
///   unit=1MiB devices=2
///   name=chat  memory=24GiB compute=60% priority=1
///   name=batch memory=8GiB  compute=40%
[[nodiscard]] inline std::vector<tenant_spec> parse_specifications(std::string_view text, tenant_spec defaults = {}) {
    using detail::specification_fields;
    std::vector<tenant_spec> all;
    specification_fields f;
    bool named = false;
    std::size_t begins = 1;  // the line of the tenant that is read
    bool ends = false;       // what is wrong is so with all of that tenant, not with one of its pairs
    const auto name = [&] { return f.name.value ? std::string_view(*f.name.value) : std::string_view(); };
    const auto finish = [&] {
        ends = true;
        auto spec = f.finish(defaults);
        ends = false;
        (named ? all.emplace_back() : defaults) = std::move(spec);
        f = {};
    };
    const auto read = [&](std::string_view key, std::string_view value, std::size_t line) {
        if (key == "name") {
            const std::string next = detail::checked_name(key, value);
            if (std::ranges::find(all, next, &tenant_spec::name) != all.end() || name() == next)
                throw specification_error(specification_error::kind::duplicate, key,
                                          "'" + next + "' is the name of a tenant above");
            finish();
            named = true;
            begins = line;
        }
        detail::read_plain(f, key, value);
    };
    const auto fail = [&](const specification_error& e, std::size_t line) {
        detail::fail_at(e, name(), ends ? begins : line);
    };
    detail::for_each_pair(text, read, fail);
    try {
        finish();
    } catch (const specification_error& e) {
        fail(e, begins);
    }
    return all;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
