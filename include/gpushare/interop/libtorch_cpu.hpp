// SPDX-License-Identifier: Apache-2.0
// Runs libtorch on the host node as a tenant: the three lines of interop/libtorch.hpp without a
// GPU. In a scope, a thread's allocations come from the tenant's memory. Computations are over when
// the call returns, so streams don't matter, and there is no gate.
//
//   gpushare::torch_cpu_scope scope{node, chat};      // once for each tenant
//   const auto inside = scope.enter();                // by each thread, for each request
//   const auto answer = model.forward(inputs);
//
// For a share of the cores, call the model in a submission or behind `acquire`, by one thread
// (at::set_num_threads(1)): see docs/cpu_engines.md. For tensors on the host, autograd runs the
// backward pass on the thread that calls it. The first scope puts an allocator in front of torch's,
// which stays until the process ends. Needs only libc10, of libtorch 1.13 or later.
#pragma once

#include <cstddef>

#include <gpushare/config.hpp>
#include <gpushare/interop/detail/torch_cpu_allocator.hpp>
#include <gpushare/interop/detail/torch_scope.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Models `torch_runtime` for libtorch on the host.
struct libtorch_cpu {
    static constexpr bool on_streams = false;
    struct guard {
        guard(int, void*) noexcept {}
    };
    static void install() { torch_cpu_allocator::install(); }
    template <class Node>
    [[nodiscard]] static int ordinal(const Node&, device_id) noexcept {
        return torch_cpu_allocator::ordinal;
    }
    static void forget(void*) noexcept {}
};

}  // namespace detail

/// One tenant in torch, on one of its devices. Lifetimes, threads and errors are those of
/// torch_scope (libtorch.hpp). `Node` is host::node; a thread is in the scope of one of its devices
/// at a time.
template <class Node, class Tenant>
class torch_cpu_scope : public detail::basic_torch_scope<detail::libtorch_cpu, Node, Tenant> {
    using base = detail::basic_torch_scope<detail::libtorch_cpu, Node, Tenant>;

public:
    using base::base;

    /// enter(number = 0): the calling thread is in the scope as long as the result lives, on the
    /// tenant's stream of that number. Destroy the result on the thread that made it, the last
    /// result first. Throws operation_error: closed; invalid_specification if there is no such
    /// stream.
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
};
/// A scope on the tenant's first device.
template <class Node, class Tenant>
torch_cpu_scope(Node&, Tenant&) -> torch_cpu_scope<Node, Tenant>;
/// A scope on another device of the tenant.
template <class Node, class Tenant>
torch_cpu_scope(Node&, Tenant&, std::size_t) -> torch_cpu_scope<Node, Tenant>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
