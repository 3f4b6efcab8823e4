// SPDX-License-Identifier: Apache-2.0
// All readers of tenant specifications share this collector of values for a tenant_spec. Each value
// is stored with the key that gave it.
//
//   specification_fields f;     f.set(f.memory, 12_GiB, "memory");     tenant_spec spec = f.finish({});
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/parse.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The values so far, each with the key that gave it.
class specification_fields {
public:
    using kind = specification_error::kind;

    /// Remembers that the key was there. Throws specification_error (duplicate).
    void see(std::string_view key) {
        for (const auto& k : seen_)
            if (k == key) throw specification_error(kind::duplicate, key, "is given twice");
        seen_.emplace_back(key);
    }

    template <class T>
    struct field {
        std::optional<T> value{};
        std::string key{};
    };
    /// Throws specification_error (contradiction) if another key gave another value.
    template <class T>
    void set(field<T>& f, T value, std::string_view key) {
        if (f.value && *f.value != value)
            throw specification_error(kind::contradiction, key, "says something else than " + f.key);
        f.value = std::move(value);
        f.key = key;
    }

    field<std::string> name;
    // in all or on each device, as the key says
    field<bytes> memory, memory_each, burst, unit, spill;
    field<std::uint32_t> devices;
    field<share> compute;
    field<priority> level, ceiling;
    field<std::vector<device_id>> on;
    field<std::uint32_t> slice, group, streams, queue_limit;
    field<memory_stack> stack;
    field<scrub_policy> scrub;
    field<share> cap, keeps, narrowest;
    field<bool> soft_cap, lends_asleep;
    field<ns> wait, slo, longest, yields_within;

    /// The given values, and the defaults for the rest. Throws specification_error (contradiction,
    /// overflow).
    [[nodiscard]] tenant_spec finish(tenant_spec spec) const {
        if (name.value) spec.name = *name.value;
        if (burst.value) spec.burst = *burst.value;
        if (unit.value) spec.unit = *unit.value;
        if (compute.value) spec.compute = *compute.value;
        if (level.value) spec.level = *level.value;
        if (ceiling.value) spec.ceiling = *ceiling.value;
        if (slice.value) spec.slice = *slice.value;
        if (streams.value) spec.streams = *streams.value;
        if (queue_limit.value) spec.queue_limit = *queue_limit.value;
        if (stack.value) spec.stack = stack.value;
        if (scrub.value) spec.scrub = scrub.value;
        if (wait.value) spec.wait = wait.value;
        if (spill.value) spec.spill = spill.value;
        if (group.value) spec.group = *group.value;
        if (narrowest.value) spec.narrowest = sm_width(narrowest.value->fraction());
        if (cap.value) spec.cap = *cap.value;
        if (soft_cap.value) spec.soft_cap = *soft_cap.value;
        if (lends_asleep.value) spec.lends_asleep = *lends_asleep.value;
        if (slo.value) spec.slo = *slo.value;
        if (longest.value) spec.longest = *longest.value;
        if (yields_within.value) spec.yields_within = *yields_within.value;
        if (keeps.value) spec.keeps = sm_width(keeps.value->fraction());
        if (on.value) {
            spec.on = *on.value;
            spec.devices = static_cast<std::uint32_t>(spec.on.size());
        }
        if (devices.value) {
            if (!spec.on.empty() && spec.on.size() != *devices.value)
                throw specification_error(
                    kind::contradiction, devices.key,
                    "is another number of devices than " + (on.value ? on.key : std::string("the default")) + " names");
            spec.devices = *devices.value;
        }
        finish_memory(spec);
        if (burst.value && spec.burst != all_burst) check_whole(spec, spec.burst, burst.key);
        return spec;
    }

private:
    void finish_memory(tenant_spec& spec) const {
        const auto& key = memory.value ? memory.key : memory_each.key;
        if (memory.value) spec.memory = *memory.value;
        if (memory_each.value) {
            const bytes all = *memory_each.value * spec.devices;
            if (all == bytes::max()) throw specification_error(kind::overflow, key, "is too much over all devices");
            if (memory.value && all != *memory.value)
                throw specification_error(kind::contradiction, key, "says something else than " + memory_each.key);
            spec.memory = all;
        }
        if (!key.empty()) check_whole(spec, spec.memory, key);
    }

    static void check_whole(const tenant_spec& spec, bytes all, std::string_view key) {
        const bytes step = spec.unit * spec.devices;
        if (step == bytes{} || all % step == bytes{}) return;
        message m;
        m.add(all, " over ", std::uint64_t{spec.devices}, " devices is not whole in units of ", spec.unit);
        throw specification_error(kind::contradiction, key, m.c_str());
    }

    std::vector<std::string> seen_;
};

/// The number in `value`, from `least` to `most`, or specification_error (bad_value, overflow):
/// "must be ...".
[[nodiscard]] inline std::uint64_t checked(parsed number, std::string_view key, std::string_view value,
                                           std::uint64_t least, std::uint64_t most, std::string_view allowed) {
    using kind = specification_error::kind;
    const bool in_range = number.value >= least && number.value <= most;
    if (number.code == parse_code::ok && in_range) return number.value;
    // Cut, because outside input may be long.
    const auto text = std::string("'").append(value.substr(0, 40)).append("': must be ").append(allowed);
    throw specification_error(number.code == parse_code::overflow ? kind::overflow : kind::bad_value, key, text);
}

[[nodiscard]] inline std::uint32_t checked_devices(std::string_view key, std::string_view value, parsed number) {
    constexpr std::uint64_t most = 1024;  // the most that a device_order_lock takes
    return static_cast<std::uint32_t>(checked(number, key, value, 1, most, "a number of devices from 1 to 1024"));
}
[[nodiscard]] inline std::uint32_t checked_devices(std::string_view key, std::string_view value) {
    return checked_devices(key, value, parse_whole(value));
}

/// "0,2": device ids.
[[nodiscard]] inline std::vector<device_id> checked_ids(std::string_view key, std::string_view value) {
    std::vector<device_id> ids;
    for (bool more = true; more;) {
        const auto comma = value.find(',');
        const auto item = value.substr(0, comma);
        const auto n =
            checked(parse_whole(item), key, item, 0, 1023, "device numbers from 0 to 1023 with commas between");
        const device_id id{static_cast<std::uint32_t>(n)};
        for (const auto other : ids)
            if (other == id)
                throw specification_error(specification_error::kind::bad_value, key, "names a device twice");
        ids.push_back(id);
        more = comma != std::string_view::npos;
        if (more) value.remove_prefix(comma + 1);
    }
    return ids;
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
