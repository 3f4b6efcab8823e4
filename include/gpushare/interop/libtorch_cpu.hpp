// SPDX-License-Identifier: Apache-2.0
// libtorch on the host node as a tenant: the three lines of interop/libtorch.hpp without a GPU. A
// thread's allocations in a scope come from the tenant's memory. Its computations are over when the
// call returns, so streams play no part, and there is no gate.
//
//   gpushare::torch_cpu_scope scope{node, chat};      // once for each tenant
//   const auto inside = scope.enter();                // by each thread, for each request
//   const auto answer = model.forward(inputs);
//
// For a share of the cores, call the model in a submission or behind `acquire`, by one thread
// (at::set_num_threads(1)): see docs/cpu_engines.md. Autograd runs the backward pass of tensors on
// the host on the thread that calls it. The first scope puts an allocator in front of torch's,
// which stays until the process ends. Needs libc10 alone, of libtorch 1.13 or later.
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

/// One tenant in torch, on one of its devices: lifetimes, threads and errors are those of
/// torch_scope (libtorch.hpp). `Node` is host::node, one device of which a thread is in at a time.
template <class Node, class Tenant>
class torch_cpu_scope : public detail::basic_torch_scope<detail::libtorch_cpu, Node, Tenant> {
    using base = detail::basic_torch_scope<detail::libtorch_cpu, Node, Tenant>;

public:
    using base::base;

    /// enter(number = 0): the calling thread is in the scope as long as the result lives, on the
    /// tenant's stream of that number. The result ends on the thread that made it, the last one
    /// first. Throws operation_error: closed; invalid_specification if there is no such stream.
    using base::enter;
    /// Gives back the memory that is kept for the next allocation, as torch's empty_cache. A
    /// sleeping tenant does so by itself, and so does a tenant whose neighbour lacks the memory
    /// that the tenant has borrowed.
    using base::give_back;
    /// A pool_usage: the bytes of the tenant's memory that are held for torch, and the bytes of
    /// these that are out. The peak is that of the held bytes.
    using base::usage;
    /// How many blocks torch has.
    using base::live;
};
/// Of the tenant's first device.
template <class Node, class Tenant>
torch_cpu_scope(Node&, Tenant&) -> torch_cpu_scope<Node, Tenant>;
/// Of another one.
template <class Node, class Tenant>
torch_cpu_scope(Node&, Tenant&, std::size_t) -> torch_cpu_scope<Node, Tenant>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
