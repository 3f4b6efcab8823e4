// SPDX-License-Identifier: Apache-2.0
// Readers of tenant specifications: plain text, for configuration files and command lines, the
// environment of a container, and resources of Kubernetes.
//
//   auto chat = gpushare::parse_specification("name=chat memory=12GiB devices=4 compute=30% priority=2");
//   for (auto& spec : gpushare::parse_specifications(text_of_a_file)) ...
//
// Pairs of key=value, with blanks or line ends between them. If a # stands in place of a key, the
// rest of the line is a comment. Keys:
//  name           anything without blanks, up to 63 characters
//  memory         guaranteed, of all devices together: a whole number of B, KiB, MiB, GiB or TiB
//  burst          bytes to borrow beyond that: as memory, or all: as much as its devices have
//  unit           memory and burst must be multiples of it on each device
//  devices        how many, 1 to 1024
//  on             which devices: numbers with commas between them
//  compute        share of each device's time: 0.1% to 100%, in steps of 0.1%; default: none
//  priority       -1000 to 1000; 0 is ordinary
//  narrowest      calls with a declared width count as at least so wide: 0.1% to 100% of the SMs
//  ceiling        the highest priority of its requests: -1000 to 1000; default: its priority
//  slice          the slice of each device (tenancy::slice): a number from 0, or any
//  stack          its kind of memory (memory_stack): pool, direct, arena or stream_ordered;
//                 default: the tenancy's
//  scrub          when its memory is overwritten: on_hand_over, on_free or off; default: the
//                 tenancy's
//  wait           how long an allocation waits for bytes: a whole number of ns, us, ms or s;
//                 0s: not at all
//  spill          bytes that may move to the host when memory is short: as memory; 0B: none
//  lends_asleep   no or yes: lends the unused part of its guarantee while it sleeps
//  cap            the most of each device's time: 0.1% to 100%
//  soft_cap       no or yes: the cap holds only while others want the device
//  slo            latency goal: how long after arrival a request is due: as wait; 0s: none
//  longest        the longest kernel: as wait; 0s: learnt
//  yields_within  the longest time between two yields of its work: as wait; 0s: doesn't yield
//  keeps          SMs that its level keeps free of long work of lower levels: 0.1% to 100%
//  group          its class in a policy_tree: a number from 0; the tree has classes to 65535
//  streams        on each device, 1 to 1024
//  queue_limit    how many submissions may wait; 0: the limiter's default
//
// read_environment and read_kubernetes make a specification of a cluster's settings for a
// container: of the environment variables that tell the container its part of the GPUs, or of the
// resources and labels by which a pod asks for parts of GPUs. They read only the values that the
// caller passes.
//
//   extern char** environ;
//   auto spec = gpushare::read_environment(environ, {.name = "this process"});
//   std::map<std::string, std::string> labels{{"aliyun.com/gpu-mem", "8"}, {"aliyun.com/gpu-count", "2"}};
//   auto pods = gpushare::read_kubernetes(labels, {.name = pod});  // 4 GiB on each of two devices
//
// Variables of Alibaba Cloud's cGPU, which shares a GPU among containers:
//  ALIYUN_COM_GPU_MEM_CONTAINER    memory of each device for this container
//  ALIYUN_COM_GPU_MEM_DEV          memory of the whole device; at least the value above
//  ALIYUN_COM_GPU_MEM_UNIT         the unit of both: GiB or GB (means GiB), MiB or MB; default: GiB
//  ALIYUN_COM_GPU_MEM_IDX          the device, or several with commas between them
//  ALIYUN_COM_GPU_VISIBLE_DEVICES  the same; UUIDs can't be resolved here
//  ALIYUN_COM_GPU_HIGH_PRIO        1: before others
//  CGPU_DISABLE                    true or 1: cGPU's variables aren't enforced, and not read
//  ALIYUN_COM_GPU_SCHD_WEIGHT      parts of each device's time, of max_inst parts in all
// max_inst is an option of cGPU's kernel module (here environment_options::cgpu_max_inst). A weight
// over 1 turns on cGPU's policy 2, which divides the time by the weights of the present containers,
// so a container never gets less than its parts. ALIYUN_COM_GPU_MEM_POD, _ASSIGNED, _ASSUME_TIME
// and _ASSIGN_TIME say nothing about a single tenant, and are skipped.
//
// Variables of HAMi, which shares GPUs in Kubernetes:
//  CUDA_DEVICE_MEMORY_LIMIT        bytes of each device, also with k, m or g; 0: no limit, so no
//                                  guarantee, and all free bytes may be used (burst)
//  CUDA_DEVICE_MEMORY_LIMIT_0, _1  of the first device, the second: all must be the same
//  CUDA_DEVICE_SM_LIMIT, _0, _1    percent of each device's time; 0: no limit, so no share, no cap
//  CUDA_TASK_PRIORITY              0: level 1, before others; 1: level 0
//  GPU_CORE_UTILIZATION_POLICY     default; other values are errors: use the tenancy's policy
//  CUDA_OVERSUBSCRIBE              false; other values are errors: use `burst` and `spill`
//
// Numbers of resources and labels may have any form that Kubernetes writes (3000 comes back as 3k),
// but must be whole. Resources and labels of Alibaba Cloud (ACK, shared GPU scheduling):
//  aliyun.com/gpu-mem              GiB of all devices together
//  aliyun.com/gpu-count            devices, on one node; gpu-mem must be a multiple of it
//  aliyun.com/gpu-core.percentage  of the time of each device, 1 to 100
// Resources of HAMi, another scheduler of shared GPUs:
//  nvidia.com/gpu                  devices
//  nvidia.com/gpumem               MiB of each device
//  nvidia.com/gpumem-percentage    of each device's memory, 1 to 100; needs to know its size
//  nvidia.com/gpucores             percent of each device's time; 0: no particular share
//  nvidia.com/priority             0: level 1, before others; 1, HAMi's default: level 0
// Every other key below aliyun.com and nvidia.com is an error, as a part of a GPU that isn't read
// would be dropped in silence: gpu.shared and mig-* name slices whose memory and share are written
// elsewhere. Keys by which nodes describe themselves (nvidia.com/gpu.product, mig.strategy,
// cuda.driver.major) and keys of others are passed over.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/parse.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/tenant/detail/specification_fields.hpp>
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

// Below any_slice, a value that no number may have.
[[nodiscard]] inline std::uint32_t checked_index(std::string_view key, std::string_view value) {
    return static_cast<std::uint32_t>(
        checked(parse_whole(value), key, value, 0, any_slice - 1, "a whole number from 0 to 4294967294"));
}

[[nodiscard]] inline bool checked_flag(std::string_view key, std::string_view value) {
    if (value == "yes" || value == "no") return value == "yes";
    return checked({0, parse_code::no_number}, key, value, 0, 0, "yes or no") != 0;  // throws
}

// One of the values of an enumeration, by its name.
template <class E>
[[nodiscard]] E checked_choice(std::string_view key, std::string_view value, std::initializer_list<E> choices,
                               std::string_view must) {
    for (const E e : choices)
        if (to_string(e) == value) return e;
    return static_cast<E>(checked({0, parse_code::no_number}, key, value, 0, 0, must));  // throws
}
[[nodiscard]] inline memory_stack checked_stack(std::string_view key, std::string_view value) {
    using enum memory_stack;
    return checked_choice(key, value, {pool, direct, arena, stream_ordered}, "pool, direct, arena or stream_ordered");
}
[[nodiscard]] inline scrub_policy checked_scrub(std::string_view key, std::string_view value) {
    using enum scrub_policy;
    return checked_choice(key, value, {on_hand_over, on_free, off}, "on_hand_over, on_free or off");
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
/// Every field of a tenant_spec, in the order of error messages.
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

/// Calls `read(key, value, line)` for each pair of the text; lines count from 1. For a
/// specification_error of `read`, and for a word without `=` (unknown_key), calls `fail(error,
/// line)`, which throws.
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
    std::size_t begins = 1;  // the first line of the tenant being read
    bool ends = false;       // the error is about the whole tenant, not one of its pairs
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

namespace detail {

/// A whole number of `scale` bytes each, at least one.
[[nodiscard]] inline bytes checked_memory(std::string_view key, std::string_view value, bytes scale,
                                          std::string_view allowed) {
    auto number = parse_quantity(value);
    if (number.code == parse_code::ok && number.value > std::numeric_limits<std::uint64_t>::max() / scale.count())
        number = {0, parse_code::overflow};
    number.value *= scale.count();
    return bytes{checked(number, key, value, 1, std::numeric_limits<std::uint64_t>::max() - 1, allowed)};
}

inline constexpr std::string_view percent_allowed = "a whole number of percent from 1 to 100";

[[nodiscard]] inline share checked_whole_percent(std::string_view key, std::string_view value) {
    return share::of_permille(checked(parse_quantity(value), key, value, 1, 100, percent_allowed) * 10);
}

inline void read_aliyun(specification_fields& f, std::string_view key, std::string_view value) {
    if (key == "aliyun.com/gpu-mem") {
        f.set(f.memory, checked_memory(key, value, 1_GiB, "a whole number of GiB, at least 1"), key);
        f.set(f.unit, 1_GiB, key);
    } else if (key == "aliyun.com/gpu-count") {
        f.set(f.devices, checked_devices(key, value, parse_quantity(value)), key);
    } else if (key == "aliyun.com/gpu-core.percentage") {
        f.set(f.compute, checked_whole_percent(key, value), key);
    } else {
        throw specification_error(specification_error::kind::unknown_key, key,
                                  "is none of aliyun.com/gpu-mem, gpu-count, gpu-core.percentage");
    }
}

inline void read_hami(specification_fields& f, std::string_view key, std::string_view value, bytes device_memory) {
    using kind = specification_error::kind;
    if (key == "nvidia.com/gpu") {
        f.set(f.devices, checked_devices(key, value, parse_quantity(value)), key);
    } else if (key == "nvidia.com/gpumem") {
        f.set(f.memory_each, checked_memory(key, value, 1_MiB, "a whole number of MiB, at least 1"), key);
    } else if (key == "nvidia.com/gpumem-percentage") {
        const auto percent = checked(parse_quantity(value), key, value, 1, 100, percent_allowed);
        if (device_memory == bytes{})
            throw specification_error(kind::contradiction, key, "can't be read without the memory of a device");
        // Takes hundredths first, so that no product can be too large.
        const auto hundredths = device_memory.count() / 100, rest = device_memory.count() % 100;
        f.set(f.memory_each, bytes{hundredths * percent + rest * percent / 100}, key);
    } else if (key == "nvidia.com/gpucores") {
        if (checked(parse_quantity(value), key, value, 0, 100, "a whole number of percent from 0 to 100") != 0)
            f.set(f.compute, checked_whole_percent(key, value), key);
    } else if (key == "nvidia.com/priority") {
        const auto hami = checked(parse_quantity(value), key, value, 0, 1, "0, before others, or 1");
        f.set(f.level, priority{hami == 0 ? 1 : 0}, key);
    } else if (key.ends_with(".shared") || key.starts_with("nvidia.com/mig-")) {
        throw specification_error(kind::unknown_key, key,
                                  "names a slice, and not its memory: say it by nvidia.com/gpumem and gpucores");
    } else {
        throw specification_error(kind::unknown_key, key,
                                  "is none of nvidia.com/gpu, gpumem, gpumem-percentage, gpucores, priority");
    }
}

/// Whether NVIDIA's feature discovery and operator label nodes with the key: no pod asks for
/// anything by it.
[[nodiscard]] inline bool describes_node(std::string_view key) noexcept {
    constexpr std::string_view domain = "nvidia.com/";
    // resources of a device plugin
    if (!key.starts_with(domain) || key.ends_with(".shared")) return false;
    key.remove_prefix(domain.size());
    constexpr std::array<std::string_view, 8> groups{"gpu.",  "mig.", "cuda.", "gfd.",
                                                     "vgpu.", "mps.", "imex.", "gpu-driver-upgrade-"};
    for (const auto group : groups)
        if (key.starts_with(group)) return true;
    // mig-1g.5gb.product: the resource mig-1g.5gb, which has one dot, of the node
    return key.starts_with("mig-") && std::count(key.begin(), key.end(), '.') > 1;
}

}  // namespace detail

/// Values that aren't given come from `defaults`. `device_memory` is one device's memory, for
/// gpumem-percentage. Throws specification_error, for unknown keys below aliyun.com and nvidia.com
/// as well (see the top of the file).
template <key_values Pairs>
[[nodiscard]] tenant_spec read_kubernetes(Pairs&& pairs, tenant_spec defaults = {}, bytes device_memory = {}) {
    detail::specification_fields f;
    for (auto&& pair : pairs) {
        const std::string_view key(pair.first), value(pair.second);
        const bool aliyun = key.starts_with("aliyun.com/");
        if (!aliyun && (!key.starts_with("nvidia.com/") || detail::describes_node(key))) continue;
        f.see(key);
        if (aliyun)
            detail::read_aliyun(f, key, value);
        else
            detail::read_hami(f, key, value, device_memory);
    }
    return f.finish(std::move(defaults));
}

namespace detail {

/// cGPU's variables. The memory is known only after the last variable, because the unit may come
/// late.
class cgpu_variables {
public:
    [[nodiscard]] static bool owns(std::string_view key) noexcept {
        return key.starts_with("ALIYUN_COM_GPU_") || key.starts_with("CGPU_");
    }

    explicit cgpu_variables(std::uint32_t max_inst) noexcept : max_inst_(max_inst) {}

    void read(specification_fields& f, std::string_view key, std::string_view value) {
        using kind = specification_error::kind;
        constexpr std::string_view prefix = "ALIYUN_COM_GPU_";
        const auto name = key.starts_with(prefix) ? key.substr(prefix.size()) : std::string_view{};
        constexpr std::array<std::string_view, 4> passed_over{"MEM_POD", "MEM_ASSIGNED", "MEM_ASSUME_TIME",
                                                              "MEM_ASSIGN_TIME"};
        if (name == "MEM_CONTAINER") {
            container_ = value;
        } else if (name == "MEM_DEV") {
            device_ = value;
        } else if (name == "MEM_UNIT") {
            const bool gib = value == "GiB" || value == "GB";
            if (!gib && value != "MiB" && value != "MB")
                throw specification_error(kind::bad_value, key, "must be GiB, GB, MiB or MB");
            unit_ = gib ? 1_GiB : 1_MiB;
        } else if (name == "MEM_IDX" || name == "VISIBLE_DEVICES") {
            f.set(f.on, checked_ids(key, value), key);
        } else if (name == "HIGH_PRIO") {
            f.set(f.level, priority{static_cast<int>(checked(parse_whole(value), key, value, 0, 1, "0 or 1"))}, key);
        } else if (name == "SCHD_WEIGHT") {
            const auto parts =
                checked(parse_whole(value), key, value, 1, max_inst_, "a whole number from 1 to cGPU's max_inst");
            const auto permille = parts * 1000 / max_inst_;  // 0 would be no share
            f.set(f.compute, share::of_permille(permille > 0 ? permille : 1), key);
        } else if (std::ranges::find(passed_over, name) == passed_over.end()) {
            throw specification_error(kind::unknown_key, key.substr(0, longest_name), "is no variable of cGPU's");
        }
    }

    void finish(specification_fields& f) const {
        constexpr std::string_view container = "ALIYUN_COM_GPU_MEM_CONTAINER", device = "ALIYUN_COM_GPU_MEM_DEV";
        constexpr std::string_view allowed = "a whole number, at least 1";
        const auto whole = device_ ? checked_memory(device, *device_, unit_, allowed) : bytes::max();
        if (!container_) return;
        const auto part = checked_memory(container, *container_, unit_, allowed);
        if (part > whole)
            throw specification_error(specification_error::kind::contradiction, container,
                                      "is more than ALIYUN_COM_GPU_MEM_DEV, which a device has");
        f.set(f.memory_each, part, container);
    }

private:
    std::uint32_t max_inst_;
    std::optional<std::string_view> container_{}, device_{};
    bytes unit_ = 1_GiB;
};

/// HAMi's variables: a limit for all devices, or one for each of them.
class hami_variables {
public:
    static constexpr std::string_view memory = "CUDA_DEVICE_MEMORY_LIMIT", sms = "CUDA_DEVICE_SM_LIMIT";
    static constexpr std::string_view urgency = "CUDA_TASK_PRIORITY", policy = "GPU_CORE_UTILIZATION_POLICY",
                                      oversubscribe = "CUDA_OVERSUBSCRIBE";

    [[nodiscard]] static bool owns(std::string_view key) noexcept {
        return key.starts_with(memory) || key.starts_with(sms) || key == urgency || key == policy ||
               key == oversubscribe;
    }

    void read(specification_fields& f, std::string_view key, std::string_view value) {
        if (key == urgency) {
            const auto hami = checked(parse_whole(value), key, value, 0, 1, "0, before others, or 1");
            return f.set(f.level, priority{hami == 0 ? 1 : 0}, key);
        }
        if (key == policy)
            return refuse_other(key, value, "default", "choose the tenancy's policy, such as hard_share");
        if (key == oversubscribe) return refuse_other(key, value, "false", "say it by `burst` or `spill`");
        read_limit(f, key, value);
    }

private:
    // A specification has no field for values other than HAMi's default.
    static void refuse_other(std::string_view key, std::string_view value, std::string_view usual,
                             std::string_view instead) {
        if (value == usual) return;
        throw specification_error(specification_error::kind::bad_value, key,
                                  std::string("can only be ").append(usual).append(" here: ").append(instead));
    }
    void read_limit(specification_fields& f, std::string_view key, std::string_view value) {
        const bool of_memory = key.starts_with(memory);
        note_device(key, key.substr(of_memory ? memory.size() : sms.size()), of_memory);
        if (of_memory) {
            constexpr std::array units{text_unit{"", 1},           text_unit{"k", 1ULL << 10},
                                       text_unit{"K", 1ULL << 10}, text_unit{"m", 1ULL << 20},
                                       text_unit{"M", 1ULL << 20}, text_unit{"g", 1ULL << 30},
                                       text_unit{"G", 1ULL << 30}};
            const bytes limit{checked(parse_scaled(value, units), key, value, 0,
                                      std::numeric_limits<std::uint64_t>::max() - 1,
                                      "a whole number of bytes, or with k, m or g behind it")};
            if (limit != bytes{})
                f.set(f.memory_each, limit, key);
            else
                unlimited_ = key;
        } else {
            const auto percent =
                checked(parse_whole(value), key, value, 0, 100, "a whole number of percent from 0 to 100");
            if (percent != 0)
                f.set(f.compute, share::of_permille(percent * 10), key);
            else
                unlimited_sms_ = key;
        }
    }

public:
    void finish(specification_fields& f, tenant_spec& defaults) const {
        all_or_none(f.memory_each, unlimited_);
        all_or_none(f.compute, unlimited_sms_);
        if (!f.memory_each.value && !unlimited_.empty()) defaults.memory = {}, defaults.burst = all_burst;
        if (!f.compute.value && !unlimited_sms_.empty()) defaults.compute = {}, defaults.cap = share::whole();
        if (numbered_.empty()) return;
        for (std::uint32_t i = 0; i < numbered_.size(); ++i)
            if (std::ranges::find(numbered_, i) == numbered_.end())
                throw specification_error(specification_error::kind::contradiction, last_,
                                          "is set, but not for all devices before that one");
        f.set(f.devices, static_cast<std::uint32_t>(numbered_.size()), last_);
    }

private:
    // Either all devices have a limit, or none has one.
    template <class T>
    static void all_or_none(const specification_fields::field<T>& f, const std::string& unlimited) {
        if (f.value && !unlimited.empty() && unlimited.back() >= '0' && unlimited.back() <= '9')
            throw specification_error(specification_error::kind::contradiction, unlimited,
                                      "says something else than " + f.key);
    }

    // `suffix` is "" or "_0" and so on. The devices with a limit of memory are the devices that
    // exist.
    void note_device(std::string_view key, std::string_view suffix, bool of_memory) {
        if (suffix.empty()) return;
        const auto number = suffix.starts_with('_') ? parse_whole(suffix.substr(1)) : parsed{0, parse_code::no_number};
        if (number.code != parse_code::ok || number.value > 1023 || (suffix.size() > 2 && suffix[1] == '0'))
            throw specification_error(specification_error::kind::unknown_key, key.substr(0, longest_name),
                                      "must end there, or in _0 to _1023");
        if (!of_memory) return;
        numbered_.push_back(static_cast<std::uint32_t>(number.value));
        last_ = key;
    }

    std::vector<std::uint32_t> numbered_{};
    // keys; of those with a number, the last that was 0
    std::string last_{}, unlimited_{}, unlimited_sms_{};
};

}  // namespace detail

/// Settings of cGPU's kernel module, which no environment variable contains.
struct environment_options {
    /// max_inst, the number of parts into which cGPU divides a device's time; this is cGPU's
    /// default
    std::uint32_t cgpu_max_inst = 20;
};

/// Values that aren't given come from `defaults`. The values must last during the call. Throws
/// specification_error.
template <key_values Pairs>
[[nodiscard]] tenant_spec read_environment(Pairs&& pairs, tenant_spec defaults = {},
                                           const environment_options& options = {}) {
    using detail::cgpu_variables;
    using detail::hami_variables;
    std::vector<std::pair<std::string_view, std::string_view>> ours;
    for (auto&& pair : pairs)
        if (const std::string_view key(pair.first); cgpu_variables::owns(key) || hami_variables::owns(key))
            ours.emplace_back(key, std::string_view(pair.second));

    detail::specification_fields f;
    bool disabled = false;
    for (const auto& [key, value] : ours) {
        f.see(key);
        if (key != "CGPU_DISABLE") continue;
        disabled = value == "true" || value == "1";
        if (!disabled && value != "false" && value != "0")
            throw specification_error(specification_error::kind::bad_value, key, "must be true, false, 1 or 0");
    }
    if (options.cgpu_max_inst == 0)
        throw operation_error(errc::invalid_specification, {},
                              "environment_options::cgpu_max_inst is 0: must be at least 1");
    cgpu_variables cgpu(options.cgpu_max_inst);
    hami_variables hami;
    for (const auto& [key, value] : ours) {
        if (hami_variables::owns(key))
            hami.read(f, key, value);
        else if (!disabled && key != "CGPU_DISABLE")
            cgpu.read(f, key, value);
    }
    cgpu.finish(f);
    hami.finish(f, defaults);
    return f.finish(std::move(defaults));
}

/// The same from an array of "KEY=value", null at its end, as a process has it. Entries without '='
/// are passed over.
[[nodiscard]] inline tenant_spec read_environment(const char* const* environment, tenant_spec defaults = {},
                                                  const environment_options& options = {}) {
    std::vector<std::pair<std::string_view, std::string_view>> pairs;
    for (; environment != nullptr && *environment != nullptr; ++environment) {
        const std::string_view entry(*environment);
        if (const auto equals = entry.find('='); equals != std::string_view::npos)
            pairs.emplace_back(entry.substr(0, equals), entry.substr(equals + 1));
    }
    return read_environment(pairs, std::move(defaults), options);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
