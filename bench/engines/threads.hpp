// SPDX-License-Identifier: Apache-2.0
// Simulates the host threads of engines that share a device in virtual time. A busy_thread always
// has work and launches kernel by kernel at the recorded pace. A serving_thread answers requests
// that arrive at random, with one graph for each request.
//
//   engines::stage on{{}, {}, {}, engines::strategy::held, 1};
//   engines::busy_thread batch{on, {.model = &resnet}};
//   engines::serving_thread chat{on, {.model = &bert, .per_s = 428}};
//   batch.begin();
//   chat.begin();
//   on.gpu.run_until(gpushare::instant{} + 2s);
//
// Both classes use a gpushare::launch_gate in the same way as cuda::launch_gate. The thread records
// an event after each 150 us of predicted launches, the gate learns durations from these events,
// and a charge is duration times width.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/launch_gate.hpp>
#include <gpushare/detail/launch_times.hpp>
#include <gpushare/units.hpp>

#include "engines/device.hpp"
#include "engines/recording.hpp"

namespace engines {

/// The mechanism that orders the threads.
enum class strategy : std::uint8_t {
    plain,   ///< no mechanism: each thread has a stream
    native,  ///< streams of requests have the highest priority
    /// Like native, and a busy thread needs a permit for each of two iterations in flight.
    acquire,
    held,  ///< a launch gate holds threads that want to launch
    /// Like held, as in an experiment on a device: one event per launch, and a launch goes while
    /// less is in flight.
    single,
    /// A launch gate opens and closes waits in streams, and holds threads only to keep shares.
    gated,
};
[[nodiscard]] constexpr std::string_view to_string(strategy s) noexcept {
    constexpr std::string_view names[] = {"plain", "native", "acquire", "held", "single", "gated"};
    return names[static_cast<std::size_t>(s)];
}

/// The host time that a launch gate adds. A thread outside the gate has no measurable cost. The
/// costs don't include the gate's own code, except in the experiment's callback.
struct gate_costs {
    /// For each launch; from the experiment on an H100, where a launch took 4.3 us.
    ns callback{100};
    /// Recording an event: gpu.record_ns on an H100, in bench/results/nvidia-h100-80gb-hbm3.
    ns record{1228};
    ns query{183};  ///< querying an event: gpu.query_of_reached_ns in the same results
    /// Putting a wait into a stream: assumed to cost as much as recording an event.
    ns put_wait{1228};
    ns experiment{400};  ///< the experiment's total per launch: 200 to 400 ns with its events

    /// The cost of a batch: recording its end, recording its start after a wait, and querying the
    /// events.
    [[nodiscard]] constexpr ns of_batch(bool behind_wait) const noexcept {
        return behind_wait ? put_wait + record * 2 + query * 3 : record + query * 4;
    }
    /// The cost of a request that is a single launch: that of a batch on an idle stream.
    [[nodiscard]] constexpr ns of_request() const noexcept { return callback + record * 2 + query * 4; }
};

/// Times of a host and its driver, from data/h100: README.md and the recorded launches.
struct host_costs {
    ns launch_latency{4500};   ///< from a launch to its arrival at the device
    ns graph_start{10'000};    ///< the same for a graph
    ns gap{1000};              ///< between two kernels of a stream
    ns gap_in_graph{100};      ///< between two kernels of a graph
    std::size_t queue = 1024;  ///< launches for which a stream has room; further launches wait
    ns graph_launch{100'000};  ///< host time of a graph's launch; no other thread can launch in that time
    double late = 0;           ///< fraction of requests with a late launch; 0 for a quiet host
    ns late_by{200'000};       ///< mean delay of a late launch
    ns seen{5000};             ///< until a waiting host thread notices an end
    ns woken{3000};            ///< until a thread that was held launches again
    /// Time that an open wait costs its stream: an assumption that still has to be measured.
    ns wait_in_stream{1500};
    gate_costs gate{};  ///< host time of the gate
};

/// An engine that always has work.
struct busy_model {
    const std::vector<iteration>* model = nullptr;
    /// Pace without a profiler, as a fraction of the recorded time between two launches.
    double host_pace = 1;
    std::uint32_t weight = 1;  ///< weight of the device time within the level
    bool as_graph = false;     ///< one launch per iteration
    /// Predicted work between two waits in the stream, or a single launch. The value is the default
    /// of launch_shell_options.
    ns piece{250'000};
};

/// An engine that serves requests, one level above the busy engines.
struct served_model {
    const std::vector<iteration>* model = nullptr;
    double per_s = 428;  ///< a quarter of what BERT can serve alone; 0: no requests
    unsigned burst = 1;  ///< requests that arrive at once
    /// The seed of the arrival times, so that runs alone and beside others have the same arrivals.
    /// 0 takes the numbers from the device.
    std::uint64_t arrivals = 0;
    bool even = false;  ///< requests arrive at a regular pace instead of at random
    /// Other engines hold back for this long before each arrival, as if the arrival were known.
    ns ahead{0};
};

/// The state that all threads share.
struct stage {
    stage(const host_costs& h, const device_constants& d, const gpushare::launch_gate_options& g, strategy s,
          std::uint64_t seed)
        : host(h), options(g), how(s), gpu(h100, d, seed), gate(g) {}
    stage(const stage&) = delete;
    stage& operator=(const stage&) = delete;

    const host_costs host;
    const gpushare::launch_gate_options options;
    const strategy how;
    device gpu;
    gpushare::launch_gate gate;
    gpushare::detail::launch_times times{};
    std::uint32_t clients = 0;
    std::uint64_t launches = 0, in_flight = 0;  // of busy threads
    // The number of requests that have arrived and aren't answered. Waits in busy streams are
    // closed while this number isn't 0.
    unsigned present = 0;
    bool closed = false;
    std::uint64_t closings = 0;                    // how often the waits were closed
    std::vector<std::function<void()>> on_hold{};  // called when a busy thread is held
    std::vector<std::function<void()>> on_open{};  // called when work has ended or the waits open

    instant driver_free{};  // when a busy thread may launch again

    void request_arrived() {
        ++present;
        if (!std::exchange(closed, true)) ++closings;
    }
    void request_left() {
        if (--present != 0) return;
        closed = false;
        something_ended();
    }
    void something_ended() {
        for (const auto& f : on_open) f();
    }
};

/// Batches of launches between two events, like those of cuda::detail::launch_batches.
class batch_times {
public:
    struct batch {
        gpushare::launch_cost predicted{};
        std::vector<gpushare::detail::launch_times::entry> entries{};
        std::optional<instant> from{};  // empty: the batch starts where the previous batch ends
        bool prompt = false;            // the end was recorded immediately after the last launch
        // The device had earlier work until the whole batch was enqueued.
        bool busy = false;
        bool shared = false;          // other threads had work in flight at the start
        std::uint64_t of_others = 0;  // launches of other threads before the start
    };

    [[nodiscard]] const batch& open() const noexcept { return open_; }
    /// Adds a launch that reaches the device at `arrival`.
    void add(gpushare::detail::launch_times::entry e, const gpushare::launch_cost& c, instant arrival, bool shared,
             std::uint64_t of_others) {
        if (open_.entries.empty()) {
            if (in_flight_.empty() && waits_ == 0) open_.from = arrival;
            open_.shared = shared;
            open_.of_others = of_others;
        }
        open_.entries.push_back(e);
        open_.predicted.time += c.time;
        open_.predicted.charge += c.charge;
    }
    /// put_wait() puts a wait and an event before the next batch. The stream calls passed_wait()
    /// when it gets past the wait.
    void put_wait() noexcept { ++waits_; }
    void passed_wait(instant now) noexcept {
        ++passed_;
        last_ = now;
    }
    /// Records the event after the last launch. `prompt` says that nothing happened in between.
    void end(instant now, bool prompt) {
        open_.prompt = prompt;
        const bool waits = passed_ != waits_;
        open_.busy = waits || (waits_ == 0 && (open_.from ? now < *open_.from : !in_flight_.empty()));
        in_flight_.push_back(std::exchange(open_, {}));
    }
    /// The event of the oldest batch has been reached. Returns the batch, how long the batch took,
    /// and whether that time is exactly the time of the batch's launches.
    struct over {
        batch what;
        ns took;
        bool exact, shared;
    };
    [[nodiscard]] over reached(instant now, std::uint64_t of_others) {
        batch b = std::move(in_flight_.front());
        in_flight_.pop_front();
        const ns took = now - b.from.value_or(last_);
        last_ = now;
        const bool shared = b.shared || b.of_others != of_others;
        const bool exact = !shared && (b.busy || (b.entries.size() == 1 && b.prompt));
        return {std::move(b), took, exact, shared};
    }

private:
    batch open_{};
    std::deque<batch> in_flight_;
    std::uint64_t waits_ = 0, passed_ = 0;
    instant last_{};
};

/// Launches kernels at the recorded pace, with three iterations in flight.
class busy_thread {
public:
    busy_thread(stage& on, const busy_model& m)
        : on_(on),
          engine_(m),
          client_(on.gate.add({.level = 0, .weight = m.weight, .in_stream = on.how == strategy::gated})),
          number_(on.clients++),
          stream_(on.gpu.make_stream({number_, 0, m.as_graph ? on.host.gap_in_graph : on.host.gap})) {
        // The gate's bounds include the piece.
        if (on.how == strategy::gated) on.gate.took(client_, m.piece);
        on.on_open.emplace_back([this] { look_again(); });
        on.on_hold.emplace_back([this] { end_old_batch(held_); });
    }
    busy_thread(const busy_thread&) = delete;
    busy_thread& operator=(const busy_thread&) = delete;

    void begin() {
        on_.gpu.at(on_.gpu.now(), [this] { go_on(); });
    }
    /// The number of finished iterations, including the finished fraction of the next iteration.
    [[nodiscard]] double iterations() const noexcept {
        return static_cast<double>(kernels_over_) / static_cast<double>(engine_.model->front().size());
    }
    [[nodiscard]] ns longest_hold() const noexcept { return longest_hold_; }
    /// The device time that the gate charges, and the device time that the device measured:
    /// duration times width.
    [[nodiscard]] ns charged() const noexcept { return on_.gate.charged(client_); }
    [[nodiscard]] ns device_time() const noexcept { return on_.gpu.kernel_time(number_); }

private:
    static constexpr std::size_t at_once = 3, permits = 2;  // iterations in flight
    static constexpr ns batch{150'000};                     // predicted work between two events
    // Age at which other threads end a batch.
    static constexpr ns idle_batch{50'000};
    static constexpr ns sample_each{40'000'000};  // how often a batch runs alone to be timed

    [[nodiscard]] bool asks() const noexcept { return on_.how >= strategy::held; }
    [[nodiscard]] bool each() const noexcept { return on_.how == strategy::single; }
    [[nodiscard]] const iteration& current() const noexcept { return (*engine_.model)[begun_ % engine_.model->size()]; }

    void go_on() {
        if (next_ == 0 && begun_ - over_ >= (on_.how == strategy::acquire ? permits : at_once)) {
            waits_for_iteration_ = true;
            return;
        }
        if (!driver_is_free()) return;
        if (!engine_.as_graph && launched_ - kernels_over_ >= on_.host.queue) {
            waits_for_room_ = true;
            return;
        }
        const std::size_t n = engine_.as_graph ? current().size() : 1;
        if (asks() && !may_go(n)) return;
        spent_ = asks() ? of_launch() : ns{0};
        for (std::size_t i = 0; i < n; ++i) {
            const kernel& k = current()[next_];
            launch(k, next_ + 1 == current().size());
            ++next_;
        }
        if (next_ == current().size()) {
            next_ = 0;
            ++begun_;
        }
        const ns pace{std::llround(static_cast<double>(current()[next_].host.count()) * engine_.host_pace)};
        on_.gpu.at(on_.gpu.now() + spent_ + (engine_.as_graph ? on_.host.graph_start : pace), [this] { go_on(); });
    }
    /// When work that the host enqueues now reaches the device.
    [[nodiscard]] instant arrival() const noexcept {
        return on_.gpu.now() + spent_ + (engine_.as_graph ? on_.host.graph_start : on_.host.launch_latency);
    }

    // If the driver is busy, the thread continues once the driver is free.
    bool driver_is_free() {
        if (on_.driver_free <= on_.gpu.now()) return true;
        if (std::exchange(waits_for_driver_, true)) return false;
        on_.gpu.at(on_.driver_free, [this] {
            waits_for_driver_ = false;
            go_on();
        });
        return false;
    }

    // ---- the gate

    // Host time of the gate for each launch. A graph is one launch, and its waits were captured
    // earlier.
    [[nodiscard]] ns of_launch() const noexcept {
        const gate_costs& gate = on_.host.gate;
        if (each()) return gate.experiment;
        return engine_.as_graph ? gate.callback + gate.of_batch(on_.how == strategy::gated) : gate.callback;
    }
    void spend_on_batch() noexcept {
        if (!each() && !engine_.as_graph) spent_ += on_.host.gate.of_batch(on_.how == strategy::gated);
    }
    [[nodiscard]] gpushare::launch_cost cost_of(const kernel& k, ns takes) const noexcept {
        return {takes, without_gaps(takes, 1) * std::min(k.blocks, h100.sms) / h100.sms};
    }
    // Computed as in cuda::launch_gate with the option `gap`, whose default is this host's gap.
    [[nodiscard]] ns without_gaps(ns apart, std::size_t launches) const noexcept {
        return std::max(apart - on_.host.gap * static_cast<std::int64_t>(launches), apart / 2);
    }
    [[nodiscard]] gpushare::detail::launch_times::entry entry_of(const kernel& k) noexcept {
        return on_.times.find(k.kind, history_, ns{20'000});
    }

    bool may_go(std::size_t n) {
        ns predicted{0};
        const instant now = on_.gpu.now();
        bool alone = false;
        auto behind = history_;
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint64_t kind = current()[next_ + i].kind;
            const auto e = on_.times.find(kind, behind, ns{20'000});
            behind.add(kind);
            predicted += on_.times.predicted(e);
            alone |= !on_.times.known(e);
        }
        const bool first = batches_.open().entries.empty();
        if (first && now - sampled_ >= sample_each && on_.gate.has_neighbours(client_)) samples_ = true;
        alone |= samples_;
        if (!held_) since_ = now;
        const auto a = on_.gate.ask(client_, each() ? ns{0} : predicted, now, since_, alone);
        if (a.goes && held_) longest_hold_ = std::max(longest_hold_, now - since_);
        held_ = !a.goes;
        if (!held_) return true;
        for (const auto& f : on_.on_hold) f();
        on_.gpu.at(std::min(a.again, since_ + on_.options.longest_hold), [this] { look_again(); });
        return false;
    }
    void look_again() {
        on_.gpu.opened(stream_);
        if (!held_ || looks_) return;
        looks_ = true;  // continue once, even if several events wake the thread
        on_.gpu.at(on_.gpu.now() + on_.host.woken, [this] {
            looks_ = false;
            if (held_) go_on();
        });
    }

    // Puts a wait in front of a batch.
    void put_wait() {
        closings_ = on_.closings;
        on_.gpu.wait_in_stream(stream_, on_.closed, arrival());
        // An open wait takes time in the stream, but hardly anything of an SM.
        wait_ = {.blocks = 1, .block = {32, 0, 0, 0}, .alone = on_.host.wait_in_stream};
        batches_.put_wait();
        on_.gpu.launch(stream_, wait_, arrival(), [this] { batches_.passed_wait(on_.gpu.now()); });
    }

    // The predicted work of a full batch.
    [[nodiscard]] ns full() const noexcept { return on_.how == strategy::gated ? engine_.piece : batch; }
    // Returns true if the open batch must end before the next launch, as in cuda::launch_gate.
    // There are three reasons: the batch is old; the piece would become too long; or the waits have
    // closed since the piece started, so that the rest of the piece would run beside the request.
    [[nodiscard]] bool ends_before(ns takes) const noexcept {
        if (on_.gpu.now() - begun_batch_ >= std::max(full(), batch) * 2) return true;
        if (on_.how != strategy::gated) return false;
        if (batches_.open().predicted.time + takes > on_.gate.piece(client_, engine_.piece)) return true;
        return on_.closed && closings_ != on_.closings;
    }
    void begin_batch() {
        begun_batch_ = on_.gpu.now();
        spend_on_batch();
        if (on_.how == strategy::gated) put_wait();
    }

    void launch(const kernel& k, bool last) {
        const auto e = entry_of(k);
        history_.add(k.kind);
        const gpushare::launch_cost c = cost_of(k, on_.times.predicted(e));
        const bool alone = !on_.times.known(e) || samples_;
        // Needs a batch of its own, to be timed.
        const bool apart = on_.times.first_time(e) || !on_.times.known(e);
        if (asks()) {
            if (!batches_.open().entries.empty() && (apart || ends_before(c.time))) end_batch();
            if (batches_.open().entries.empty()) begin_batch();
            on_.gate.launched(client_, {c.time, c.charge, !apart}, on_.gpu.now(), alone);
            batches_.add(e, c, arrival(), on_.in_flight != launched_ - kernels_over_, on_.launches - launched_);
        }
        const bool ends = asks() && (apart || each() || batches_.open().predicted.time >= full());
        ++on_.launches;
        ++on_.in_flight;
        on_.gpu.launch(stream_, k, arrival(), [this, last] {
            kernel_over();
            if (last) on_.gpu.at(on_.gpu.now() + on_.host.seen, [this] { iteration_over(); });
        });
        ++launched_;
        if (ends) end_batch(true);
    }
    // A held thread ends the open batches of all threads, because the gate otherwise wouldn't learn
    // when they finish. A thread that isn't held keeps its batch until the batch is old.
    void end_old_batch(bool now) {
        if (batches_.open().entries.empty()) return;
        if (now) return end_batch();
        const std::size_t had = launched_;
        on_.gpu.at(on_.gpu.now() + idle_batch, [this, had] { end_old_batch(launched_ == had); });
    }
    void end_batch(bool prompt = false) {
        if (std::exchange(samples_, false)) sampled_ = on_.gpu.now();
        batches_.end(on_.gpu.now(), prompt);
        ends_.push_back(launched_);
        if (launched_ == kernels_over_) batch_over();
    }
    void kernel_over() {
        ++kernels_over_;
        --on_.in_flight;
        if (!ends_.empty() && ends_.front() == kernels_over_) batch_over();
        if (std::exchange(waits_for_room_, false)) go_on();
    }
    void batch_over() {
        ends_.pop_front();
        const instant now = on_.gpu.now();
        const auto b = batches_.reached(now, on_.launches - launched_);
        const auto& p = b.what.predicted;
        const ns measured = b.exact ? b.took : b.shared ? p.time : std::min(b.took, p.time);
        const std::size_t launches = b.what.entries.size();
        const ns net = without_gaps(measured, launches), expected = without_gaps(p.time, launches);
        const double scale = static_cast<double>(net.count()) / static_cast<double>(std::max(expected, ns{1}).count());
        const ns charge{std::llround(static_cast<double>(p.charge.count()) * scale)};
        on_.gate.finished(client_, p, {measured, charge}, now);
        if (launches == 1) on_.gate.took(client_, measured);
        if (!b.shared) on_.times.learn(b.what.entries, b.what.entries.size(), b.took, b.exact);
        on_.something_ended();
    }
    void iteration_over() {
        ++over_;
        if (!waits_for_iteration_) return;
        waits_for_iteration_ = false;
        go_on();
    }

    stage& on_;
    const busy_model engine_;
    const gpushare::launch_gate::client client_;
    const std::uint32_t number_, stream_;
    std::size_t begun_ = 0, over_ = 0, next_ = 0;
    bool waits_for_iteration_ = false, waits_for_room_ = false, waits_for_driver_ = false;
    bool held_ = false, looks_ = false;
    bool samples_ = false;
    instant since_{}, sampled_{};
    ns longest_hold_{0};
    ns spent_{0};  // host time of the gate for this launch so far
    batch_times batches_;
    instant begun_batch_{};       // time of the first launch in the open batch
    std::uint64_t closings_ = 0;  // number of closings when the last wait was put
    gpushare::detail::launch_history history_;
    std::size_t launched_ = 0, kernels_over_ = 0;
    std::deque<std::size_t> ends_;  // launch counts after which there is an event
    kernel wait_{};
};

/// Serves one request after another, in the order of arrival.
class serving_thread {
public:
    struct answer {
        ns from_arrival, call;  ///< from the request's arrival, and from its turn
        ns told;                ///< the announced bound, at the arrival, on the wait for lower clients' work in flight
    };

    serving_thread(stage& on, const served_model& m)
        : on_(on),
          engine_(m),
          client_(on.gate.add({.level = 1})),
          number_(on.clients++),
          random_(m.arrivals),
          stream_(on.gpu.make_stream(
              {number_, on.how == strategy::native || on.how == strategy::acquire ? 5 : 0, on.host.gap_in_graph})) {}
    serving_thread(const serving_thread&) = delete;
    serving_thread& operator=(const serving_thread&) = delete;

    void begin() {
        if (engine_.per_s <= 0) return;
        on_.gpu.at(on_.gpu.now() + ns{1'000'000}, [this] { arrive(); });
    }
    [[nodiscard]] const std::vector<answer>& answers() const noexcept { return answers_; }

private:
    struct request {
        instant arrival, turn;
        ns told;
    };

    void arrive() {
        for (unsigned i = 0; i < engine_.burst; ++i) {
            on_.gate.arrived(client_, on_.gpu.now());
            if (!std::exchange(expected_, false)) on_.request_arrived();
            waiting_.push_back({on_.gpu.now(), {}, on_.gate.bound(client_)});
        }
        if (!serves_) serve();
        const instant next = on_.gpu.now() + until_next();
        if (engine_.ahead != ns{0}) on_.gpu.at(next - engine_.ahead, [this] { expect(); });
        on_.gpu.at(next, [this] { arrive(); });
    }
    [[nodiscard]] ns until_next() {
        const ns mean{static_cast<std::int64_t>(1e9 * engine_.burst / engine_.per_s)};
        if (engine_.even) return mean;
        return (engine_.arrivals != 0 ? random_ : on_.gpu.random()).exponential(mean);
    }
    void expect() {
        expected_ = true;
        on_.request_arrived();
    }

    void serve() {
        serves_ = true;
        waiting_.front().turn = on_.gpu.now();
        const iteration& graph = (*engine_.model)[0];
        instant arrival = on_.gpu.now() + on_.host.graph_start;
        if (on_.how >= strategy::held)
            arrival += on_.how == strategy::single ? on_.host.gate.experiment : on_.host.gate.of_request();
        if (on_.host.late > 0 && on_.gpu.random().fraction() < on_.host.late)
            arrival += on_.gpu.random().exponential(on_.host.late_by);
        on_.driver_free = on_.gpu.now() + on_.host.graph_launch;
        for (std::size_t i = 0; i + 1 < graph.size(); ++i) on_.gpu.launch(stream_, graph[i], arrival);
        on_.gpu.launch(stream_, graph.back(), arrival,
                       [this] { on_.gpu.at(on_.gpu.now() + on_.host.seen, [this] { answered(); }); });
    }

    void answered() {
        const instant now = on_.gpu.now();
        const request r = waiting_.front();
        waiting_.pop_front();
        answers_.push_back({now - r.arrival, now - r.turn, r.told});
        on_.gate.left(client_, now);
        on_.request_left();
        if (!waiting_.empty()) return serve();
        serves_ = false;
        on_.gpu.at(now + on_.options.linger, [this] { on_.something_ended(); });
    }

    stage& on_;
    const served_model engine_;
    const gpushare::launch_gate::client client_;
    const std::uint32_t number_;
    gpushare::sim::random random_;  // draws the arrival times if the engine has a seed of its own
    const std::uint32_t stream_;
    std::deque<request> waiting_;
    std::vector<answer> answers_;
    bool serves_ = false;
    bool expected_ = false;  // the other threads hold back for the next request
};

}  // namespace engines
