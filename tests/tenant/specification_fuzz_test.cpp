// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// The readers of specifications with random input: they answer or refuse, and an accepted
// specification is the one that was written.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/tenant/specification_text.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

using gpushare::specification_error;
using gpushare::tenant_spec;

namespace {

using pairs = std::vector<std::pair<std::string, std::string>>;

constexpr std::array<std::string_view, 53> tokens{"slice",
                                                  "cap",
                                                  "soft_cap",
                                                  "slo",
                                                  "longest",
                                                  "yields_within",
                                                  "keeps",
                                                  "group",
                                                  "ms",
                                                  "yes",
                                                  "any",
                                                  "name",
                                                  "memory",
                                                  "burst",
                                                  "unit",
                                                  "devices",
                                                  "on",
                                                  "compute",
                                                  "priority",
                                                  "=",
                                                  "=",
                                                  "=",
                                                  " ",
                                                  " ",
                                                  "\n",
                                                  "#",
                                                  "%",
                                                  "GiB",
                                                  "MiB",
                                                  "KiB",
                                                  "B",
                                                  "TiB",
                                                  "0",
                                                  "1",
                                                  "2",
                                                  "7",
                                                  "12",
                                                  "64",
                                                  "1024",
                                                  "18446744073709551615",
                                                  "18446744073709551616",
                                                  ".",
                                                  ",",
                                                  "-",
                                                  "_",
                                                  "g",
                                                  "m",
                                                  "_0",
                                                  "_1",
                                                  "true",
                                                  "GB",
                                                  "100",
                                                  "30"};

constexpr std::array<std::string_view, 22> keys{"aliyun.com/gpu-mem",
                                                "aliyun.com/gpu-count",
                                                "aliyun.com/gpu-core.percentage",
                                                "aliyun.com/gpu-",
                                                "nvidia.com/gpu",
                                                "nvidia.com/gpumem",
                                                "nvidia.com/gpumem-percentage",
                                                "nvidia.com/gpucores",
                                                "nvidia.com/gpu.product",
                                                "CGPU_DISABLE",
                                                "ALIYUN_COM_GPU_MEM_CONTAINER",
                                                "ALIYUN_COM_GPU_MEM_DEV",
                                                "ALIYUN_COM_GPU_MEM_UNIT",
                                                "ALIYUN_COM_GPU_MEM_IDX",
                                                "ALIYUN_COM_GPU_VISIBLE_DEVICES",
                                                "ALIYUN_COM_GPU_HIGH_PRIO",
                                                "ALIYUN_COM_GPU_SCHD_WEIGHT",
                                                "CUDA_DEVICE_MEMORY_LIMIT",
                                                "CUDA_DEVICE_MEMORY_LIMIT_0",
                                                "CUDA_DEVICE_MEMORY_LIMIT_1",
                                                "CUDA_DEVICE_SM_LIMIT",
                                                "app"};

/// Bytes, or words of the grammar, or both.
std::string noise(support::random& any, std::size_t most) {
    std::string text;
    for (auto n = any.below(most); n > 0; --n) {
        if (any.one_in(4))
            text.push_back(static_cast<char>(any.below(256)));
        else
            text.append(any.of(tokens));
    }
    return text;
}

/// What is accepted is in range, and divides as it must.
void check_sane(const tenant_spec& s) {
    REQUIRE(s.devices >= 1);
    REQUIRE(s.devices <= 1024);
    REQUIRE(gpushare::bytes::max() > s.memory);
    REQUIRE(s.unit > gpushare::bytes{});
    REQUIRE((s.on.empty() || s.on.size() == s.devices));
    REQUIRE(s.name.size() <= 63);
    const auto step = s.unit * s.devices;
    REQUIRE((s.burst == gpushare::all_burst || s.burst % step == gpushare::bytes{} || step == gpushare::bytes::max()));
    REQUIRE((s.memory % step == gpushare::bytes{} || step == gpushare::bytes::max()));
}

/// The text that says the same.
std::string written(const tenant_spec& s) {
    std::string text = "memory=" + std::to_string(s.memory.count()) +
                       "B burst=" + (s.burst == gpushare::all_burst ? "all" : std::to_string(s.burst.count()) + "B") +
                       " unit=" + std::to_string(s.unit.count()) + "B devices=" + std::to_string(s.devices) +
                       " priority=" + std::to_string(s.level.level);
    if (s.compute != gpushare::share{})
        text += " compute=" + std::to_string(s.compute.permille() / 10) + "." +
                std::to_string(s.compute.permille() % 10) + "%";
    if (!s.name.empty()) text += " name=" + s.name;
    for (const char* separator = " on="; const auto d : s.on)
        text += std::exchange(separator, ",") + std::to_string(d.index);
    return text;
}

void check_same(const tenant_spec& a, const tenant_spec& b) {
    REQUIRE(a.name == b.name);
    REQUIRE(a.memory == b.memory);
    REQUIRE(a.burst == b.burst);
    REQUIRE(a.unit == b.unit);
    REQUIRE(a.devices == b.devices);
    REQUIRE(a.level == b.level);
    REQUIRE(a.compute == b.compute);
    REQUIRE(a.on == b.on);
}

struct tally {
    std::uint64_t accepted = 0, refused = 0;
};

template <class Read>
void try_to(tally& seen, const Read& read) {
    try {
        const tenant_spec s = read();
        ++seen.accepted;
        check_sane(s);
        if (s.memory > gpushare::bytes{}) check_same(s, gpushare::parse_specification(written(s)));
    } catch (const specification_error& e) {
        ++seen.refused;
        REQUIRE(std::string_view(e.what()).size() > e.key().size());  // no byte of it has cut the text short
        REQUIRE(std::string_view(e.what()).size() < 400);
    }
}

void fuzz(std::uint64_t runs) {
    tally text, several, labels, variables;
    for (std::uint64_t run = 0; run < runs; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any{seed};
        const auto plain = noise(any, 30);
        CAPTURE(plain);
        try_to(text, [&] { return gpushare::parse_specification(plain); });
        try_to(several, [&] {
            const auto all = gpushare::parse_specifications(plain);
            for (const auto& one : all) {
                check_sane(one);
                REQUIRE(std::ranges::count(all, one.name, &tenant_spec::name) == 1);
            }
            return all.empty() ? tenant_spec{} : all.back();
        });
        pairs some;
        for (auto n = any.below(6); n > 0; --n)
            some.emplace_back(any.one_in(8) ? noise(any, 4) : std::string(any.of(keys)),
                              any.one_in(3) ? noise(any, 4) : std::string(any.of(tokens)));
        try_to(labels, [&] { return gpushare::read_kubernetes(some, {}, gpushare::bytes{any.below(1ULL << 40)}); });
        try_to(variables, [&] { return gpushare::read_environment(some); });
    }
    for (const auto& seen : {text, several, labels, variables}) {
        CHECK(seen.accepted > 0);
        CHECK(seen.refused > 0);
    }
}

}  // namespace

TEST_CASE("random input is read or refused, never taken for something else", "[interop][specification][property]") {
    fuzz(20'000);
}

TEST_CASE("random input is read or refused, for long", "[.long]") { fuzz(500'000); }

TEST_CASE("a specification survives being written and read again", "[interop][specification][property]") {
    for (std::uint64_t run = 0; run < 5'000; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any{seed};
        tenant_spec s{.name = "t" + std::to_string(any.below(1000)),
                      .devices = 1 + static_cast<std::uint32_t>(any.below(8))};
        s.unit = gpushare::bytes{1 + any.below(1 << 20)};
        s.memory = s.unit * s.devices * (1 + any.below(1000));
        s.burst = s.unit * s.devices * any.below(1000);
        s.compute = gpushare::share::of_permille(1 + any.below(1000));
        s.level = {static_cast<std::int32_t>(any.below(2001)) - 1000};
        if (any.one_in(2))
            for (std::uint32_t d = 0; d < s.devices; ++d) s.on.push_back({d * 3});
        check_same(s, gpushare::parse_specification(written(s)));
    }
}
