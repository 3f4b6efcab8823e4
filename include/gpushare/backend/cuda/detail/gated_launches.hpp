// SPDX-License-Identifier: Apache-2.0
// The state of a launch gate. It drives a core, which makes the decisions, by the driver's
// callbacks and events. Threads inside a launch, scopes and the gate share the state.
//
// One mutex guards the state. A launch that goes takes the mutex twice, for some ten nanoseconds
// each. A held thread gives the mutex up while it waits. The driver is called under the mutex, but
// calls nothing back, and no foreign code runs under it.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/launch_batches.hpp>
#include <gpushare/backend/cuda/detail/launch_call.hpp>
#include <gpushare/backend/cuda/detail/launch_hub.hpp>
#include <gpushare/backend/cuda/detail/own_calls.hpp>
#include <gpushare/backend/cuda/detail/patience.hpp>
#include <gpushare/backend/cuda/detail/stream_waits.hpp>
#include <gpushare/backend/cuda/detail/sync_call.hpp>
#include <gpushare/backend/cuda/detail/thread_polls.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/launch_times.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// A policy that decides about launches; gpushare::launch_gate is the only one.
// clang-format off
template <class C>
concept launch_core = std::movable<C> && requires(C& c, const C& cc, typename C::client who,
                                                  const typename C::client_options& o, instant now, ns t) {
    { c.add(o) } -> std::same_as<typename C::client>;
    { c.remove(who) } noexcept;
    { c.arrived(who, now) } noexcept;
    { c.left(who, now, now) } noexcept;
    { c.occupied(who, now) } noexcept;
    { c.drained(who, now) } noexcept;
    { c.change(who, o, now) } noexcept;
    { c.ask(who, t, now, now, true) } noexcept -> std::same_as<typename C::answer>;
    { cc.closed(who, now, now) } noexcept -> std::same_as<typename C::answer>;
    { cc.awaited(std::optional(who), true, now, now)->held } noexcept -> std::convertible_to<ns>;
    { c.keep_open() } noexcept;
    { c.let_close() } noexcept;
    { cc.takes_more(1U) } noexcept -> std::same_as<bool>;
    { cc.overdue(who, now)->held } noexcept -> std::convertible_to<ns>;
    { cc.overdue(who, now)->held_by } noexcept -> std::convertible_to<typename C::client>;
    requires std::same_as<decltype(C::client_options::level), int>;
    requires std::same_as<decltype(C::client_options::in_stream), bool>;
    requires std::same_as<decltype(C::answer::by_time), bool>;
    { c.launched(who, {t, t, true}, now, true) } noexcept;
    { c.finished(who, {t, t}, {t, t}, now) } noexcept;
    { c.overtook(who, {t, t}, {t, t}, now) } noexcept;
    { c.took(who, t) } noexcept;
    { c.spread(who, 1U) } noexcept;
    { cc.has_neighbours(who) } noexcept -> std::same_as<bool>;
    { cc.bound(who) } noexcept -> std::same_as<ns>;
    { cc.in_flight(who) } noexcept -> std::same_as<ns>;
};
// clang-format on

/// How a launch gate keeps lower clients back. With `thread` nothing waits on the device, so no
/// wait there can stop a request. With `stream` lower clients get more work done. docs/launches.md,
/// "How", helps to choose.
enum class launch_wait : std::uint8_t {
    thread,  ///< holds the launching thread, so its engine can't enqueue work ahead
    /// The client's streams wait for a word in memory between two batches, and its host runs ahead.
    stream,
};

/// Options of a CUDA launch gate.
struct launch_shell_options {
    /// With `stream`, a thread is held only for its share, for running too far ahead, and while the
    /// waits of streams are open because a thread waits for the device. If the driver has no such
    /// waits, threads are held. A launch into the legacy default stream always holds its thread,
    /// since a wait there would stop other streams. So do synchronous copies, copies of pageable
    /// memory and the first launch of each kernel, which may wait inside the driver, and host
    /// functions in a stream, for which another thread may wait.
    launch_wait waits = launch_wait::thread;
    /// Captures waits as well, so that a graph can be stopped between two pieces. Only clients of
    /// the level of the capture, or below, may launch such a graph: launched by a higher client,
    /// the graph would wait for its own request. The memory of the words is never freed.
    bool waits_in_graphs = false;
    /// Predicted work between two waits in a stream; see launch_gate::piece.
    ns piece{250'000};
    /// Predicted work after which an event is recorded, if streams don't wait.
    ns batch{150'000};
    ns idle_batch{50'000};  ///< the age from which a held thread ends another client's open batch
    ns gap{1'000};          ///< time between two kernels of a stream, which isn't charged
    /// How often a batch of a client with neighbours runs alone, to be timed.
    ns sample_each{40'000'000};
    /// If CUPTI has another subscriber, hold whole calls at enter() instead of throwing.
    bool calls_instead = false;
};

/// A launch that went because it had been held for too long. The urgent client may have waited for
/// a lock of the engine that the held thread had. Also reported for launches in a waiting stream,
/// if a thread waited for that stream.
struct forced_launch {
    std::uint32_t client = 0;   ///< the client that launched
    std::uint32_t held_by = 0;  ///< the client for which the launch was held
    ns held{};                  ///< how long the launch was held, or the thread had waited
    instant at{};               ///< when the launch went
};

/// A client's account so far.
struct launch_usage {
    ns device_time{};            ///< charged time: measured duration times width
    ns time{};                   ///< measured duration
    std::uint64_t launches = 0;  ///< completed launches
    std::uint64_t held = 0;      ///< launches that were held
    ns longest_hold{};           ///< the longest time for which a launch was held
};

namespace detail {

template <launch_core Core, gpushare::clock Clock>
class gated_launches final : public launch_listener {
public:
    gated_launches(std::shared_ptr<device_state> device, Core core, const launch_shell_options& o, Clock time)
        : device_(std::move(device)),
          core_(std::move(core)),
          options_(o),
          time_(std::move(time)),
          waits_(device_),
          in_stream_(o.waits == launch_wait::stream && waits_.supported()) {}

    ~gated_launches() override {
        if (told_closing_) thread_polls::closing_gates().fetch_sub(1, std::memory_order_relaxed);
        if (launch_hub::in_child()) waits_.keep_memory();
        if (!in_stream_ || launch_hub::in_child()) return;
        const instant now = time_.now();
        for (std::uint32_t n = 0; n < clients_.size(); ++n) retire(n, now);
    }

    /// Holds threads instead of streams, if launches can't be seen. Call before clients are added.
    void hold_threads() noexcept { in_stream_ = false; }
    [[nodiscard]] bool waits_in_streams() const noexcept override { return in_stream_; }

    // ---- clients

    [[nodiscard]] launch_owner add(typename Core::client_options o) {
        const std::lock_guard lock(mutex_);
        o.in_stream = in_stream_;
        const auto c = static_cast<std::uint32_t>(core_.add(o));
        if (in_stream_) core_.took(c, options_.piece);
        try {
            if (clients_.size() <= c) clients_.resize(c + 1);
            if (in_stream_ && !join(o.level)) throw std::bad_alloc();
        } catch (...) {
            core_.remove(c);
            throw;
        }
        client_state& s = clients_[c];
        s = client_state{.turn = ++turns_, .used = true, .level = o.level};
        return {c, s.turn};
    }
    void remove(launch_owner who) noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        const client_state* const c = find(who);
        if (c == nullptr) return;
        if (in_stream_) {
            retire(who.client, time_.now());
            waits_.leave(c->level, c->requests);
        }
        core_.remove(who.client);
        clients_[who.client] = client_state{};
        wake();
    }
    /// Returns false if streams wait and the client gets another level while it has a request or
    /// work in flight: its streams may be in front of a wait for the old level. Then the other
    /// options are in force, and the level follows once the client is idle. Does nothing once the
    /// gate is closed.
    [[nodiscard]] bool change(launch_owner who, typename Core::client_options o) noexcept {
        if (launch_hub::in_child()) return true;
        const std::lock_guard lock(mutex_);
        client_state* const c = find(who);
        if (c == nullptr || closed_) return true;  // the tenant of a client may outlive the gate
        const instant now = time_.now();
        o.in_stream = in_stream_;
        c->later.reset();
        if (in_stream_ && o.level != c->level) {
            // Perhaps no other thread ends an open batch.
            for (const auto& s : c->streams) (void)s->end();
            settle(who.client, now);
            c->later = o;
            if (change_level_if_idle(*c, who.client, now)) return true;
            o.level = c->level;
        }
        c->level = o.level;
        core_.change(who.client, o, now);
        wake();
        return !c->later;
    }
    /// A request has arrived. Returns when, for left().
    instant arrived(launch_owner who) noexcept {
        if (launch_hub::in_child()) return {};
        const std::lock_guard lock(mutex_);
        client_state* const c = find(who);
        if (c == nullptr) return {};
        const instant now = time_.now();
        end_polls(now);
        if (c->later) settle(who.client, now);
        core_.arrived(who.client, now);
        ++c->requests;
        if (in_stream_) waits_.arrived(c->level);
        tell_closing();
        return now;
    }
    /// A request has left. Ends the client's open batches, so that the gate learns when they are
    /// over.
    void left(launch_owner who, instant came) noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        client_state* const c = find(who);
        if (c == nullptr) return;
        for (const auto& s : c->streams) (void)s->end();
        const instant now = time_.now();
        core_.left(who.client, now, came);
        --c->requests;
        if (in_stream_ && waits_.left(c->level)) open_behind(c->level, now);
        tell_closing();
        (void)change_level_if_idle(*c, who.client, now);
        wake();
    }
    void close() noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        closed_ = true;
        waits_.end();
        tell_closing();
        wake();
    }

    // ---- launches, from the driver's callbacks

    [[nodiscard]] launch_verdict before(launch_owner who, const launch_call& call,
                                        std::uint64_t& note) noexcept override {
        try {
            // The launch is recorded, and passes the gate when its graph is launched.
            if (captured(call.stream)) {
                if (in_stream_ && options_.waits_in_graphs && !call.host) put_waits_in_graph(who, call);
                return launch_verdict::passes;
            }
            std::unique_lock lock(mutex_);
            if (!passes_gate(who)) return launch_verdict::passes;
            if (!is_here(*find(who), call)) return launch_verdict::elsewhere;
            if (find(who)->later) settle(who.client, time_.now());
            if (call.host) return before_host(lock, who, call, note);
            if (call.is_synchronous()) return before_synchronous(lock, who, call, note);
            return before_launch(lock, who, call, note);
        } catch (...) {  // no memory for a new stream: the launch isn't followed
            return launch_verdict::passes;
        }
    }
    void after(launch_owner who, const launch_call& call, std::uint64_t note, CUresult result) noexcept override {
        const std::lock_guard lock(mutex_);
        if ((note & waits_opened) != 0) end_opening();
        if ((note & function_inside) != 0) forget_function(call.stream);
        client_state* const c = find(who);
        if (c == nullptr) return;
        if ((note & waits_inside) != 0) {
            --c->inside;
            wake();
        }
        if (call.host) return;
        const ns predicted{static_cast<std::int64_t>((note & (waits_inside - 1)) - 1)};
        if (call.is_synchronous()) return after_synchronous(*c, who.client, predicted, result);
        launch_batches* const in = c->on(call);
        if (in == nullptr) return;
        if (result != CUDA_SUCCESS) {
            const ns charge = charged(call, predicted);
            if (in->take_back(predicted, charge)) {
                const instant now = time_.now();
                core_.overtook(who.client, {predicted, charge}, {ns{0}, ns{0}}, now);
                absent_if_idle(*c, who.client, now);
            }
            return;
        }
        if (in->open().predicted < full_batch(*c) && !c->alone && !c->later && !call.of_thread()) return;
        c->alone = false;
        if (in->end(true) && std::exchange(c->samples, false)) c->sampled = time_.now();
        settle(who.client, time_.now());
    }
    // The driver may wait for a stream whose waits are closed, and the thread can't act inside the
    // driver. So the thread waits here, until its work is over or the waits are opened for it. The
    // waits stay open until synchronised().
    [[nodiscard]] bool synchronises(const launch_owner* who, const sync_call& call) noexcept override {
        if (!in_stream_ || launch_hub::in_child() || !concerns(call)) return false;
        std::unique_lock lock(mutex_);
        ++looking_;
        unsigned looks = 0;
        const bool opens = look(lock, who, call, time_.now(), false, looks);
        --looking_;
        if (!opens) return false;
        begin_opening();
        return true;
    }
    void synchronised() noexcept override {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        end_opening();
    }
    // Called after the driver's call. A polling thread doesn't say when it stops. So the waits stay
    // open until the thread gets its answer, launches, or stops polling.
    [[nodiscard]] bool polls(const launch_owner* who, const sync_call& call,
                             std::optional<instant>& since) noexcept override {
        if (!in_stream_ || launch_hub::in_child() || !concerns(call)) {
            since.reset();
            return false;
        }
        const std::lock_guard lock(mutex_);
        const instant now = time_.now();
        const auto there = find_poll(call.awaited());
        if (there != polls_.end()) {
            there->last = now;
            return true;
        }
        end_polls(now);
        if (closed_ || device_->health().lost()) {
            since.reset();
            return false;
        }
        const client_state* const c = who != nullptr ? find(*who) : nullptr;
        const auto own = c != nullptr ? std::optional(who->client) : std::nullopt;
        settle_all(c != nullptr && is_gated(*c) ? *own : nobody, call.context, now);
        tell_closing();
        const auto stopped = first_stopped(call);
        if (!stopped || !since) {
            since = stopped ? std::optional(now) : std::nullopt;
            return false;
        }
        const auto held = opens_at(own, needs_all(own, call), now, *since);
        if (!held || !has_pushed(polls_, {std::this_thread::get_id(), call.awaited(), now})) return false;
        if (held->held != ns{0}) note_forced({*stopped, held->held_by, held->held, now});
        begin_opening();
        return true;
    }
    void poll_over(const void* what) noexcept override {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        const auto there = find_poll(what);
        if (there == polls_.end()) return;
        polls_.erase(there);
        end_opening();
    }
    void ends(CUstream s) noexcept override {
        const std::lock_guard lock(mutex_);
        for (client_state& c : clients_)
            for (const auto& in : c.streams)
                if (in->stream() == s && !in->gone()) in->stream_gone();
    }

    // ---- captures

    /// Puts waits into the capture that is under way in the stream. errc::not_supported if streams
    /// don't wait; invalid_specification if the stream isn't being captured. Does nothing if no
    /// client is above this one.
    [[nodiscard]] errc wait_in_capture(launch_owner who, CUstream s) noexcept {
        const std::lock_guard lock(mutex_);
        if (!in_stream_) return errc::not_supported;
        if (!captured(s)) return errc::invalid_specification;
        if (!passes_gate(who)) return errc::none;
        client_state& c = *find(who);
        c.captured = ns{};
        waits_.keep_memory();
        waits_.each_above(c.level, [&](CUdeviceptr word) { launch_batches::put_wait(*device_, s, word); });
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
        client_state* c = find(who);
        if (c == nullptr) return {};
        call_state call{.predicted = c->call_takes};
        call.begun = hold(lock, who, call.predicted, nullptr, false);
        c = find(who);
        if (c == nullptr) return {};
        core_.launched(who.client, {call.predicted, call.predicted}, call.begun, false);
        for (const auto& in : c->streams)
            if (!in->gone()) in->begin(call.begun);
        present(*c, who.client, call.begun);
        return call;
    }
    void end_call(launch_owner who, const call_state& call) noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        client_state* const c = find(who);
        if (c == nullptr || call.predicted == ns{0}) return;
        const auto& all = c->streams;
        const auto last = std::ranges::find_if(all.rbegin(), all.rend(), [](const auto& s) { return !s->gone(); });
        const instant now = time_.now();
        if (last != all.rend()) {
            // The stream was bound during the call.
            if (!(*last)->has_begun()) (*last)->begin(call.begun);
            (*last)->add_call(call.predicted);
            if ((*last)->end()) return settle(who.client, now);
        } else {
            over(who.client, {.predicted = call.predicted, .charge = call.predicted, .launches = 1, .call = true},
                 now - call.begun, now);
        }
    }
    /// Adds a stream of the client, whose events tell when calls are over. Throws std::bad_alloc.
    void adopt(launch_owner who, CUstream s) {
        const std::lock_guard lock(mutex_);
        if (client_state* const c = find(who)) c->on_or_new({.stream = s}, device_).adopt();
    }
    /// Ends one adopt(). The end of the last one counts as the end of the stream, since nothing
    /// else tells when the stream is destroyed.
    void abandon(launch_owner who, CUstream s) noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        if (client_state* const c = find(who))
            if (launch_batches* const in = c->on({.stream = s}); in != nullptr && in->abandon()) in->stream_gone();
    }
    /// The client's binding to the stream has ended.
    void unbound(launch_owner who, CUstream s) noexcept {
        if (launch_hub::in_child()) return;
        const std::lock_guard lock(mutex_);
        if (const client_state* const c = find(who))
            for (const auto& in : c->streams)
                if (in->stream() == s) (void)in->end();
    }

    // ---- figures

    [[nodiscard]] launch_usage usage(launch_owner who) noexcept {
        const std::lock_guard lock(mutex_);
        if (find(who) == nullptr) return {};
        settle(who.client, time_.now());
        return clients_[who.client].used_so_far;
    }
    [[nodiscard]] ns bound(launch_owner who) noexcept {
        const std::lock_guard lock(mutex_);
        if (find(who) == nullptr) return ns{0};
        const instant now = time_.now();
        for (std::uint32_t n = 0; n < clients_.size(); ++n) settle(n, now);
        return core_.bound(who.client);
    }
    [[nodiscard]] ns in_flight(launch_owner who) noexcept {
        const std::lock_guard lock(mutex_);
        if (find(who) == nullptr) return ns{0};
        settle(who.client, time_.now());
        return core_.in_flight(who.client);
    }
    [[nodiscard]] std::size_t held() const noexcept {
        const std::lock_guard lock(mutex_);
        return held_;
    }
    [[nodiscard]] std::optional<forced_launch> take_forced() noexcept {
        const std::lock_guard lock(mutex_);
        if (forced_ == 0) return std::nullopt;
        return forced_launches_[(first_forced_ + forced_launches_.size() - forced_--) % forced_launches_.size()];
    }

private:
    using entry = gpushare::detail::launch_times::entry;
    // Flags of a launch, kept in `note` beside the predicted time from before() to after().
    static constexpr std::uint64_t waits_inside = std::uint64_t{1} << 53, waits_opened = std::uint64_t{1} << 54,
                                   function_inside = std::uint64_t{1} << 55;
    static constexpr std::uint32_t nobody = std::numeric_limits<std::uint32_t>::max();

    struct client_state {
        std::uint32_t turn = 0;
        bool used = false;
        int level = 0;
        // Options that are to apply when the client is idle, because their level differs.
        std::optional<typename Core::client_options> later{};
        std::uint32_t requests = 0;  // open requests
        bool present = false;        // the client has work in flight, and the core knows
        bool alone = false;          // its last launch is a batch by itself, to be timed
        bool samples = false;        // its next or open batch runs alone
        std::uint32_t inside = 0;    // calls under way in front of which there may be no wait
        std::uint32_t passing = 0;   // those of them that are still held
        instant sampled{};           // when the last batch that ran alone was over
        std::uint64_t launches = 0;
        ns captured{0};  // predicted work captured since the last captured wait
        ns call_takes{1'000'000};
        std::vector<std::unique_ptr<launch_batches>> streams{};
        launch_usage used_so_far{};

        [[nodiscard]] launch_batches* on(const launch_call& call) const noexcept {
            for (const auto& s : streams)
                if (s->of(call)) return s.get();
            return nullptr;
        }
        [[nodiscard]] launch_batches& on_or_new(const launch_call& call, const std::shared_ptr<device_state>& device) {
            if (launch_batches* const there = on(call)) return *there;
            std::erase_if(streams, [](const auto& s) { return s->drained() || s->forgettable(); });
            streams.push_back(std::make_unique<launch_batches>(device, call));
            return *streams.back();
        }
    };

    [[nodiscard]] client_state* find(launch_owner who) noexcept {
        if (who.client >= clients_.size()) return nullptr;
        client_state& c = clients_[who.client];
        return c.used && c.turn == who.turn ? &c : nullptr;
    }
    [[nodiscard]] bool passes_gate(launch_owner who) noexcept {
        return !closed_ && find(who) != nullptr && !device_->health().lost();
    }
    [[nodiscard]] bool captured(CUstream s) const noexcept {
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
        return device_->api().stream_is_capturing(s, &status) != CUDA_SUCCESS ||
               status != CU_STREAM_CAPTURE_STATUS_NONE;
    }
    // Whether the launch is for this device. Streams that the client has used are of this device. A
    // launch's stream belongs to the current context, but a copy's may belong to another device.
    // (Programming Guide, "Stream and Event Behavior".)
    [[nodiscard]] bool is_here(const client_state& c, const launch_call& call) const noexcept {
        if (c.on(call) != nullptr) return true;
        const relaxed_capture relaxed(device_->api());
        if (is_legacy(call) || call.of_thread()) return is_current();
        const context_guard any(device_->context());
        return may_have(call.stream);
    }
    // Whether the current context is of this device, or unknown.
    [[nodiscard]] bool is_current() const noexcept {
        CUdevice now = 0;
        return device_->api().ctx_get_device(&now) != CUDA_SUCCESS || now == device_->context().device();
    }
    // The same for a stream that isn't a default stream.
    [[nodiscard]] bool may_have(CUstream s) const noexcept {
        int of_stream = device_->ordinal();
        return handled(cudaStreamGetDevice(s, &of_stream)) != cudaSuccess || of_stream == device_->ordinal();
    }
    [[nodiscard]] entry entry_of(launch_owner who, const launch_call& call) noexcept {
        const launch_batches* const in = find(who)->on(call);
        return times_.find(call.key, in != nullptr ? in->history() : gpushare::detail::launch_history{}, call.guess);
    }
    // The charge: duration times width. A launch with as many blocks as SMs counts as filling them
    // all, however many blocks fit on an SM. The kernels of a graph are unknown, so a graph counts
    // as filling all SMs.
    [[nodiscard]] ns charged(const launch_call& call, ns predicted) const noexcept {
        const std::uint32_t sms = std::max(1U, device_->properties().sms);
        const std::uint32_t filled = call.copies ? 0 : call.blocks == 0 ? sms : std::min(call.blocks, sms);
        return without_gaps(predicted, 1) * filled / sms;
    }
    // The time between two events without the gaps between launches, in which the device does
    // nothing.
    [[nodiscard]] ns without_gaps(ns apart, std::uint32_t launches) const noexcept {
        return std::max(apart - options_.gap * launches, apart / 2);
    }

    // Whether the launch should run alone. Events tell how long launches took only if no others ran
    // beside them. So a launch of unknown length is timed alone, and so is an occasional batch of a
    // client that always has neighbours.
    [[nodiscard]] bool runs_alone(launch_owner who, const launch_call& call, entry e) noexcept {
        client_state& c = *find(who);
        const launch_batches* const in = c.on(call);
        const bool begins = in == nullptr || in->open().launches == 0;
        if (begins && core_.has_neighbours(who.client) && time_.now() - c.sampled >= options_.sample_each)
            c.samples = true;
        return c.samples || !times_.known(e);
    }
    // Whether launches of the two clients run side by side. Clients of different levels don't if
    // streams wait.
    [[nodiscard]] bool run_together(std::uint32_t a, std::uint32_t b) const noexcept {
        return a != b && clients_[b].used && (!in_stream_ || clients_[a].level == clients_[b].level);
    }
    [[nodiscard]] bool others_in_flight(std::uint32_t number) const noexcept {
        for (std::uint32_t n = 0; n < clients_.size(); ++n)
            if (run_together(number, n) && core_.in_flight(n) != ns{0}) return true;
        return false;
    }
    // The number of launches so far that may have run beside the client's.
    [[nodiscard]] std::uint64_t launches_beside(std::uint32_t number) const noexcept {
        if (!in_stream_) return launches_ - clients_[number].launches;
        std::uint64_t all = 0;
        for (std::uint32_t n = 0; n < clients_.size(); ++n)
            if (run_together(number, n)) all += clients_[n].launches;
        return all;
    }
    // Counts a launch that goes into its stream's batch. `inside`: no wait may be put in front of
    // the launch.
    void follow(launch_owner who, const launch_call& call, entry e, ns predicted, instant now, bool alone,
                bool inside) {
        client_state& c = *find(who);
        launch_batches& in = c.on_or_new(call, device_);
        core_.spread(who.client, static_cast<std::uint32_t>(c.streams.size()));
        c.alone = times_.first_time(e) || !times_.known(e);
        const bool gated = is_gated(c) && !is_legacy(call) && !inside;
        if (c.alone || is_old(c, in, now) || (gated && piece_ends(c, who.client, in, predicted))) (void)in.end();
        if (in.open().launches == 0) {
            if (gated) put_waits(c, in);
            in.begin(now, others_in_flight(who.client), launches_beside(who.client));
        }
        const ns charge = charged(call, predicted);
        in.add(e, call.key, predicted, charge);
        ++launches_;
        ++c.launches;
        core_.launched(who.client, {predicted, charge, !c.alone}, now, alone);
        present(c, who.client, now);
    }
    // A client counts as present while its work is in flight, also outside of its scopes.
    void present(client_state& c, std::uint32_t number, instant now) noexcept {
        if (std::exchange(c.present, true)) return;
        core_.occupied(number, now);
    }
    void absent_if_idle(client_state& c, std::uint32_t number, instant now) noexcept {
        if (!c.present || core_.in_flight(number) != ns{0}) return;
        c.present = false;
        core_.drained(number, now);
        (void)change_level_if_idle(c, number, now);
        wake();
    }
    // Gives an idle client the new level for which it waits. Returns false if the client waits for
    // none or isn't idle. If there is no memory for the level's word, the client gets the level
    // when it is idle the next time.
    bool change_level_if_idle(client_state& c, std::uint32_t number, instant now) noexcept {
        if (!c.later || c.requests != 0 || c.present || !joins(c.later->level)) return false;
        waits_.leave(c.level, 0);
        c.level = c.later->level;
        core_.change(number, *c.later, now);
        c.later.reset();
        wake();
        return true;
    }
    // A new level's word may need pinned memory. The gate's callback for that driver call would
    // need the mutex that this thread holds.
    [[nodiscard]] bool join(int level) {
        const own_calls unwatched;
        return waits_.join(level);
    }
    [[nodiscard]] bool joins(int level) noexcept {
        try {
            return join(level);
        } catch (const std::bad_alloc&) {
            return false;
        }
    }

    // False if there is no memory for the element.
    template <class T>
    [[nodiscard]] static bool has_pushed(std::vector<T>& list, const std::type_identity_t<T>& element) noexcept {
        try {
            list.push_back(element);
            return true;
        } catch (const std::bad_alloc&) {
            return false;
        }
    }

    // Notes which batches of the client are over.
    void settle(std::uint32_t number, instant now) noexcept {
        for (const auto& in : clients_[number].streams)
            in->settle([&](const launch_batch& b, std::optional<ns> took) { over(number, b, took, now); });
    }
    void over(std::uint32_t number, const launch_batch& b, std::optional<ns> took, instant now) noexcept {
        client_state& c = clients_[number];
        const bool shared = !b.call && (b.shared || b.of_others != launches_beside(number));
        if (shared) took.reset();
        const ns measured = took ? taken(b, *took) : b.predicted;
        const std::uint32_t gaps = b.call ? 0 : b.launches;
        const ns net = without_gaps(measured, gaps), expected = without_gaps(b.predicted, gaps);
        const double scale =
            expected > ns{0} ? static_cast<double>(net.count()) / static_cast<double>(expected.count()) : 0;
        const ns charge{static_cast<std::int64_t>(static_cast<double>(b.charge.count()) * scale)};
        core_.finished(number, {b.predicted, b.charge}, {measured, charge}, now);
        if (b.launches == 1) core_.took(number, measured);
        if (b.call) c.call_takes = std::max(ns{1000}, (c.call_takes * 3 + measured) / 4);
        if (took) times_.learn(b.known(), b.launches, *took, b.exact());
        c.used_so_far.time += net;
        c.used_so_far.device_time += charge;
        c.used_so_far.launches += b.launches;
        absent_if_idle(c, number, now);
    }
    // The time that the launches of a batch took. If the device may have waited for the host
    // meanwhile, at most the prediction counts, which is right in the long run. For a batch that
    // others' launches ran beside, over() takes the prediction instead.
    [[nodiscard]] static ns taken(const launch_batch& b, ns apart) noexcept {
        return b.exact() || b.call ? apart : std::min(apart, b.predicted);
    }

    // ---- waits in streams

    [[nodiscard]] bool is_gated(const client_state& c) const noexcept {
        return in_stream_ && waits_.any_above(c.level);
    }
    [[nodiscard]] static bool is_legacy(const launch_call& call) noexcept { return call.stream == CU_STREAM_LEGACY; }
    // The predicted work of the client's batches.
    [[nodiscard]] ns full_batch(const client_state& c) const noexcept {
        return is_gated(c) ? options_.piece : options_.batch;
    }
    // A slow host takes longer to enqueue a batch than the device takes to run it. The batch ends
    // all the same, so that the gate learns what is over. A piece has as much time as its work asks
    // for, since each further piece costs a wait.
    [[nodiscard]] bool is_old(const client_state& c, const launch_batches& in, instant now) const noexcept {
        return now - in.open().begun >= std::max(full_batch(c), options_.batch) * 2;
    }
    // Whether to put a wait in front of the next launch. There are two reasons: the piece would get
    // too long, or the words were closed since its beginning, so that the rest of the piece would
    // run beside the request.
    [[nodiscard]] bool piece_ends(const client_state& c, std::uint32_t client, const launch_batches& in,
                                  ns predicted) const noexcept {
        if (in.open().predicted + predicted > core_.piece(client, options_.piece)) return true;
        return in.closings() != waits_.closings_above(c.level) && waits_.closed_above(c.level);
    }
    void put_waits(const client_state& c, launch_batches& in) noexcept {
        const std::uint64_t closings = waits_.closings_above(c.level);
        waits_.each_above(c.level, [&](CUdeviceptr word) { in.wait_for(word, closings); });
    }
    // Puts waits into a capture once enough work was captured. No wait is needed at the graph's
    // beginning, since the graph is launched behind waits.
    void put_waits_in_graph(launch_owner who, const launch_call& call) noexcept {
        const std::lock_guard lock(mutex_);
        if (!passes_gate(who)) return;
        client_state& c = *find(who);
        if (!is_gated(c) || !is_here(c, call)) return;
        const ns predicted = times_.predicted(times_.find(call.key, call.guess));
        if ((c.captured += predicted) <= options_.piece) return;
        c.captured = predicted;
        waits_.keep_memory();
        waits_.each_above(c.level, [&](CUdeviceptr word) { launch_batches::put_wait(*device_, call.stream, word); });
    }
    // Called when the level's last request has left. The device opens the waits once the work that
    // these requests have in flight has ended. Of several streams, the last one waits for the
    // others; this delays only later work on that stream.
    void open_behind(int level, instant now) noexcept {
        launch_batches* last = nullptr;
        const auto each = [&](auto f) {
            for (const client_state& c : clients_)
                if (c.used && c.level == level)
                    for (const auto& in : c.streams)
                        if (in->in_flight() && !in->gone()) f(*in);
        };
        for (std::uint32_t n = 0; n < clients_.size(); ++n)
            if (clients_[n].used && clients_[n].level == level) settle(n, now);
        each([&](launch_batches& in) {
            if (last == nullptr || last->is_elsewhere() || !in.is_elsewhere()) last = &in;
        });
        // In this thread, the handle of a per-thread default stream means this thread's own stream,
        // not another thread's.
        each([&](launch_batches& in) {
            if (&in != last || in.is_elsewhere()) last->run_behind(in);
        });
        if (last == nullptr) return waits_.open(level);
        const auto opens = waits_.hand_over(level);
        if (opens && !last->clear_behind(opens->where)) waits_.open(level, *opens);
    }
    // The client is being removed. Its streams may still be in front of waits, so the memory of the
    // words is kept.
    void retire(std::uint32_t number, instant now) noexcept {
        for (const auto& in : clients_[number].streams) (void)in->end();
        settle(number, now);
        for (const auto& in : clients_[number].streams)
            if (in->may_wait()) waits_.keep_memory();
    }
    void open_overdue(std::uint32_t number, instant now) noexcept {
        const client_state& c = clients_[number];
        if (!is_gated(c) || !waits_.closed_above(c.level)) return;
        const auto overdue = core_.overdue(number, now);
        if (!overdue) return;
        waits_.force_above(c.level);
        note_forced({number, overdue->held_by, overdue->held, now});
    }

    // ---- calls in front of which there may be no closed wait

    // A copy from or to pageable memory may wait inside the driver for all work in front of the
    // copy. (Runtime API, "API synchronization behavior".) The driver reports no type for pageable
    // memory.
    [[nodiscard]] bool is_pageable(const launch_call& call) const noexcept {
        if (!call.copies || !device_->api().pointer_get_attribute) return false;
        const relaxed_capture relaxed(device_->api());
        return call.any_address([&](CUdeviceptr p) {
            unsigned kind = 0;
            return device_->api().pointer_get_attribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p) ==
                   CUDA_ERROR_INVALID_VALUE;
        });
    }
    // A client without waits may launch into a stream of a lower client, which has waits. The work
    // in front of such a copy would then wait for the client's own request.
    [[nodiscard]] bool opens_for_copy(launch_owner who, const launch_call& call) const noexcept {
        const sync_call waits{.reach = wait_reach::stream, .stream = call.stream};
        return needs_all(who.client, waits) && is_pageable(call);
    }
    // The driver may wait inside the call: to load code, or for a synchronous copy. Waits here
    // until nothing stops the work for which the driver waits. `since`: when the call began to
    // wait. Returns a flag for after() if the waits must stay open until then. The mutex is given
    // up meanwhile.
    [[nodiscard]] std::uint64_t opens_inside(std::unique_lock<std::mutex>& lock, launch_owner who,
                                             const launch_call& call, instant since) noexcept {
        ++held_;
        unsigned looks = 0;
        const bool opens = look(lock, &who, sync_of(call), since, true, looks);
        end_hold(who, looks != 0, time_.now() - since);
        if (!opens) return 0;
        begin_opening();
        return waits_opened;
    }
    // A request launches: its word closes again if it was forced open.
    void close_for(const client_state& c) noexcept {
        if (!in_stream_ || c.requests == 0) return;
        end_polls(time_.now());
        waits_.keep(c.level);
    }
    // A synchronous copy holds its thread, as a launch into the legacy stream does. An event behind
    // the copy would stop other streams. So the copy counts as over when it returns, after its
    // predicted time.
    [[nodiscard]] launch_verdict before_synchronous(std::unique_lock<std::mutex>& lock, launch_owner who,
                                                    const launch_call& call, std::uint64_t& note) noexcept {
        close_for(*find(who));
        const instant since = time_.now();
        (void)hold(lock, who, call.guess, &call, false);
        if (!passes_gate(who)) return launch_verdict::passes;
        const std::uint64_t how = in_stream_ ? opens_inside(lock, who, call, since) : 0;
        client_state* const c = find(who);
        if (c == nullptr) return abandon_opening(how);
        const instant now = time_.now();
        ++launches_;
        ++c->launches;
        core_.launched(who.client, {call.guess, charged(call, call.guess)}, now, false);
        present(*c, who.client, now);
        note = (static_cast<std::uint64_t>(call.guess.count()) + 1) | how;
        return launch_verdict::followed;
    }
    void after_synchronous(client_state& c, std::uint32_t number, ns predicted, CUresult result) noexcept {
        const instant now = time_.now();
        const bool went = result == CUDA_SUCCESS;
        core_.overtook(number, {predicted, ns{0}}, {went ? predicted : ns{0}, ns{0}}, now);
        if (went) {
            c.used_so_far.time += predicted;
            ++c.used_so_far.launches;
        }
        absent_if_idle(c, number, now);
        wake();
    }
    [[nodiscard]] launch_verdict abandon_opening(std::uint64_t how) noexcept {
        if ((how & waits_opened) != 0) end_opening();
        return launch_verdict::passes;
    }
    [[nodiscard]] launch_verdict before_launch(std::unique_lock<std::mutex>& lock, launch_owner who,
                                               const launch_call& call, std::uint64_t& note) {
        const entry e = entry_of(who, call);
        const ns predicted = times_.predicted(e);
        const bool alone = runs_alone(who, call, e);
        close_for(*find(who));
        const bool may_wait = in_stream_ && call.waits != wait_reach::none;
        const instant since = may_wait ? time_.now() : instant{};
        instant now = hold(lock, who, predicted, &call, alone);
        if (!passes_gate(who)) return launch_verdict::passes;
        std::uint64_t how = 0;
        if (may_wait) {
            how = opens_inside(lock, who, call, since);
            if (!passes_gate(who)) return abandon_opening(how);
            now = time_.now();
        } else if (in_stream_ && !is_gated(*find(who)) && opens_for_copy(who, call)) {
            begin_opening();
            how = waits_opened;
        } else if (in_stream_ && is_gated(*find(who)) && is_pageable(call)) {
            how = pass_waits(lock, who, call, predicted);
            if ((how & waits_inside) == 0) return launch_verdict::passes;
            now = time_.now();
        }
        try {
            follow(who, call, e, predicted, now, alone, (how & waits_inside) != 0);
        } catch (...) {  // after() won't be called
            if ((how & function_inside) != 0) forget_function(call.stream);
            if ((how & waits_inside) != 0) {
                --find(who)->inside;
                wake();
            }
            return abandon_opening(how);
        }
        note = (static_cast<std::uint64_t>(predicted.count()) + 1) | how;
        return launch_verdict::followed;
    }
    // Another thread may wait for the host function in a way that the gate can't see. So no closed
    // wait may delay the function: no wait of any client in the function's stream, and no wait in
    // the client's other streams, since the function's stream may wait for their events.
    [[nodiscard]] launch_verdict before_host(std::unique_lock<std::mutex>& lock, launch_owner who,
                                             const launch_call& call, std::uint64_t& note) noexcept {
        if (!in_stream_) return launch_verdict::passes;
        note = pass_waits(lock, who, call, ns{0});
        return (note & waits_inside) != 0 ? launch_verdict::followed : launch_verdict::passes;
    }
    // The client of the lowest level that has enqueued work behind a wait in front of the call;
    // none if there is no such work.
    [[nodiscard]] std::optional<std::uint32_t> in_front(std::uint32_t number, const launch_call& call) const noexcept {
        std::optional<std::uint32_t> lowest;
        for (std::uint32_t n = 0; n < clients_.size(); ++n) {
            const client_state& c = clients_[n];
            if (!c.used || !is_gated(c) || (lowest && clients_[*lowest].level <= c.level)) continue;
            const auto stops = [&](const auto& in) {
                const bool counts = n == number || in->of(call) || (is_legacy(call) && in->legacy_waits());
                return counts && !in->passed_waits();
            };
            if (std::ranges::any_of(c.streams, stops)) lowest = n;
        }
        return lowest;
    }
    // Host functions that threads are about to enqueue, by their streams. The legacy stream waits
    // for others, so its functions count for all streams.
    void forget_function(CUstream s) noexcept {
        const auto there = std::ranges::find(functions_, s);
        if (there != functions_.end()) functions_.erase(there);
        wake();
    }
    [[nodiscard]] bool has_function(CUstream s) const noexcept {
        return std::ranges::any_of(functions_, [s](CUstream f) { return f == s || f == CU_STREAM_LEGACY; });
    }
    // Waits until no enqueued work in front of the call is behind a wait. No further wait is
    // enqueued for the client, or for others in front of a host function, until the call is over.
    // The gate opens the waits until the call is over: at once if a request's own call is behind a
    // lower client's work, otherwise after the longest hold. Once the waits have been open for the
    // longest hold, the call goes in any case: the device may wait for this thread. Returns flags
    // for after(); 0 if the gate lets everything go.
    [[nodiscard]] std::uint64_t pass_waits(std::unique_lock<std::mutex>& lock, launch_owner who,
                                           const launch_call& call, ns predicted) noexcept {
        const instant since = time_.now();
        instant closed = since;  // when this thread last found the waits closed
        std::uint64_t how = waits_inside;
        patience seen;
        ++held_;
        ++find(who)->passing;
        for (unsigned looks = 0;; ++looks) {
            const instant now = time_.now();
            if (looks != 0 || is_gated(*find(who))) settle_all(who.client, call.context, now);
            if (!passes_gate(who)) break;
            client_state& c = *find(who);
            const auto front = in_front(who.client, call);
            const bool opened = (how & waits_opened) != 0;
            const bool may = call.host || opened || runs_now(who.client, predicted, now);
            const bool stopped = !opened && (!may || waits_.closed_above(clients_[front.value_or(who.client)].level));
            if (stopped) closed = now;
            if ((may && !front) || (!stopped && core_.awaited(std::nullopt, false, now, closed))) {
                --c.passing;
                ++c.inside;
                if (call.host && has_pushed(functions_, call.stream)) how |= function_inside;
                end_hold(who, looks != 0, now - since);
                return how;
            }
            const bool behind_lower = front && clients_[*front].level < c.level;
            if (const auto held = opens_at(who.client, behind_lower, now, since); stopped && held) {
                if (held->held != ns{0}) note_forced({who.client, held->held_by, held->held, now});
                begin_opening();
                how |= waits_opened;
            }
            wait(lock, {.own = true}, seen, front.value_or(who.client), now);
        }
        --held_;
        if (client_state* const c = find(who)) --c->passing;
        if ((how & waits_opened) != 0) end_opening();
        return 0;
    }
    // `waited`: the thread didn't go at once, so the hold counts.
    void end_hold(launch_owner who, bool waited, ns held) noexcept {
        --held_;
        client_state* const c = find(who);
        if (c == nullptr || !waited) return;
        ++c->used_so_far.held;
        c->used_so_far.longest_hold = std::max(c->used_so_far.longest_hold, held);
    }
    // Whether a launch without a wait may run now: no higher client is there, and little is in
    // front of it.
    [[nodiscard]] bool runs_now(std::uint32_t number, ns predicted, instant now) const noexcept {
        const ns already = core_.in_flight(number);
        return core_.closed(number, now, now).goes && (already == ns{0} || already + predicted <= options_.piece);
    }

    // ---- threads that wait for work

    // Opens the words. Each call needs one call of end_opening().
    void begin_opening() noexcept {
        core_.keep_open();
        waits_.keep_open();
        wake();
    }
    void end_opening() noexcept {
        core_.let_close();
        waits_.let_close();
        wake();
    }
    // Publishes whether the gate may have closed waits. Threads read this without a lock to decide
    // whether polls matter.
    void tell_closing() noexcept {
        const bool may_close = in_stream_ && !closed_ && waits_.any_closed();
        if (may_close == told_closing_) return;
        told_closing_ = may_close;
        thread_polls::closing_gates().fetch_add(may_close ? 1 : -1, std::memory_order_relaxed);
    }
    // A polling thread for which the waits are open.
    struct poll_under_way {
        std::thread::id thread{};
        const void* what = nullptr;
        instant last{};  // when it polled last
    };
    [[nodiscard]] auto find_poll(const void* what) noexcept {
        return std::ranges::find_if(polls_, [&, me = std::this_thread::get_id()](const poll_under_way& p) {
            return p.what == what && p.thread == me;
        });
    }
    // Ends the polls of threads that have stopped polling.
    void end_polls(instant now) noexcept {
        constexpr ns longest{10'000'000};
        while (!polls_.empty()) {
            const auto gone = std::ranges::find_if(polls_, [&](const auto& p) { return now - p.last >= longest; });
            if (gone == polls_.end()) return;
            polls_.erase(gone);
            end_opening();
        }
    }
    // For a request whose work is behind lower clients' (`needs_all`), the waits open at once. For
    // others they open after the longest hold.
    [[nodiscard]] auto opens_at(std::optional<std::uint32_t> own, bool needs_all, instant now,
                                instant since) const noexcept {
        const auto held = core_.awaited(own, needs_all, now, since);
        return held && held->held == ns{0} ? held : core_.awaited(std::nullopt, false, now, since);
    }

    // Streams of other devices don't wait for this gate. A call that frees memory may concern any
    // device, and so may most others.
    [[nodiscard]] bool concerns(const sync_call& call) const noexcept {
        if (call.stream != nullptr && captured(call.stream)) return false;  // the call fails
        const relaxed_capture relaxed(device_->api());
        return call.is_here ? is_current() : call.stream == nullptr || may_have(call.stream);
    }
    // Waits until the call's work is over (false) or the waits must be opened for it (true).
    // `launches`: the client enqueues work in the call, which counts as stopped, too. `looks`: how
    // often the thread has looked.
    [[nodiscard]] bool look(std::unique_lock<std::mutex>& lock, const launch_owner* who, const sync_call& call,
                            instant since, bool launches, unsigned& looks) noexcept {
        patience seen;
        for (looks = 0; !closed_ && !device_->health().lost(); ++looks) {
            const instant now = time_.now();
            const client_state* const c = who != nullptr ? find(*who) : nullptr;
            const auto own = c != nullptr ? std::optional(who->client) : std::nullopt;
            const bool gated = c != nullptr && is_gated(*c);
            settle_all(gated ? *own : nobody, call.context, now);
            if (!may_wait(call)) return false;
            auto stopped = first_stopped(call);
            if (!stopped && launches && gated && waits_.closed_above(c->level)) stopped = *own;
            const bool own_runs = gated && call.drains && core_.in_flight(*own) != ns{0} &&
                                  !core_.awaited(std::nullopt, false, now, since);
            if (!stopped && !own_runs && call.reach >= wait_reach::legacy) return true;
            if (const auto held = core_.awaited(own, needs_all(own, call), now, since); stopped && held) {
                if (held->held != ns{0}) note_forced({*stopped, held->held_by, held->held, now});
                return true;
            }
            if (gated)
                wait(lock, {.own = true}, seen, *own, now);
            else
                nap(lock, looks);
        }
        return false;
    }
    // Whether the call may have to wait for work of a client whose streams have waits.
    [[nodiscard]] bool may_wait(const sync_call& call) const noexcept {
        if (call.reach == wait_reach::all) return true;
        const auto of = [&](const client_state& c) { return runs_for(c, call.reach); };
        if (std::ranges::none_of(clients_, of)) return false;
        const own_calls unwatched;
        const relaxed_capture relaxed(device_->api());
        if (call.reach == wait_reach::event) return device_->api().event_query(call.event) == CUDA_ERROR_NOT_READY;
        return call.reach == wait_reach::legacy || device_->api().stream_query(call.stream) == CUDA_ERROR_NOT_READY;
    }
    [[nodiscard]] bool runs_for(const client_state& c, wait_reach reach) const noexcept {
        if (!c.used || !is_gated(c)) return false;
        return std::ranges::any_of(c.streams, [&](const auto& in) {
            return in->in_flight() && (reach != wait_reach::legacy || in->legacy_waits());
        });
    }
    // A client whose work in flight is behind closed waits; none if there is no such client.
    [[nodiscard]] std::optional<std::uint32_t> first_stopped(const sync_call& call) const noexcept {
        for (std::uint32_t n = 0; n < clients_.size(); ++n)
            if (runs_for(clients_[n], call.reach) && waits_.closed_above(clients_[n].level)) return n;
        return std::nullopt;
    }
    // Whether the client `own` waits for work that is certainly behind work of lower clients. An
    // event may be in any of the client's streams.
    [[nodiscard]] bool needs_all(std::optional<std::uint32_t> own, const sync_call& call) const noexcept {
        if (call.reach >= wait_reach::legacy) return true;
        if (!own) return false;
        const auto is_shared = [&](const launch_batches& in) {
            if (call.stream != nullptr) return in.stream() == call.stream && !in.is_elsewhere();
            return std::ranges::any_of(clients_[*own].streams, [&](const auto& mine) { return mine->shares(in); });
        };
        return std::ranges::any_of(clients_, [&](const client_state& c) {
            return c.used && c.level < clients_[*own].level &&
                   std::ranges::any_of(c.streams, [&](const auto& in) { return in->in_flight() && is_shared(*in); });
        });
    }
    // A pause of a thread that isn't woken when its work is over.
    void nap(std::unique_lock<std::mutex>& lock, unsigned looks) noexcept {
        constexpr unsigned awake = 512;
        if (looks >= awake) return static_cast<void>(changed_.wait_for(lock, ns{50'000}));
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
    }

    // ---- holding a thread

    // Whether the launch may go now, by the core and by the state of its stream. `call` is null for
    // a whole call of an engine.
    [[nodiscard]] typename Core::answer may_go(launch_owner who, ns predicted, const launch_call* call, instant now,
                                               instant since, bool alone) noexcept {
        auto a = core_.ask(who.client, predicted, now, since, alone);
        const client_state& c = clients_[who.client];
        if (!a.goes || a.forced || call == nullptr || !is_gated(c)) return a;
        // While the waits are open, the launches of the client's other threads would keep its
        // streams behind them.
        const bool stays_out =
            c.inside != 0 || has_function(call->stream) || (c.passing != 0 && !waits_.closed_above(c.level));
        if (stays_out && !core_.awaited(std::nullopt, false, now, since)) return {.own = true};
        const launch_batches* const in = c.on(*call);
        if (in != nullptr && !(in->has_room() && core_.takes_more(in->launches()))) return {.own = true};
        if (!is_legacy(*call) && !call->is_synchronous()) return a;
        const auto above = core_.closed(who.client, now, since);
        if (!above.goes || above.forced) return above;
        // At most for the longest hold: other threads of the client may always have work in flight.
        const ns already = core_.in_flight(who.client);
        const bool fits = already == ns{0} || already + predicted <= options_.batch;
        return fits || core_.awaited(std::nullopt, false, now, since) ? a : typename Core::answer{.own = true};
    }
    // Holds the thread until the launch may go, or the gate holds no thread any more. Returns when
    // that was.
    instant hold(std::unique_lock<std::mutex>& lock, launch_owner who, ns predicted, const launch_call* call,
                 bool alone) noexcept {
        const instant since = time_.now();
        auto a = may_go(who, predicted, call, since, since, alone);
        if (a.goes) return since;
        ++held_;
        instant now = since;
        patience seen;
        for (unsigned looks = 0;; ++looks) {
            settle_all(who.client, call != nullptr ? call->context : nullptr, now);
            end_polls(now);
            if (!passes_gate(who)) break;
            open_overdue(who.client, now);
            a = may_go(who, predicted, call, now, since, alone);
            if (a.goes) break;
            if (a.by_time)
                (void)changed_.wait_for(lock, nap_until(a.again, now, looks, who.client));
            else
                wait(lock, a, seen, who.client, now);
            now = time_.now();
        }
        end_hold(who, true, now - since);
        if (a.forced) note_forced({who.client, a.held_by, now - since, now});
        return now;
    }
    // A held thread settles the batches of all clients, since there may be no other thread to do
    // so.
    void settle_all(std::uint32_t own, CUcontext in, instant now) noexcept {
        for (std::uint32_t n = 0; n < clients_.size(); ++n) {
            for (const auto& s : clients_[n].streams) {
                const launch_batch& open = s->open();
                if (open.launches != 0 && (n == own || now - open.begun >= options_.idle_batch) && s->within_reach(in))
                    (void)s->end();
            }
            settle(n, now);
        }
    }
    // One wait of a held thread. While the device works for the client that holds the thread up
    // (maybe its own), the thread sleeps for half of the remaining time and then polls, so that the
    // launch follows within a microsecond or two, unless predictions are wrong. While only that
    // client's thread works, this thread polls for a moment, since the request may end. Then it
    // sleeps until it is woken, for 1 ms at most.
    void wait(std::unique_lock<std::mutex>& lock, const typename Core::answer& a, patience& seen, std::uint32_t own,
              instant now) noexcept {
        constexpr ns nap{50'000}, longest_nap{1'000'000};
        constexpr unsigned awake = 64;
        const std::uint32_t whose = a.own ? own : a.held_by;
        const ns left = core_.in_flight(whose), remaining = seen.remaining(whose, left, now);
        if (remaining > nap * 4)
            (void)changed_.wait_for(lock, std::min(remaining / 2, longest_nap));
        else if (seen.look(whose, !a.own && clients_[whose].requests != 0, left) <= awake)
            look_without_lock(lock, whose);
        else
            (void)changed_.wait_for(lock, left == ns{0} && a.again == never ? longest_nap : nap);
    }
    // How long a thread sleeps that only time or the end of its own launches lets go. The thread
    // looks at its launches less and less often. The loss of the device wakes no thread, so each
    // sleep has an end.
    [[nodiscard]] ns nap_until(instant again, instant now, unsigned looks, std::uint32_t own) const noexcept {
        constexpr ns shortest{50'000}, longest{10'000'000};
        const ns left = core_.in_flight(own);
        const ns look = left == ns{0} ? longest : std::max(left / 2, shortest * (1U << std::min(looks, 7U)));
        return std::clamp(again - now, ns{1'000}, std::min(look, longest));
    }
    // Polls without the mutex, so that no other thread's launch waits for the poll.
    void look_without_lock(std::unique_lock<std::mutex>& lock, std::uint32_t whose) noexcept {
        point_state* next = nullptr;
        for (const auto& in : clients_[whose].streams)
            if (next == nullptr) next = in->keep_next_end();
        lock.unlock();
        {
            const relaxed_capture relaxed(device_->api());
            const unsigned most = next != nullptr ? 32 : 4;
            for (unsigned n = 0; n < most; ++n) {
                if (next != nullptr && launch_batches::reached(*device_, *next)) break;
                std::this_thread::yield();
            }
        }
        lock.lock();
        launch_batches::let_go(*device_, next);
    }
    void wake() noexcept {
        if (held_ + looking_ != 0) changed_.notify_all();
    }
    void note_forced(const forced_launch& f) noexcept {
        forced_launches_[first_forced_] = f;
        first_forced_ = (first_forced_ + 1) % forced_launches_.size();
        forced_ = std::min(forced_ + 1, forced_launches_.size());
    }

    const std::shared_ptr<device_state> device_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    Core core_;
    const launch_shell_options options_;
    const Clock time_;
    gpushare::detail::launch_times times_;
    std::vector<client_state> clients_;
    std::uint32_t turns_ = 0;
    std::uint64_t launches_ = 0;
    std::size_t held_ = 0, looking_ = 0;
    std::vector<poll_under_way> polls_{};
    std::vector<CUstream> functions_{};  // under way
    bool told_closing_ = false;
    stream_waits waits_;
    bool in_stream_;
    bool closed_ = false;
    std::array<forced_launch, 64> forced_launches_{};  // a ring of the latest
    std::size_t first_forced_ = 0, forced_ = 0;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
