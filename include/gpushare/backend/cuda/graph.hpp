// SPDX-License-Identifier: Apache-2.0
// Graphs: work that is recorded once and launched many times, each time as one submission.
//
//   gpushare::cuda::graph g = gpushare::cuda::capture(stream, [&](auto& s) { s.fill(to, std::byte{0}, n); s.copy(to, from, n); });
//   gpushare::cuda::graph_executable run{g};
//   // one submission, however many kernels are in it
//   auto ticket = tenant.submit([&](auto& s) { run.launch(s); });
//
// A graph captured from launches only is as wide as the widest launch. A graph of the embedder, or
// a graph whose native handle was requested, counts as filling the device.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/owned.hpp>
#include <gpushare/backend/cuda/detail/partition_state.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

namespace detail {
struct graph_kind {
    using native_type = cudaGraph_t;
    static constexpr const char* destroys = "cudaGraphDestroy";
    static cudaError_t destroy(const driver&, cudaGraph_t g) noexcept { return cudaGraphDestroy(g); }
};
struct graph_executable_kind {
    using native_type = cudaGraphExec_t;
    static constexpr const char* destroys = "cudaGraphExecDestroy";
    static cudaError_t destroy(const driver&, cudaGraphExec_t g) noexcept { return cudaGraphExecDestroy(g); }
};

/// The part of the SMs that a graph can fill, as seen in its capture. Unknown once other code may
/// have changed the nodes. A value.
class graph_fill {
public:
    /// The fill of a foreign graph.
    graph_fill() noexcept = default;
    explicit graph_fill(sm_fill captured) noexcept : captured_(captured) {}

    [[nodiscard]] sm_fill known() const noexcept { return captured_; }
    /// Other code has the handle from now on, and may change the nodes.
    void give_up() noexcept {
        captured_ = {.opaque = true};
        is_ours_ = false;
    }
    /// Takes on the fill of another graph, whose nodes this graph has now, unless other code may
    /// change them.
    void become(const graph_fill& other) noexcept {
        if (is_ours_) captured_ = other.captured_;
    }

private:
    sm_fill captured_{.opaque = true};
    bool is_ours_ = true;
};

/// The device, and the part of it, in which a graph was captured: its kernels run there, on
/// whatever stream it is launched. Keeps a partition of the library alive, so that no other green
/// context gets the partition's handle. An embedder may destroy its own green context, and a new
/// one may get that handle. The graph's kernels then belong to a context that is gone, but its
/// place compares equal to that of the new context, and only the driver refuses the launch.
class captured_place {
public:
    explicit captured_place(const stream_state& s) noexcept
        : ordinal_(s.device->ordinal()), green_(s.green), partition_(s.partition) {}
    [[nodiscard]] bool is_of(const stream_state& s) const noexcept {
        return s.device->ordinal() == ordinal_ && s.green == green_;
    }
    friend bool operator==(const captured_place& a, const captured_place& b) noexcept {
        return a.ordinal_ == b.ordinal_ && a.green_ == b.green_;
    }

private:
    int ordinal_;  // CUDA's number, since devices of several nodes may be the same
    CUgreenCtx green_;
    std::shared_ptr<partition_state> partition_;
};

/// A graph or an executable, with its place of capture and its fill. Movable; one owner.
template <class Kind>
struct placed_graph {
    using native_type = typename Kind::native_type;

    placed_graph(const stream_state& s, native_type handle, graph_fill fill) noexcept
        : place(s), native(s.device, handle), fills(fill) {}
    /// An object with the place and fill of `other`.
    template <class Other>
    placed_graph(const placed_graph<Other>& other, native_type handle)
        : place(other.place), native(other.native.device(), handle), fills(other.fills.known()) {}
    placed_graph(placed_graph&&) noexcept = default;
    /// The old value is released, its graph before its partition.
    placed_graph& operator=(placed_graph other) noexcept {
        std::swap(place, other.place);
        std::swap(native, other.native);
        std::swap(fills, other.fills);
        return *this;
    }
    ~placed_graph() = default;

    /// Gives out the handle: other code may change the nodes from now on.
    [[nodiscard]] native_type hand_out() const noexcept {
        fills.give_up();
        return native.get();
    }

    captured_place place;  // declared first: the partition is destroyed after the graph
    owned<Kind> native;
    mutable graph_fill fills;
};
}  // namespace detail

/// A recorded graph. Movable; one owner. Not thread-safe, like CUDA's graphs.
class graph {
public:
    /// Takes over a graph of the embedder. Its kernels must belong to the partition of `s` or, if
    /// `s` is in none, to no partition. Launch the graph there.
    [[nodiscard]] static graph from_native_handle(const stream& s, cudaGraph_t handle) { return {s, handle}; }
    static graph from_native_handle(const stream&, std::nullptr_t) = delete;
    static graph from_native_handle(const stream&, int) = delete;
    /// The native handle, which this object still owns.
    [[nodiscard]] cudaGraph_t native_handle() const noexcept { return its_.hand_out(); }
    /// Releases the handle: from now on the caller destroys it.
    [[nodiscard]] cudaGraph_t release() noexcept { return its_.native.release(); }

    /// The number of nodes; a nested graph counts as one.
    [[nodiscard]] std::size_t num_nodes() const {
        std::size_t count = 0;
        const detail::context_guard any(its_.native.device()->context());
        check(cudaGraphGetNodes(its_.native.get(), nullptr, &count), "counting the nodes of a graph");
        return count;
    }

private:
    friend class graph_capture;
    friend class graph_executable;
    graph(const stream& s, cudaGraph_t native, detail::graph_fill fills = {}) noexcept
        : its_(s.state(), native, fills) {}

    detail::placed_graph<detail::graph_kind> its_;
};

/// While this object exists, work enqueued on the stream is recorded instead of run. The capture
/// must begin and end in one thread; it doesn't disturb other threads and streams. The destructor
/// ends the capture if it is still under way, so that an exception leaves a usable stream.
class graph_capture {
public:
    /// Throws operation_error: errc::capturing if the stream is captured already.
    explicit graph_capture(stream& s) : stream_(&s) {
        if (s.captured() || !s.state().captures.begin())
            throw operation_error(errc::capturing, {}, "the stream is being captured already");
        // Thread-local: unsafe calls are forbidden to this thread only.
        const detail::context_guard any(s.state().device->context());
        const auto code = cudaStreamBeginCapture(s.state().native, cudaStreamCaptureModeThreadLocal);
        if (code != cudaSuccess) s.state().captures.end();
        check(code, "beginning a capture");
        notes_.emplace(s);
    }
    graph_capture(const graph_capture&) = delete;
    graph_capture& operator=(const graph_capture&) = delete;
    ~graph_capture() {
        if (stream_ == nullptr) return;
        const detail::context_guard any(stream_->state().device->context());
        cudaGraph_t unfinished = nullptr;
        (void)detail::handled(end(unfinished));  // the cause of the early end has been reported
        if (unfinished != nullptr) (void)detail::handled(cudaGraphDestroy(unfinished));
    }

    /// Ends the capture. Call once. Throws operation_error: errc::capturing if the capture was
    /// invalidated by a forbidden call, or by work of other streams that wasn't joined again.
    [[nodiscard]] graph finish() {
        cudaGraph_t native = nullptr;
        const stream& s = *stream_;
        const detail::context_guard any(s.state().device->context());
        const auto code = end(native);
        if (code != cudaSuccess && native != nullptr) (void)detail::handled(cudaGraphDestroy(native));
        check(code, "ending a capture");
        return {s, native, detail::graph_fill(notes_->found())};
    }

private:
    cudaError_t end(cudaGraph_t& native) noexcept {
        stream& s = *stream_;
        stream_ = nullptr;
        const auto code = cudaStreamEndCapture(s.state().native, &native);
        s.state().captures.end();
        return code;
    }

    stream* stream_;
    std::optional<stream::launch_notes> notes_{};  // empty before the capture begins
};

/// Records the work that `body(s)` enqueues. Exceptions pass through, and then the stream is usable
/// as before.
template <std::invocable<stream&> F>
[[nodiscard]] graph capture(stream& s, F&& body) {
    graph_capture scope{s};
    std::forward<F>(body)(s);
    return scope.finish();
}

/// A graph made ready to launch. Movable; one owner; launches of one executable run one after the
/// other, on any streams. Not safe from several threads at once. Launched work still runs after the
/// executable is destroyed.
class graph_executable {
public:
    /// Makes `g` executable. Throws operation_error, and memory_error if the device has no room.
    explicit graph_executable(const graph& g) : its_(g.its_, instantiate(g)) {}

    /// Takes over an executable of the embedder; see graph::from_native_handle.
    [[nodiscard]] static graph_executable from_native_handle(const stream& s, cudaGraphExec_t handle) {
        return {s, handle};
    }
    static graph_executable from_native_handle(const stream&, std::nullptr_t) = delete;
    static graph_executable from_native_handle(const stream&, int) = delete;
    /// The native handle, which this object still owns.
    [[nodiscard]] cudaGraphExec_t native_handle() const noexcept { return its_.hand_out(); }
    /// Releases the handle: from now on the caller destroys it.
    [[nodiscard]] cudaGraphExec_t release() noexcept { return its_.native.release(); }

    /// Enqueues the whole graph as one operation of the stream. In a capture, the graph becomes one
    /// node. Throws operation_error: errc::invalid_specification for a stream on a different device
    /// or partition from the capture's. The kernels would run at the place of the capture all the
    /// same, bypassing the limiter of that device. (Driver API, CUDA_KERNEL_NODE_PARAMS: a node
    /// keeps the context of its capture.)
    void launch(stream& s) {
        if (!its_.place.is_of(s.state()))
            throw operation_error(errc::invalid_specification, {},
                                  "a graph keeps the device and the SMs that it was captured on: launch it on a stream "
                                  "of that partition");
        s.enqueued_on_device([&] { return cudaGraphLaunch(its_.native.get(), s.state().native); }, "cudaGraphLaunch",
                             its_.fills.known());
    }

    /// Takes on the arguments of `g`, which must have the same shape and partition. Far cheaper
    /// than a new executable. Otherwise returns false, and nothing has changed: make a new
    /// executable. Earlier launches keep the old arguments.
    [[nodiscard]] bool update(const graph& g) {
        if (!(g.its_.place == its_.place)) return false;
        const detail::context_guard any(its_.native.device()->context());
        cudaGraphExecUpdateResultInfo info{};
        const auto code = detail::handled(cudaGraphExecUpdate(its_.native.get(), g.its_.native.get(), &info));
        if (code == cudaErrorGraphExecUpdateFailure) return false;
        check(code, "updating a graph");
        its_.fills.become(g.its_.fills);
        return true;
    }

private:
    graph_executable(const stream& s, cudaGraphExec_t native) noexcept : its_(s.state(), native, {}) {
        its_.fills.give_up();  // the embedder may have kept the handle
    }

    static cudaGraphExec_t instantiate(const graph& g) {
        const detail::device_state& device = *g.its_.native.device();
        const device_guard on(device.context());
        cudaGraphExec_t made = nullptr;
        check(cudaGraphInstantiate(&made, g.its_.native.get(), 0), "making a graph executable");
        return made;
    }

    detail::placed_graph<detail::graph_executable_kind> its_;
};

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
