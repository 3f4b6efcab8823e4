// SPDX-License-Identifier: Apache-2.0
// Measures green contexts: the available sizes, the cost, and the isolation.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include <gpushare/backend/cuda/green_context.hpp>

#include "experiments.hpp"
#include "rig.hpp"

namespace bench {

namespace {

using namespace std::chrono_literals;
using gpushare::never;
using sm_set = std::set<std::uint32_t>;

// The number of SMs in a group when a split asks for at least `wanted` SMs; 0 if the driver
// refuses.
std::uint32_t obtained(const cu::driver& api, const CUdevResource& all, std::uint32_t wanted) {
    CUdevResource group{};
    unsigned groups = 1;
    if (api.sm_resource_split(&group, &groups, &all, nullptr, 0, wanted) != CUDA_SUCCESS || groups == 0) return 0;
    return group.sm.smCount;
}

std::size_t common(const sm_set& a, const sm_set& b) {
    sm_set both;
    std::ranges::set_intersection(a, b, std::inserter(both, both.end()));
    return both.size();
}

/// A kernel with several waves of blocks on a stream; records the SMs on which the blocks ran.
class wide_kernel {
public:
    wide_kernel(rig& device, cu::stream& s)
        : stream_(&s), blocks_(8 * max_resident_spins(s, wide_block)), records_(device, blocks_) {}

    void launch(gpushare::ns each) {
        launch_spin(*stream_, {.blocks = blocks_, .threads = wide_block}, each, records_.data());
    }
    [[nodiscard]] sm_set sms() const { return sms_of(records_.read(*stream_)); }

private:
    cu::stream* stream_;
    std::uint32_t blocks_;
    device_array<block_record> records_;
};

}  // namespace

void partition_sizes(report& r) {
    rig device;
    const auto can = cu::query_sm_split(device.node, device.device);
    r.figure("gpu.sms", {static_cast<double>(can.sms)}, "SMs");
    r.figure("gpu.partition_unit", {static_cast<double>(can.unit)}, "SMs");
    r.figure("gpu.partition_units", {static_cast<double>(can.units)}, "units");
    r.figure("gpu.sms_in_no_unit", {static_cast<double>(can.sms - can.unit * can.units)}, "SMs");

    const cu::driver& api = device.node.api();
    CUdevice native = 0;
    CUdevResource all{};
    cu::check(api.device_get(&native, device.properties().ordinal), "asking a device for its SMs");
    cu::check(api.device_get_resource(native, &all, CU_DEV_RESOURCE_TYPE_SM), "asking a device for its SMs");
    std::uint32_t from = 1, before = obtained(api, all, 1), most_above = 0;
    for (std::uint32_t wanted = 1; wanted <= can.sms + 1; ++wanted) {
        const std::uint32_t now = wanted <= can.sms ? obtained(api, all, wanted) : UINT32_MAX;
        if (now != before) {
            std::printf("# a split for %u to %u SMs gives %u\n", from, wanted - 1, before);
            from = wanted;
            before = now;
        }
        if (wanted <= can.sms && now > wanted) most_above = std::max(most_above, now - wanted);
    }
    r.figure("gpu.partition_most_above_wanted", {static_cast<double>(most_above)}, "SMs");

    // For every size that the library offers, counts the SMs on which kernels really ran.
    auto& memory = device.node.memory(device.device);
    std::vector<double> made_in, taken, off;
    for (std::uint32_t units = 1; units <= can.units; ++units) {
        const std::vector<std::uint32_t> sms{units * can.unit};
        const auto others = memory.taken_by_others();
        std::vector<cu::green_context> parts;
        made_in.push_back(us_of([&] { parts = cu::make_green_contexts(device.node, device.device, sms); }) / 1e3);
        auto s = parts.front().make_stream();
        taken.push_back(to_mib(memory.taken_by_others() - others));
        wide_kernel kernel(device, s);
        kernel.launch(sized(100us, 5us));
        const std::size_t seen = kernel.sms().size();
        std::printf("# a partition of %u SMs: kernels on %zu\n", sms.front(), seen);
        off.push_back(std::abs(static_cast<double>(seen) - static_cast<double>(sms.front())));
    }
    r.figure("gpu.partition_sms_off", off, "SMs");
    r.figure("gpu.partition_made_in_ms", made_in, "ms");
    r.figure("gpu.partition_takes_mib", taken, "MiB");
}

void partition_isolation(report& r) {
    const std::size_t repeats = sized<std::size_t>(31, 1);
    const gpushare::ns short_wave = sized(500us, 5us), long_wave = sized(2000us, 10us);
    rig device;
    const auto can = cu::query_sm_split(device.node, device.device);
    auto parts = cu::make_green_contexts(device.node, device.device, gpushare::equal_sms(can, 2));
    auto a = parts[0].make_stream(), b = parts[1].make_stream(), outside = device.stream();
    wide_kernel in_a(device, a), in_b(device, b), of_primary(device, outside);

    in_a.launch(short_wave);
    in_b.launch(short_wave);
    const sm_set of_a = in_a.sms(), of_b = in_b.sms();
    r.figure("gpu.sms_in_two_partitions", {static_cast<double>(common(of_a, of_b))}, "SMs");

    const auto leak = [&](const char* name) {
        of_primary.launch(short_wave);
        const sm_set of_outside = of_primary.sms();
        r.figure(name, {static_cast<double>(common(of_outside, of_a) + common(of_outside, of_b))}, "SMs");
    };
    leak("gpu.partitioned_sms_used_by_primary_context");
    in_a.launch(long_wave);
    in_b.launch(long_wave);
    leak("gpu.partitioned_sms_used_beside_busy_partitions");
    a.record().wait(never);
    b.record().wait(never);

    // The latency of a short kernel in one partition while other work runs.
    const auto latency = [&](auto disturb, cu::stream& other) {
        return repeated(repeats, [&] {
            disturb();
            const double us = us_of([&] {
                launch_spin(a, {.blocks = a.sms(), .threads = 256}, 10us);
                spin_until(a.record());
            });
            other.record().wait(never);
            return us;
        });
    };
    r.figure("gpu.partition_latency_alone_us", latency([] {}, b), "us");
    r.figure("gpu.partition_latency_beside_partition_us", latency([&] { in_b.launch(short_wave); }, b), "us");
    r.figure("gpu.partition_latency_beside_primary_us", latency([&] { of_primary.launch(short_wave); }, outside), "us");
}

}  // namespace bench
