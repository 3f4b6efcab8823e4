// SPDX-License-Identifier: Apache-2.0
// The node whose device the server's tenants share: the host's, or CUDA's if
// INFERENCE_SERVER_ON_CUDA is defined. The rest of the server uses only the names of this header,
// so the server's code compiles for either node. A program has one of the two.
//
//   void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, place& on) override;
//
// An engine's call gets a `place`. On the host a place is a block of the device, and the call
// computes there. On CUDA a place has a stream: the call enqueues its work and returns. A function
// that the call passes to place::afterwards() makes the outputs when the work is over.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#ifdef INFERENCE_SERVER_ON_CUDA
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>
#else
#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/kernel_context.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#endif

namespace inference_server {

/// The server has one device.
constexpr gpushare::device_id server_device{0};

/// Functions that a submission's calls leave. They are called when the calls' work is over.
using when_over = std::vector<std::function<void()>>;

#ifdef INFERENCE_SERVER_ON_CUDA

using server_node = gpushare::cuda::node;
using node_options = gpushare::cuda::node_options;
using cache_memory = gpushare::cuda::virtual_memory;

/// Where a call enqueues its work.
class place {
public:
    place(gpushare::cuda::stream& on, when_over& later) noexcept : stream_(on), later_(later) {}

    /// The tenant's stream. If a call waits for it, the tenant's other calls wait, too; without a
    /// gate, the calls of all tenants wait: see call_gate.hpp.
    [[nodiscard]] gpushare::cuda::stream& stream() const noexcept { return stream_; }
    /// Calls `f` when the work of the whole submission is over, unless the submission failed. `f`
    /// keeps everything that it needs alive, except for the call's outputs, and must not wait.
    void afterwards(std::function<void()> f) { later_.push_back(std::move(f)); }
    [[nodiscard]] static std::uint32_t num_blocks() noexcept { return 1; }

private:
    gpushare::cuda::stream& stream_;
    when_over& later_;
};

/// Whether a call is over when it returns. Only such calls are timed, cut into pieces, put on
/// several blocks, or make a text.
constexpr bool calls_end_by_returning = false;

/// Makes the call now: it enqueues its work.
template <class F>
void put_call(gpushare::cuda::stream& to, std::uint32_t, when_over& later, const F& call) {
    place here(to, later);
    call(here);
}
inline void give_way(place&) noexcept {}

/// CUDA's first device.
[[nodiscard]] inline node_options usual_node() { return {.devices = {0}}; }
[[nodiscard]] inline cache_memory memory_for_caches(server_node& on) { return {on, server_device}; }
[[nodiscard]] inline gpushare::bytes memory_of(server_node& on) { return on.memory(server_device).capacity(); }
[[nodiscard]] inline std::uint32_t sms_of(const server_node& on) { return on.properties(server_device).sms; }

#else

using server_node = gpushare::host::node;
using node_options = gpushare::host::node_options;
using cache_memory = gpushare::host::virtual_memory;
using place = gpushare::host::kernel_context;

constexpr bool calls_end_by_returning = true;

/// Enqueues the call on the stream, with `blocks` blocks that start together.
template <class F>
void put_call(gpushare::host::stream& to, std::uint32_t blocks, when_over&, const F& call) {
    if (blocks == 1)
        to.launch({}, call);
    else if (const auto why = to.launch_cooperative({.blocks = blocks}, call); why != gpushare::errc::none)
        gpushare::raise({why}, {}, "the model needs more SMs than the device has");
}
/// Lets more urgent work have the SM.
inline void give_way(place& on) noexcept { (void)gpushare::yield_point(on); }

[[nodiscard]] inline node_options usual_node() { return {.memory = gpushare::bytes{std::uint64_t{1} << 30}, .sms = 2}; }
[[nodiscard]] inline cache_memory memory_for_caches(server_node& on) {
    constexpr gpushare::bytes chunk{std::uint64_t{64} << 10};
    return cache_memory(on.memory(server_device), chunk);
}
[[nodiscard]] inline gpushare::bytes memory_of(const server_node& on) { return on.options().memory; }
[[nodiscard]] inline std::uint32_t sms_of(const server_node& on) { return on.options().sms; }

#endif

using server_stream = server_node::stream;

}  // namespace inference_server
