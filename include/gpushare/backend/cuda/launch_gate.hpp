// SPDX-License-Identifier: Apache-2.0
// Orders launches on a device, not calls: each kernel, graph and copy of an unchanged engine passes
// the gate before the driver launches it. If others go first, the engine's thread waits or, with
// `launch_wait::stream`, its stream does. Needs CUPTI, by the target gpushare::cuda_launch_gate.
//
//   gpushare::cuda::launch_gate<gpushare::launch_gate> gate{node, gpushare::device_id{0}};
//   auto chat = gate.add({.level = 1}), batch = gate.add({});
//   {
//       const auto inside = gate.enter(chat);            // this thread's launches are the chat's
//       engine.forward(input);
//   }
//   const auto theirs = gate.bind(batch, stream);        // launches into the stream are, from whatever thread
//
// The gate runs no other client's code on a thread, and starts no thread: a waiting thread checks
// the device's progress itself. Inside a stream capture no launch waits or counts; the graph does
// when it is launched. CUPTI allows one subscriber for each process. If a profiler is subscribed
// already, the constructor throws subscriber_taken. With `calls_instead` the gate decides about
// whole calls instead: the thread waits in enter() for its turn, once, and its launches don't wait.
//
// Launches that pass are those of the driver's functions that CUDA's runtime and libraries use:
// kernels, cooperative kernels, graphs, asynchronous copies, prefetches and fills, on the gate's
// device. The waiting thread is inside such a call: if it holds a lock of the engine's that an
// urgent thread needs, both wait, until the core lets the launch go (`longest_hold`; take_forced()
// names both).
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
#include <gpushare/backend/host/clock.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// The gate of one device. Safe from any thread. The destructor lets all held launches through.
/// Clients, scopes and bindings may outlive the gate, and then do nothing.
template <launch_core Core, gpushare::clock Clock = host::steady_clock>
class launch_gate {
    using state = detail::gated_launches<Core, Clock>;

public:
    using client_options = typename Core::client_options;  ///< what add() takes

    /// One that launches. Movable; removed when it is destroyed, and what it has in flight is forgotten.
    class client {
    public:
        /// Nothing is left in `other`.
        client(client&& other) noexcept
            : state_(std::move(other.state_)), who_(other.who_), follows_(std::move(other.follows_)) {}
        /// Removes the client that this was.
        client& operator=(client&& other) noexcept {
            if (this == &other) return *this;
            remove();
            state_ = std::move(other.state_);
            who_ = other.who_;
            follows_ = std::move(other.follows_);
            return *this;
        }
        ~client() { remove(); }

        /// Of it and others, as forced_launch names it.
        [[nodiscard]] std::uint32_t number() const noexcept { return who_.client; }

    private:
        friend launch_gate;
        client(std::shared_ptr<state> s, detail::launch_owner who) noexcept : state_(std::move(s)), who_(who) {}
        void remove() noexcept {
            if (state_ != nullptr) state_->remove(who_);
            // A watch ends under a mutex, which another thread may have had at the fork().
            if (detail::launch_hub::in_child()) (void)follows_.release();
        }
        using watch = std::unique_ptr<void, void (*)(void*)>;
        std::shared_ptr<state> state_;
        detail::launch_owner who_;
        watch follows_{nullptr, [](void*) {}};  // a tenant's changes, if any
    };

    /// Says that a request of a client's is there. Movable; over when it is destroyed.
    class request {
    public:
        /// Nothing is left in `other`.
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

    /// Binds the thread that made it, which destroys it as well. A scope inside another one
    /// replaces it meanwhile; scopes may go in any order.
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

    /// Binds a stream as long as both are there. Movable.
    class binding {
    public:
        /// Nothing is left in `other`.
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
        std::uint64_t number_;  // 0 where launches aren't gated
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

    /// A client that isn't present. Throws std::bad_alloc.
    [[nodiscard]] client add(const client_options& o) { return client(state_, state_->add(o)); }
    /// The client of a tenant, with the options that `as` makes of the tenant's specification. The
    /// client follows the tenant: a change of these options (tenant::resize, alone or together) is
    /// in force here before the call that makes it returns, for held launches as well; for another
    /// level see change(). If `as` throws at a change, the client stays as it was. `as` is
    /// copyable, and does only what tenant::watch_grant allows. After move_tenant the client still
    /// follows the old tenant, which no longer changes: add a client for the new tenant. Client,
    /// tenant and gate may be destroyed in any order. Throws std::bad_alloc, and the exceptions of
    /// the first call of `as`.
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
            (void)s->change(of, then);  // or later, for its level
        };
        using watch = decltype(who.watch_grant(follow));
        c.follows_ = {new watch(who.watch_grant(std::move(follow))), [](void* w) { delete static_cast<watch*>(w); }};
        return c;
    }
    /// The same, with level, share, caps and goal as the tenant has them: launch_client_options_of.
    template <class Tenant>
    requires requires(Tenant& t) {
        { launch_client_options_of(t.spec()) } -> std::same_as<client_options>;
    }
    [[nodiscard]] client add(Tenant& who) {
        return add(who, [](const auto& spec) { return launch_client_options_of(spec); });
    }
    /// Other options for the client, in force at once, for launches that are held as well. False
    /// where streams wait and the client is to have another level, but has a request or launches in
    /// flight: then all but the level is in force, and the level follows by itself when those are
    /// over. For a tenant's client these options hold until the tenant's own change.
    bool change(const client& c, const client_options& o) noexcept { return state_->change(c.who_, o); }
    /// Begins a request of the client in this thread. Until the scope is over, the thread's
    /// launches are the client's. If launches aren't gated (gates_launches()), the thread waits
    /// here for its turn, once, for the engine's whole call.
    [[nodiscard]] scope enter(const client& c) { return scope(state_, c.who_, calls_); }
    /// Makes launches into the stream the client's, in whatever thread: for an engine with threads
    /// of its own. The stream isn't null. As long as work is in flight there, the client is
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
    /// Announces a request of the client that is there, or will be in a moment: lower clients hold
    /// back already. For a queue in front of the engine.
    [[nodiscard]] request announce(const client& c) { return request(state_, c.who_); }

    /// Puts a wait into the capture that is under way in the stream. The graph stops there while a
    /// request of a client above `c` is present. It works as launch_shell_options::waits_in_graphs,
    /// with the same limits, at a place of the caller's choice, such as between two pieces of a
    /// model. A level that gets its first client after the capture doesn't stop the graph. Throws
    /// operation_error: not_supported if streams don't wait (waits_in_streams()),
    /// invalid_specification if the stream isn't being captured.
    void wait_in_capture(const client& c, cudaStream_t stream) {
        if (const errc why = state_->wait_in_capture(c.who_, stream); why != errc::none)
            raise({why}, {}, "a wait in a graph");
    }

    /// Lets every launch through from now on, held launches included.
    void close() noexcept { state_->close(); }

    /// Whether single launches pass the gate; else whole calls do, since CUPTI has another subscriber.
    [[nodiscard]] bool gates_launches() const noexcept { return !calls_; }
    /// Whether the streams of lower clients wait; else their threads are held.
    [[nodiscard]] bool waits_in_streams() const noexcept { return state_->waits_in_streams(); }
    /// How many threads are held.
    [[nodiscard]] std::size_t held() const noexcept { return state_->held(); }
    /// The longest time for which a request of the client waits for lower clients, if launches take
    /// as long as predicted, or exceed that by as much as some did lately. Inside a scope or beside
    /// announce(): for the work in flight now. Without a request: for the work that may be in
    /// flight when one comes, which is more. Queries the device.
    [[nodiscard]] ns bound(const client& c) const noexcept { return state_->bound(c.who_); }
    /// The predicted time of the client's launches in flight. Asks the device.
    [[nodiscard]] ns in_flight(const client& c) const noexcept { return state_->in_flight(c.who_); }
    /// The client's account so far. Asks the device. Where several of its streams run side by side, both count in full.
    [[nodiscard]] launch_usage usage(const client& c) const noexcept { return state_->usage(c.who_); }
    /// The next of the launches that went after the longest hold, oldest first. If more than 64
    /// weren't taken, only the last ones are kept.
    [[nodiscard]] std::optional<forced_launch> take_forced() noexcept { return state_->take_forced(); }

private:
    std::shared_ptr<state> state_;
    bool calls_ = false;
};

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
