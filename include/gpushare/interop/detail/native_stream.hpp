// SPDX-License-Identifier: Apache-2.0
// Points on streams that other libraries name by a native handle (a cudaStream_t), the default stream included. PyTorch
// and TensorRT name with each free the stream that may still use the block.
//
//   auto used = gpushare::detail::point_after(node, device_id{0}, stream);           // stream: a cudaStream_t
//   tenant.memory().deallocate_after(used, p, size);
#pragma once

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The point after what is enqueued so far on a stream that somebody else owns. `d` is the device whose default stream is
/// meant by a null handle. Where a node knows no handles, as that of the host, a handle is the address of one of its
/// streams, and null means that nothing runs. Safe from any thread. Throws operation_error: capturing, no_device,
/// invalid_specification (a per-thread default stream); and std::bad_alloc.
template <node Node, class Handle>
[[nodiscard]] typename Node::stream::point point_after(Node& on, device_id d, Handle* stream) {
    if constexpr (requires { on.point_after(d, stream); }) {
        return on.point_after(d, stream);
    } else {
        if (stream == nullptr) return {};
        return static_cast<typename Node::stream*>(static_cast<void*>(stream))->record();
    }
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
