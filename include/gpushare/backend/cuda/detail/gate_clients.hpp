// SPDX-License-Identifier: Apache-2.0
// The bookkeeping of a launch gate: its clients, with their levels and accounts, and their launches
// in flight, in batches on streams. A core makes the decisions, and learns here what has happened.
// Nothing here blocks a thread; gated_launches.hpp does.
//
//   gate_clients<gpushare::launch_gate, clock> clients(device, core, options, clock{});
//   const launch_owner who = clients.add({.level = 1});
//   clients.follow(*clients.find(who), call, ...);       // in front of the launch
//   clients.enqueued(*clients.find(who), call);          // behind the launch
//   clients.settle(*clients.find(who), clients.now());   // notes what is over
//
// Not thread-safe: every function is called under the gate's mutex.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/launch_batches.hpp>
#include <gpushare/backend/cuda/detail/launch_call.hpp>
#include <gpushare/backend/cuda/detail/launch_hub.hpp>
#include <gpushare/backend/cuda/detail/launch_site.hpp>
#include <gpushare/backend/cuda/detail/own_calls.hpp>
#include <gpushare/backend/cuda/detail/stream_waits.hpp>
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

/// The threads that wait in a gate: held before a launch, or waiting for the device.
class waiting_threads {
public:
    std::size_t held = 0, looking = 0;

    void wake() noexcept {
        if (held + looking != 0) changed_.notify_all();
    }
    /// Gives the mutex up until wake(), at most for `most`.
    void sleep(std::unique_lock<std::mutex>& lock, ns most) noexcept { (void)changed_.wait_for(lock, most); }

private:
    std::condition_variable changed_;
};

/// The record of a client.
template <launch_core Core>
struct gate_client {
    std::uint32_t number = 0, turn = 0;
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
    /// Ends the open batches, so that the gate learns when they are over.
    void end_batches() noexcept {
        for (const auto& s : streams) (void)s->end();
    }
};

template <launch_core Core, gpushare::clock Clock>
class gate_clients {
public:
    using client = gate_client<Core>;
    using client_options = typename Core::client_options;
    using entry = gpushare::detail::launch_times::entry;

    gate_clients(std::shared_ptr<device_state> device, Core core, const launch_shell_options& o, Clock time)
        : device_(std::move(device)),
          site_(device_),
          core_(std::move(core)),
          options_(o),
          time_(std::move(time)),
          waits_(device_),
          in_streams_(o.waits == launch_wait::stream && waits_.supported()) {}
    gate_clients(const gate_clients&) = delete;
    gate_clients& operator=(const gate_clients&) = delete;
    ~gate_clients() {
        if (launch_hub::in_child()) waits_.keep_memory();
        if (!in_streams_ || launch_hub::in_child()) return;
        const instant at = now();
        for (client& c : clients_) retire(c, at);
    }

    // ---- parts

    [[nodiscard]] Core& core() noexcept { return core_; }
    [[nodiscard]] const Core& core() const noexcept { return core_; }
    [[nodiscard]] stream_waits& waits() noexcept { return waits_; }
    [[nodiscard]] const stream_waits& waits() const noexcept { return waits_; }
    [[nodiscard]] waiting_threads& threads() noexcept { return threads_; }
    [[nodiscard]] const launch_site& site() const noexcept { return site_; }
    [[nodiscard]] device_state& device() const noexcept { return *device_; }
    [[nodiscard]] const launch_shell_options& options() const noexcept { return options_; }
    [[nodiscard]] instant now() const { return time_.now(); }
    /// Whether streams wait. If not, threads are held.
    [[nodiscard]] bool in_streams() const noexcept { return in_streams_; }
    /// Holds threads instead of streams, if launches can't be seen. Call before clients are added.
    void hold_threads() noexcept { in_streams_ = false; }
    /// Lets everything go from now on.
    void close() noexcept {
        closed_ = true;
        waits_.end();
    }
    /// Whether the gate holds nothing any more.
    [[nodiscard]] bool holds_nothing() const noexcept { return closed_ || device_->health().lost(); }
    [[nodiscard]] bool closed() const noexcept { return closed_; }

    // ---- clients

    /// All records; the index is the client's number. Some have no client (`used`).
    [[nodiscard]] std::vector<client>& all() noexcept { return clients_; }
    [[nodiscard]] const std::vector<client>& all() const noexcept { return clients_; }
    [[nodiscard]] const client& at(std::uint32_t number) const noexcept { return clients_[number]; }
    /// Null if the client was removed. Valid until the mutex is given up.
    [[nodiscard]] client* find(launch_owner who) noexcept {
        if (who.client >= clients_.size()) return nullptr;
        client& c = clients_[who.client];
        return c.used && c.turn == who.turn ? &c : nullptr;
    }
    /// The same, and null if the gate holds nothing any more.
    [[nodiscard]] client* find_gated(launch_owner who) noexcept { return holds_nothing() ? nullptr : find(who); }

    /// Throws std::bad_alloc.
    [[nodiscard]] launch_owner add(client_options o) {
        o.in_stream = in_streams_;
        const auto n = static_cast<std::uint32_t>(core_.add(o));
        if (in_streams_) core_.took(n, options_.piece);
        try {
            if (clients_.size() <= n) clients_.resize(n + 1);
            if (in_streams_ && !join(o.level)) throw std::bad_alloc();
        } catch (...) {
            core_.remove(n);
            throw;
        }
        clients_[n] = client{.number = n, .turn = ++turns_, .used = true, .level = o.level};
        return {n, clients_[n].turn};
    }
    void remove(client& c) noexcept {
        if (in_streams_) {
            retire(c, now());
            waits_.leave(c.level, c.requests);
        }
        core_.remove(c.number);
        c = client{};
        threads_.wake();
    }
    /// See launch_gate::change.
    [[nodiscard]] bool change(client& c, client_options o) noexcept {
        const instant at = now();
        o.in_stream = in_streams_;
        c.later.reset();
        if (in_streams_ && o.level != c.level) {
            c.end_batches();  // perhaps no other thread does
            settle(c, at);
            c.later = o;
            if (change_level_if_idle(c, at)) return true;
            o.level = c.level;
        }
        c.level = o.level;
        core_.change(c.number, o, at);
        threads_.wake();
        return !c.later;
    }
    void arrived(client& c, instant at) noexcept {
        if (c.later) settle(c, at);
        core_.arrived(c.number, at);
        ++c.requests;
        if (in_streams_) waits_.arrived(c.level);
    }
    /// `came`: when the request arrived.
    void left(client& c, instant came) noexcept {
        c.end_batches();
        const instant at = now();
        core_.left(c.number, at, came);
        --c.requests;
        if (in_streams_ && waits_.left(c.level)) open_behind(c.level, at);
        (void)change_level_if_idle(c, at);
        threads_.wake();
    }

    // ---- launches

    /// Whether the launch is for this device. Streams that the client has used are of this device.
    [[nodiscard]] bool is_here(const client& c, const launch_call& call) const noexcept {
        return c.on(call) != nullptr || site_.may_be_here(call);
    }
    /// A launch that is about to be enqueued, with its predicted time.
    struct launch {
        entry of{};
        ns predicted{};
        bool alone = false;   // the launch should run alone, to be timed
        bool inside = false;  // no wait may be put before the launch
    };
    /// Predicts a launch. Makes the record of its stream, so that follow() doesn't
    /// allocate. Events tell how long launches took only if no others ran alongside them. So a
    /// launch of unknown length is timed alone, and so is an occasional batch of a client that
    /// always has neighbours. Throws std::bad_alloc.
    [[nodiscard]] launch expect(client& c, const launch_call& call) {
        const launch_batches& in = c.on_or_new(call, device_);
        launch l{.of = times_.find(call.key, in.history(), call.guess)};
        l.predicted = times_.predicted(l.of);
        const bool begins = in.open().launches == 0;
        if (begins && core_.has_neighbours(c.number) && now() - c.sampled >= options_.sample_each) c.samples = true;
        l.alone = c.samples || !times_.known(l.of);
        return l;
    }
    /// Counts a launch that goes into its stream's batch. Throws std::bad_alloc.
    void follow(client& c, const launch_call& call, const launch& l, instant at) {
        launch_batches& in = c.on_or_new(call, device_);
        core_.spread(c.number, static_cast<std::uint32_t>(c.streams.size()));
        c.alone = times_.first_time(l.of) || !times_.known(l.of);
        const bool gated = is_gated(c) && !call.of_legacy() && !l.inside;
        if (c.alone || is_old(c, in, at) || (gated && piece_ends(c, in, l.predicted))) (void)in.end();
        if (in.open().launches == 0) {
            if (gated) put_waits(c, in);
            in.begin(at, others_in_flight(c), launches_beside(c));
        }
        const ns charge = charged(call, l.predicted);
        in.add(l.of, call.key, l.predicted, charge);
        ++launches_;
        ++c.launches;
        core_.launched(c.number, {l.predicted, charge, !c.alone}, at, l.alone);
        present(c, at);
    }
    /// The driver has taken the launch. Ends the batch if it is full, or if the launch is to be
    /// timed alone.
    void enqueued(client& c, const launch_call& call) noexcept {
        launch_batches* const in = c.on(call);
        if (in == nullptr) return;
        if (in->open().predicted < full_batch(c) && !c.alone && !c.later && !call.of_thread()) return;
        c.alone = false;
        if (in->end(true) && std::exchange(c.samples, false)) c.sampled = now();
        settle(c, now());
    }
    /// The driver has refused the launch.
    void take_back(client& c, const launch_call& call, ns predicted) noexcept {
        launch_batches* const in = c.on(call);
        const ns charge = charged(call, predicted);
        if (in == nullptr || !in->take_back(predicted, charge)) return;
        const instant at = now();
        core_.overtook(c.number, {predicted, charge}, {ns{0}, ns{0}}, at);
        absent_if_idle(c, at);
    }
    /// Counts a synchronous copy. An event after the copy would stop other streams. So the copy
    /// counts as over when it returns, after its predicted time.
    void begin_synchronous(client& c, const launch_call& call) noexcept {
        const instant at = now();
        ++launches_;
        ++c.launches;
        core_.launched(c.number, {call.guess, charged(call, call.guess)}, at, false);
        present(c, at);
    }
    void end_synchronous(client& c, ns predicted, bool went) noexcept {
        const instant at = now();
        core_.overtook(c.number, {predicted, ns{0}}, {went ? predicted : ns{0}, ns{0}}, at);
        if (went) {
            c.used_so_far.time += predicted;
            ++c.used_so_far.launches;
        }
        absent_if_idle(c, at);
        threads_.wake();
    }

    // ---- whole calls, if launches can't be seen

    void begin_call(client& c, ns predicted, instant begun) noexcept {
        core_.launched(c.number, {predicted, predicted}, begun, false);
        for (const auto& in : c.streams)
            if (!in->gone()) in->begin(begun);
        present(c, begun);
    }
    void end_call(client& c, ns predicted, instant begun) noexcept {
        const auto& all = c.streams;
        const auto last = std::ranges::find_if(all.rbegin(), all.rend(), [](const auto& s) { return !s->gone(); });
        const instant at = now();
        if (last == all.rend())
            return over(c, {.predicted = predicted, .charge = predicted, .launches = 1, .call = true}, at - begun, at);
        if (!(*last)->has_begun()) (*last)->begin(begun);  // the stream was bound during the call
        (*last)->add_call(predicted);
        if ((*last)->end()) settle(c, at);
    }
    /// Adds a stream of the client, whose events tell when calls are over. Throws std::bad_alloc.
    void adopt(client& c, CUstream s) { c.on_or_new({.stream = s}, device_).adopt(); }

    // ---- what is over

    /// Records which batches of the client are over.
    void settle(client& c, instant at) noexcept {
        for (const auto& in : c.streams)
            in->settle([&](const launch_batch& b, std::optional<ns> took) { over(c, b, took, at); });
    }
    /// The same for all clients, for a thread that waits: perhaps no other thread does. Ends the
    /// open batches of the client `own`, and others' batches that are old enough. `in`: the
    /// thread's current context.
    void settle_all(std::optional<std::uint32_t> own, CUcontext in, instant at) noexcept {
        for (client& c : clients_) {
            for (const auto& s : c.streams) {
                const launch_batch& open = s->open();
                const bool ends = c.number == own || at - open.begun >= options_.idle_batch;
                if (open.launches != 0 && ends && s->within_reach(in)) (void)s->end();
            }
            settle(c, at);
        }
    }

    // ---- waits in streams

    /// Whether the client's streams wait for others' requests.
    [[nodiscard]] bool is_gated(const client& c) const noexcept { return in_streams_ && waits_.any_above(c.level); }
    /// Whether the client's streams stop now.
    [[nodiscard]] bool is_stopped(const client& c) const noexcept { return waits_.closed_above(c.level); }
    /// Puts waits into a capture once enough work was captured. No wait is needed at the graph's
    /// beginning, since the graph is launched behind waits.
    void put_waits_in_graph(client& c, const launch_call& call) noexcept {
        if (!is_gated(c) || !is_here(c, call)) return;
        const ns time = times_.predicted(times_.find(call.key, call.guess));
        if (c.captured + time <= options_.piece) {
            c.captured += time;
            return;
        }
        put_waits_in_capture(c, call.stream);
        c.captured = time;
    }
    /// Puts waits into the capture of the stream at this place.
    void put_waits_in_capture(client& c, CUstream s) noexcept {
        c.captured = ns{};
        waits_.keep_memory();
        waits_.each_above(c.level, [&](CUdeviceptr word) { launch_batches::put_wait(*device_, s, word); });
    }

private:
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

    // Whether launches of the two clients run side by side. Clients of different levels don't if
    // streams wait.
    [[nodiscard]] bool run_together(const client& a, const client& b) const noexcept {
        return a.number != b.number && b.used && (!in_streams_ || a.level == b.level);
    }
    [[nodiscard]] bool others_in_flight(const client& c) const noexcept {
        return std::ranges::any_of(clients_, [&](const client& other) {
            return run_together(c, other) && core_.in_flight(other.number) != ns{0};
        });
    }
    // The number of launches so far that may have run alongside the client's.
    [[nodiscard]] std::uint64_t launches_beside(const client& c) const noexcept {
        if (!in_streams_) return launches_ - c.launches;
        std::uint64_t all = 0;
        for (const client& other : clients_)
            if (run_together(c, other)) all += other.launches;
        return all;
    }

    // A client counts as present while its work is in flight, also outside its scopes.
    void present(client& c, instant at) noexcept {
        if (std::exchange(c.present, true)) return;
        core_.occupied(c.number, at);
    }
    void absent_if_idle(client& c, instant at) noexcept {
        if (!c.present || core_.in_flight(c.number) != ns{0}) return;
        c.present = false;
        core_.drained(c.number, at);
        (void)change_level_if_idle(c, at);
        threads_.wake();
    }
    // Gives an idle client the new level for which it waits. Returns false if the client waits for
    // none or isn't idle. If there is no memory for the level's word, the client gets the level
    // when it is idle the next time.
    bool change_level_if_idle(client& c, instant at) noexcept {
        if (!c.later || c.requests != 0 || c.present || !joins(c.later->level)) return false;
        waits_.leave(c.level, 0);
        c.level = c.later->level;
        core_.change(c.number, *c.later, at);
        c.later.reset();
        threads_.wake();
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

    void over(client& c, const launch_batch& b, std::optional<ns> took, instant at) noexcept {
        const bool shared = !b.call && (b.shared || b.of_others != launches_beside(c));
        if (shared) took.reset();
        const ns measured = took ? taken(b, *took) : b.predicted;
        const std::uint32_t gaps = b.call ? 0 : b.launches;
        const ns net = without_gaps(measured, gaps), expected = without_gaps(b.predicted, gaps);
        const double scale =
            expected > ns{0} ? static_cast<double>(net.count()) / static_cast<double>(expected.count()) : 0;
        const ns charge{static_cast<std::int64_t>(static_cast<double>(b.charge.count()) * scale)};
        core_.finished(c.number, {b.predicted, b.charge}, {measured, charge}, at);
        if (b.launches == 1) core_.took(c.number, measured);
        if (b.call) c.call_takes = std::max(ns{1000}, (c.call_takes * 3 + measured) / 4);
        if (took) times_.learn(b.known(), b.launches, *took, b.exact());
        c.used_so_far.time += net;
        c.used_so_far.device_time += charge;
        c.used_so_far.launches += b.launches;
        absent_if_idle(c, at);
    }
    // The time that the launches of a batch took. If the device may have waited for the host
    // meanwhile, at most the prediction counts, which is right in the long run. For a batch that
    // others' launches ran beside, over() takes the prediction instead.
    [[nodiscard]] static ns taken(const launch_batch& b, ns apart) noexcept {
        return b.exact() || b.call ? apart : std::min(apart, b.predicted);
    }

    // The predicted work of the client's batches.
    [[nodiscard]] ns full_batch(const client& c) const noexcept {
        return is_gated(c) ? options_.piece : options_.batch;
    }
    // A slow host takes longer to enqueue a batch than the device takes to run it. The batch ends
    // all the same, so that the gate learns what is over. A piece has as much time as its work asks
    // for, since each further piece costs a wait.
    [[nodiscard]] bool is_old(const client& c, const launch_batches& in, instant at) const noexcept {
        return (at - in.open().begun) / 2 >= std::max(full_batch(c), options_.batch);
    }
    // Whether to put a wait before the next launch. There are two reasons: the piece would get too
    // long, or the words were closed since its beginning, so that the rest of the piece would run
    // alongside the request.
    [[nodiscard]] bool piece_ends(const client& c, const launch_batches& in, ns predicted) const noexcept {
        if (in.open().predicted + predicted > core_.piece(c.number, options_.piece)) return true;
        return in.closings() != waits_.closings_above(c.level) && is_stopped(c);
    }
    void put_waits(const client& c, launch_batches& in) noexcept {
        const std::uint64_t closings = waits_.closings_above(c.level);
        waits_.each_above(c.level, [&](CUdeviceptr word) { in.wait_for(word, closings); });
    }
    // Called when the level's last request has left. The device opens the waits once the work that
    // these requests have in flight has ended. Of several streams, the last one waits for the
    // others; this delays only later work on that stream.
    void open_behind(int level, instant at) noexcept {
        launch_batches* last = nullptr;
        const auto each = [&](auto f) {
            for (const client& c : clients_)
                if (c.used && c.level == level)
                    for (const auto& in : c.streams)
                        if (in->in_flight() && !in->gone()) f(*in);
        };
        for (client& c : clients_)
            if (c.used && c.level == level) settle(c, at);
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
    // The client's streams may still have waits ahead of them when it is gone, so the memory of the
    // words is kept then.
    void retire(client& c, instant at) noexcept {
        c.end_batches();
        settle(c, at);
        for (const auto& in : c.streams)
            if (in->may_wait()) waits_.keep_memory();
    }

    const std::shared_ptr<device_state> device_;
    const launch_site site_;
    Core core_;
    const launch_shell_options options_;
    const Clock time_;
    gpushare::detail::launch_times times_;
    std::vector<client> clients_;
    std::uint32_t turns_ = 0;
    std::uint64_t launches_ = 0;
    stream_waits waits_;
    waiting_threads threads_;
    bool in_streams_;
    bool closed_ = false;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
