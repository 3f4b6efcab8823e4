// SPDX-License-Identifier: Apache-2.0
// Orders single launches on a device instead of whole calls: each kernel, graph and copy of an
// unmodified engine passes the gate before the driver launches it. If others go first, the engine's
// thread waits or, with `launch_wait::stream`, its stream waits. Needs CUPTI, which the CMake
// target gpushare::cuda_launch_gate links.
//
//   gpushare::cuda::launch_gate<gpushare::launch_gate> gate{node, gpushare::device_id{0}};
//   auto chat = gate.add({.level = 1}), batch = gate.add({});
//   {
//       const auto inside = gate.enter(chat);            // this thread's launches are the chat's
//       engine.forward(input);
//   }
//   // launches into the stream are, from whatever thread
//   const auto theirs = gate.bind(batch, stream);
//
// The gate runs no other client's code on a thread, and starts no thread: a waiting thread checks
// the device's progress itself. During a stream capture no launch waits or counts. The graph waits
// and counts when it is launched. CUPTI allows one subscriber for each process. If a profiler is
// subscribed already, the constructor throws subscriber_taken. With `calls_instead` the gate then
// decides about whole calls: the thread waits in enter() for its turn, once, and its launches don't
// wait.
//
// Launches that pass are those of the driver's functions that CUDA's runtime and libraries use:
// kernels, cooperative kernels, graphs, copies, prefetches, decompressions and fills, on the gate's
// device. The waiting thread is inside such a call. If it holds a lock of the engine that an urgent
// thread needs, both wait until the core lets the launch go (`longest_hold`); take_forced() names
// both.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include <gpushare/backend/cuda/detail/gated_launches.hpp>
#include <gpushare/backend/cuda/detail/launch_hub.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/steady_clock.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// The gate of one device. Safe from any thread. The destructor lets all held launches through.
/// Clients, scopes and bindings may outlive the gate, and then do nothing.
template <launch_core Core, gpushare::clock Clock = gpushare::detail::steady_clock>
class launch_gate {
    using state = detail::gated_launches<Core, Clock>;

public:
    using client_options = typename Core::client_options;  ///< the argument of add()

    /// A client, whose launches pass the gate. Movable. The destructor removes the client, and the
    /// gate forgets its launches in flight.
    class client {
    public:
        /// `other` is empty afterwards.
        client(client&& other) noexcept
            : state_(std::move(other.state_)), who_(other.who_), follows_(std::move(other.follows_)) {}
        /// Removes the client that this object was before.
        client& operator=(client&& other) noexcept {
            if (this == &other) return *this;
            remove();
            state_ = std::move(other.state_);
            who_ = other.who_;
            follows_ = std::move(other.follows_);
            return *this;
        }
        ~client() { remove(); }

        /// The client's number, as in forced_launch.
        [[nodiscard]] std::uint32_t number() const noexcept { return who_.client; }

    private:
        friend launch_gate;
        client(std::shared_ptr<state> s, detail::launch_owner who) noexcept : state_(std::move(s)), who_(who) {}
        void remove() noexcept {
            if (state_ != nullptr) state_->remove(who_);
            // The end of a watch takes a mutex, which another thread may have held at the fork().
            if (detail::launch_hub::in_child()) (void)follows_.release();
        }
        using watch = std::unique_ptr<void, void (*)(void*)>;
        std::shared_ptr<state> state_;
        detail::launch_owner who_;
        // Follows a tenant's changes, if the client has a tenant.
        watch follows_{nullptr, [](void*) {}};
    };

    /// An open request of a client. Movable; the request ends when this object is destroyed.
    class request {
    public:
        /// `other` is empty afterwards.
        request(request&& other) noexcept : state_(std::move(other.state_)), who_(other.who_), came_(other.came_) {}
        request& operator=(request&&) = delete;
        ~request() {
            if (state_ != nullptr) state_->left(who_, came_);
        }

    private:
        friend launch_gate;
        request(std::shared_ptr<state> s, detail::launch_owner who) noexcept
            : state_(std::move(s)), who_(who), came_(state_->arrived(who_)) {}
        std::shared_ptr<state> state_;
        detail::launch_owner who_;
        instant came_;
    };

    /// Binds the thread that made the scope; the same thread must destroy it. While an inner scope
    /// exists, it replaces the outer one. Scopes may be destroyed in any order.
    class scope {
    public:
        scope(const scope&) = delete;
        scope& operator=(const scope&) = delete;
        ~scope() {
            if (!binding_) request_.state_->end_call(request_.who_, call_);
        }

    private:
        friend launch_gate;
        scope(const std::shared_ptr<state>& s, detail::launch_owner who, bool calls) : request_(s, who) {
            if (calls)
                call_ = s->begin_call(who);
            else
                binding_.emplace(*s, who);
        }
        request request_;
        typename state::call_state call_{};
        std::optional<detail::thread_binding> binding_;
    };

    /// Binds a stream to a client, while this object, the stream and the client exist. Movable.
    class binding {
    public:
        /// `other` is empty afterwards.
        binding(binding&& other) noexcept
            : state_(std::move(other.state_)), who_(other.who_), stream_(other.stream_), number_(other.number_) {}
        binding& operator=(binding&&) = delete;
        ~binding() {
            if (state_ == nullptr) return;
            if (number_ == 0) {
                state_->abandon(who_, stream_);
            } else {
                detail::launch_hub::of_process().unbind(number_);
                state_->unbound(who_, stream_);
            }
        }

    private:
        friend launch_gate;
        binding(std::shared_ptr<state> s, detail::launch_owner who, CUstream stream, std::uint64_t number) noexcept
            : state_(std::move(s)), who_(who), stream_(stream), number_(number) {}
        std::shared_ptr<state> state_;
        detail::launch_owner who_;
        CUstream stream_;
        std::uint64_t number_;  // 0 if launches aren't gated
    };

    /// Throws subscriber_taken if CUPTI has another subscriber already, unless `calls_instead`;
    /// operation_error: no_device, or backend_failed if CUPTI fails otherwise.
    launch_gate(const node& on, device_id d, Core core = Core{}, const launch_shell_options& o = {}, Clock time = {})
        : state_(std::make_shared<state>(on.state(d), std::move(core), o, std::move(time))) {
        try {
            detail::launch_hub::of_process().join(state_);
        } catch (const subscriber_taken&) {
            if (!o.calls_instead) throw;
            calls_ = true;
            state_->hold_threads();
        }
    }
    launch_gate(const launch_gate&) = delete;
    launch_gate& operator=(const launch_gate&) = delete;
    ~launch_gate() {
        close();
        if (!calls_) detail::launch_hub::of_process().leave(*state_);
    }

    /// Adds a client, which isn't present yet. Throws std::bad_alloc.
    [[nodiscard]] client add(const client_options& o) { return client(state_, state_->add(o)); }
    /// Adds the client of a tenant, with the options that `as` makes of the tenant's specification.
    /// The client follows the tenant: a change by tenant::resize or tenancy::resize_together is in
    /// force here before that call returns, for held launches as well. For a change of level see
    /// change(). If `as` throws at a change, the client stays as it was. `as` is copyable, and does
    /// only what tenant::watch_grant allows. After move_tenant the client still follows the old
    /// tenant, which no longer changes: add a client for the new tenant. Client, tenant and gate
    /// may be destroyed in any order. Throws std::bad_alloc, and the exceptions of the first call
    /// of `as`.
    template <class Tenant, class OptionsOf>
    requires std::copy_constructible<OptionsOf> &&
        std::is_invocable_r_v<client_options, OptionsOf&, decltype(std::declval<Tenant&>().spec())>
    [[nodiscard]] client add(Tenant& who, OptionsOf as) {
        client_options now = as(who.spec());
        client c = add(now);
        auto follow = [s = state_, of = c.who_, as = std::move(as), now](const auto& spec) mutable {
            const client_options then = as(spec);
            if (then == now) return;
            now = then;
            (void)s->change(of, then);  // a new level may follow later
        };
        using watch = decltype(who.watch_grant(follow));
        c.follows_ = {new watch(who.watch_grant(std::move(follow))), [](void* w) { delete static_cast<watch*>(w); }};
        return c;
    }
    /// The same, with the tenant's level, share, caps and goal: launch_client_options_of.
    template <class Tenant>
    requires requires(Tenant& t) {
        { launch_client_options_of(t.spec()) } -> std::same_as<client_options>;
    }
    [[nodiscard]] client add(Tenant& who) {
        return add(who, [](const auto& spec) { return launch_client_options_of(spec); });
    }
    /// Changes a client's options. They take effect immediately, for held launches as well, with
    /// one exception: if streams wait, and the client has a request or launches in flight, a new
    /// level takes effect only once the request and the launches are over. In this case returns
    /// false. For a tenant's client these options hold until the tenant changes.
    bool change(const client& c, const client_options& o) noexcept { return state_->change(c.who_, o); }
    /// Begins a request of the client in this thread. Until the scope ends, the thread's launches
    /// belong to the client. If launches aren't gated (gates_launches()), the thread waits here for
    /// its turn, once, for the engine's whole call.
    [[nodiscard]] scope enter(const client& c) { return scope(state_, c.who_, calls_); }
    /// Binds launches into the stream to the client, from any thread: for an engine with threads of
    /// its own. The stream must not be null. As long as work is in flight there, the client is
    /// present. If launches aren't gated, destroy the binding before the stream. Throws
    /// std::bad_alloc.
    [[nodiscard]] binding bind(const client& c, cudaStream_t stream) {
        std::uint64_t number = 0;
        if (calls_)
            state_->adopt(c.who_, stream);
        else
            number = detail::launch_hub::of_process().bind(stream, state_, c.who_);
        return binding(state_, c.who_, stream, number);
    }
    /// Announces a request of the client before its call: lower clients hold back already. For a
    /// queue in front of the engine.
    [[nodiscard]] request announce(const client& c) { return request(state_, c.who_); }

    /// Puts a wait into the capture that is under way in the stream. The graph stops there while a
    /// request of a client above `c` is present. The wait is like those of
    /// launch_shell_options::waits_in_graphs, with the same limits, but at a place of the caller's
    /// choice, such as between two parts of a model. A level that gets its first client after the
    /// capture doesn't stop the graph. Throws operation_error: not_supported if streams don't wait
    /// (waits_in_streams()), invalid_specification if the stream isn't being captured.
    void wait_in_capture(const client& c, cudaStream_t stream) {
        if (const errc why = state_->wait_in_capture(c.who_, stream); why != errc::none)
            raise({why}, {}, "a wait in a graph");
    }

    /// Lets every launch through from now on, held launches included.
    void close() noexcept { state_->close(); }

    /// Whether single launches pass the gate. If not, whole calls do, since CUPTI has another
    /// subscriber.
    [[nodiscard]] bool gates_launches() const noexcept { return !calls_; }
    /// Whether the streams of lower clients wait. If not, their threads are held.
    [[nodiscard]] bool waits_in_streams() const noexcept { return state_->waits_in_streams(); }
    /// The number of held threads.
    [[nodiscard]] std::size_t held() const noexcept { return state_->held(); }
    /// The longest time for which a request of the client waits for lower clients, if launches
    /// exceed their predictions by no more than they lately did. With an open request, the bound
    /// counts the work in flight now. Without a request, it counts the work that may be in flight
    /// when a request comes, which is more. Queries the device.
    [[nodiscard]] ns bound(const client& c) const noexcept { return state_->bound(c.who_); }
    /// The predicted time of the client's launches in flight. Queries the device.
    [[nodiscard]] ns in_flight(const client& c) const noexcept { return state_->in_flight(c.who_); }
    /// The client's account so far. Queries the device. If several of its streams run side by side,
    /// all of them count in full.
    [[nodiscard]] launch_usage usage(const client& c) const noexcept { return state_->usage(c.who_); }
    /// Takes the oldest record of a launch that went after the longest hold. The latest 64 records
    /// are kept.
    [[nodiscard]] std::optional<forced_launch> take_forced() noexcept { return state_->take_forced(); }

private:
    std::shared_ptr<state> state_;
    bool calls_ = false;
};

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
