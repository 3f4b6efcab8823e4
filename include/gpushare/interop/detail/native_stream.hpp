// SPDX-License-Identifier: Apache-2.0
// Points on streams that other libraries name by a native handle: a cudaStream_t, or null for the
// default stream. With each free, PyTorch and TensorRT name the stream that may still use the
// block.
//
//   // stream: a cudaStream_t
//   auto used = gpushare::detail::point_after(node, device_id{0}, stream);
//   tenant.memory().deallocate_after(used, p, size);
#pragma once

#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A point on a stream of another owner, after which no work enqueued so far uses memory. If the
/// stream is captured, the point is reached once the graph is gone. A null handle means the default
/// stream of device `d`. On a node without handles, such as the host's, a handle is the address of
/// one of its streams, and null means that no work runs. Any thread may call it. Throws
/// std::bad_alloc, and operation_error: capturing, no_device, invalid_specification (a per-thread
/// default stream).
template <node Node, class Handle>
[[nodiscard]] typename Node::stream::point point_after(Node& on, device_id d, Handle* stream) {
    if constexpr (requires { on.point_after(d, stream); }) {
        return on.point_after(d, stream);
    } else {
        if (stream == nullptr) return {};
        return static_cast<typename Node::stream*>(static_cast<void*>(stream))->record();
    }
}

/// The same point on a stream that belongs to the embedder.
template <timeline Stream>
[[nodiscard]] typename Stream::point last_use(Stream& stream) {
    if constexpr (requires { stream.last_use(); })
        return stream.last_use();
    else
        return stream.record();
}

/// A point that is reached once all `points` are reached. If the node can't join points, a new
/// stream waits for all of them. Throws the errors of making a stream.
template <node Node, class Point = typename Node::stream::point>
[[nodiscard]] Point point_after_all(Node& on, device_id d, std::vector<Point> points) {
    if (points.size() == 1) return std::move(points.front());
    if constexpr (requires { Point::all_of(std::move(points)); }) {
        return Point::all_of(std::move(points));
    } else {
        auto joined = on.make_stream(d);
        for (const Point& p : points) joined.wait(p);
        return joined.record();
    }
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
