// SPDX-License-Identifier: Apache-2.0
// Green contexts: SM partitions of a device. The kernels of a partition's streams run on its SMs
// only. Kernels of other streams run on all SMs, so tenants are protected from each other only if
// every tenant is in a partition.
//
//   const auto can = gpushare::cuda::query_sm_split(node, d);         // 16 units of 8 SMs
//   auto parts = gpushare::cuda::make_green_contexts(node, d, gpushare::equal_sms(can, 2));
//   gpushare::cuda::stream s = parts[0].make_stream(gpushare::priority{1});
//
// device_sms has the form that partitioned_limiter and tenancy::slice need (the concept
// sm_partitionable):
//
//   gpushare::cuda::device_sms sms{node, gpushare::device_id{0}};
//   auto halves = sms.partition(gpushare::equal_sms(sms.split(), 2));
//   // tag: whose work it is, a number that you choose
//   gpushare::cuda::stream tagged = halves[0].make_stream(gpushare::priority{1}, /*tag=*/7);
//
// Needs a driver of CUDA 12.4 (for streams 12.5); errc::not_supported if the driver is older.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <ranges>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/partition_state.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/sm_split.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

namespace detail {

/// The units that partitions of the device are made of. Throws operation_error (not_supported).
[[nodiscard]] inline std::span<const CUdevResource> sm_units(device_state& on) {
    return on.sms().units([&] {
        const driver& api = on.api();
        if (!api.has_green_contexts()) fail(cudaErrorNotSupported, "splitting the SMs of a device");
        CUdevice device = 0;
        check(api.device_get(&device, on.ordinal()), "querying a device's SMs");
        CUdevResource all{};
        check(api.device_get_resource(device, &all, CU_DEV_RESOURCE_TYPE_SM), "querying a device's SMs");
        const unsigned least = std::max(1U, all.sm.minSmPartitionSize);
        unsigned groups = 0;
        check(api.sm_resource_split(nullptr, &groups, &all, nullptr, 0, least), "querying how SMs can be split");
        std::vector<CUdevResource> units(groups);
        check(api.sm_resource_split(units.data(), &groups, &all, nullptr, 0, least), "splitting the SMs of a device");
        units.resize(groups);
        return units;
    });
}

[[nodiscard]] inline sm_split split_of(device_state& on) {
    const auto units = sm_units(on);
    return {.sms = on.properties().sms,
            .unit = units.empty() ? 0 : units.front().sm.smCount,
            .units = static_cast<std::uint32_t>(units.size())};
}

}  // namespace detail

/// How the device can be split. Throws operation_error: errc::not_supported, no_device.
[[nodiscard]] inline sm_split query_sm_split(const node& on, device_id d) { return detail::split_of(*on.state(d)); }

/// A partition. Movable; one owner; safe from any thread. The partition stays until the last of its
/// streams is gone and their work is done, so streams may outlive this object. All partitions use
/// the memory of the device's primary context, and its events.
class green_context {
public:
    /// The number of SMs on which its kernels run.
    [[nodiscard]] std::uint32_t sms() const noexcept { return state_->sms; }
    /// The native handle, which this object still owns.
    [[nodiscard]] CUgreenCtx native_handle() const noexcept { return state_->own->native; }
    /// Releases the handle: from now on the caller destroys it, after the streams made from it. Its
    /// SMs count as free once the streams and this object are gone. If the native handle of a
    /// stream was released, the SMs never count as free, since the library doesn't see that
    /// stream's end.
    [[nodiscard]] CUgreenCtx release() noexcept {
        // The release of a stream changes the same state.
        const std::lock_guard lock(state_->mutex);
        state_->own->owned = false;
        return state_->own->native;
    }

    /// A stream in the partition; see node::make_stream.
    [[nodiscard]] stream make_stream(priority level = {}, std::uint32_t tag = 0) {
        auto made = std::make_shared<detail::stream_state>();
        made->device = state_->device;
        made->partition = state_;
        made->green = state_->own->native;
        made->level = level;
        made->tag = tag;
        made->sms = state_->sms;
        const auto& properties = state_->device->properties();
        {
            const std::lock_guard lock(state_->mutex);
            made->end = &state_->new_end();
            check(state_->device->api().green_stream_create(&made->native, state_->own->native, CU_STREAM_NON_BLOCKING,
                                                            properties.native_priority(level)),
                  "making a stream of a partition");
        }
        made->owned = true;
        const detail::context_guard any(state_->device->context());
        check(cudaStreamGetPriority(made->native, &made->native_priority), "querying a stream's priority");
        return stream(std::move(made));
    }

    /// Takes over a green context of the embedder on this device, without its existing streams.
    [[nodiscard]] static green_context from_native_handle(const node& on, device_id d, CUgreenCtx handle) {
        if (!on.api().has_green_contexts()) fail(cudaErrorNotSupported, "taking over a partition");
        CUdevResource has{};
        check(on.api().green_get_resource(handle, &has, CU_DEV_RESOURCE_TYPE_SM), "querying a partition's SMs");
        return adopt(on.state(d), handle, has.sm.smCount);
    }
    static green_context from_native_handle(const node&, device_id, std::nullptr_t) = delete;
    static green_context from_native_handle(const node&, device_id, int) = delete;

private:
    friend std::vector<green_context> make_green_contexts(const node&, device_id, std::span<const std::uint32_t>);

    explicit green_context(std::shared_ptr<detail::partition_state> state) noexcept : state_(std::move(state)) {}

    static green_context adopt(const std::shared_ptr<detail::device_state>& device, CUgreenCtx handle,
                               std::uint32_t sms) {
        auto state = std::make_shared<detail::partition_state>(device);
        state->own->native = handle;
        state->sms = sms;
        return green_context(std::move(state));
    }

    std::shared_ptr<detail::partition_state> state_;
};

/// Makes partitions with these numbers of SMs, disjoint from each other. They also share no SM with
/// earlier partitions that still exist, or whose last work still runs. SMs left over are in no
/// partition. Makes all of them or none. Throws operation_error: errc::not_whole if a number isn't
/// a multiple of the unit, too_few_sms, not_supported, no_device.
[[nodiscard]] inline std::vector<green_context> make_green_contexts(const node& on, device_id d,
                                                                    std::span<const std::uint32_t> sms) {
    const auto& device = on.state(d);
    const auto units = detail::sm_units(*device);
    const sm_split can = detail::split_of(*device);
    check_sms(can, sms);

    CUdevice native_device = 0;
    check(on.api().device_get(&native_device, device->ordinal()), "making a partition");
    std::vector<green_context> parts;
    std::vector<std::vector<std::uint32_t>*> theirs;
    for (const std::uint32_t wanted : sms) {
        parts.push_back(green_context::adopt(device, nullptr, wanted));
        theirs.push_back(&parts.back().state_->own->units);
        theirs.back()->reserve(wanted / can.unit);
    }
    device->collect_partitions();
    device->sms().take(can, sms, theirs);
    for (auto& part : parts) {
        std::vector<CUdevResource> own;
        for (const std::uint32_t u : part.state_->own->units) own.push_back(units[u]);
        CUdevResourceDesc described = nullptr;
        check(on.api().resource_describe(&described, own.data(), static_cast<unsigned>(own.size())),
              "describing a partition");
        check(on.api().green_create(&part.state_->own->native, described, native_device, CU_GREEN_CTX_DEFAULT_STREAM),
              "making a partition");
    }
    return parts;
}

/// Whether the driver says that the stream's kernels stay in some partition.
[[nodiscard]] inline bool stream_inside_partition(const node& on, cudaStream_t s) noexcept {
    return detail::green_place_of(on.api(), s).sms != 0;
}

/// Checks that all these streams are in partitions. Throws operation_error,
/// errc::invalid_specification with the stream's tag, for the first stream in no partition, whose
/// kernels would run on the SMs of all partitions. Call it with all the tenants' streams of a
/// device before you rely on partitions.
// clang-format off
template <std::ranges::input_range R>
requires std::same_as<std::ranges::range_value_t<R>, stream>
void require_partitioned(const node& on, R&& streams) {
    // clang-format on
    for (const stream& s : streams) {
        if (stream_inside_partition(on, s.state().native)) continue;
        gpushare::detail::message text;
        text.add("the stream with tag ", std::uint64_t{s.tag()},
                 " is in no partition: its kernels run on the SMs of all of them");
        throw operation_error(failure{.code = errc::invalid_specification, .asked = s.tag()}, {}, text);
    }
}

/// The SMs of a device as a handle: copies refer to the same SMs. Safe from any thread; the node
/// must outlive it.
class device_sms {
public:
    using stream = cuda::stream;           ///< the stream type, inside and outside partitions
    using partition_type = green_context;  ///< the type of a partition

    /// The SMs of device `d`. Throws operation_error (no_device).
    device_sms(node& on, device_id d) : node_(&on), device_(d) { (void)on.state(d); }

    /// See node::make_stream.
    [[nodiscard]] stream make_stream(priority level = {}, std::uint32_t tag = 0) {
        return node_->make_stream(device_, level, tag);
    }
    /// How the SMs can be split. Throws operation_error (not_supported).
    [[nodiscard]] sm_split split() const { return query_sm_split(*node_, device_); }
    /// See make_green_contexts.
    [[nodiscard]] std::vector<green_context> partition(std::span<const std::uint32_t> sms) {
        return make_green_contexts(*node_, device_, sms);
    }
    /// The tags of streams whose kernels run on all SMs: existing streams that the node made or
    /// took over. Streams that the embedder made without the node are unknown.
    [[nodiscard]] std::vector<std::uint32_t> outside_any_partition() const {
        return node_->state(device_)->sms().unpartitioned();
    }

private:
    node* node_;
    device_id device_;
};
static_assert(sm_partitionable<device_sms>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
