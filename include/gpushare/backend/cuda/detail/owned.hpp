// SPDX-License-Identifier: Apache-2.0
// A native object that has one owner and keeps its device's state alive: graphs, pools, chunks of
// memory.
//
//   struct graph_kind {
//       using native_type = cudaGraph_t;
//       static constexpr const char* destroys = "cudaGraphDestroy";
//       static cudaError_t destroy(const driver&, cudaGraph_t g) noexcept { return cudaGraphDestroy(g); }
//   };
//   detail::owned<graph_kind> graph{device, native};
#pragma once

#include <cuda_runtime_api.h>

#include <concepts>
#include <memory>
#include <utility>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Says how to destroy a kind of native object, and names the call for reports. native_type{} means
/// no object.
// clang-format off
template <class K>
concept native_kind = requires(const driver& api, typename K::native_type native) {
    { K::destroy(api, native) } noexcept -> std::same_as<cudaError_t>;
    { K::destroys } -> std::convertible_to<const char*>;
};
// clang-format on

/// Owns a native object. Movable; empty after a move. Errors of the destruction go to the device's
/// health.
template <native_kind Kind>
class owned {
public:
    using native_type = typename Kind::native_type;

    owned(std::shared_ptr<device_state> device, native_type native) noexcept
        : device_(std::move(device)), native_(native) {}
    owned(owned&& other) noexcept : device_(std::move(other.device_)), native_(other.release()) {}
    owned& operator=(owned&& other) noexcept {
        if (this == &other) return *this;
        reset();
        device_ = std::move(other.device_);
        native_ = other.release();
        return *this;
    }
    ~owned() { reset(); }

    [[nodiscard]] native_type get() const noexcept { return native_; }
    /// Releases the handle: from now on the caller destroys it. (Not by std::exchange, which
    /// instantiates fifty traits for each kind.)
    [[nodiscard]] native_type release() noexcept {
        const native_type was = native_;
        native_ = {};
        return was;
    }
    [[nodiscard]] const std::shared_ptr<device_state>& device() const noexcept { return device_; }

private:
    void reset() noexcept {
        if (native_ == native_type{}) return;
        cudaError_t entered = cudaSuccess;  // not checked: the call below reports a failure, too
        const device_guard on(device_->context(), entered);
        (void)device_->health().keep(Kind::destroy(device_->api(), release()), Kind::destroys);
    }

    std::shared_ptr<device_state> device_;
    native_type native_;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
