// SPDX-License-Identifier: Apache-2.0
// Runs libtorch on CUDA as a tenant. In a scope, torch's code runs unchanged, for inference and for
// training: on the tenant's stream, in the tenant's memory, and with its launches behind a gate.
//
//   gpushare::torch_scope scope{node, chat, gate};   // once for each tenant
//   const auto inside = scope.enter();    // by each thread, for each request
//   const auto answer = model.forward(inputs);
//
// The scope sets torch's current device and stream, and enters a cuda::launch_gate. (Without a
// gate, leave out the last argument.) The tenant's client at the gate has the tenant's level,
// share, caps and goal, and follows each resize; if you pass options of your own (`{.level = 1}`),
// these stay in force instead.
//
// Allocations follow the stream, so those of autograd's threads are the tenant's, too. They come
// from a cache above the tenant's memory, which works like torch's own: a block that is freed on
// its stream is free there immediately, without an event. If the tenant has no more memory, torch's
// callers get c10::OutOfMemoryError, with the tenant's figures in its text. Allocations on other
// streams, outside scopes, go to torch's own allocator as before.
//
// Graphs: capture in a scope. Allocations during the capture go to a torch pool of the graph's own,
// whose memory is the tenant's. Launch the graph on the tenant's streams.
//
// The scope leaves torch's other thread-local state to the caller, so put a torch::NoGradGuard next
// to the scope. The first scope puts an allocator in front of torch's, which stays until the
// process ends. Torch's own statistics don't count the tenants' blocks: see usage(). Made for
// libtorch 2.11.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <tuple>

#include <gpushare/config.hpp>
#include <gpushare/interop/detail/torch_allocator.hpp>
#include <gpushare/interop/detail/torch_scope.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Models `torch_runtime` for libtorch on CUDA.
struct libtorch_cuda {
    static constexpr bool on_streams = true;

    /// Sets torch's current device and stream for the calling thread.
    struct guard {
        guard(int ordinal, void* stream)
            : of_torch(c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream),
                                                        static_cast<c10::DeviceIndex>(ordinal))) {}
        c10::cuda::CUDAStreamGuard of_torch;
    };

    static void install() { torch_allocator::install(); }
    template <class Node>
    [[nodiscard]] static int ordinal(const Node& on, device_id d) {
        return on.properties(d).ordinal;
    }
    // Torch keeps a workspace for each pair of a cuBLAS handle and a stream, and never drops one by
    // itself. A later stream at the same address would get a workspace that no longer exists.
    static void forget(void* stream) noexcept {
        drop_of(stream, at::cuda::cublas_handle_stream_to_workspace());
        drop_of(stream, at::cuda::cublaslt_handle_stream_to_workspace());
    }

private:
    template <class Workspaces>
    static void drop_of(const void* stream, Workspaces& all) noexcept {
        const std::lock_guard lock(all.mutex);
        std::erase_if(all.map, [&](const auto& w) { return std::get<1>(w.first) == stream; });
    }
};

}  // namespace detail

/// One tenant in torch, on one of its devices. Make the scope once, before threads of torch work
/// for the tenant. From then on, torch's allocations on the tenant's streams, by any thread, come
/// from the tenant's memory, and launches on these streams belong to a client of the gate.
///
/// Lifetimes: destroy tensors and graphs before the scope, the scope before its tenant, and the
/// tenant before its tenancy and node. Tensors that outlive the scope are safe as long as the
/// tenant is open: they stay charged, and their memory goes back in order. Tensors that outlive the
/// tenant are leaks of the tenant.
///
/// Any thread may call enter() at any time. Don't make or destroy a scope while a thread works on
/// its streams. `Node` is cuda::node; `Gate` is a cuda::launch_gate, or there is none. The
/// constructor throws std::bad_alloc, what the gate throws, and operation_error: closed; no_device
/// if the tenant doesn't have that many devices; invalid_specification if a stream already has a
/// scope; not_supported if the tenant is in a slice of SMs, since cuDNN fails there.
template <class Node, class Tenant, class Gate = detail::no_launch_gate>
class torch_scope : public detail::basic_torch_scope<detail::libtorch_cuda, Node, Tenant, Gate> {
    using base = detail::basic_torch_scope<detail::libtorch_cuda, Node, Tenant, Gate>;

public:
    using base::base;

    /// enter(number = 0): the calling thread is in the scope as long as the result lives, on the
    /// tenant's stream of that number. With a gate, the result's life is a request there. Destroy
    /// the result on the thread that made it, the last result first. Throws operation_error:
    /// closed; invalid_specification if there is no such stream.
    using base::enter;
    /// Gives back the memory that is kept for the next allocation, as torch's empty_cache does. A
    /// sleeping tenant gives the memory back by itself, and so does a tenant whose neighbour lacks
    /// memory that the tenant has borrowed.
    using base::give_back;
    /// A pool_usage: the bytes of the tenant's memory that are held for torch, and how many of
    /// these bytes are allocated. The peak is the peak of the held bytes.
    using base::usage;
    /// The number of blocks that torch has.
    using base::live;
    /// The tenant's client at the gate.
    using base::client;
};
/// A scope without a gate.
template <class Node, class Tenant>
torch_scope(Node&, Tenant&) -> torch_scope<Node, Tenant>;
/// A scope on one of the tenant's devices.
template <class Node, class Tenant>
torch_scope(Node&, Tenant&, std::size_t) -> torch_scope<Node, Tenant>;
/// A scope with a gate, at which the tenant's policy applies.
template <class Node, class Tenant, class Gate>
requires requires { typename Gate::client_options; }
torch_scope(Node&, Tenant&, Gate&)->torch_scope<Node, Tenant, Gate>;
/// A scope with a client from gate.add(): for a tenant with a quota of time, or for another part of
/// the tenant.
template <class Node, class Tenant, class Gate>
torch_scope(Node&, Tenant&, Gate&, typename Gate::client&&, std::size_t = 0) -> torch_scope<Node, Tenant, Gate>;
/// A scope with client options of its own.
template <class Node, class Tenant, class Gate>
torch_scope(Node&, Tenant&, Gate&, const typename Gate::client_options&, std::size_t = 0)
    -> torch_scope<Node, Tenant, Gate>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
