// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Specifications from text, Kubernetes labels and environment variables: their meaning, and errors
// that name the key for everything else.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/tenant/specification_text.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"

using namespace gpushare::literals;
using gpushare::device_id;
using gpushare::errc;
using gpushare::parse_specification;
using gpushare::priority;
using gpushare::read_environment;
using gpushare::read_kubernetes;
using gpushare::specification_error;
using kind = gpushare::specification_error::kind;

namespace {

using pairs = std::vector<std::pair<std::string, std::string>>;

/// What is wrong, of which key.
template <class F>
std::optional<std::pair<kind, std::string>> wrong(F f) {
    try {
        (void)f();
    } catch (const specification_error& e) {
        CHECK(std::string(e.what()).find(e.key() + ": ") == 0);
        CHECK(e.code() == (e.why() == kind::overflow ? errc::size_overflow : errc::invalid_specification));
        return std::pair{e.why(), e.key()};
    }
    return std::nullopt;
}

auto wrong_text(std::string_view text) {
    return wrong([&] { return parse_specification(text); });
}
auto wrong_labels(const pairs& labels, gpushare::bytes device_memory = {}) {
    return wrong([&] { return read_kubernetes(labels, {}, device_memory); });
}
auto wrong_environment(const pairs& variables) {
    return wrong([&] { return read_environment(variables); });
}
std::optional<std::pair<kind, std::string>> because(kind why, const std::string& key) { return std::pair{why, key}; }

}  // namespace

TEST_CASE("plain text says all there is to say", "[interop][specification]") {
    const auto spec = parse_specification(
        "name=chat memory=12GiB devices=4 compute=30%\n"
        "  priority=-2   # after the others\n"
        "\tburst=1024MiB\r\n"
        "on=0,2,5,7 unit=512KiB");
    CHECK(spec.name == "chat");
    CHECK(spec.memory == 12_GiB);
    CHECK(spec.burst == 1_GiB);
    CHECK(spec.unit == 512_KiB);
    CHECK(spec.devices == 4);
    CHECK(spec.compute == 30_pct);
    CHECK(spec.level == priority{-2});
    CHECK(spec.on == std::vector<device_id>{{0}, {2}, {5}, {7}});
    CHECK(parse_specification("compute=0.5%").compute == 0.5_pct);
    CHECK(parse_specification("memory=3TiB").memory == 3_TiB);
    CHECK(parse_specification("memory=17B").memory == 17_B);
    CHECK(parse_specification("on=3").devices == 1);
}

TEST_CASE("every field of a tenant's specification has a key", "[interop][specification]") {
    const auto spec = parse_specification(
        "name=chat memory=12GiB burst=2GiB unit=1MiB devices=2 on=1,3 compute=30% priority=-2 ceiling=3 narrowest=75% "
        "slice=4 stack=direct "
        "scrub=on_free wait=5ms spill=6GiB lends_asleep=yes cap=45.5% soft_cap=yes "
        "slo=20ms longest=1500us yields_within=2ms keeps=25% group=7 streams=3 queue_limit=5");
    // By position: a field that is added to the type has to be added here, and needs a key.
    const auto& [name, memory, devices, compute, level, ceiling, narrowest, burst, on, unit, slice, stack, scrub, wait,
                 spill, lends_asleep, cap, soft_cap, slo, group, longest, yields_within, keeps, streams, queue_limit] =
        spec;
    CHECK(name == "chat");
    CHECK(memory == 12_GiB);
    CHECK(devices == 2);
    CHECK(compute == 30_pct);
    CHECK(level == gpushare::priority{-2});
    CHECK(ceiling == gpushare::priority{3});
    CHECK(narrowest == gpushare::sm_width(0.75));
    CHECK(burst == 2_GiB);
    CHECK(on == std::vector<gpushare::device_id>{{1}, {3}});
    CHECK(unit == 1_MiB);
    CHECK(slice == 4);
    CHECK(stack == gpushare::memory_stack::direct);
    CHECK(scrub == gpushare::scrub_policy::on_free);
    CHECK(wait == gpushare::ns{std::chrono::milliseconds(5)});
    CHECK(spill == 6_GiB);
    CHECK(cap == 45.5_pct);
    CHECK(lends_asleep);
    CHECK(soft_cap);
    CHECK(slo == std::chrono::milliseconds(20));
    CHECK(group == 7);
    CHECK(longest == std::chrono::microseconds(1500));
    CHECK(yields_within == std::chrono::milliseconds(2));
    CHECK(keeps == gpushare::sm_width(0.25));
    CHECK(streams == 3);
    CHECK(queue_limit == 5);

    CHECK(parse_specification("slice=any", {.slice = 3}).slice == gpushare::any_slice);
    CHECK_FALSE(parse_specification("soft_cap=no", {.soft_cap = true}).soft_cap);
    CHECK(parse_specification("slo=0s", {.slo = gpushare::ns{5}}).slo == gpushare::ns{0});
    CHECK(parse_specification("stack=pool").stack == gpushare::memory_stack::pool);
    CHECK_FALSE(parse_specification("").stack.has_value());
    CHECK(parse_specification("burst=all devices=3 unit=7B").burst == gpushare::all_burst);
    for (const auto* wrong :
         {"slice=-1",      "stack=",           "stack=none",       "scrub=",     "scrub=always",    "wait=5",
          "burst=some",    "slice=4294967295", "slice=",           "cap=0%",     "cap=101%",        "cap=20",
          "soft_cap=true", "soft_cap=",        "slo=20",           "slo=-1ms",   "slo=1.5ms",       "slo=10000000000s",
          "longest=1h",    "group=x",          "group=4294967295", "keeps=0.25", "yields_within=2", "back_within=1ms"})
        CHECK_THROWS_AS(parse_specification(wrong), gpushare::specification_error);
}

TEST_CASE("fields that aren't given stay as they were", "[interop][specification]") {
    const gpushare::tenant_spec defaults{.name = "default", .memory = 8_GiB, .devices = 2, .compute = 10_pct};
    for (const auto* empty : {"", "  \n\t", "# nothing", "#\n#"}) {
        const auto spec = parse_specification(empty, defaults);
        CHECK(spec.name == "default");
        CHECK(spec.memory == 8_GiB);
        CHECK(spec.devices == 2);
    }
    CHECK(parse_specification("compute=20%", defaults).memory == 8_GiB);
    CHECK(read_kubernetes(pairs{{"app", "chat"}}, defaults).memory == 8_GiB);
    CHECK(read_environment(pairs{{"PATH", "/bin"}}, defaults).compute == 10_pct);
    // What a device gets is for each device.
    CHECK(read_kubernetes(pairs{{"nvidia.com/gpumem", "1024"}}, defaults).memory == 2_GiB);
}

TEST_CASE("pairs can come from a map, an array, a view", "[interop][specification]") {
    const std::map<std::string, std::string> map{{"name", "chat"}, {"memory", "2GiB"}};
    CHECK(gpushare::read_specification(map).memory == 2_GiB);
    const std::array<std::pair<std::string_view, std::string_view>, 1> array{{{"memory", "2GiB"}}};
    CHECK(gpushare::read_specification(array).memory == 2_GiB);
}

TEST_CASE("text that can't be meant is an error that names its key", "[interop][specification]") {
    CHECK(wrong_text("memroy=1GiB") == because(kind::unknown_key, "memroy"));
    CHECK(wrong_text("Memory=1GiB") == because(kind::unknown_key, "Memory"));
    CHECK(wrong_text("=1GiB") == because(kind::unknown_key, ""));
    CHECK(wrong_text("memory") == because(kind::unknown_key, "memory"));
    CHECK(wrong_text("name=a name=a") == because(kind::duplicate, "name"));
    CHECK(wrong_text("burst=1GiB devices=3") == because(kind::contradiction, "burst"));
    CHECK(wrong([] {
              return parse_specification("devices=3", {.devices = 2, .on = {{0}, {1}}});
          }) == because(kind::contradiction, "devices"));
    CHECK(wrong_text("name=") == because(kind::bad_value, "name"));
    CHECK(wrong_text("name=" + std::string(64, 'x')) == because(kind::bad_value, "name"));
    CHECK_FALSE(wrong_text("name=" + std::string(63, 'x')));
    for (const auto* bad : {"", "12", "12GB", "12gib", "-1GiB", "+1GiB", "1.5GiB", "1 GiB", "GiB", "0x10B", "0B",
                            "1GiBx", "1e3B", "12GiB12GiB"})
        CHECK(wrong_text(std::string("memory=") + bad) == because(kind::bad_value, "memory"));
    CHECK(wrong_text("memory=16777216TiB") == because(kind::overflow, "memory"));
    CHECK(wrong_text("memory=18446744073709551616B") == because(kind::overflow, "memory"));
    CHECK(wrong_text("memory=99999999999999999999999999TiB") == because(kind::overflow, "memory"));
    CHECK(wrong_text("memory=18446744073709551615B") ==
          because(kind::bad_value, "memory"));  // the largest means too much
    for (const auto* bad : {"0", "-1", "1025", "4.0", "", "all"})
        CHECK(wrong_text(std::string("devices=") + bad) == because(kind::bad_value, "devices"));
    for (const auto* bad : {"30", "0%", "100.1%", "30.55%", "30.%", ".5%", "%", "-1%", "30%%", "1000%"})
        CHECK(wrong_text(std::string("compute=") + bad) == because(kind::bad_value, "compute"));
    CHECK(wrong_text("compute=99999999999999999999%") == because(kind::overflow, "compute"));
    CHECK(wrong_text("compute=1844674407370955161.9%") == because(kind::overflow, "compute"));
    for (const auto* bad : {"1001", "-1001", "high", "--1", "-", "", "+1"})
        CHECK(wrong_text(std::string("priority=") + bad) == because(kind::bad_value, "priority"));
    for (const auto* bad : {"", ",", "1,", ",1", "1,,2", "1,1", "1024", "a"})
        CHECK(wrong_text(std::string("on=") + bad) == because(kind::bad_value, "on"));
    CHECK(wrong_text("on=0,1 devices=3") == because(kind::contradiction, "devices"));
    CHECK(wrong_text("memory=10GiB devices=4 unit=1GiB") == because(kind::contradiction, "memory"));
    CHECK_FALSE(wrong_text("memory=10GiB devices=4 unit=512MiB"));
}

TEST_CASE("an error says what is allowed", "[interop][specification]") {
    CHECK_THROWS_WITH(parse_specification("memory=12GB"),
                      "memory: '12GB': must be a whole number of B, KiB, MiB, GiB or TiB, such as 12GiB");
    CHECK_THROWS_WITH(parse_specification("memory=10GiB devices=4 unit=1GiB"),
                      "memory: 10 GiB over 4 devices is not whole in units of 1 GiB");
    CHECK_THROWS_WITH(read_kubernetes(pairs{{"aliyun.com/gpu-core.percentage", "130"}}),
                      "aliyun.com/gpu-core.percentage: '130': must be a whole number of percent from 1 to 100");
    CHECK_THROWS_WITH(read_environment(pairs{{"CGPU_DISABLE", "yes"}}), "CGPU_DISABLE: must be true, false, 1 or 0");
    CHECK_THROWS_WITH(parse_specification("a\x1b[2Jb=1"),
                      "a\\x1b[2Jb: is none of name, memory, burst, unit, devices, on, compute, priority, narrowest, "
                      "ceiling, slice, stack, "
                      "scrub, wait, spill, lends_asleep, cap, soft_cap, "
                      "slo, longest, yields_within, keeps, group, streams, queue_limit");
    // However long what came in is.
    CHECK(wrong_text("devices=" + std::string(100'000, '7')) == because(kind::overflow, "devices"));
    std::string long_key(100'000, 'k');
    long_key += "=1";
    CHECK(wrong_text(long_key).value().second.size() == 63);
}

TEST_CASE("one text has several tenants, each from its name on", "[interop][specification]") {
    const auto all = gpushare::parse_specifications(
        "# for all\n"
        "unit=1MiB devices=2\n"
        "name=chat memory=24GiB compute=60% priority=1\n"
        "name=batch # on one\n"
        "  memory=8GiB compute=40% devices=1\n");
    REQUIRE(all.size() == 2);
    CHECK(all[0].name == "chat");
    CHECK(all[0].devices == 2);
    CHECK(all[0].memory == 24_GiB);
    CHECK(all[0].unit == 1_MiB);
    CHECK(all[1].name == "batch");
    CHECK(all[1].devices == 1);
    CHECK(all[1].unit == 1_MiB);
    CHECK(all[1].level == gpushare::priority{});
    CHECK(gpushare::parse_specifications("").empty());
    CHECK(gpushare::parse_specifications("memory=1GiB").empty());
}

TEST_CASE("an error in a text of several tenants says where", "[interop][specification]") {
    const auto text_of = [](const char* text) {
        try {
            (void)gpushare::parse_specifications(text);
        } catch (const specification_error& e) {
            return e.key() + "|" + e.what();
        }
        return std::string("none");
    };
    CHECK(
        text_of("name=a memory=1GiB\nname=b\nmemory=2GB") ==
        "memory|memory: '2GB': must be a whole number of B, KiB, MiB, GiB or TiB, such as 12GiB (line 3, tenant 'b')");
    CHECK(text_of("unit=1MiB\n\nnonsense") ==
          "nonsense|nonsense: must be a key, '=' and a value, without blanks (line 3)");
    CHECK(text_of("name=a\nname=b\nname=a") == "name|name: 'a' is the name of a tenant above (line 3, tenant 'b')");
    CHECK(text_of("name=a\nname=a") == "name|name: 'a' is the name of a tenant above (line 2, tenant 'a')");
    CHECK(text_of("name=a memory=1GiB memory=2GiB") == "memory|memory: is given twice (line 1, tenant 'a')");
    CHECK(text_of("\nname=a\ndevices=2\nmemory=3B\nname=b") ==
          "memory|memory: 3 B over 2 devices is not whole in units of 1 B (line 2, tenant 'a')");
}

TEST_CASE("labels of shared GPU scheduling become a specification", "[interop][specification]") {
    const auto spec = read_kubernetes(pairs{{"app", "train"},
                                            {"aliyun.com/gpu-mem", "8"},
                                            {"aliyun.com/gpu-count", "2"},
                                            {"aliyun.com/gpu-core.percentage", "30"},
                                            {"nvidia.com/gpu.product", "T4"}},
                                      {.name = "train"});
    CHECK(spec.name == "train");
    CHECK(spec.memory == 8_GiB);
    CHECK(spec.devices == 2);
    CHECK(spec.compute == 30_pct);
    CHECK(spec.unit == 1_GiB);

    CHECK(wrong_labels({{"aliyun.com/gpu-mem", "9"}, {"aliyun.com/gpu-count", "2"}}) ==
          because(kind::contradiction, "aliyun.com/gpu-mem"));
    for (const auto* bad : {"5.5", "5gi", "0", "-3", "", "3 "})
        CHECK(wrong_labels({{"aliyun.com/gpu-mem", bad}}) == because(kind::bad_value, "aliyun.com/gpu-mem"));
    CHECK(wrong_labels({{"aliyun.com/gpu-mem", "17179869184"}}) == because(kind::overflow, "aliyun.com/gpu-mem"));
    CHECK(wrong_labels({{"aliyun.com/gpu-memory", "3"}}) == because(kind::unknown_key, "aliyun.com/gpu-memory"));
    CHECK(wrong_labels({{"aliyun.com/gpu-count", "1"}, {"aliyun.com/gpu-count", "1"}}) ==
          because(kind::duplicate, "aliyun.com/gpu-count"));
    CHECK(wrong_labels({{"aliyun.com/gpu-core.percentage", "0"}}) ==
          because(kind::bad_value, "aliyun.com/gpu-core.percentage"));
}

TEST_CASE("quantities are read in every form that Kubernetes writes", "[interop][specification]") {
    using gpushare::detail::parse_code;
    using gpushare::detail::parse_quantity;
    const auto is = [](std::string_view text, std::uint64_t n) {
        const auto q = parse_quantity(text);
        return q.code == parse_code::ok && q.value == n;
    };
    for (const auto* three_thousand : {"3000", "3k", "+3k", "3000000m", "3e3", "3E3", "3.0k", "0.003M", ".003M",
                                       "3000.", "30e2", "3e+3", "300000e-2", "003000", "3000000000u", "3000000000000n"})
        CHECK(is(three_thousand, 3000));
    const std::array<std::string_view, 5> decimal{"M", "G", "T", "P", "E"}, binary{"Mi", "Gi", "Ti", "Pi", "Ei"};
    std::uint64_t thousands = 1000, kibis = 1024;
    for (std::size_t i = 0; i < 5; ++i) {
        CHECK(is(std::string("2").append(decimal[i]), 2 * (thousands *= 1000)));
        CHECK(is(std::string("2").append(binary[i]), 2 * (kibis *= 1024)));
    }
    CHECK(is("1.5Ki", 1536));
    CHECK(is("0.5Gi", 1 << 29));
    CHECK(is("0", 0));
    CHECK(is("0.000m", 0));
    CHECK(is("1E", 1'000'000'000'000'000'000));
    CHECK(is("18446744073709551615", ~std::uint64_t{0}));
    CHECK(is("1844674407370955161500000000e-8", 18'446'744'073'709'551'615ULL));
    CHECK(is("10000000000000000000000m", 10'000'000'000'000'000'000ULL));
    for (const auto* not_whole : {"1.5", "1500m", "1e-1", "0.1Ki", "1n", "1e-99999999999999999999"})
        CHECK(parse_quantity(not_whole).code == parse_code::no_number);
    for (const auto* no_number : {"", "k", ".", "-3", "3K", "3ki", "3kk", "1e", "1e+", "1ee3", "3 k", " 3", "1.2.3",
                                  "0x3", "++3", "1Ei3", "3Mi "})
        CHECK(parse_quantity(no_number).code == parse_code::no_number);
    for (const auto* much : {"19E", "16Ei", "18446744073709551616", "1e20", "1e99999999999999999999"})
        CHECK(parse_quantity(much).code == parse_code::overflow);

    // Each further zero counts, however many there are.
    const std::string zeros(5000, '0');
    CHECK(is("1" + zeros + "e-5000", 1));
    CHECK(is("0." + zeros + "1e5003", 100));
    CHECK(parse_quantity("1" + zeros.substr(0, 1000) + "e-2000").code == parse_code::no_number);
    CHECK(parse_quantity("0." + zeros.substr(0, 999) + "1e5000").code == parse_code::overflow);

    CHECK(read_kubernetes(pairs{{"nvidia.com/gpu", "2"}, {"nvidia.com/gpumem", "3k"}}).memory == 6000_MiB);
    CHECK(read_kubernetes(pairs{{"aliyun.com/gpu-mem", "8000m"}}).memory == 8_GiB);
    CHECK(read_kubernetes(pairs{{"nvidia.com/gpu", "2000m"}, {"nvidia.com/gpucores", "5e1"}}).compute == 50_pct);
    CHECK(wrong_labels({{"aliyun.com/gpu-mem", "16Gi"}}) == because(kind::overflow, "aliyun.com/gpu-mem"));
}

TEST_CASE("no key by which a pod or container asks is dropped in silence", "[interop][specification]") {
    for (const auto* key : {"nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb.shared",
                            "nvidia.com/use-gputype", "nvidia.com/gpumem-percent", "aliyun.com/other"})
        CHECK(wrong_labels({{key, "1"}}) == because(kind::unknown_key, key));
    CHECK(read_kubernetes(pairs{{"nvidia.com/priority", "0"}}).level == priority{1});
    CHECK(read_kubernetes(pairs{{"nvidia.com/priority", "1"}}).level == priority{0});
    CHECK(wrong_labels({{"nvidia.com/priority", "2"}}) == because(kind::bad_value, "nvidia.com/priority"));
    // What nodes say of themselves, and what isn't about GPUs.
    for (const auto* key : {"nvidia.com/gpu.product", "nvidia.com/mig.strategy", "nvidia.com/mig-1g.5gb.product",
                            "nvidia.com/cuda.driver.major", "app", "cpu", "memory"})
        CHECK_FALSE(wrong_labels({{key, "x"}}));
    CHECK(read_environment(pairs{{"CUDA_TASK_PRIORITY", "0"}}).level == priority{1});
    CHECK_FALSE(wrong_environment({{"GPU_CORE_UTILIZATION_POLICY", "default"}, {"CUDA_OVERSUBSCRIBE", "false"}}));
    CHECK(wrong_environment({{"GPU_CORE_UTILIZATION_POLICY", "force"}}) ==
          because(kind::bad_value, "GPU_CORE_UTILIZATION_POLICY"));
    CHECK(wrong_environment({{"CUDA_OVERSUBSCRIBE", "true"}}) == because(kind::bad_value, "CUDA_OVERSUBSCRIBE"));
}

TEST_CASE("resources of HAMi become a specification", "[interop][specification]") {
    const auto spec =
        read_kubernetes(pairs{{"nvidia.com/gpu", "2"}, {"nvidia.com/gpumem", "3000"}, {"nvidia.com/gpucores", "25"}});
    CHECK(spec.memory == 6000_MiB);
    CHECK(spec.devices == 2);
    CHECK(spec.compute == 25_pct);
    CHECK(read_kubernetes(pairs{{"nvidia.com/gpumem-percentage", "50"}, {"nvidia.com/gpu", "2"}}, {}, 80_GiB).memory ==
          80_GiB);
    CHECK(read_kubernetes(pairs{{"nvidia.com/gpumem-percentage", "33"}}, {}, 101_B).memory == 33_B);
    CHECK(read_kubernetes(pairs{{"nvidia.com/gpucores", "0"}}).compute == gpushare::share{});

    CHECK(wrong_labels({{"nvidia.com/gpumem-percentage", "50"}}) ==
          because(kind::contradiction, "nvidia.com/gpumem-percentage"));
    CHECK(wrong_labels({{"nvidia.com/gpumem-percentage", "101"}}, 1_GiB) ==
          because(kind::bad_value, "nvidia.com/gpumem-percentage"));
    CHECK(wrong_labels({{"nvidia.com/gpumem", "3000"}, {"nvidia.com/gpumem-percentage", "50"}}, 8_GiB) ==
          because(kind::contradiction, "nvidia.com/gpumem-percentage"));
    CHECK(wrong_labels({{"nvidia.com/gpucores", "101"}}) == because(kind::bad_value, "nvidia.com/gpucores"));
    CHECK(wrong_labels({{"nvidia.com/gpumemory", "1"}}) == because(kind::unknown_key, "nvidia.com/gpumemory"));
    CHECK(wrong_labels({{"nvidia.com/gpumem", "17592186044415"}, {"nvidia.com/gpu", "2"}}) ==
          because(kind::overflow, "nvidia.com/gpumem"));
    // Both kinds at once, if they agree.
    CHECK_FALSE(wrong_labels({{"nvidia.com/gpu", "2"},
                              {"nvidia.com/gpumem", "4096"},
                              {"aliyun.com/gpu-mem", "8"},
                              {"aliyun.com/gpu-count", "2"}}));
    CHECK(wrong_labels({{"nvidia.com/gpu", "2"}, {"aliyun.com/gpu-count", "3"}}) ==
          because(kind::contradiction, "aliyun.com/gpu-count"));
    CHECK(wrong_labels({{"nvidia.com/gpumem", "4096"}, {"aliyun.com/gpu-mem", "8"}}) ==
          because(kind::contradiction, "aliyun.com/gpu-mem"));
}

TEST_CASE("variables of cGPU become a specification", "[interop][specification]") {
    const auto spec = read_environment(pairs{{"HOME", "/root"},
                                             {"ALIYUN_COM_GPU_MEM_CONTAINER", "4"},
                                             {"ALIYUN_COM_GPU_MEM_DEV", "15"},
                                             {"ALIYUN_COM_GPU_VISIBLE_DEVICES", "0,1"},
                                             {"ALIYUN_COM_GPU_SCHD_WEIGHT", "3"},
                                             {"ALIYUN_COM_GPU_HIGH_PRIO", "1"},
                                             {"ALIYUN_COM_GPU_MEM_POD", "8"}});
    CHECK(spec.memory == 8_GiB);
    CHECK(spec.on == std::vector<device_id>{{0}, {1}});
    CHECK(spec.devices == 2);
    CHECK(spec.level == priority{1});
    CHECK(spec.compute == 15_pct);  // 3 of 20 parts
    CHECK(read_environment(pairs{{"ALIYUN_COM_GPU_SCHD_WEIGHT", "1"}}, {}, {.cgpu_max_inst = 3}).compute ==
          gpushare::share::of_permille(333));
    CHECK(read_environment(pairs{{"ALIYUN_COM_GPU_SCHD_WEIGHT", "1"}}, {}, {.cgpu_max_inst = 5000}).compute ==
          gpushare::share::of_permille(1));
    for (const auto* bad : {"0", "21", "a", "1.5", ""})
        CHECK(wrong_environment({{"ALIYUN_COM_GPU_SCHD_WEIGHT", bad}}) ==
              because(kind::bad_value, "ALIYUN_COM_GPU_SCHD_WEIGHT"));
    CHECK_THROWS_AS((void)read_environment(pairs{}, {}, {.cgpu_max_inst = 0}), gpushare::operation_error);
    // In whichever order they come.
    CHECK(read_environment(pairs{{"ALIYUN_COM_GPU_MEM_CONTAINER", "3803"},
                                 {"ALIYUN_COM_GPU_MEM_DEV", "7606"},
                                 {"ALIYUN_COM_GPU_MEM_UNIT", "MiB"},
                                 {"ALIYUN_COM_GPU_MEM_IDX", "3"}})
              .memory == 3803_MiB);
    CHECK(read_environment(pairs{{"ALIYUN_COM_GPU_MEM_DEV", "15"}}).memory == 0_B);

    // Disabled: nothing of it counts, not even what is wrong with it.
    for (const auto* yes : {"true", "1"})
        CHECK(read_environment(pairs{{"ALIYUN_COM_GPU_MEM_CONTAINER", "x"}, {"CGPU_DISABLE", yes}}).memory == 0_B);
    for (const auto* no : {"false", "0"})
        CHECK(read_environment(pairs{{"ALIYUN_COM_GPU_MEM_CONTAINER", "2"}, {"CGPU_DISABLE", no}}).memory == 2_GiB);

    CHECK(wrong_environment({{"ALIYUN_COM_GPU_MEM_CONTAINER", "16"}, {"ALIYUN_COM_GPU_MEM_DEV", "15"}}) ==
          because(kind::contradiction, "ALIYUN_COM_GPU_MEM_CONTAINER"));
    CHECK(wrong_environment({{"ALIYUN_COM_GPU_MEM_CONTAINER", "4GiB"}}) ==
          because(kind::bad_value, "ALIYUN_COM_GPU_MEM_CONTAINER"));
    CHECK(wrong_environment({{"ALIYUN_COM_GPU_MEM_IDX", "-1"}}) == because(kind::bad_value, "ALIYUN_COM_GPU_MEM_IDX"));
    CHECK(wrong_environment({{"ALIYUN_COM_GPU_VISIBLE_DEVICES", "GPU-8932f937"}}) ==
          because(kind::bad_value, "ALIYUN_COM_GPU_VISIBLE_DEVICES"));
    CHECK(wrong_environment({{"ALIYUN_COM_GPU_MEM_IDX", "1"}, {"ALIYUN_COM_GPU_VISIBLE_DEVICES", "0"}}) ==
          because(kind::contradiction, "ALIYUN_COM_GPU_VISIBLE_DEVICES"));
    CHECK(wrong_environment({{"ALIYUN_COM_GPU_MEM_UNIT", "TB"}}) ==
          because(kind::bad_value, "ALIYUN_COM_GPU_MEM_UNIT"));
    CHECK(wrong_environment({{"ALIYUN_COM_GPU_HIGH_PRIO", "2"}}) ==
          because(kind::bad_value, "ALIYUN_COM_GPU_HIGH_PRIO"));
    CHECK(wrong_environment({{"ALIYUN_COM_GPU_MEMORY", "1"}}) == because(kind::unknown_key, "ALIYUN_COM_GPU_MEMORY"));
    CHECK(wrong_environment({{"CGPU_DISABLED", "1"}}) == because(kind::unknown_key, "CGPU_DISABLED"));
    CHECK(wrong_environment({{"CGPU_DISABLE", ""}}) == because(kind::bad_value, "CGPU_DISABLE"));
    CHECK(wrong_environment({{"CGPU_DISABLE", "0"}, {"CGPU_DISABLE", "0"}}) ==
          because(kind::duplicate, "CGPU_DISABLE"));
    CHECK(wrong_environment({{"ALIYUN_COM_GPU_MEM_CONTAINER", "18446744073709551615"}}) ==
          because(kind::overflow, "ALIYUN_COM_GPU_MEM_CONTAINER"));
}

TEST_CASE("variables of HAMi become a specification", "[interop][specification]") {
    CHECK(read_environment(pairs{{"CUDA_DEVICE_MEMORY_LIMIT", "1g"}}).memory == 1_GiB);
    CHECK(read_environment(pairs{{"CUDA_DEVICE_MEMORY_LIMIT", "1024m"}}).memory == 1_GiB);
    CHECK(read_environment(pairs{{"CUDA_DEVICE_MEMORY_LIMIT", "1048576K"}}).memory == 1_GiB);
    CHECK(read_environment(pairs{{"CUDA_DEVICE_MEMORY_LIMIT", "1073741824"}}).memory == 1_GiB);
    const gpushare::tenant_spec little{.memory = 1_GiB, .compute = 10_pct, .cap = 20_pct};
    for (const auto* key : {"CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT_0"}) {
        const auto unlimited = read_environment(pairs{{key, "0"}}, little);
        CHECK(unlimited.memory == 0_B);
        CHECK(unlimited.burst == gpushare::all_burst);
        CHECK(unlimited.compute == 10_pct);
    }
    for (const auto* key : {"CUDA_DEVICE_SM_LIMIT", "CUDA_DEVICE_SM_LIMIT_0"}) {
        const auto unlimited = read_environment(pairs{{key, "0"}}, little);
        CHECK(unlimited.compute == gpushare::share{});
        CHECK(unlimited.cap == gpushare::share::whole());
        CHECK(unlimited.memory == 1_GiB);
        CHECK(unlimited.burst == 0_B);
    }
    CHECK(read_environment(pairs{{"CUDA_DEVICE_MEMORY_LIMIT", "2g"}}, {.devices = 3}).memory == 6_GiB);
    const auto spec = read_environment(pairs{{"CUDA_DEVICE_MEMORY_LIMIT_1", "3000m"},
                                             {"CUDA_DEVICE_SM_LIMIT", "40"},
                                             {"CUDA_DEVICE_MEMORY_LIMIT_0", "3000m"},
                                             {"CUDA_DEVICE_MEMORY_SHARED_CACHE", "/tmp/x"},
                                             {"CUDA_DEVICE_ORDER", "PCI_BUS_ID"}});
    CHECK(spec.memory == 6000_MiB);
    CHECK(spec.devices == 2);
    CHECK(spec.on.empty());
    CHECK(spec.compute == 40_pct);
    CHECK(read_environment(pairs{{"CUDA_DEVICE_SM_LIMIT_0", "40"}, {"CUDA_DEVICE_SM_LIMIT_1", "40"}}).compute ==
          40_pct);
    CHECK(read_environment(pairs{{"CUDA_DEVICE_SM_LIMIT", "0"}}).compute == gpushare::share{});

    CHECK(wrong_environment({{"CUDA_DEVICE_MEMORY_LIMIT_0", "4g"}, {"CUDA_DEVICE_MEMORY_LIMIT_1", "2g"}}) ==
          because(kind::contradiction, "CUDA_DEVICE_MEMORY_LIMIT_1"));
    CHECK(wrong_environment({{"CUDA_DEVICE_MEMORY_LIMIT_0", "4g"}, {"CUDA_DEVICE_MEMORY_LIMIT_2", "4g"}}) ==
          because(kind::contradiction, "CUDA_DEVICE_MEMORY_LIMIT_2"));
    CHECK(wrong_environment({{"CUDA_DEVICE_SM_LIMIT_0", "40"}, {"CUDA_DEVICE_SM_LIMIT_1", "60"}}) ==
          because(kind::contradiction, "CUDA_DEVICE_SM_LIMIT_1"));
    // No limit on one device is another limit than that of the other.
    CHECK(wrong_environment({{"CUDA_DEVICE_MEMORY_LIMIT_0", "4g"}, {"CUDA_DEVICE_MEMORY_LIMIT_1", "0"}}) ==
          because(kind::contradiction, "CUDA_DEVICE_MEMORY_LIMIT_1"));
    CHECK(wrong_environment({{"CUDA_DEVICE_SM_LIMIT_0", "0"}, {"CUDA_DEVICE_SM_LIMIT_1", "60"}}) ==
          because(kind::contradiction, "CUDA_DEVICE_SM_LIMIT_0"));
    CHECK(read_environment(pairs{{"CUDA_DEVICE_MEMORY_LIMIT_0", "0"}, {"CUDA_DEVICE_MEMORY_LIMIT_1", "0"}}).devices ==
          2);
    for (const auto* bad : {"4gb", "g", "", "4.5g", "-4g", "0x10", "4 g", "4t"})
        CHECK(wrong_environment({{"CUDA_DEVICE_MEMORY_LIMIT", bad}}) ==
              because(kind::bad_value, "CUDA_DEVICE_MEMORY_LIMIT"));
    CHECK(wrong_environment({{"CUDA_DEVICE_MEMORY_LIMIT", "17179869184g"}}) ==
          because(kind::overflow, "CUDA_DEVICE_MEMORY_LIMIT"));
    CHECK(wrong_environment({{"CUDA_DEVICE_SM_LIMIT", "101"}}) == because(kind::bad_value, "CUDA_DEVICE_SM_LIMIT"));
    for (const auto* bad : {"_", "_x", "0", "_01", "_1024", "_-1", "_0_0", "S"})
        CHECK(wrong_environment({{std::string("CUDA_DEVICE_MEMORY_LIMIT") + bad, "1g"}}) ==
              because(kind::unknown_key, std::string("CUDA_DEVICE_MEMORY_LIMIT") + bad));
    // cGPU's and HAMi's, if they agree.
    CHECK_FALSE(wrong_environment({{"CUDA_DEVICE_MEMORY_LIMIT", "4g"}, {"ALIYUN_COM_GPU_MEM_CONTAINER", "4"}}));
    CHECK(wrong_environment({{"CUDA_DEVICE_MEMORY_LIMIT", "4g"}, {"ALIYUN_COM_GPU_MEM_CONTAINER", "3"}}) ==
          because(kind::contradiction, "ALIYUN_COM_GPU_MEM_CONTAINER"));
}

TEST_CASE("the array of a process's environment is read as it is", "[interop][specification]") {
    const std::array<const char*, 5> process{"PATH=/bin", "CUDA_DEVICE_MEMORY_LIMIT=2g", "odd", "=C:=x", nullptr};
    CHECK(read_environment(process.data()).memory == 2_GiB);
    const std::array<const char*, 1> empty{nullptr};
    CHECK(read_environment(empty.data(), {.name = "x"}).name == "x");
    CHECK(read_environment(nullptr).memory == 0_B);
    const std::array<const char*, 3> twice{"CUDA_DEVICE_SM_LIMIT=1", "CUDA_DEVICE_SM_LIMIT=2", nullptr};
    CHECK_THROWS_AS(read_environment(twice.data()), specification_error);
}

TEST_CASE("a specification that was read can be admitted", "[interop][specification]") {
    gpushare::host::node n({.devices = 2, .memory = 64_MiB, .sms = 1});
    gpushare::tenancy shared(n);
    auto chat = shared.admit(parse_specification("name=chat memory=32MiB devices=2 compute=30% priority=1 unit=1MiB"));
    CHECK(chat.memory(1).capacity() == 16_MiB);
    CHECK(shared.unpromised({0}) == 70_pct);
}
