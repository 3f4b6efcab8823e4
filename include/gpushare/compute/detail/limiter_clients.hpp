// SPDX-License-Identifier: Apache-2.0
// The clients of a limiter's core. Each client has its settings, the head of its queue, its
// account, and its habit of coming back soon after an end. Functions over all clients say for which
// clients the device is kept, when a submission that arrives now would probably begin, and whether
// a latency goal can be met at all. A part of limiter_core.hpp.
//
//   client.learn_next(nullptr, now, id, kinds, first_guess);    // what waits first, as predicted
//   if (client.ended(failed, 1, 32)) ...                        // quarantined after 32 failures in a row
//   const auto e = detail::estimate(clients, kinds, budget, chat, key, first_guess, bound);
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/cost_model.hpp>
#include <gpushare/compute/detail/in_flight_budget.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/index_set.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The default if the caller can't say which submission follows a client's first.
struct nothing_known {
    instant now{};
    [[nodiscard]] submission_facts operator()(client_id) const noexcept { return {.head = {.arrival = now}}; }
};

/// The default if a client's submissions must keep their order, whatever their streams.
struct strict_order {
    [[nodiscard]] bool operator()(client_id) const noexcept { return false; }
};

/// The duration of work that takes this much device time at this width.
[[nodiscard]] inline ns lasting(ns took, sm_width width) noexcept {
    if (width.part() >= 1) return took;
    return ns{static_cast<ns::rep>(std::min(static_cast<double>(took.count()) / width.part(), 9e18))};
}

/// The timeline of a submission: its stream's or, if that is unknown, one for all such submissions
/// of its client.
[[nodiscard]] constexpr std::uint64_t timeline_or_own(std::uint64_t told, client_id c) noexcept {
    return told != 0 ? told : ~std::uint64_t{c.index};
}

/// Whether a client submits again soon after an end, as a thread that waits for each call before
/// the next one does. Between two calls the client has nothing waiting, and the device would go to
/// others for a whole call of theirs, whatever the shares. So the limiter keeps the device for a
/// client that is behind its share and lately came back in time (like anticipatory scheduling of
/// disks: Iyer, Druschel, SOSP 2001). The cost is always bounded: after an end, the device waits
/// for at most 1/50 of the time that the ended work took. A value.
class return_habit {
public:
    /// The device idles for such a client for at most this part of the time that its work took:
    /// 2 %.
    static constexpr ns::rep part = ratios::idle_part;
    /// After shorter work no client can be back in time.
    static constexpr ns shortest{1'000'000};

    /// Whether the end of work that lasted this long must be reported, with the time.
    [[nodiscard]] static constexpr bool is_concerned(ns lasts) noexcept { return lasts >= shortest; }

    /// Work that lasted this long has ended, and no work of the client waits. `now` is no time
    /// (instant{}) if it isn't known.
    void ended(ns lasted, instant now) noexcept {
        if (is_concerned(lasted) && now > instant{}) until_ = saturating_add(now, lasted / part);
    }
    /// A submission of the client waits again.
    void came(instant now) noexcept {
        if (until_ == never) return;
        if (now > instant{}) in_time_ = now <= until_ ? std::min(in_time_ + 1, most) : in_time_ / 2;
        until_ = never;
    }
    /// Whether the client usually comes back, and is due back now that its work in flight has ended
    /// or is about to end. The client has no waiting work.
    [[nodiscard]] bool is_expected(instant now, bool in_flight) const noexcept {
        return in_time_ >= enough && is_watched(now, in_flight);
    }
    /// Whether the client may still come back in time: until() hasn't passed or, if nothing has
    /// ended since the client last came, its work is in flight.
    [[nodiscard]] bool is_watched(instant now, bool in_flight) const noexcept {
        return until_ == never ? in_flight : now <= until_;
    }
    /// The time until which the client is expected; `never`: its work in flight hasn't ended yet.
    [[nodiscard]] instant until() const noexcept { return until_; }

private:
    static constexpr int enough = 2, most = 8;

    instant until_ = never;
    int in_time_ = 0;  // how often the client lately came back in time
};

struct limiter_client {
    client_settings settings{};
    std::uint32_t generation = 0, level = 0;  // the level's index in the budget
    // The level index of its first waiting submission, which may be a higher one.
    std::uint32_t at = 0;
    bool present = false, quarantined = false;
    bool closing = false;    // takes no more submissions
    bool enqueuing = false;  // a callable of the client is running
    // Its first waiting submission is for a stream that has enough work: the policy must not pick
    // the client.
    bool blocked = false;
    // Blocked because a higher level keeps SMs, or by a hard cap: any end may unblock the client.
    bool kept_off = false;
    // Its turn has come, but its hard cap admits no more: other clients wait behind it until then.
    instant turn_until{};
    // A submission took longer than its settings declare, or filled more SMs than believed.
    bool overran = false;
    std::uint32_t failures_in_row = 0, admitted = 0;
    double width_in_flight = 0;  // the sum of the widths of its work in flight
    // Its first work in flight has been there at least since then; kept only with hard caps.
    instant since{};
    // Its streams with work in flight; `abreast`: the most that it ever used at once.
    std::uint32_t streams = 0, abreast = 1;
    return_habit habit{};
    double latest_width = 1;     // the width of its latest completed work
    cost_estimate costs{};       // the estimate over all its submissions
    submission_facts next{};     // the facts of its first waiting submission, if there is one
    bool cost_declared = false;  // whether that submission's cost was declared
    client_usage usage{};
    // Time charged but not yet in `usage`, since other work in flight may have shared it: the
    // latest charges, and those before. And time in `usage` that was given back, which comes off
    // later charges.
    ns unsettled{}, nearly_settled{}, given_back{};

    /// Charges the client `took`. Returns whether a part has to be settled later.
    bool add_charge(ns took, bool may_shrink) noexcept {
        const ns owed = std::min(given_back, std::max(took, ns{0}));
        given_back -= owed;
        took -= owed;
        (may_shrink ? unsettled : usage.device_time) = saturating_add(may_shrink ? unsettled : usage.device_time, took);
        return may_shrink;
    }
    /// The client shared `time` of its charge. The published usage doesn't fall: later charges make
    /// up for it.
    void give_back(ns time) noexcept {
        for (ns* of : {&unsettled, &nearly_settled}) {
            const ns part = std::min(time, *of);
            *of -= part;
            time -= part;
        }
        given_back = saturating_add(given_back, time);
    }
    /// Call when all work that was in flight at the last call has ended or, with `all`, when
    /// nothing is in flight. Returns whether the account is settled in full.
    bool settle(bool all) noexcept {
        usage.device_time = saturating_add(usage.device_time, nearly_settled);
        nearly_settled = std::exchange(unsettled, ns{0});
        if (!all) return nearly_settled == ns{0};
        usage.device_time = saturating_add(usage.device_time, std::exchange(nearly_settled, ns{0}));
        return true;
    }

    /// The timeline of the first waiting submission. `index`: the client's.
    [[nodiscard]] std::uint64_t timeline(std::uint32_t index) const noexcept {
        return timeline_or_own(next.timeline, {index});
    }
    /// The longest time that the client declared or lately showed; 0: unknown.
    [[nodiscard]] ns longest() const noexcept { return std::max(settings.longest, costs.longest.get()); }
    /// The lengths with which other clients' bounds count its work.
    [[nodiscard]] work_lengths lasts() const noexcept { return lengths(longest()); }
    /// The same without the longest one in a hundred, if a hundred were seen. Forever if nothing is
    /// known of the client.
    [[nodiscard]] work_lengths mostly_lasts() const noexcept {
        const ns most = costs.longest.seen() >= 100 ? costs.longest.p99() : longest();
        return lengths(most > ns{0} ? most : ns::max());
    }

    /// Learns the facts of the first waiting submission, which came at `now`; null if nothing is
    /// known of it. Afterwards `next` holds the facts. Predictions complete those that its
    /// submitter didn't state.
    void learn_next(const submission_facts* from, instant now, client_id c, const cost_model& kinds,
                    ns first_guess) noexcept {
        static constexpr submission_facts nothing{};
        next = from != nullptr ? *from : nothing;
        auto& h = next.head;
        if (from == nullptr) h.arrival = now;
        cost_declared = h.cost > ns{0};
        if (!cost_declared) h.cost = predict(h.key, c, kinds, first_guess);
        h.remaining = std::max(h.remaining, h.cost);
        if (next.width.known() && settings.narrowest.known() && next.width.part() < settings.narrowest.part())
            next.width = settings.narrowest;
        const auto above = std::min(h.level, settings.ceiling);
        h.level = above > settings.level ? above : no_priority;
        if (settings.slo > ns{0}) h.deadline = std::min(h.deadline, saturating_add(h.arrival, settings.slo));
    }

    /// Describes the client's first submission, without the policy's and the bound's facts.
    /// `horizon`: as in limiter_options.
    void describe(admission& a, client_id c, const cost_model& kinds, ns horizon) const noexcept {
        const ns quantum = horizon / 2;
        const auto kind = kinds.next(c, next.head.key, costs);
        a.client = c;
        a.level = std::max(settings.level, next.head.level);
        a.level_index = at;
        a.predicted = next.head.cost;
        a.known = kind.known;
        a.declared = next.width.known();
        a.width = a.declared ? next.width : usual_width(kind);
        a.length = lasting(a.predicted, a.width);
        a.timeline = timeline(c.index);
        a.key = next.head.key;
        a.of_request = next.of_request;
        a.at_least = kind.at_least;
        a.longest = kind.longest > ns{0} ? kind.longest : longest();
        a.unproven = false;
        if (cost_declared) count_declared(a, horizon);
        a.yields_within = settings.yields_within;
        a.may_share = a.known && a.length <= quantum / 2 && admitted % cycle != cycle - 1;
    }
    /// The part of the SMs that a submission of this kind can fill, as declared or seen.
    [[nodiscard]] sm_width width_of(client_id c, std::uint64_t key, sm_width told,
                                    const cost_model& kinds) const noexcept {
        return told.known() ? told : usual_width(kinds.next(c, key, costs));
    }
    /// A submission that lasted this long has ended. Returns whether to watch for the client's
    /// return.
    [[nodiscard]] bool may_return(const admission& g, ns lasted, instant now) noexcept {
        if (usage.waiting > 0 || !return_habit::is_concerned(lasted)) return false;
        latest_width = g.width.part();
        habit.ended(lasted, now);
        return habit.is_watched(now, usage.in_flight > 0);
    }
    /// Adds to `k` the room to reserve for this client. Returns whether to keep watching for its
    /// return.
    [[nodiscard]] bool keep_for_return(kept_for_return& k, instant now, bool goes_first) const noexcept {
        const bool in_flight = usage.in_flight > 0;
        if (!present || closing || quarantined || usage.waiting > 0 || !habit.is_watched(now, in_flight)) return false;
        if (!goes_first || !habit.is_expected(now, in_flight)) return true;
        k.any = true;
        if (habit.until() == never) return true;
        k.width += latest_width;
        k.until = std::min(k.until, habit.until());
        return true;
    }
    /// Learns from the end of a submission, or of several together: its time and width, and whether
    /// the settings told the truth. `kind`: the estimate of its kind, if it has one. Returns how
    /// long it lasted.
    ns learn(const admission& g, const charge& o, cost_estimate* kind) noexcept {
        learn_width(o, kind);
        const ns time = lasted(o, g.declared ? g.width : sm_width{}, kind);
        learn_trust(o, time, g.width);
        learn_time(o, time, kind);
        return time;
    }
    /// Counts and charges completed submissions. Returns whether a part of the charge has to be
    /// settled later.
    bool account(const charge& o, ns lasted) noexcept {
        usage.ran = saturating_add(usage.ran, o.took);
        usage.completed += o.times;
        usage.running.add(o.times > 1 ? lasted / ns::rep{o.times} : lasted, o.times);
        return add_charge(o.amount(), o.may_shrink);
    }
    /// `times` submissions have ended alike. Returns whether that quarantines the client: with
    /// them, `quarantine_after` in a row have failed.
    [[nodiscard]] bool ended(bool failed, std::uint32_t times, std::uint32_t quarantine_after) noexcept {
        if (!failed) {
            failures_in_row = 0;
            return false;
        }
        usage.failed += times;
        const auto before = std::exchange(failures_in_row, failures_in_row + times);
        if (before >= quarantine_after || failures_in_row < quarantine_after) return false;
        quarantined = true;
        return true;
    }

    /// How long the client's work in flight and `more` submissions last at most. Unbounded if its
    /// settings declare no length, or if its work has exceeded that length or exceeds it now.
    [[nodiscard]] ns surely_within(std::uint32_t more, instant now) const noexcept {
        const auto n = static_cast<ns::rep>(usage.in_flight) + more;
        if (n == 0) return ns{0};
        if (settings.longest <= ns{0} || overran || settings.longest > ns::max() / n) return ns::max();
        const ns all = settings.longest * n;
        return usage.in_flight > 0 && now - since > all ? ns::max() : all;
    }

    void pardon() noexcept {
        quarantined = false;
        failures_in_row = 0;
    }

    /// The predicted time of a submission of this kind.
    [[nodiscard]] ns predict(std::uint64_t key, client_id c, const cost_model& kinds, ns first_guess) const noexcept {
        if (key != 0)
            if (const auto& kind = kinds.find(c, key); kind.seen != 0) return kind.typical;
        if (costs.seen != 0) return costs.typical;
        return settings.longest > ns{0} ? settings.longest : first_guess;
    }

private:
    // The duration of work with this charge, at most its time in flight. `declared`: its width, if
    // declared.
    [[nodiscard]] ns lasted(const charge& o, sm_width declared, const cost_estimate* kind) const noexcept {
        const sm_width width = declared.known() ? declared : kind != nullptr ? kind->width : costs.width;
        const ns length = lasting(o.took, width);
        return o.in_flight > ns{0} ? std::min(o.in_flight, length) : length;
    }
    // Learns the time of a measured submission, or of several together; ignores one that wasn't
    // measured. `kind`: the estimate of its kind, if it has one.
    void learn_time(const charge& o, ns lasted, cost_estimate* kind) noexcept {
        if (o.from == charge::source::doubt) return;
        if (o.from == charge::source::shared) {
            costs.learn_mean(o.took, o.times);
            if (kind != nullptr) kind->learn_mean(o.took, o.times);
            return;
        }
        const bool alone = o.from == charge::source::alone;
        const bool cold = kind != nullptr ? kind->seen == 0 : costs.seen == 0;
        costs.learn(o.took, lasted, alone, cold);
        if (kind != nullptr) kind->learn(o.took, lasted, alone, cold);
        usage.longest = std::max(usage.longest, lasted);
    }

    // Learns the width of a submission that was seen to fill part of the SMs, or that may have
    // filled all of them. The latter counts if narrower ones are known. `kind` as for learn().
    void learn_width(const charge& o, cost_estimate* kind) noexcept {
        const auto learn = [&](cost_estimate& e, bool mixture) {
            if (o.width.known())
                e.learn_width(o.width, mixture);
            else if (o.opaque && e.width.known())
                e.learn_width(sm_width(1), mixture);
        };
        learn(costs, true);
        if (kind != nullptr) learn(*kind, false);
    }
    // Learns from the time of a measured submission, or of several together, whether it exceeded
    // the length that its settings declare, or filled more SMs than `believed`.
    void learn_trust(const charge& o, ns lasted, sm_width believed) noexcept {
        constexpr ns tolerance{20'000};
        constexpr double percents = 0.1;
        if (o.width.known() && o.width.part() > believed.part() + percents) overran = true;
        if (o.from == charge::source::doubt || settings.longest <= ns{0}) return;
        if (lasted / std::max<ns::rep>(o.times, 1) > saturating_add(settings.longest, tolerance)) overran = true;
    }
    // A time that the submitter declares counts in the bounds of others if it exceeds the times
    // seen. If no time was seen, the limiter doesn't rely on the submission to be short.
    static void count_declared(admission& a, ns horizon) noexcept {
        a.unproven = a.longest <= ns{0};
        a.longest = std::max(a.unproven ? horizon : a.longest, a.length);
    }

    [[nodiscard]] work_lengths lengths(ns longest) const noexcept {
        const ns stretch = settings.yields_within;
        if (stretch <= ns{0}) return {.longest = longest, .opaque = longest, .unknown = longest <= ns{0}};
        return {.longest = longest, .stretch = longest > ns{0} ? std::min(longest, stretch) : stretch};
    }

    // One submission in `cycle` is timed by itself and shares no points, because a batch hides its
    // longest member and its gaps.
    static constexpr std::uint32_t cycle = 64;

    // All SMs if no device reports widths; unknown for the first submissions of a kind.
    [[nodiscard]] static sm_width usual_width(const cost_model::outlook& kind) noexcept {
        // Kernels that fill the device, with an occasional copy, may show only this much.
        constexpr double almost_all = 0.9;
        if (kind.width.part() < almost_all) return kind.width;
        return kind.width.known() || kind.known ? sm_width(1) : sm_width{};
    }
};

/// The room reserved for clients that may be back soon and that `policy` would serve before the
/// waiting client `c`. Removes clients that show no sign of coming back from `watched`.
template <class Policy>
[[nodiscard]] kept_for_return keep_for_returns(index_set& watched, const plain_list<limiter_client>& clients,
                                               const Policy& policy, client_id c, instant now) noexcept {
    kept_for_return kept;
    watched.erase_if([&](std::uint32_t i) {
        const auto& client = clients[i];
        // A client that has gone is unknown to a later policy.
        return !client.present || !client.keep_for_return(kept, now, goes_before(policy, {i, client.generation}, c));
    });
    return kept;
}

/// Estimates as if the policy shared each level's time by weight, and no other client came
/// (generalised processor sharing; Parekh, Gallager, IEEE/ACM ToN 1, 1993). Linear in the clients,
/// for each level.
[[nodiscard]] inline submission_estimate estimate(const plain_list<limiter_client>& clients, const cost_model& kinds,
                                                  const in_flight_budget& budget, client_id c, std::uint64_t key,
                                                  ns first_guess, ns bound) noexcept {
    const auto& own = clients[c.index];
    const auto all = [&](std::uint32_t i) {
        const client_id id{i, clients[i].generation};
        return static_cast<double>(clients[i].predict(0, id, kinds, first_guess).count()) * clients[i].usage.waiting;
    };
    const auto weight = [](const limiter_client& of) { return std::max<double>(of.settings.weight.permille(), 1); };
    const ns took = own.predict(key, c, kinds, first_guess);
    const double mine = all(c.index) + static_cast<double>(took.count());
    double ahead = all(c.index);
    for (std::uint32_t i = 0; i < clients.size(); ++i) {
        const auto& other = clients[i];
        if (i == c.index || !other.present || other.quarantined || other.settings.level < own.settings.level) continue;
        const bool above = other.settings.level > own.settings.level;
        ahead += above ? all(i) : std::min(all(i), mine * weight(other) / weight(own));
    }
    submission_estimate e;
    e.bound = bound;
    const auto kind = kinds.next(c, key, own.costs);
    // The client's submissions go one after the other on each stream, of which there are as many as
    // it ever used. While some of the device is free, the waiting work of others waits for their
    // streams.
    const double of_streams = static_cast<double>(own.usage.in_flight) + own.usage.waiting + 1 - own.abreast;
    const auto each = lasting(own.predict(0, c, kinds, first_guess), own.width_of(c, 0, {}, kinds));
    const auto as_time = [](double t) { return ns{static_cast<ns::rep>(std::clamp(t, 0.0, 9e18))}; };
    const ns room = budget.until_room();
    e.wait = std::max(as_time(of_streams * static_cast<double>(each.count()) / own.abreast),
                      room > ns{0} ? saturating_add(room, as_time(ahead)) : ns{0});
    e.lasts = lasting(took, own.width_of(c, key, {}, kinds));
    e.longest = kind.longest > ns{0} ? kind.longest : own.longest();
    const auto& seen = kind.longest > ns{0} ? kinds.find(c, key).longest : own.costs.longest;
    e.p99 = seen.p99();
    e.observed = seen.seen();
    const ns mostly = budget.bound_if(own.level, [&](std::uint32_t level) {
        work_lengths lasts;
        for (const auto& other : clients)
            if (other.present && other.level == level) lasts.raise_to(other.mostly_lasts());
        return lasts;
    });
    e.bound_p99 = mostly < ns::max() ? std::min(bound, mostly) : ns{0};
    e.known = kind.known;
    return e;
}

/// The reason why a client can't meet its latency goal: other clients may have work in flight when
/// its submission comes, and the longest work that they declared or lately showed leaves too little
/// time. Work above doesn't count, nor does work below a level that keeps SMs. Figures in ns: the
/// goal, the time left of it, and the time needed. `self`: the client that gets the settings `s`.
/// Its own work isn't counted, and an unchanged goal isn't checked.
[[nodiscard]] inline failure beyond_reach(const client_settings& s, const plain_list<limiter_client>& clients,
                                          const limiter_client* self = nullptr) noexcept {
    if (s.slo <= ns{0} || (self != nullptr && s.slo == self->settings.slo)) return {};
    ns others{};
    for (const auto& c : clients) {
        if (!c.present || &c == self || c.settings.level > s.level) continue;
        const auto lasts = c.lasts();
        const bool is_below = c.settings.level < s.level;
        if (is_below && s.keeps.known()) continue;
        others = std::max(others, is_below ? std::max(lasts.opaque, lasts.stretch) : lasts.longest);
    }
    const ns least = saturating_add(others, s.longest);
    if (least <= s.slo) return {};
    const auto count = [](ns t) { return static_cast<std::uint64_t>(t.count()); };
    return {.code = errc::slo_unreachable,
            .asked = count(s.slo),
            .left = count(std::max(s.slo - others, ns{0})),
            .limit = count(least),
            .because = reason::objective_too_short};
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
