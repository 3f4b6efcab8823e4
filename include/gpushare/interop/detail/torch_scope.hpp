// SPDX-License-Identifier: Apache-2.0
// A tenant's scope for torch, without torch. interop/libtorch.hpp has the scope for libtorch on
// CUDA, and interop/libtorch_cpu.hpp the scope for the host. Both are this class, with a runtime of
// their own that makes the calls to torch.
//
//   basic_torch_scope<my_runtime, node_type, tenant_type> scope{node, chat};
//   const auto inside = scope.enter();  // this thread's work and memory are the tenant's
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/detail/torch_blocks.hpp>
#include <gpushare/interop/detail/torch_memory.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The operations of torch that a scope needs. `install` makes torch call torch_blocks for each
/// allocation, and may be called again. `ordinal` is torch's number for a node's device. A `guard`
/// makes a stream the thread's current stream as long as the guard lives. `forget` drops the data
/// that torch keeps for a stream that is about to end. If `on_streams` is false, work is over when
/// its call returns, and streams don't matter.
template <class R, class Node>
concept torch_runtime = node<Node> && requires(Node& on, device_id d, void* stream, int ordinal) {
    // clang-format off
    R::install();
    { R::ordinal(on, d) } -> std::convertible_to<int>;
    R::forget(stream);
    requires std::constructible_from<typename R::guard, int, void*>;
    { R::on_streams } -> std::convertible_to<bool>;
    // clang-format on
};

/// Stands in for a launch gate if there is none: launches aren't held back.
struct no_launch_gate {
    struct client_options {};  ///< no options
    struct client {};          ///< no client
    struct scope {};           ///< holds nothing back
    struct binding {};         ///< binds nothing
    /// Adds nothing.
    [[nodiscard]] client add(const client_options&) const noexcept { return {}; }
    /// Doesn't wait.
    [[nodiscard]] scope enter(const client&) const noexcept { return {}; }
    /// Binds nothing.
    template <class Stream>
    [[nodiscard]] binding bind(const client&, Stream) const noexcept {
        return {};
    }
};

/// One tenant in torch, on one of its devices. Make the scope once, before threads of torch work
/// for the tenant. From then on, torch's allocations on the tenant's streams, by any thread, come
/// from the tenant's memory. Launches on these streams, by any thread, belong to a client of the
/// gate.
///
/// Lifetimes: destroy tensors and graphs before the scope, the scope before its tenant, and the
/// tenant before its tenancy and node. Tensors that outlive the scope are safe as long as the
/// tenant is open: they stay charged, and their memory goes back in order. Tensors that outlive the
/// tenant are its leaks: the tenant's close report counts them, their memory is taken back, and
/// freeing them does nothing.
///
/// Any thread may call enter() at any time. Don't make or destroy a scope while threads work on its
/// streams.
template <class Runtime, node Node, class Tenant, class Gate = no_launch_gate>
requires torch_runtime<Runtime, Node>
class basic_torch_scope {
    using memory = torch_memory<typename Tenant::memory_type, Node>;

public:
    using stream = typename Node::stream;  ///< the type of the tenant's streams
    /// Options of the tenant's client at the gate.
    using client_options = typename Gate::client_options;

    /// A thread in the scope: the thread's allocations on the device are the tenant's, and the
    /// tenant's stream is the thread's current stream. The object must end on the thread that made
    /// it, the last object first; otherwise the program ends.
    class [[nodiscard]] inside {
    public:
        inside(const inside&) = delete;
        inside& operator=(const inside&) = delete;

    private:
        friend basic_torch_scope;
        inside(basic_torch_scope& of, void* handle)
            : request_(of.gate_->enter(of.client_)), current_(of.ordinal_, handle), thread_(of.memory_, of.ordinal_) {}
        typename Gate::scope request_;  // declared first, because entering the gate may wait
        typename Runtime::guard current_;
        torch_inside thread_;
    };

    /// A scope without a gate. Throws std::bad_alloc, and operation_error: closed; no_device if the
    /// tenant has no such part; invalid_specification if a stream already has a scope;
    /// not_supported if the tenant is in a slice of SMs.
    basic_torch_scope(Node& on, Tenant& who, std::size_t part = 0) requires std::same_as<Gate, no_launch_gate>
        : basic_torch_scope(on, who, none(), client_options{}, part) {}
    /// A scope with a gate. The client has the tenant's policy there, and follows its changes. All
    /// arguments must outlive the scope, and the tenant's handle must not be moved in that time.
    /// For a part other than the first part, pass a client that follows the tenant: {on, who, gate,
    /// gate.add(who), part}. Throws as the constructor without a gate does, and the gate's errors.
    basic_torch_scope(Node& on, Tenant& who, Gate& gate) requires(!std::same_as<Gate, no_launch_gate>)
        : basic_torch_scope(on, who, gate, gate.add(who)) {}
    /// A scope with client options `o`, which don't follow the tenant's policy.
    basic_torch_scope(Node& on, Tenant& who, Gate& gate, const client_options& o, std::size_t part = 0)
        : basic_torch_scope(on, who, gate, gate.add(o), part) {}
    /// A scope with an existing client of the gate.
    basic_torch_scope(Node& on, Tenant& who, Gate& gate, typename Gate::client&& made, std::size_t part = 0)
        : tenant_(&who),
          gate_(&gate),
          ordinal_(Runtime::ordinal(on, who.spec().on.at(part_of(who, part)))),
          client_(std::move(made)) {
        std::vector<stream*> streams;
        if constexpr (Runtime::on_streams)
            for (std::uint32_t i = 0; i < who.spec().streams; ++i) streams.push_back(&who.work_stream(part, i));
        for (stream* const s : streams) refuse_a_slice(who, *s);
        for (stream* const s : streams) handles_.push_back(native_handle_of(*s));
        memory_ = std::make_shared<memory>(on, who.spec().on[part], who.memory(part), streams);
        Runtime::install();
        torch_blocks::of_process().add(memory_, ordinal_, handles_);
        try {
            for (stream* const s : streams) bindings_.push_back(gate.bind(client_, native_of(*s)));
        } catch (...) {
            torch_blocks::of_process().remove(*memory_);
            throw;
        }
    }
    basic_torch_scope(const basic_torch_scope&) = delete;
    basic_torch_scope& operator=(const basic_torch_scope&) = delete;
    ~basic_torch_scope() {
        torch_blocks::of_process().remove(*memory_);
        for (void* const s : handles_) Runtime::forget(s);
        memory_->give_back();
    }

    /// The calling thread is in the scope as long as the result lives, on the tenant's stream of
    /// that number. With a gate, the result's life is a request: launches wait while other clients
    /// go first. Throws operation_error: closed; invalid_specification if there is no such stream.
    [[nodiscard]] inside enter(std::size_t number = 0) {
        if (tenant_->closed()) raise({.code = errc::closed}, tenant_->name(), "enter a scope of torch");
        const bool any = Runtime::on_streams;
        if (any ? number >= handles_.size() : number != 0)
            raise({errc::invalid_specification, number, 0, handles_.size(), reason::no_such_stream}, tenant_->name(),
                  "enter a scope of torch");
        return inside(*this, any ? handles_[number] : nullptr);
    }

    /// Gives back the memory that is kept for the next allocation, as torch's empty_cache does. A
    /// tenant that goes to sleep gives the memory back by itself, and so does a tenant whose
    /// neighbour needs memory that the tenant has borrowed.
    void give_back() noexcept { memory_->give_back(); }
    /// The bytes of the tenant's memory that are held for torch, and how many of these bytes are
    /// allocated. The peak is the peak of the held bytes.
    [[nodiscard]] pool_usage usage() const noexcept { return memory_->usage(); }
    /// The blocks that torch has.
    [[nodiscard]] std::uint64_t live() const noexcept { return torch_blocks::of_process().out(*memory_); }
    /// The tenant's client at the gate.
    [[nodiscard]] const typename Gate::client& client() const noexcept { return client_; }

private:
    [[nodiscard]] static no_launch_gate& none() noexcept {
        static no_launch_gate all_pass;
        return all_pass;
    }
    [[nodiscard]] static std::size_t part_of(Tenant& who, std::size_t part) {
        (void)who.memory(part);  // throws if there is no such part
        return part;
    }
    // On a slice of SMs, cuDNN's batch norm failed in tests, with an error that doesn't state the
    // reason.
    static void refuse_a_slice(Tenant& who, stream& s) {
        if constexpr (requires { s.in_partition(); })
            if (s.in_partition())
                raise({.code = errc::not_supported}, who.name(),
                      "a scope of torch on a slice of SMs, where cuDNN fails");
    }
    [[nodiscard]] static auto native_of(stream& s) noexcept {
        if constexpr (requires { s.native_handle(); })
            return s.native_handle();
        else
            return &s;
    }

    Tenant* tenant_;
    Gate* gate_;
    int ordinal_;
    typename Gate::client client_;
    std::vector<void*> handles_;
    std::shared_ptr<memory> memory_;
    std::vector<typename Gate::binding> bindings_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
