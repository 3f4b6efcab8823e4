// SPDX-License-Identifier: Apache-2.0
// Decides which launch goes to a device now: a kernel, a graph or a copy, as the driver sees it. An
// engine's call enqueues hundreds of launches, and no thread waits between them. A decision once
// per call comes too late for the engine's neighbours.
//
//   gpushare::launch_gate gate;
//   const auto urgent = gate.add({.level = 1}), batch = gate.add({});
//   gate.arrived(urgent, now);  // a request is there: batch holds back
//   if (gate.ask(batch, 20us, now).goes) gate.launched(batch, 20us, now);
//   gate.finished(batch, 20us, 22us, now);                     // predicted, and measured
//   gate.left(urgent, now);                                    // batch continues after the linger
//
// A plain value without a clock, a thread or a device. Its driver asks before each launch. While
// the answer is no, the driver holds the launching thread or closes a gate in its stream. The
// driver asks again when a launch finished or a client left, or at the time that the answer names.
// Not thread-safe: its driver locks.
//
// Four rules, in this order. A client with a cap or a quota of time waits until it may have device
// time again; a client with a soft cap waits only while others want the device. A client holds back
// while a client of a higher level is present, and for a linger after that, since the next request
// often follows immediately. While a client of a higher level exists, even if it isn't present, a
// client may have only little in flight. If a client of a level has a weight, the clients of that
// level take turns, and device time is divided by weight, in virtual time (start-time fair
// queueing, Goyal et al., SIGCOMM 1996). A launch that was held for longest_hold goes whatever the
// rules say: the engine may hold a lock that the urgent client needs.
//
// If a client of a level has a latency goal (`slo`), the clients of that level take turns by
// deadline instead, as the policy earliest_deadline serves submissions: a request is due `slo`
// after its arrival, but no earlier than its client's pace of weight x device time allows. So a
// client that floods its queue misses its own goal first.
//
// Turns make shares exact. Events tell how long a launch took only if no other launch ran alongside
// it, and a client that is charged for others' launches gets less than its share. Clients of a
// level without weights run side by side, which costs nothing. In such a level the driver may ask
// to run a launch of unknown length alone. That launch waits until the launches of others are over,
// and others of its level wait until it is over.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/open_requests.hpp>
#include <gpushare/compute/detail/pacer.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Options of a launch_gate. More than an hour of `in_flight`, `ahead` or `queued` counts as an
/// hour.
struct launch_gate_options {
    /// The most predicted time in flight of a client below another one; at least one launch.
    ns in_flight{200'000};
    ns linger{10'000};  ///< how long others hold back after a client left
    /// How far a client may be ahead of its share alongside clients of its level.
    ns ahead{500'000};
    ns pause{50'000};              ///< how long a client keeps its turn while it launches nothing
    ns longest_hold{100'000'000};  ///< a launch goes after this wait in any case
    /// As `in_flight`, for a client whose streams wait or that takes turns.
    ns queued{8'000'000};
    /// The most launches in a stream that waits; a driver's queue ends at about 1000.
    std::uint32_t queued_launches = 512;
    /// Where other clients have goals, a launch of a client without a goal is due this long after
    /// the gate was asked about it.
    ns patience{1'000'000'000};
};

/// A quota of device time. Unused time is saved up to `time`, and no further.
struct launch_quota {
    ns time{};  ///< the device time that a client may have at once
    ns each{};  ///< the period in which it gets as much again, evenly; 0: no quota

    friend constexpr bool operator==(const launch_quota&, const launch_quota&) = default;
};

/// Options of a launch_gate's client.
struct launch_client_options {
    int level = 0;  ///< higher levels go first
    /// The client's weight for the level's device time, relative to other clients. 0: the client
    /// wants no share, and counts as 1 alongside clients with weights.
    std::uint32_t weight = 0;
    /// Its streams wait for higher clients, so ask() doesn't say no for their sake.
    bool in_stream = false;
    /// The most of the device's time, whatever other clients want: over a time t no more than this
    /// part of (t + 5 ms), and one launch, as far as predictions are right.
    share cap = share::whole();
    /// The cap holds only while other clients, within their caps, have launches. Borrowed time
    /// isn't charged to the cap.
    bool soft_cap = false;
    /// Over a time t no more device time than quota.time x (1 + t / quota.each), and one launch, as
    /// far as predictions are right. A launch that the quota holds goes after longest_hold:
    /// let longest_hold be longer than the longest wait, `each` x the longest launch / quota.time.
    launch_quota quota{};
    /// How long after its arrival a request is due; 0: no goal. Without a request, as long after a
    /// launch was asked about. Among clients of a level, the one that is due first launches first.
    ns slo{};

    friend constexpr bool operator==(const launch_client_options&, const launch_client_options&) = default;
};

/// The options of a tenant's client at a gate, from its specification (tenant_spec): level, share,
/// caps and latency goal. A client that cuda::launch_gate::add() makes of a tenant follows the
/// tenant's changes; any other client gets new options only through `change`.
template <class Spec>
requires requires(const Spec& s) {
    { s.compute } -> std::convertible_to<share>;
    { s.level } -> std::convertible_to<priority>;
    { s.cap } -> std::convertible_to<share>;
    { s.soft_cap } -> std::convertible_to<bool>;
    { s.slo } -> std::convertible_to<ns>;
}
[[nodiscard]] constexpr launch_client_options launch_client_options_of(const Spec& spec) {
    return {.level = detail::level_of(spec.compute, spec.level).level,
            .weight = spec.compute.permille(),
            .cap = spec.cap,
            .soft_cap = spec.soft_cap,
            .slo = spec.slo};
}

/// The answer to whether a launch may go.
struct launch_answer {
    bool goes = false;    ///< the launch may go now
    bool forced = false;  ///< the launch goes because it was held for too long: worth an event
    /// The launch waits for the client's own work in flight, which must be little for the sake of
    /// `held_by`.
    bool own = false;
    std::uint32_t held_by{};  ///< the client for which the launch is or was held
    instant again = never;    ///< ask again at this time, if nothing has finished or left earlier
    /// The launch waits for its client's quota or hard cap. Before `again`, only three events can
    /// let it go: the end of the client's own launches, other options, or the client's removal.
    /// Others' launches don't matter.
    bool by_time = false;
};

/// The client for which waits in a stream have been closed for too long.
struct long_hold {
    std::uint32_t held_by{};  ///< the client for which they are closed
    /// The time since that client became present, or since a thread waits for the streams.
    ns held{};
};

/// The cost of a launch: the device time that the launch takes, and the part of that time that its
/// client is charged.
struct launch_cost {
    ns time{0};        ///< from its beginning to its end
    ns charge{0};      ///< `time` times the part of the SMs that the launch fills
    bool sure = true;  ///< of a prediction: whether such a launch was timed before
};

/// The decisions about one device's launches. See the top of the file.
class launch_gate {
public:
    using client = std::uint32_t;                  ///< an index, used again once it was removed
    using client_options = launch_client_options;  ///< the argument of add()
    using answer = launch_answer;                  ///< the result of ask()

    /// A gate without clients. Throws nothing but std::bad_alloc.
    explicit launch_gate(const launch_gate_options& o = {}) : options_(bounded(o)) {}

    /// Adds a client that isn't present. Throws std::bad_alloc.
    [[nodiscard]] client add(const launch_client_options& o) {
        const auto unused = std::ranges::find(clients_, false, &state::used);
        const auto c = static_cast<client>(unused - clients_.begin());
        if (unused == clients_.end()) clients_.emplace_back();
        clients_[c] = {.in_stream = o.in_stream, .used = true};
        set(clients_[c], o, instant{});
        catch_up(c);
        order_level(o.level);
        return c;
    }
    /// Other options, in force immediately; `in_stream` stays as it was. Time that the client had
    /// beyond its old cap or quota counts against the new one.
    void change(client c, const launch_client_options& o, instant now) noexcept {
        state& s = clients_[c];
        const int before = s.level;
        set(s, o, now);
        s.due.at = never;  // until the client asks again
        if (s.level != before) {
            s.has_turn = false;
            s.virtual_time = std::numeric_limits<std::int64_t>::min() / 2;
            catch_up(c);
            order_level(before);
        }
        order_level(s.level);
    }
    /// Removes a client, with its launches in flight.
    void remove(client c) noexcept {
        const int level = std::exchange(clients_[c], {}).level;
        order_level(level);
    }

    /// A request of `c` has arrived. The client is present until all its requests have left.
    void arrived(client c, instant now) noexcept {
        state& s = clients_[c];
        if (s.slo != ns{0}) s.open.arrived(now);
        present(c, now);
    }
    /// The request of `c` that arrived at `came` is over.
    void left(client c, instant now, instant came) noexcept {
        clients_[c].open.left(came);
        absent(c, now);
    }
    /// The same for the request that arrived first.
    void left(client c, instant now) noexcept { left(c, now, clients_[c].open.first()); }
    /// Launches of `c` are in flight. The client is present until they have drained, as with a
    /// request, but nothing is due.
    void occupied(client c, instant now) noexcept { present(c, now); }
    /// See occupied().
    void drained(client c, instant now) noexcept { absent(c, now); }

    /// Whether `c` may launch work that is predicted to take `predicted`. `since`: when the driver
    /// first asked about this launch. `alone`: the launch is to run alone, so that it can be timed.
    [[nodiscard]] launch_answer ask(client c, ns predicted, instant now, instant since, bool alone = false) noexcept {
        state& s = clients_[c];
        if (!busy(s)) catch_up(c, saved(s, now));
        if (s.by_due) {
            if (s.due.pace.per_million != s.rate) s.due.pace.change(s.rate, now);
            if (!busy(s)) s.due.pace.begin(now);
            // Another thread of the client may have asked earlier.
            s.asked = s.waits ? std::min(s.asked, since) : since;
            s.due.at = due_at(s);
        }
        launch_answer a = decide(c, predicted, now);
        // Otherwise the launch waits for its turn, and others needn't wait for it.
        s.wants_alone = alone && a.goes;
        if (a.goes) a = decide_apart(c, alone, now);
        if (!a.goes && now - since >= options_.longest_hold) a.goes = a.forced = true;
        if (a.by_time) a.again = std::min(a.again, saturating_add(since, options_.longest_hold));
        s.lends = s.soft && !a.forced;
        // Beyond its cap, others don't leave the device to it.
        s.waits = !a.goes && within_cap(s, now);
        return a;
    }
    /// The same for a launch about which the driver asks for the first time.
    [[nodiscard]] launch_answer ask(client c, ns predicted, instant now) noexcept {
        return ask(c, predicted, now, now);
    }

    /// `c` has launched work with this predicted cost. `alone`: it runs alone until it has
    /// finished, to be timed.
    void launched(client c, launch_cost predicted, instant now, bool alone = false) noexcept {
        state& s = clients_[c];
        s.waits = s.wants_alone = false;
        if (!s.has_turn)
            for (state& o : clients_)
                if (o.level == s.level) o.has_turn = &o == &s;
        note_longest(s, predicted.time, now);
        s.in_flight += predicted.time;
        if (alone) s.timed = s.in_flight;
        if (!predicted.sure) s.unsure = s.in_flight;
        if (!has_above(s.level)) s.unchecked = s.in_flight;
        s.virtual_time += predicted.charge.count() / s.weight;
        if (s.limited) spend(s, predicted.charge, now);
        if (s.by_due) s.due.pace.spend(predicted.charge, now);
        s.seen = now;
    }
    /// The same for a launch that fills the device.
    void launched(client c, ns predicted, instant now) noexcept { launched(c, {predicted, predicted}, now); }
    /// A launch has ended, or several together. `measured` replaces the prediction in the client's
    /// charge.
    void finished(client c, launch_cost predicted, launch_cost measured, instant now) noexcept {
        state& s = clients_[c];
        end(s, predicted, measured, now);
        for (ns* const until : {&s.timed, &s.unsure, &s.unchecked}) *until -= std::min(predicted.time, *until);
    }
    /// The same for a launch that may have ended before the client's earlier launches: a
    /// synchronous copy, or a launch that the device's driver refused.
    void overtook(client c, launch_cost predicted, launch_cost measured, instant now) noexcept {
        state& s = clients_[c];
        end(s, predicted, measured, now);
        for (ns* const until : {&s.timed, &s.unsure, &s.unchecked}) *until = std::min(*until, s.in_flight);
    }
    /// As the first finished(), for launches that fill the device.
    void finished(client c, ns predicted, ns measured, instant now) noexcept {
        finished(c, {predicted, predicted}, {measured, measured}, now);
    }
    /// A launch of `c` took up to `longest`, longer than predicted; bound() takes this time into
    /// account. Before the first launch of `c`: no launch or piece of work counts as shorter.
    void took(client c, ns longest) noexcept {
        state& s = clients_[c];
        if (s.forgets != never) return note_longest(s, longest, s.seen);
        s.least = s.longest = std::max(s.longest, std::min(longest, unlimited));
    }
    /// The launches of `c` go into this many streams. In each of them, one piece may be past its
    /// wait.
    void spread(client c, std::uint32_t streams) noexcept { clients_[c].streams = std::max(streams, 1U); }

    /// Whether a client above the level of `c` is present or lingers. A gate in the stream of `c`
    /// stays closed for that long.
    [[nodiscard]] launch_answer closed(client c, instant now) const noexcept {
        launch_answer a{.goes = true};
        for (client other = 0; other < clients_.size(); ++other) {
            const state& o = clients_[other];
            if (!o.used || o.level <= clients_[c].level) continue;
            // That client can't use the device now.
            if (!within_cap(o, now) && o.in_flight == ns{0}) continue;
            if (o.requests != 0) return {.goes = false, .held_by = other};
            if (o.seen == instant{} || now - o.seen >= options_.linger) continue;
            const instant ends = saturating_add(o.seen, options_.linger);
            if (a.goes || ends > a.again) a = {.goes = false, .held_by = other, .again = ends};
        }
        return a;
    }

    /// The same for a launch that can't wait in its stream. `since`: when the driver first asked
    /// about it.
    [[nodiscard]] launch_answer closed(client c, instant now, instant since) const noexcept {
        launch_answer a = closed(c, now);
        if (!a.goes && now - since >= options_.longest_hold) a.goes = a.forced = true;
        return a;
    }
    /// Returns a value if a higher client has been present for longest_hold. The driver then opens
    /// the waits of `c`, since the engine may hold a lock that the higher client needs.
    [[nodiscard]] std::optional<long_hold> overdue(client c, instant now) const noexcept {
        for (client other = 0; other < clients_.size(); ++other) {
            const state& o = clients_[other];
            if (!o.used || o.level <= clients_[c].level || o.requests == 0) continue;
            if (now - o.arrived >= options_.longest_hold) return long_hold{other, now - o.arrived};
        }
        return std::nullopt;
    }

    /// Whether waits in streams are to be opened now for a thread that waits for work on the
    /// device, and has waited since `since`. `c`: the thread's client, if it has one. `needs_all`:
    /// the work that the thread waits for includes the streams that wait. If `needs_all` and a
    /// request of `c` is open, the waits open immediately, unless a higher client is present.
    /// Otherwise they open after longest_hold, which begins at `since` or, for a client below, when
    /// a higher client became present, if that was earlier.
    [[nodiscard]] std::optional<long_hold> awaited(std::optional<client> c, bool needs_all, instant now,
                                                   instant since) const noexcept {
        long_hold longest{.held_by = c.value_or(0), .held = now - since};
        bool above = false;
        for (client other = 0; other < clients_.size(); ++other) {
            const state& o = clients_[other];
            if (!o.used || o.requests == 0 || (c && o.level <= clients_[*c].level)) continue;
            if (!c && (!above || o.level > clients_[longest.held_by].level)) longest.held_by = other;
            if (c && now - o.arrived >= longest.held) longest = {other, now - o.arrived};
            above = true;
        }
        if (c && needs_all && clients_[*c].requests != 0 && !above) return long_hold{*c, ns{0}};
        return longest.held >= options_.longest_hold ? std::optional(longest) : std::nullopt;
    }
    /// From now on waits in streams are open, whichever clients are present, because a thread waits
    /// for them inside the driver. Each call needs one call of let_close(). Meanwhile ask() holds
    /// launches whose streams can't wait.
    void keep_open() noexcept { ++kept_open_; }
    /// See keep_open().
    void let_close() noexcept { --kept_open_; }
    /// Whether a waiting stream with this many unfinished launches may get another one.
    [[nodiscard]] bool takes_more(std::uint32_t launches) const noexcept {
        return launches < std::max(options_.queued_launches, 1U);
    }
    /// The most predicted work of `c` between two waits in its stream. `wanted`: the predicted work
    /// that justifies another wait. A longer launch is a piece by itself, and bound() counts every
    /// piece as long as the longest launch. So short launches may be joined to a piece of that
    /// length: this saves waits, and bound() still holds. The result is at most twice `wanted`, so
    /// that a long, rare launch doesn't make all pieces long. The first launch behind a request's
    /// arrival gets a wait, too, however short the piece: bound() counts no later launch.
    [[nodiscard]] ns piece(client c, ns wanted) const noexcept {
        return wanted + std::clamp(clients_[c].longest - wanted, ns{0}, wanted);
    }

    /// The longest time for which a request of `c` waits for lower clients, in device time. Once
    /// the request has arrived, it waits for the work of each lower client that is in flight and
    /// that no wait can stop. Nothing else passes, unless `c` waits for its cap. Before the
    /// arrival, the bound counts the work that each lower client may have in flight by then. Both
    /// are predictions, plus the time by which launches lately exceeded their predictions. A launch
    /// without a measured time may take any time: launch_gate_options::in_flight plus the longest
    /// launch is added for it.
    [[nodiscard]] ns bound(client c) const noexcept {
        const bool is_there = clients_[c].requests != 0;
        ns sum{0};
        for (const state& o : clients_) {
            if (!o.used || o.level >= clients_[c].level || (is_there && o.in_flight == ns{0})) continue;
            const ns may_pass = std::max(options_.in_flight, o.longest) * (o.in_stream ? o.streams : 1U);
            const ns most = std::max(may_pass, o.in_stream && kept_open_ == 0 ? o.unchecked : o.in_flight);
            sum += is_there ? std::min(o.in_flight, most) : most;
            sum += o.unsure != ns{0} ? options_.in_flight + o.longest : o.late;
        }
        return sum;
    }
    /// Whether another client of its level has launches in flight.
    [[nodiscard]] bool has_neighbours(client c) const noexcept {
        for (client other = 0; other < clients_.size(); ++other) {
            const state& o = clients_[other];
            if (other != c && o.used && o.level == clients_[c].level && o.in_flight != ns{0}) return true;
        }
        return false;
    }
    /// Predicted time of the launches of `c` in flight.
    [[nodiscard]] ns in_flight(client c) const noexcept { return clients_[c].in_flight; }
    /// Device time charged to `c`: that of its launches, as measured.
    [[nodiscard]] ns charged(client c) const noexcept { return clients_[c].charged; }

private:
    struct state {
        int level = 0;
        std::uint32_t weight = 1;
        bool wants_share = false;
        bool in_stream = false;
        bool used = false;
        bool capped = false;
        bool soft = false;
        bool lends = false;        // the part of the next launch beyond the soft cap isn't charged
        bool limited = false;      // the client has a cap or a quota
        bool by_due = false;       // a client of its level has a latency goal
        bool turns = false;        // a client of its level has a goal or wants a share
        bool has_turn = false;     // it was the last client of its level that launched
        bool waits = false;        // a launch of the client is held
        bool wants_alone = false;  // its held launch is to run alone, and waits for others
        std::uint32_t requests = 0;
        ns in_flight{0}, charged{0};
        ns longest{0};  // the longest launch of this period and of the one before; at least `least`
        ns lately{0};   // the longest launch of this period
        ns least{0};
        instant forgets = never;  // when the period ends; `never` before the first launch
        ns timed{0};              // predicted time in flight, until a launch that is timed alone is over
        // Predicted time in flight, until no launch without a measured time is in flight.
        ns unsure{0};
        // Predicted time in flight, until the work launched without a higher client is over.
        ns unchecked{0};
        ns late{0};  // by how much recent launches exceeded their predictions
        std::uint32_t streams = 1;
        detail::pacer cap{};
        std::int64_t virtual_time = 0;
        instant seen{};     // when it was last present
        instant arrived{};  // when it became present
        // The members that only clients with a goal or a quota need come last.
        ns slo{0};
        detail::due_time due{};
        std::int64_t rate = 1'000'000;  // its pace, from its next launch on
        // When the driver first asked about the waiting launch, or about the last one.
        instant asked{};
        detail::refill quota{};
        ns charging{0};  // with a soft cap: the charge of its launches in flight
        ns lent{0};      // the part of that which the cap wasn't charged
        detail::open_requests open{};
    };

    // Sums and multiples of such times don't overflow.
    static constexpr ns unlimited = std::chrono::hours(1);
    [[nodiscard]] static launch_gate_options bounded(launch_gate_options o) noexcept {
        for (ns* const time : {&o.in_flight, &o.ahead, &o.queued}) *time = std::min(*time, unlimited);
        return o;
    }

    static void set(state& s, const launch_client_options& o, instant now) noexcept {
        s.level = o.level;
        s.weight = std::max(o.weight, 1U);
        s.wants_share = o.weight != 0;
        s.capped = o.cap < share::whole();
        s.soft = s.capped && o.soft_cap;
        s.cap.change(std::int64_t{o.cap.permille()} * 1000, now);
        s.slo = std::max(o.slo, ns{0});
        s.quota.change(std::max(o.quota.time, ns{0}), std::max(o.quota.each, ns{0}), now);
        s.limited = s.capped || s.quota.is_set();
        if (!s.capped) s.cap = {};
        if (!s.soft) s.charging = s.lent = ns{0};
        if (s.slo == ns{0}) s.open = {};
    }
    // A rare long launch, such as the copy of a model's weights, is forgotten after two periods.
    // Only while nothing is in flight: bounds of queued work may rely on it.
    static void note_longest(state& s, ns time, instant now) noexcept {
        constexpr ns period = std::chrono::seconds(10);
        const bool over = now >= s.forgets && s.in_flight == ns{0};
        if (over) s.longest = std::max(s.least, std::exchange(s.lately, ns{0}));
        if (over || s.forgets == never) s.forgets = saturating_add(now, period);
        s.lately = std::max(s.lately, time);
        s.longest = std::max(s.longest, time);
    }
    // Updates for each client of a level whether deadlines or shares order the level, and the
    // client's pace.
    void order_level(int level) noexcept {
        bool goals = false, shares = false;
        std::uint64_t weights = 0;
        for (const state& s : clients_) {
            if (!s.used || s.level != level) continue;
            goals = goals || s.slo != ns{0};
            shares = shares || s.wants_share;
            weights += s.weight;
        }
        for (state& s : clients_) {
            if (!s.used || s.level != level) continue;
            if (!s.by_due) s.asked = s.due.at = never;  // until it asks again
            s.by_due = goals;
            s.turns = goals || shares;
            const std::uint64_t part = shares ? std::uint64_t{s.weight} * 1'000'000 / weights : 1'000'000;
            s.rate = static_cast<std::int64_t>(part);
        }
    }

    static void end(state& s, launch_cost predicted, launch_cost measured, instant now) noexcept {
        // A first measurement says nothing about predictions.
        const ns late = s.unsure == ns{0} ? measured.time - predicted.time : ns{0};
        s.late = std::max(late, s.late - s.late / 64);
        s.in_flight -= std::min(predicted.time, s.in_flight);
        s.virtual_time += (measured.charge - predicted.charge).count() / s.weight;
        s.charged += measured.charge;
        if (s.limited) adjust(s, predicted.charge, measured.charge);
        if (s.by_due) s.due.pace.adjust(measured.charge - predicted.charge);
        s.seen = now;
    }

    void present(client c, instant now) noexcept {
        state& s = clients_[c];
        if (s.requests == 0 && s.in_flight == ns{0}) catch_up(c, saved(s, now));
        if (s.requests++ == 0) s.arrived = now;
        s.seen = now;
    }
    void absent(client c, instant now) noexcept {
        state& s = clients_[c];
        if (s.requests != 0) --s.requests;
        s.seen = now;
    }

    [[nodiscard]] launch_answer decide(client c, ns predicted, instant now) const noexcept {
        const state& s = clients_[c];
        if (!within_cap(s, now) && !borrows(c, now)) return beyond_cap(c, now);
        if (const launch_answer a = closed(c, now); !a.goes && !waits_in_stream(s)) return a;
        for (client other = 0; other < clients_.size(); ++other) {
            const state& o = clients_[other];
            if (!o.used || other == c || o.level < s.level) continue;
            const bool above = o.level > s.level;
            const bool little = above ? !s.in_stream : o.slo != ns{0};
            const ns most = little ? options_.in_flight : options_.queued;
            const bool enough = s.in_flight != ns{0} && s.in_flight + predicted > most;
            if (enough && (above || s.turns)) return {.goes = false, .own = true, .held_by = other};
            if (above || !s.turns) continue;
            if (o.in_flight != ns{0} || (busy(o) && goes_after(s, o))) return {.goes = false, .held_by = other};
            // The other client pauses only because its host is slow. It keeps its turn, or it would
            // wait for one after each pause.
            const bool pauses = o.has_turn && !o.waits && now - o.seen < options_.pause;
            if (pauses && (!s.by_due || goes_after(s, o)))
                return {.goes = false, .held_by = other, .again = saturating_add(o.seen, options_.pause)};
        }
        return {.goes = true};
    }
    // The answer to a client beyond its cap. With a soft cap it may go when others are done, but
    // not before its quota allows.
    [[nodiscard]] launch_answer beyond_cap(client c, instant now) const noexcept {
        const state& s = clients_[c];
        const bool no_quota = s.quota.is_set() && !s.quota.entitled(now);
        const instant again = s.soft && no_quota ? s.quota.from : entitled_from(s, now);
        return {.goes = false, .own = true, .held_by = c, .again = again, .by_time = !s.soft || no_quota};
    }
    [[nodiscard]] bool waits_in_stream(const state& s) const noexcept { return s.in_stream && kept_open_ == 0; }
    // Whether the client is within its cap and its quota.
    [[nodiscard]] static bool within_cap(const state& s, instant now) noexcept {
        return !s.limited || entitled_from(s, now) <= now;
    }
    [[nodiscard]] static instant entitled_from(const state& s, instant now) noexcept {
        const instant by_cap = s.capped ? s.cap.from : now;
        return s.quota.is_set() ? std::max(by_cap, s.quota.from) : by_cap;
    }
    // Beyond its soft cap a client continues while no client within its cap would use the device.
    // Work that waits in a stream for a request of `c` can't use it.
    [[nodiscard]] bool borrows(client c, instant now) const noexcept {
        const state& s = clients_[c];
        if (!s.soft || (s.quota.is_set() && !s.quota.entitled(now))) return false;
        return std::ranges::none_of(clients_, [&](const state& o) {
            const bool stopped = waits_in_stream(o) && o.level < s.level && s.requests != 0;
            return &o != &s && o.used && busy(o) && !stopped && within_cap(o, now);
        });
    }
    static void spend(state& s, ns charge, instant now) noexcept {
        if (s.quota.is_set()) s.quota.spend(charge, now);
        if (!s.capped) return;
        const bool lends = s.lends && !s.cap.entitled(now);
        if (!lends) s.cap.spend(charge, now);
        if (!s.soft) return;
        s.charging += charge;
        if (lends) s.lent += charge;
    }
    // The lent part of ending launches is taken to be the same as of all launches in flight.
    static void adjust(state& s, ns predicted, ns measured) noexcept {
        ns delta = measured - predicted;
        if (s.quota.is_set()) s.quota.adjust(delta);
        if (s.soft && s.charging > ns{0}) {
            const double part = static_cast<double>(s.lent.count()) / static_cast<double>(s.charging.count());
            const auto of = [part](ns whole) {
                return ns{static_cast<std::int64_t>(part * static_cast<double>(whole.count()))};
            };
            delta -= of(delta);
            s.lent -= std::min(of(predicted), s.lent);
            s.charging -= std::min(predicted, s.charging);
        }
        if (s.capped) s.cap.adjust(delta);
    }
    [[nodiscard]] bool has_above(int level) const noexcept {
        return std::ranges::any_of(clients_, [&](const state& o) { return o.used && o.level > level; });
    }

    // Whether the other clients leave the device to `c`, or `c` leaves it to another client's
    // launch that is timed alone. If two ask to run alone at once, the first in the list goes
    // first. Work queued below, behind closed waits, doesn't run.
    [[nodiscard]] launch_answer decide_apart(client c, bool alone, instant now) const noexcept {
        for (client other = 0; other < clients_.size(); ++other) {
            const state& o = clients_[other];
            if (!o.used || other == c) continue;
            const bool asks_first = o.wants_alone && (!alone || other < c) && !(goes_after(o, clients_[c]) && o.turns);
            const bool first = o.timed != ns{0} || asks_first;
            const bool stopped = o.in_stream && o.level < clients_[c].level && !closed(other, now).goes;
            if ((alone && o.in_flight != ns{0} && !stopped) || (o.level == clients_[c].level && first))
                return {.goes = false, .held_by = other};
        }
        return {.goes = true};
    }

    // Whether `s` waits for `other`, if their level takes turns.
    [[nodiscard]] bool goes_after(const state& s, const state& other) const noexcept {
        return s.by_due ? other.due.counts() < s.due.counts() : is_ahead(s, other);
    }
    // When the client's work is due: its first request or, without requests, the launch about which
    // the driver asks.
    [[nodiscard]] instant due_at(const state& s) const noexcept {
        if (s.slo == ns{0}) return saturating_add(s.asked, options_.patience);
        return saturating_add(s.open.any() ? s.open.first() : s.asked, s.slo);
    }
    // Whether `s` has had so much more than its share that it waits for `other`.
    [[nodiscard]] bool is_ahead(const state& s, const state& other) const noexcept {
        return s.virtual_time > other.virtual_time + options_.ahead.count() / s.weight;
    }
    // Whether the client uses the device or would like to. A request alone doesn't count: its
    // thread may compute for long, and others needn't wait for that.
    [[nodiscard]] static bool busy(const state& o) noexcept { return o.waits || o.in_flight != ns{0}; }
    // How much virtual time a client may be owed after a pause: the longer the pause, the less.
    [[nodiscard]] ns saved(const state& s, instant now) const noexcept {
        constexpr ns idle{2'000'000};
        if (s.seen != instant{} && now - s.seen < idle) return options_.ahead * 10;
        return s.requests != 0 ? options_.ahead : ns{0};
    }
    // Moves the client's virtual time up to that of the least served competitor of its level or,
    // without competitors, to the greatest of the level, less at most `saved`.
    void catch_up(client c, ns saved = ns{0}) noexcept {
        bool any = false;
        std::int64_t least = 0, greatest = 0;
        for (client other = 0; other < clients_.size(); ++other) {
            const state& o = clients_[other];
            if (other == c || !o.used || o.level != clients_[c].level) continue;
            greatest = std::max(greatest, o.virtual_time);
            if (!busy(o) && o.requests == 0) continue;
            least = any ? std::min(least, o.virtual_time) : o.virtual_time;
            any = true;
        }
        const std::int64_t from = (any ? least : greatest) - saved.count() / clients_[c].weight;
        clients_[c].virtual_time = std::max(clients_[c].virtual_time, from);
    }

    launch_gate_options options_;
    std::vector<state> clients_;
    std::uint32_t kept_open_ = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
