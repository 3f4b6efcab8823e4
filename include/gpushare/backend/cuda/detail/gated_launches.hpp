// SPDX-License-Identifier: Apache-2.0
// The threads of a launch gate: the driver's callbacks, and threads that wait in them. Its parts:
//
//   gate_clients.hpp     the bookkeeping: clients, their launches in flight, levels and accounts
//   gate_openings.hpp    when closed waits must open, since a thread waits for work behind them
//   launch_site.hpp      the driver's answers about a call
//   launch_hub.hpp       finds the gate for a callback
//
// One mutex guards the first two. A launch that goes takes the mutex twice, for some ten
// nanoseconds each. A held thread gives the mutex up while it waits. The driver is called under the
// mutex, but calls nothing back, and no foreign code runs under it.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/gate_clients.hpp>
#include <gpushare/backend/cuda/detail/gate_openings.hpp>
#include <gpushare/backend/cuda/detail/launch_batches.hpp>
#include <gpushare/backend/cuda/detail/launch_call.hpp>
#include <gpushare/backend/cuda/detail/launch_hub.hpp>
#include <gpushare/backend/cuda/detail/patience.hpp>
#include <gpushare/backend/cuda/detail/sync_call.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Thread-safe. In the child of a fork() no function does anything.
template <launch_core Core, gpushare::clock Clock>
class gated_launches final : public launch_listener {
public:
    using client_options = typename Core::client_options;

    gated_launches(std::shared_ptr<device_state> device, Core core, const launch_shell_options& o, Clock time)
        : clients_(std::move(device), std::move(core), o, std::move(time)) {}

    /// See gate_clients::hold_threads.
    void hold_threads() noexcept { clients_.hold_threads(); }
    [[nodiscard]] bool waits_in_streams() const noexcept override { return clients_.in_streams(); }

    // ---- clients

    [[nodiscard]] launch_owner add(const client_options& o) {
        const std::lock_guard lock(mutex_);
        return clients_.add(o);
    }
    void remove(launch_owner who) noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        if (client* const c = clients_.find(who)) clients_.remove(*c);
    }
    /// Returns false if streams wait and the client gets another level while it has a request or
    /// work in flight: its streams may be in front of a wait for the old level. Then the other
    /// options are in force, and the level follows once the client is idle. Does nothing once the
    /// gate is closed.
    [[nodiscard]] bool change(launch_owner who, const client_options& o) noexcept {
        if (launch_hub::in_child()) return true;
        const std::lock_guard lock(mutex_);
        client* const c = clients_.find(who);
        // The tenant of a client may outlive the gate.
        if (c == nullptr || clients_.closed()) return true;
        return clients_.change(*c, o);
    }
    /// A request has arrived. Returns when, for left().
    instant arrived(launch_owner who) noexcept {
        if (launch_hub::in_child()) return {};
        const std::lock_guard lock(mutex_);
        client* const c = clients_.find(who);
        if (c == nullptr) return {};
        const instant now = clients_.now();
        openings_.end_polls(now);
        clients_.arrived(*c, now);
        openings_.tell_closing();
        return now;
    }
    /// A request has left. Ends the client's open batches, so that the gate learns when they are
    /// over.
    void left(launch_owner who, instant came) noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        client* const c = clients_.find(who);
        if (c == nullptr) return;
        clients_.left(*c, came);
        openings_.tell_closing();
    }
    void close() noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        clients_.close();
        openings_.tell_closing();
        wake();
    }

    // ---- launches, from the driver's callbacks

    [[nodiscard]] launch_verdict before(launch_owner who, const launch_call& call,
                                        std::uint64_t& note) noexcept override {
        try {
            // The launch is recorded, and passes the gate when its graph is launched.
            if (clients_.site().captured(call.stream)) {
                record(who, call);
                return launch_verdict::passes;
            }
            std::unique_lock lock(mutex_);
            client* const c = clients_.find_gated(who);
            if (c == nullptr) return launch_verdict::passes;
            if (!clients_.is_here(*c, call)) return launch_verdict::elsewhere;
            if (c->later) clients_.settle(*c, clients_.now());
            if (call.host) return before_host(lock, who, call, note);
            if (call.is_synchronous()) return before_synchronous(lock, who, call, note);
            return before_launch(lock, who, call, note);
        } catch (...) {  // no memory for a new stream: the launch isn't followed
            return launch_verdict::passes;
        }
    }
    void after(launch_owner who, const launch_call& call, std::uint64_t note, CUresult result) noexcept override {
        const std::lock_guard lock(mutex_);
        if ((note & waits_opened) != 0) openings_.end();
        if ((note & function_inside) != 0) openings_.forget_function(call.stream);
        client* const c = clients_.find(who);
        if (c == nullptr) return;
        if ((note & waits_inside) != 0) {
            --c->inside;
            wake();
        }
        if (call.host) return;
        const ns predicted{static_cast<std::int64_t>((note & (waits_inside - 1)) - 1)};
        if (call.is_synchronous())
            clients_.end_synchronous(*c, predicted, result == CUDA_SUCCESS);
        else if (result == CUDA_SUCCESS)
            clients_.enqueued(*c, call);
        else
            clients_.take_back(*c, call, predicted);
    }
    void ends(CUstream s) noexcept override {
        const std::lock_guard lock(mutex_);
        for (client& c : clients_.all())
            for (const auto& in : c.streams)
                if (in->stream() == s && !in->gone()) in->stream_gone();
    }

    // ---- threads that wait for the device

    // The driver may wait for a stream whose waits are closed, and the thread can't act inside the
    // driver. So the thread waits here, until its work is over or the waits are opened for it. The
    // waits stay open until synchronised().
    [[nodiscard]] bool synchronises(const launch_owner* who, const sync_call& call) noexcept override {
        if (!waits_in_streams() || launch_hub::in_child() || !clients_.site().may_concern(call)) return false;
        std::unique_lock lock(mutex_);
        ++clients_.threads().looking;
        unsigned looks = 0;
        const bool opens = look(lock, who, call, clients_.now(), false, looks);
        --clients_.threads().looking;
        if (opens) openings_.begin();
        return opens;
    }
    void synchronised() noexcept override {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        openings_.end();
    }
    // Called after the driver's call.
    [[nodiscard]] bool polls(const launch_owner* who, const sync_call& call,
                             std::optional<instant>& since) noexcept override {
        if (!waits_in_streams() || launch_hub::in_child() || !clients_.site().may_concern(call)) {
            since.reset();
            return false;
        }
        const std::lock_guard lock(mutex_);
        const instant now = clients_.now();
        if (openings_.polls_on(call.awaited(), now)) return true;
        openings_.end_polls(now);
        if (clients_.holds_nothing()) {
            since.reset();
            return false;
        }
        const client* const own = who != nullptr ? clients_.find(*who) : nullptr;
        clients_.settle_all(gated_number(own), call.context, now);
        openings_.tell_closing();
        const client* const stopped = openings_.first_stopped(call);
        if (stopped == nullptr || !since) {
            since = stopped != nullptr ? std::optional(now) : std::nullopt;
            return false;
        }
        const auto held = openings_.opens_at(number(own), openings_.needs_all(own, call), now, *since);
        if (!held || !openings_.begin_poll(call.awaited(), now)) return false;
        note_opened(stopped->number, *held, now);
        return true;
    }
    void poll_over(const void* what) noexcept override {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        openings_.end_poll(what);
    }

    // ---- captures

    /// Puts waits into the capture that is under way in the stream. errc::not_supported if streams
    /// don't wait; invalid_specification if the stream isn't being captured. Does nothing if no
    /// client is above this one.
    [[nodiscard]] errc wait_in_capture(launch_owner who, CUstream s) noexcept {
        const std::lock_guard lock(mutex_);
        if (!waits_in_streams()) return errc::not_supported;
        if (!clients_.site().captured(s)) return errc::invalid_specification;
        if (client* const c = clients_.find_gated(who)) clients_.put_waits_in_capture(*c, s);
        return errc::none;
    }

    // ---- whole calls, if launches can't be seen

    /// A call under way.
    struct call_state {
        instant begun{};
        ns predicted{};
    };
    [[nodiscard]] call_state begin_call(launch_owner who) noexcept {
        if (launch_hub::in_child()) return {};
        std::unique_lock lock(mutex_);
        client* c = clients_.find(who);
        if (c == nullptr) return {};
        call_state call{.predicted = c->call_takes};
        call.begun = hold(lock, who, call.predicted, nullptr, false);
        c = clients_.find(who);
        if (c == nullptr) return {};
        clients_.begin_call(*c, call.predicted, call.begun);
        return call;
    }
    void end_call(launch_owner who, const call_state& call) noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        client* const c = clients_.find(who);
        if (c != nullptr && call.predicted != ns{0}) clients_.end_call(*c, call.predicted, call.begun);
    }
    /// Adds a stream of the client, whose events tell when calls are over. Throws std::bad_alloc.
    void adopt(launch_owner who, CUstream s) {
        const std::lock_guard lock(mutex_);
        if (client* const c = clients_.find(who)) clients_.adopt(*c, s);
    }
    /// Ends one adopt(). The end of the last one counts as the end of the stream, since nothing
    /// else tells when the stream is destroyed.
    void abandon(launch_owner who, CUstream s) noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        if (const client* const c = clients_.find(who))
            if (launch_batches* const in = c->on({.stream = s}); in != nullptr && in->abandon()) in->stream_gone();
    }
    /// The client's binding to the stream has ended.
    void unbound(launch_owner who, CUstream s) noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        if (const client* const c = clients_.find(who))
            for (const auto& in : c->streams)
                if (in->stream() == s) (void)in->end();
    }

    // ---- figures

    [[nodiscard]] launch_usage usage(launch_owner who) noexcept {
        const std::lock_guard lock(mutex_);
        client* const c = clients_.find(who);
        if (c == nullptr) return {};
        clients_.settle(*c, clients_.now());
        return c->used_so_far;
    }
    [[nodiscard]] ns bound(launch_owner who) noexcept {
        const std::lock_guard lock(mutex_);
        if (clients_.find(who) == nullptr) return ns{0};
        const instant now = clients_.now();
        for (client& c : clients_.all()) clients_.settle(c, now);
        return core().bound(who.client);
    }
    [[nodiscard]] ns in_flight(launch_owner who) noexcept {
        const std::lock_guard lock(mutex_);
        client* const c = clients_.find(who);
        if (c == nullptr) return ns{0};
        clients_.settle(*c, clients_.now());
        return core().in_flight(who.client);
    }
    [[nodiscard]] std::size_t held() noexcept {
        const std::lock_guard lock(mutex_);
        return clients_.threads().held;
    }
    [[nodiscard]] std::optional<forced_launch> take_forced() noexcept {
        const std::lock_guard lock(mutex_);
        return openings_.take_forced();
    }

private:
    using client = gate_client<Core>;
    using lock_type = std::unique_lock<std::mutex>;
    // Flags of a launch, kept in `note` next to the predicted time from before() to after().
    static constexpr std::uint64_t waits_inside = std::uint64_t{1} << 53, waits_opened = std::uint64_t{1} << 54,
                                   function_inside = std::uint64_t{1} << 55;

    [[nodiscard]] const Core& core() noexcept { return clients_.core(); }
    void wake() noexcept { clients_.threads().wake(); }
    [[nodiscard]] static std::optional<std::uint32_t> number(const client* c) noexcept {
        return c != nullptr ? std::optional(c->number) : std::nullopt;
    }
    [[nodiscard]] std::optional<std::uint32_t> gated_number(const client* c) const noexcept {
        return c != nullptr && clients_.is_gated(*c) ? std::optional(c->number) : std::nullopt;
    }
    // A value of `note`, which is never 0.
    [[nodiscard]] static std::uint64_t noted(ns predicted, std::uint64_t how) noexcept {
        return (static_cast<std::uint64_t>(predicted.count()) + 1) | how;
    }
    // The waits open for a thread that waits for work of this client.
    template <class Awaited>
    void note_opened(std::uint32_t stopped, const Awaited& held, instant now) noexcept {
        if (held.held != ns{0}) openings_.note_forced({stopped, held.held_by, held.held, now});
    }

    // ---- one launch

    void record(launch_owner who, const launch_call& call) noexcept {
        if (!waits_in_streams() || !clients_.options().waits_in_graphs || call.host) return;
        const std::lock_guard lock(mutex_);
        if (client* const c = clients_.find_gated(who)) clients_.put_waits_in_graph(*c, call);
    }
    [[nodiscard]] launch_verdict before_launch(lock_type& lock, launch_owner who, const launch_call& call,
                                               std::uint64_t& note) {
        client* c = clients_.find(who);
        auto l = clients_.expect(*c, call);  // nothing may fail once the core has let the launch go
        openings_.close_for(*c);
        const bool may_wait = waits_in_streams() && call.waits != wait_reach::none;
        const instant since = may_wait ? clients_.now() : instant{};
        instant now = hold(lock, who, l.predicted, &call, l.alone);
        c = clients_.find_gated(who);
        if (c == nullptr) return launch_verdict::passes;
        std::uint64_t how = 0;
        if (may_wait) {
            how = opens_inside(lock, who, call, since);
            now = clients_.now();
        } else if (clients_.is_gated(*c) && clients_.site().is_pageable(call)) {
            how = pass_waits(lock, who, call, l.predicted);
            if ((how & waits_inside) == 0) return launch_verdict::passes;
            now = clients_.now();
        } else if (waits_in_streams() && !clients_.is_gated(*c) && openings_.opens_for_copy(*c, call)) {
            openings_.begin();
            how = waits_opened;
        }
        c = clients_.find_gated(who);
        if (c == nullptr) return goes_unseen(who, call, how);
        try {
            l.inside = (how & waits_inside) != 0;
            clients_.follow(*c, call, l, now);
        } catch (...) {
            return goes_unseen(who, call, how);
        }
        note = noted(l.predicted, how);
        return launch_verdict::followed;
    }
    // A synchronous copy holds its thread, as a launch into the legacy stream does.
    [[nodiscard]] launch_verdict before_synchronous(lock_type& lock, launch_owner who, const launch_call& call,
                                                    std::uint64_t& note) noexcept {
        openings_.close_for(*clients_.find(who));
        const instant since = clients_.now();
        (void)hold(lock, who, call.guess, &call, false);
        if (clients_.find_gated(who) == nullptr) return launch_verdict::passes;
        const std::uint64_t how = waits_in_streams() ? opens_inside(lock, who, call, since) : 0;
        client* const c = clients_.find(who);
        if (c == nullptr) return goes_unseen(who, call, how);
        clients_.begin_synchronous(*c, call);
        note = noted(call.guess, how);
        return launch_verdict::followed;
    }
    // Another thread may wait for the host function in a way that the gate can't see. So no closed
    // wait may delay the function: no wait of any client in the function's stream, and no wait in
    // the client's other streams, since the function's stream may wait for their events.
    [[nodiscard]] launch_verdict before_host(lock_type& lock, launch_owner who, const launch_call& call,
                                             std::uint64_t& note) noexcept {
        if (!waits_in_streams()) return launch_verdict::passes;
        note = pass_waits(lock, who, call, ns{0});
        return (note & waits_inside) != 0 ? launch_verdict::followed : launch_verdict::passes;
    }
    // The launch goes, and after() won't be called.
    launch_verdict goes_unseen(launch_owner who, const launch_call& call, std::uint64_t how) noexcept {
        if ((how & function_inside) != 0) openings_.forget_function(call.stream);
        if (client* const c = clients_.find(who); c != nullptr && (how & waits_inside) != 0) {
            --c->inside;
            wake();
        }
        if ((how & waits_opened) != 0) openings_.end();
        return launch_verdict::passes;
    }

    // ---- calls in front of which there may be no closed wait

    // The driver may wait inside the call: to load code, or for a synchronous copy. Waits here
    // until nothing stops the work for which the driver waits. `since`: when the call began to
    // wait. Returns a flag for after() if the waits must stay open until then. The mutex is given
    // up meanwhile.
    [[nodiscard]] std::uint64_t opens_inside(lock_type& lock, launch_owner who, const launch_call& call,
                                             instant since) noexcept {
        ++clients_.threads().held;
        unsigned looks = 0;
        const bool opens = look(lock, &who, sync_of(call), since, true, looks);
        end_hold(who, looks != 0, clients_.now() - since);
        if (!opens) return 0;
        openings_.begin();
        return waits_opened;
    }
    // Waits until no enqueued work in front of the call is behind a wait. No further wait is
    // enqueued for the client, or for others in front of a host function, until the call is over.
    // The gate opens the waits until the call is over: immediately if a request's own call is
    // behind a lower client's work, otherwise after the longest hold. Once the waits have been open
    // for the longest hold, the call goes in any case: the device may wait for this thread. Returns
    // flags for after(); 0 if the gate lets everything go.
    [[nodiscard]] std::uint64_t pass_waits(lock_type& lock, launch_owner who, const launch_call& call,
                                           ns predicted) noexcept {
        const instant since = clients_.now();
        instant closed = since;  // when this thread last found the waits closed
        std::uint64_t how = waits_inside;
        patience seen;
        ++clients_.threads().held;
        ++clients_.find(who)->passing;
        for (unsigned looks = 0;; ++looks) {
            const instant now = clients_.now();
            if (looks != 0 || clients_.is_gated(*clients_.find(who)))
                clients_.settle_all(who.client, call.context, now);
            client* const c = clients_.find_gated(who);
            if (c == nullptr) break;
            const client* const front = openings_.in_front(c->number, call);
            const bool opened = (how & waits_opened) != 0;
            const bool may = call.host || opened || runs_now(*c, predicted, now);
            const bool stopped = !opened && (!may || clients_.is_stopped(front != nullptr ? *front : *c));
            if (stopped) closed = now;
            if ((may && front == nullptr) || (!stopped && openings_.opens_anyway(now, closed))) {
                --c->passing;
                ++c->inside;
                if (call.host && openings_.note_function(call.stream)) how |= function_inside;
                end_hold(who, looks != 0, now - since);
                return how;
            }
            const bool behind_lower = front != nullptr && front->level < c->level;
            if (const auto held = openings_.opens_at(c->number, behind_lower, now, since); stopped && held) {
                note_opened(c->number, *held, now);
                openings_.begin();
                how |= waits_opened;
            }
            wait(lock, {.own = true}, seen, (front != nullptr ? *front : *c).number, now);
        }
        --clients_.threads().held;
        if (client* const c = clients_.find(who)) --c->passing;
        if ((how & waits_opened) != 0) openings_.end();
        return 0;
    }
    // Whether a launch without a wait may run now: no higher client is there, and little is in
    // front of it.
    [[nodiscard]] bool runs_now(const client& c, ns predicted, instant now) noexcept {
        return core().closed(c.number, now, now).goes && fits(c, predicted, clients_.options().piece);
    }
    [[nodiscard]] bool fits(const client& c, ns predicted, ns most) noexcept {
        const ns already = core().in_flight(c.number);
        return already == ns{0} || already + predicted <= most;
    }
    // Waits until the call's work is over (false) or the waits must be opened for it (true).
    // `launches`: the client enqueues work in the call, which counts as stopped, too. `looks`: how
    // often the thread has looked.
    [[nodiscard]] bool look(lock_type& lock, const launch_owner* who, const sync_call& call, instant since,
                            bool launches, unsigned& looks) noexcept {
        patience seen;
        for (looks = 0; !clients_.holds_nothing(); ++looks) {
            const instant now = clients_.now();
            const client* const own = who != nullptr ? clients_.find(*who) : nullptr;
            const bool gated = own != nullptr && clients_.is_gated(*own);
            clients_.settle_all(gated_number(own), call.context, now);
            if (!openings_.may_wait(call)) return false;
            const client* stopped = openings_.first_stopped(call);
            if (stopped == nullptr && launches && gated && clients_.is_stopped(*own)) stopped = own;
            const bool own_runs =
                gated && call.drains && core().in_flight(own->number) != ns{0} && !openings_.opens_anyway(now, since);
            if (stopped == nullptr && !own_runs && call.reach >= wait_reach::legacy) return true;
            const bool needs_all = openings_.needs_all(own, call);
            if (const auto held = core().awaited(number(own), needs_all, now, since); stopped != nullptr && held) {
                note_opened(stopped->number, *held, now);
                return true;
            }
            if (gated)
                wait(lock, {.own = true}, seen, own->number, now);
            else
                nap(lock, looks);
        }
        return false;
    }

    // ---- holding a thread

    // Whether the launch may go now, by the core and by the state of its stream. `call` is null for
    // a whole call of an engine.
    [[nodiscard]] typename Core::answer may_go(launch_owner who, ns predicted, const launch_call* call, instant now,
                                               instant since, bool alone) noexcept {
        auto a = clients_.core().ask(who.client, predicted, now, since, alone);
        const client& c = clients_.at(who.client);
        if (!a.goes || a.forced || call == nullptr || !clients_.is_gated(c)) return a;
        // While the waits are open, the launches of the client's other threads would keep its
        // streams behind them.
        const bool stays_out =
            c.inside != 0 || openings_.has_function(call->stream) || (c.passing != 0 && !clients_.is_stopped(c));
        if (stays_out && !openings_.opens_anyway(now, since)) return {.own = true};
        const launch_batches* const in = c.on(*call);
        if (in != nullptr && !(in->has_room() && core().takes_more(in->launches()))) return {.own = true};
        if (!call->of_legacy() && !call->is_synchronous()) return a;
        const auto above = core().closed(who.client, now, since);
        if (!above.goes || above.forced) return above;
        // At most for the longest hold: other threads of the client may always have work in flight.
        if (fits(c, predicted, clients_.options().batch) || openings_.opens_anyway(now, since)) return a;
        return {.own = true};
    }
    // Holds the thread until the launch may go, or the gate holds no thread any more. Returns when
    // that was.
    instant hold(lock_type& lock, launch_owner who, ns predicted, const launch_call* call, bool alone) noexcept {
        const instant since = clients_.now();
        auto a = may_go(who, predicted, call, since, since, alone);
        if (a.goes) return since;
        ++clients_.threads().held;
        instant now = since;
        patience seen;
        for (unsigned looks = 0;; ++looks) {
            clients_.settle_all(who.client, call != nullptr ? call->context : nullptr, now);
            openings_.end_polls(now);
            const client* const c = clients_.find_gated(who);
            if (c == nullptr) break;
            openings_.open_overdue(*c, now);
            a = may_go(who, predicted, call, now, since, alone);
            if (a.goes) break;
            if (a.by_time)
                clients_.threads().sleep(lock, nap_until(a.again, now, looks, who.client));
            else
                wait(lock, a, seen, who.client, now);
            now = clients_.now();
        }
        end_hold(who, true, now - since);
        if (a.forced) openings_.note_forced({who.client, a.held_by, now - since, now});
        return now;
    }
    // `waited`: the thread didn't go immediately, so the hold counts.
    void end_hold(launch_owner who, bool waited, ns held) noexcept {
        --clients_.threads().held;
        client* const c = clients_.find(who);
        if (c == nullptr || !waited) return;
        ++c->used_so_far.held;
        c->used_so_far.longest_hold = std::max(c->used_so_far.longest_hold, held);
    }

    // ---- one pause of a waiting thread

    // While the device works for the client that holds the thread up (maybe its own), the thread
    // sleeps for half of the remaining time and then polls, so that the launch follows within a
    // microsecond or two, unless predictions are wrong. While only that client's thread works, this
    // thread polls for a moment, since the request may end. Then it sleeps until it is woken, for
    // 1 ms at most.
    void wait(lock_type& lock, const typename Core::answer& a, patience& seen, std::uint32_t own,
              instant now) noexcept {
        constexpr ns nap{50'000}, longest_nap{1'000'000};
        constexpr unsigned awake = 64;
        const std::uint32_t whose = a.own ? own : a.held_by;
        const ns left = core().in_flight(whose), remaining = seen.remaining(whose, left, now);
        if (remaining > nap * 4)
            clients_.threads().sleep(lock, std::min(remaining / 2, longest_nap));
        else if (seen.look(whose, !a.own && clients_.at(whose).requests != 0, left) <= awake)
            look_without_lock(lock, whose);
        else
            clients_.threads().sleep(lock, left == ns{0} && a.again == never ? longest_nap : nap);
    }
    // How long a thread sleeps that only time or the end of its own launches lets go. The thread
    // looks at its launches less and less often. The loss of the device wakes no thread, so each
    // sleep has an end.
    [[nodiscard]] ns nap_until(instant again, instant now, unsigned looks, std::uint32_t own) noexcept {
        constexpr ns shortest{50'000}, longest{10'000'000};
        const ns left = core().in_flight(own);
        const ns look = left == ns{0} ? longest : std::max(left / 2, shortest * (1U << std::min(looks, 7U)));
        return std::clamp(again - now, ns{1'000}, std::min(look, longest));
    }
    // A pause of a thread that isn't woken when its work is over.
    void nap(lock_type& lock, unsigned looks) noexcept {
        constexpr unsigned awake = 512;
        if (looks >= awake) return clients_.threads().sleep(lock, ns{50'000});
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
    }
    // Polls without the mutex, so that no other thread's launch waits for the poll.
    void look_without_lock(lock_type& lock, std::uint32_t whose) noexcept {
        device_state& device = clients_.device();
        point_state* next = nullptr;
        for (const auto& in : clients_.at(whose).streams)
            if (next == nullptr) next = in->keep_next_end();
        lock.unlock();
        {
            const relaxed_capture relaxed(device.api());
            const unsigned most = next != nullptr ? 32 : 4;
            for (unsigned n = 0; n < most; ++n) {
                if (next != nullptr && launch_batches::reached(device, *next)) break;
                std::this_thread::yield();
            }
        }
        lock.lock();
        launch_batches::let_go(device, next);
    }

    std::mutex mutex_;
    gate_clients<Core, Clock> clients_;
    gate_openings<Core, Clock> openings_{clients_};
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
