// SPDX-License-Identifier: Apache-2.0
// The driver's answers about a call: whether its stream is captured, whether the call is for the
// gate's device, and whether it concerns pageable memory. A part of the launch gate.
//
//   const launch_site site(device);
//   if (site.captured(call.stream)) ...               // the call is recorded, and nothing runs
//   if (!site.may_be_here(call)) ...                  // its stream belongs to another device
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/launch_call.hpp>
#include <gpushare/backend/cuda/detail/own_calls.hpp>
#include <gpushare/backend/cuda/detail/sync_call.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Asks the driver each time. No question ends a capture that is under way in the calling thread.
/// Thread-safe.
class launch_site {
public:
    explicit launch_site(std::shared_ptr<device_state> device) noexcept : device_(std::move(device)) {}

    [[nodiscard]] bool captured(CUstream s) const noexcept {
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
        return device_->api().stream_is_capturing(s, &status) != CUDA_SUCCESS ||
               status != CU_STREAM_CAPTURE_STATUS_NONE;
    }
    /// Whether the launch may be for this device. A launch's stream belongs to the current context,
    /// but a copy's may belong to another device. (Programming Guide, "Stream and Event Behavior".)
    [[nodiscard]] bool may_be_here(const launch_call& call) const noexcept {
        const relaxed_capture relaxed(device_->api());
        if (call.of_legacy() || call.of_thread()) return is_current();
        const context_guard any(device_->context());
        return may_have(call.stream);
    }
    /// Whether the call may wait for work of this device. A call that frees memory may concern any
    /// device, and so may most others.
    [[nodiscard]] bool may_concern(const sync_call& call) const noexcept {
        if (call.stream != nullptr && captured(call.stream)) return false;  // the call fails
        const relaxed_capture relaxed(device_->api());
        return call.is_here ? is_current() : call.stream == nullptr || may_have(call.stream);
    }
    /// Whether a copy is from or to pageable memory. Such a copy may wait inside the driver for all
    /// work in front of the copy. (Runtime API, "API synchronization behavior".) The driver reports
    /// no type for pageable memory.
    [[nodiscard]] bool is_pageable(const launch_call& call) const noexcept {
        if (!call.copies || !device_->api().pointer_get_attribute) return false;
        const relaxed_capture relaxed(device_->api());
        return call.any_address([&](CUdeviceptr p) {
            unsigned kind = 0;
            return device_->api().pointer_get_attribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p) ==
                   CUDA_ERROR_INVALID_VALUE;
        });
    }
    /// Whether the stream or the event for which the call waits has work to do.
    [[nodiscard]] bool is_pending(const sync_call& call) const noexcept {
        const own_calls unwatched;
        const relaxed_capture relaxed(device_->api());
        if (call.reach == wait_reach::event) return device_->api().event_query(call.event) == CUDA_ERROR_NOT_READY;
        return device_->api().stream_query(call.stream) == CUDA_ERROR_NOT_READY;
    }

private:
    // Whether the current context is of this device, or unknown.
    [[nodiscard]] bool is_current() const noexcept {
        CUdevice now = 0;
        return device_->api().ctx_get_device(&now) != CUDA_SUCCESS || now == device_->context().device();
    }
    // The same for a stream that isn't a default stream.
    [[nodiscard]] bool may_have(CUstream s) const noexcept {
        int of_stream = device_->ordinal();
        return handled(cudaStreamGetDevice(s, &of_stream)) != cudaSuccess || of_stream == device_->ordinal();
    }

    std::shared_ptr<device_state> device_;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
