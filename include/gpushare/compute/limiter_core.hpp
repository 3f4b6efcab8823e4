// SPDX-License-Identifier: Apache-2.0
// The decisions of a compute limiter, as a plain value: whose submission is admitted next, its
// charge until the true cost is known, and how much may be in flight. The core has no clock: its
// user (compute_limiter, a simulator, a test) passes the time.
//
//   gpushare::limiter_core core{{.depth = 4}};
//   auto chat = core.add({.weight = 70_pct});
//   core.arrive(chat, now);                          // a submission waits
//   if (auto a = core.next(now)) {
//       ...                                          // it is enqueued, and ends
//       core.complete(*a, measured_device_time);
//   }
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <utility>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/cost_model.hpp>
#include <gpushare/compute/detail/in_flight_budget.hpp>
#include <gpushare/compute/detail/limiter_clients.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/index_set.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Tracks whether a thread drives a limiter while work waits in it. A value.
class attendance {
public:
    /// A submission that waits this long beyond its turn has been forgotten by the thread that
    /// should drive.
    static constexpr ns patience{1'000'000'000};

    /// Whether look() needs the time: work was left without a driving thread.
    [[nodiscard]] bool is_left() const noexcept { return left_ != never; }
    /// How long no thread has driven, if that is too long; then restarts the count. Otherwise 0.
    ns look(instant now) noexcept {
        if (left_ == never || now < left_ || now - left_ < patience) return ns{0};
        return now - std::exchange(left_, now);
    }
    /// A thread drives now.
    void come() noexcept { left_ = never; }
    /// The last driving thread leaves work that waits. `turn`: the earliest time at which that work
    /// may go, or `never` if this time isn't known.
    void leave(instant now, instant turn) noexcept { left_ = turn == never ? now : std::max(now, turn); }

private:
    instant left_ = never;
};

/// The latest events that weren't taken yet; new events displace the oldest. A value.
class event_queue {
public:
    static constexpr std::size_t capacity = 64;

    void push(const limiter_event& e) noexcept {
        events_[(first_ + size_) % capacity] = e;
        if (size_ < capacity) {
            ++size_;
        } else {
            first_ = (first_ + 1) % capacity;
            ++dropped_;
        }
    }
    std::optional<limiter_event> take() noexcept {
        if (size_ == 0) return std::nullopt;
        const auto e = events_[first_];
        first_ = (first_ + 1) % capacity;
        --size_;
        return e;
    }
    [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }

private:
    std::array<limiter_event, capacity> events_{};
    std::size_t first_ = 0, size_ = 0;
    std::uint64_t dropped_ = 0;
};

}  // namespace detail

/// The decision core of a limiter. A value; not thread-safe. Only `add`, `change` and `set_policy`
/// throw std::bad_alloc. `set_first` and `bound_of` may allocate for a new level; if that fails,
/// the client's level counts.
template <compute_policy Policy = weighted_fair>
class limiter_core {
public:
    /// `policy` decides among the clients; it must have none yet. `turns`: on this device, work
    /// that fills it waits for other clients' work before it runs; such a wait costs time, so the
    /// policy may let a client go several times in a row.
    explicit limiter_core(limiter_options options = {}, Policy policy = {}, bool turns = false)
        : options_(detail::usable(options)), turns_(turns), policy_(std::move(detail::in_turn(policy, turns))) {}

    /// Adds a client. Throws operation_error if the policy refuses it, or `keeps` isn't a part
    /// (invalid_specification), and std::bad_alloc: then nothing has changed.
    [[nodiscard]] client_id add(const client_settings& s) {
        std::uint32_t index = 0;
        while (index < clients_.size() && clients_[index].present) ++index;
        if (index == clients_.size()) clients_.emplace_back();
        auto& client = clients_[index];
        const client_id id{index, client.generation + 1};
        if (!s.keeps.valid())
            raise({.code = errc::invalid_specification, .because = reason::no_such_width}, {}, "limiter: keeps");
        if (const auto why = detail::beyond_reach(s, clients_); why.code != errc::none) raise(why, {}, "limiter");
        const auto level = budget_.open(s.level);
        blocked_.reserve(clients_.size());
        watched_.reserve(clients_.size());
        unsettled_.reserve(clients_.size());
        if (const auto why = policy_.add(id, s); why.code != errc::none) raise(why, {}, "limiter");
        client = {.settings = s, .generation = id.generation, .level = level, .at = level, .present = true};
        budget_.add_client(level, s.keeps);
        budget_.raise_longest(level, client.lasts());
        return id;
    }

    /// The settings apply to submissions admitted from now on; the charges of work in flight stay.
    /// If the policy refuses, the latency goal is out of reach, or `keeps` isn't a part, nothing
    /// has changed.
    failure change(client_id c, const client_settings& s) {
        if (!s.keeps.valid()) return {.code = errc::invalid_specification, .because = reason::no_such_width};
        if (const auto why = detail::beyond_reach(s, clients_, &clients_[c.index]); why != errc::none) return why;
        const auto to = budget_.open(s.level);
        if (const auto why = policy_.change(c, s); why != errc::none) return why;
        auto& client = clients_[c.index];
        const auto from = std::exchange(client.level, to);
        if (client.at == from || budget_.of(client.at).level < s.level) client.at = to;
        if (s.longest != client.settings.longest || s.narrowest != client.settings.narrowest) client.overran = false;
        budget_.remove_client(from, std::exchange(client.settings, s).keeps);
        budget_.add_client(to, s.keeps);
        for (const auto l : {from, to}) budget_.survey(l, clients_);
        unblock();
        return {};
    }

    /// Names a setting that the policy would ignore, a cap or a class; errc::none if there is none.
    [[nodiscard]] failure ignores(const client_settings& s) const noexcept { return detail::ignores(policy_, s); }

    /// Replaces the policy: from now on `p`, which must have no clients yet, decides among the same
    /// clients. Clients keep their debts and credits, if both policies can tell (client_standing).
    /// The old policy charged the work in flight; the new one corrects these charges. Afterwards
    /// `p` holds the old policy. If `p` refuses a client or throws, nothing has changed, and `p`
    /// has no clients again.
    errc set_policy(Policy& p, instant now) {
        now_ = std::max(now_, now);
        if (const auto why = add_all_to(p); why != errc::none) return why;
        for (std::uint32_t i = 0; i < clients_.size(); ++i) {
            if (!clients_[i].present) continue;
            const client_id c{i, clients_[i].generation};
            client_standing standing;
            detail::tell_standing(policy_, c, standing, now_);
            standing.back_to(0);
            detail::resume(p, c, standing, now_);
        }
        std::swap(policy_, detail::in_turn(p, turns_));
        ++policies_;
        for (std::uint32_t i = 0; i < clients_.size(); ++i) {
            auto& client = clients_[i];
            if (client.usage.waiting == 0) continue;
            client.blocked = false;
            policy_.wake({i, client.generation}, client.next.head, now_);
        }
        return errc::none;
    }

    /// Removes a client, which must have nothing waiting and nothing in flight.
    void remove(client_id c) noexcept {
        auto& client = clients_[c.index];
        policy_.remove(c);
        budget_.remove_client(client.level, client.settings.keeps);
        client.present = false;
        budget_.survey(client.level, clients_);
        unblock();
    }

    /// Whether there is such a client.
    [[nodiscard]] bool contains(client_id c) const noexcept {
        return c.index < clients_.size() && clients_[c.index].present && clients_[c.index].generation == c.generation;
    }

    /// One more submission of `c` waits. `facts`, if given, describe it.
    void arrive(client_id c, instant now, const submission_facts* facts = nullptr) noexcept {
        auto& client = clients_[c.index];
        ++num_waiting_;
        if (client.usage.waiting++ != 0) {
            // It may be for another stream.
            if (std::exchange(client.blocked, false)) policy_.wake(c, client.next.head, now);
            return;
        }
        if (client.usage.in_flight == 0) ++num_active_;
        client.habit.came(now);
        set_first(c, now, facts);
    }
    /// The same, with facts.
    void arrive(client_id c, instant now, const submission_facts& facts) noexcept { arrive(c, now, &facts); }

    /// One submission of `c` no longer waits and was not admitted. `facts_of(c)` describes the
    /// first waiting one, if there is one.
    template <std::invocable<client_id> F>
    void withdraw(client_id c, instant now, F facts_of) noexcept {
        auto& client = clients_[c.index];
        if (--num_waiting_ == 0) resume_at_ = never;
        if (--client.usage.waiting == 0) {
            if (client.usage.in_flight == 0) --num_active_;
            client.blocked = false;
            policy_.sleep(c);
        } else {
            const submission_facts first = facts_of(c);
            set_first(c, now, &first);
        }
    }
    /// The same, without facts about the submissions behind it.
    void withdraw(client_id c, instant now = {}) noexcept { withdraw(c, now, detail::nothing_known{now}); }

    /// arrive() and next() in one, for a submission that may be the only waiting one. Returns
    /// whether it was admitted.
    [[nodiscard]] bool pass(admission& g, client_id c, instant now, const submission_facts* facts) noexcept {
        arrive(c, now, facts);
        if (num_waiting_ != 1 || !is_ready(g, now)) return false;
        admit(g, now, detail::nothing_known{now});
        return true;
    }

    /// Whether the next submission can be admitted now, and the facts about it. It can if one
    /// waits, there is room alongside work in flight of its level and above
    /// (detail/in_flight_budget.hpp), and no request of a higher level is under way. A second call
    /// gives the same answer. Calls `other_stream(c)` if the first submission of `c` is for a
    /// stream that has enough work: the owner of the queues may move one forward for an idle
    /// stream, call set_first() and return true.
    template <std::predicate<client_id> F = detail::strict_order>
    [[nodiscard]] bool is_ready(admission& a, instant now, F other_stream = {}) noexcept {
        resume_at_ = never;
        now_ = std::max(now_, now);
        for (;;) {
            if (num_waiting_ == 0) return false;
            const auto picked = policy_.pick(now);
            if (!picked) {
                const auto again = picked.ask_again();
                resume_at_ = again == never ? never : std::max(again, saturating_add(now, ns{1}));
                return false;
            }
            const client_id c = *picked;
            auto& client = clients_[c.index];
            client.describe(a, c, costs_, options_.horizon);
            a.policy = policies_;
            a.bound = client.next.bound > ns{0} ? client.next.bound : budget_.bound_now(a.level_index, a.width);
            if (client.enqueuing) return false;
            if (!fits_cap(a)) {  // until some of its work has ended
                if (keeps_turn(client, a, now)) return false;
                client.kept_off = true;
                block(client, c);
                continue;
            }
            if (client.next.late_at != never && !budget_.ends_within(a, client.next.late_at - now)) return false;
            const auto others = watched_.empty() ? detail::kept_for_return{}
                                                 : detail::keep_for_returns(watched_, clients_, policy_, c, now);
            const auto room = budget_.room_for(a, num_active_ == 1, others);
            if (room == budget::room::no) {
                resume_at_ = saturating_add(others.until, ns{1});  // still reserved at `until`
                return false;
            }
            if (room == budget::room::yes) break;
            client.kept_off = room == budget::room::not_beside_kept;
            if (!client.kept_off && other_stream(c)) continue;
            block(client, c);
        }
        const auto hold = budget_.held(a.level_index, now);
        if (hold.held) resume_at_ = hold.until;
        return !hold.held;
    }
    /// Whether nothing is in flight on a stream: `timeline` as in submission_facts.
    [[nodiscard]] bool is_idle(std::uint64_t timeline, client_id c) const noexcept {
        return !budget_.is_busy(detail::timeline_or_own(timeline, c), clients_[c.index].at);
    }
    /// From now on another submission of `c` waits first. `facts`, if given, describe it.
    void set_first(client_id c, instant now, const submission_facts* facts) noexcept {
        now_ = std::max(now_, now);
        auto& client = clients_[c.index];
        client.learn_next(facts, now, c, costs_, options_.first_guess);
        client.at = client.level;
        if (client.next.head.level != no_priority) try {
                client.at = budget_.open(client.next.head.level);
            } catch (const std::bad_alloc&) {  // the submission stays at its client's level
                client.next.head.level = no_priority;
            }
        client.blocked = false;
        policy_.wake(c, client.next.head, now_);
    }
    /// Admits the submission that is_ready() has just described. `facts_of(c)` describes the
    /// client's next waiting submission.
    template <std::invocable<client_id> F>
    void admit(admission& a, instant now, F facts_of) noexcept {
        a.lent = detail::serve(policy_, a.client, a.predicted, now);
        a.served_before = budget_.served_from(a.level_index);
        auto& client = clients_[a.client.index];
        client.turn_until = {};
        if (budget_.enter(a)) client.abreast = std::max(client.abreast, ++client.streams);
        if (client.usage.in_flight++ == 0) client.since = now;
        client.width_in_flight += a.width.part();
        ++client.admitted;
        withdraw(a.client, now, facts_of);
        if (client.usage.waiting == 0 && detail::return_habit::is_concerned(a.length)) watched_.add(a.client.index);
    }
    /// is_ready() and admit() in one: admits the next submission; empty if none can be admitted.
    template <std::invocable<client_id> F>
    [[nodiscard]] std::optional<admission> next(instant now, F facts_of) noexcept {
        admission a;
        if (!is_ready(a, now)) return std::nullopt;
        admit(a, now, facts_of);
        return a;
    }
    /// The same, without facts about the submissions behind it.
    [[nodiscard]] std::optional<admission> next(instant now) noexcept { return next(now, detail::nothing_known{now}); }

    /// The callable that enqueues the submission is running, or no longer running. Meanwhile no
    /// submission of its client or its level is admitted, so submissions are enqueued in order, and
    /// no level waits for another's callables.
    void set_enqueuing(const admission& g, bool on) noexcept {
        clients_[g.client.index].enqueuing = budget_.of(g.level_index).enqueuing = on;
    }

    /// For a call after next() admitted nothing: when to call next() again even if nothing else
    /// happens, because a policy holds work back; or `never`.
    [[nodiscard]] instant resume_at() const noexcept { return resume_at_; }

    /// The submission is over. `now` matters if needs_end_of() says so. Returns the time by which
    /// its wait exceeded the published bound.
    ns complete(const admission& g, const charge& o, instant now = {}) noexcept {
        now_ = std::max(now_, now);
        auto& client = remove_from_flight(g, o.times);
        auto* const kind = costs_.find_or_add(g.client, g.key);
        const ns longest = client.longest();
        const ns lasted = client.learn(g, o, kind);
        if (detail::return_habit::is_concerned(lasted)) budget_.learn_hand_over(o, lasted);
        auto& level = budget_.of(g.level_index);
        const ns waited = waited_for_others(g, o, lasted, budget_.served_from(g.level_index));
        const ns beyond = g.bound > ns{0} && waited > g.bound ? waited - g.bound : ns{0};
        if (beyond > ns{0}) note(limiter_event::kind::waited_beyond_bound, g, waited, g.bound);
        level.served = saturating_add(level.served, lasted);
        correct(g, o.took - g.predicted);
        detail::ended(policy_, o.took);
        // The submission was measured by itself.
        const bool measured = o.from == charge::source::own || o.from == charge::source::alone;
        if (measured) update_longest(client, longest);
        if (measured && g.longest > ns{0} && lasted > g.longest)
            note(limiter_event::kind::overran, g, lasted, g.longest);
        if (client.may_return(g, lasted, now)) watched_.add(g.client.index);
        if (client.account(o, lasted)) unsettled_.add(g.client.index);
        if (g.of_request && !o.request_over) expect_more(g, now);
        if (client.ended(o.failed, o.times, options_.quarantine_after))
            report(
                {.what = limiter_event::kind::quarantined, .client = g.client, .failures = options_.quarantine_after});
        return beyond;
    }
    /// The same for a submission that was measured by itself.
    ns complete(const admission& g, ns device_time, bool failed = false) noexcept {
        return complete(g, {.took = device_time, .failed = failed});
    }

    /// The submission was admitted but nothing was enqueued: it costs nothing.
    void cancel(const admission& g) noexcept {
        remove_from_flight(g);
        correct(g, -g.predicted);
    }

    /// The submission doesn't end: its room goes to others and its client gets no more. If it ever
    /// ends, complete_late() charges it. `times`: the number of equal submissions; `g` has the sum
    /// of their predictions.
    void write_off(const admission& g, std::uint32_t times = 1) noexcept {
        auto& client = remove_from_flight(g, times);
        // Counted here because `failed` counts them too: failed submissions are among the
        // completed.
        client.usage.completed += times;
        client.usage.failed += times;
        client.quarantined = true;
        while (times-- > 0) report({.what = limiter_event::kind::stuck, .client = g.client});
    }
    /// A submission that was written off has ended after all. It has been counted already. Does
    /// nothing if its client is gone.
    void complete_late(const admission& g, ns device_time) noexcept {
        if (!contains(g.client)) return;
        correct(g, device_time - g.predicted);
        detail::ended(policy_, device_time);
        auto& client = clients_[g.client.index];
        client.usage.ran = saturating_add(client.usage.ran, device_time);
        (void)client.add_charge(device_time, false);
        auto& level = budget_.of(g.level_index);
        level.served = saturating_add(level.served, device_time);
    }

    /// Client `c` shared `time` of its completed submissions' charge with other clients.
    void give_back(client_id c, ns time) noexcept {
        if (!contains(c)) return;
        clients_[c.index].give_back(time);
        policy_.correct(c, -time);
    }
    /// Whether any charge isn't in usage() yet (charge::may_shrink).
    [[nodiscard]] bool any_unsettled() const noexcept { return !unsettled_.empty(); }
    /// All work that was in flight at the last call has ended since: settles the charges made
    /// before that call. If `all`, nothing is in flight: settles all charges.
    void settle(bool all) noexcept {
        unsettled_.erase_if([&](std::uint32_t i) { return clients_[i].settle(all); });
    }
    /// The final account of `c`: other clients' work in flight no longer changes it.
    [[nodiscard]] const client_usage& final_usage(client_id c) noexcept {
        (void)clients_[c.index].settle(true);
        return clients_[c.index].usage;
    }

    /// `c` has no open request any more: no work is held back for one.
    void end_request(client_id c) noexcept { budget_.end_holds(c.index); }
    /// The same for requests of this level.
    void end_request(client_id c, priority level) noexcept { budget_.end_holds(c.index, request_level(c, level)); }
    /// The level at which submissions of a request with this level go. no_priority: the request has
    /// no level of its own.
    [[nodiscard]] priority request_level(client_id c, priority level) const noexcept {
        const auto& s = clients_[c.index].settings;
        return std::clamp(level, s.level, std::max(s.level, s.ceiling));
    }
    /// Whether arrive() and next() need the time though the policy doesn't.
    [[nodiscard]] bool holds_back() const noexcept {
        if constexpr (requires { policy_.needs_time(); })
            if (policy_.needs_time()) return true;
        return !watched_.empty() || budget_.any_hold();
    }
    /// Whether complete() needs the time for this submission: it is of a request, long, or under a
    /// hard cap.
    [[nodiscard]] bool needs_end_of(const admission& g) const noexcept {
        return g.of_request || detail::return_habit::is_concerned(g.length) ||
               detail::hard_cap_of(policy_, g.client) != 0;
    }
    /// Whether work is held back until `t`, for a request.
    [[nodiscard]] bool is_held_until(instant t) const noexcept { return budget_.is_held_until(t); }

    /// Counts a submission of `c` that was refused on arrival. Does nothing if there is no such
    /// client.
    template <class Why>
    void count_refused(client_id c, Why why) noexcept {
        if (contains(c)) clients_[c.index].usage.refused.add(why);
    }
    /// Counts a waiting submission that never runs. Does nothing if there is no such client.
    void count_cancelled(client_id c, errc why) noexcept {
        if (contains(c)) clients_[c.index].usage.cancelled.add(why);
    }
    /// Counts an admitted submission that had waited this long.
    void count_queued(client_id c, ns waited) noexcept { clients_[c.index].usage.queueing.add(waited); }

    /// Refuses further submissions of `c`.
    void close(client_id c) noexcept { clients_[c.index].closing = true; }
    /// Whether close() was called for `c`.
    [[nodiscard]] bool closing(client_id c) const noexcept { return clients_[c.index].closing; }
    /// The reason why nothing more of `c` is admitted, closed or quarantined; errc::none if there
    /// is none.
    [[nodiscard]] errc refusal(client_id c) const noexcept {
        if (!contains(c) || clients_[c.index].closing) return errc::closed;
        return clients_[c.index].quarantined ? errc::quarantined : errc::none;
    }
    /// Whether the queue of `c` is full. `held`: how many further submissions wait of which the
    /// core doesn't know.
    [[nodiscard]] bool is_full(client_id c, std::uint32_t held) const noexcept {
        const auto& client = clients_[c.index];
        const auto own = client.settings.queue_limit;
        return client.usage.waiting + held >= (own != 0 ? own : options_.queue_limit);
    }
    /// Whether `c` is quarantined: its work failed too often in a row, and nothing of it is
    /// admitted until it is pardoned.
    [[nodiscard]] bool quarantined(client_id c) const noexcept { return clients_[c.index].quarantined; }
    void pardon(client_id c) noexcept { clients_[c.index].pardon(); }  ///< Ends its quarantine.
    /// Events that weren't taken yet.
    [[nodiscard]] detail::event_queue& events() noexcept { return events_; }
    /// The same.
    [[nodiscard]] const detail::event_queue& events() const noexcept { return events_; }
    /// Queues this event, with its client's name.
    void report(limiter_event e) noexcept {
        e.name = settings(e.client).name;
        events_.push(e);
    }

    /// The longest time that a submission of `c` arriving now waits, once admitted, for work of
    /// lower levels. The bound is the larger of two sums:
    /// - all work that may be in flight at once, where each submission counts with the longest time
    ///   that a client of its level declared (client_settings::longest) or lately took;
    /// - the work in flight now, where each submission counts with the largest of its declared cost
    ///   (submission_facts), the longest time that its kind lately took, and the time that it has
    ///   already taken. For a kind seen fewer than eight times, the longest time that its client
    ///   declared or lately took stands in.
    ///
    /// The same lengths decide how much may be in flight (limiter_options::depth and horizon). If
    /// no client of a level declared or showed a length, the longest of all levels counts. If no
    /// level has one, the bound is 0: unknown. Without lower levels, the bound covers the work of
    /// its own level in flight. Waits for higher levels are unbounded. A submission that takes
    /// longer than it counts breaks the bound and raises an event.
    ///
    /// If the level of `c` keeps part of the SMs (client_settings::keeps), a submission that fits
    /// there, as `declared` or as its kind showed, waits only for short work below (a quarter of
    /// the horizon for each level), and for work too wide to be kept off.
    [[nodiscard]] ns bound_of(client_id c, std::uint64_t key = 0, sm_width declared = {}) const noexcept {
        return bound_at(clients_[c.index].level, c, key, declared);
    }
    /// The same for a submission with its own level, if that is above its client's; no_priority: no
    /// level of its own.
    [[nodiscard]] ns bound_of(client_id c, std::uint64_t key, sm_width declared, priority level) noexcept {
        auto at = clients_[c.index].level;
        if (level > clients_[c.index].settings.level) try {
                at = budget_.open(level);
            } catch (const std::bad_alloc&) {  // the client's level counts then
            }
        return bound_at(at, c, key, declared);
    }
    /// Work in flight of this level has exceeded its expected time by `by`. This counts in bounds,
    /// and for work that queues behind it.
    void set_overdue(std::uint32_t level_index, ns by) noexcept { budget_.set_overdue(level_index, by); }
    /// Whether clients of more than one level are there, or have work in flight.
    [[nodiscard]] bool several_levels() const noexcept { return budget_.several_levels(); }
    /// The bound of the highest level in use.
    [[nodiscard]] ns wait_bound() const noexcept { return budget_.bound(); }
    /// The forecast for a submission of this kind that arrives now. Linear in the clients.
    [[nodiscard]] submission_estimate estimate(client_id c, std::uint64_t key = 0) const noexcept {
        return detail::estimate(clients_, costs_, budget_, c, key, options_.first_guess, bound_of(c, key));
    }

    /// The first thread begins to drive; see look_for_undriven().
    template <std::invocable F>
    void attend(F now) noexcept {
        if (!attendance_.is_left()) return;
        look_for_undriven(now);
        attendance_.come();
    }
    /// Call when a thread comes. If waiting submissions were left without a thread that drives for
    /// a second, an event reports it. `now` is called only if any were left.
    template <std::invocable F>
    void look_for_undriven(F now) noexcept {
        if (!attendance_.is_left()) return;
        const ns alone = attendance_.look(now());
        if (alone == ns{0}) return;
        for (std::uint32_t i = 0; i < clients_.size(); ++i)
            if (clients_[i].present && clients_[i].usage.waiting > 0)
                return report({.what = limiter_event::kind::undriven,
                               .client = {i, clients_[i].generation},
                               .took = alone,
                               .bound = detail::attendance::patience});
    }
    /// The last driving thread leaves. `now` is called only if submissions wait.
    template <std::invocable F>
    void leave(F now) noexcept {
        if (num_waiting_ > 0) attendance_.leave(now(), resume_at_);
    }

    /// The number of waiting submissions of all clients.
    [[nodiscard]] std::uint64_t num_waiting() const noexcept { return num_waiting_; }
    /// The number of client indices so far.
    [[nodiscard]] std::size_t num_indices() const noexcept { return clients_.size(); }
    /// The account of `c`.
    [[nodiscard]] const client_usage& usage(client_id c) const noexcept { return clients_[c.index].usage; }
    /// The settings of `c` that are in force.
    [[nodiscard]] const client_settings& settings(client_id c) const noexcept { return clients_[c.index].settings; }
    /// The most predicted time of all submissions that are timed together: half the horizon.
    [[nodiscard]] ns quantum() const noexcept { return options_.horizon / 2; }
    /// The options, corrected to usable values.
    [[nodiscard]] const limiter_options& options() const noexcept { return options_; }

private:
    using budget = detail::in_flight_budget;
    using client_state = detail::limiter_client;

    [[nodiscard]] ns bound_at(std::uint32_t level, client_id c, std::uint64_t key, sm_width declared) const noexcept {
        if (!budget_.keeps(level)) return budget_.bound_now(level);
        return budget_.bound_now(level, clients_[c.index].width_of(c, key, declared, costs_));
    }

    // Adds all clients to `p`. If `p` refuses one or throws, those that it has end there.
    errc add_all_to(Policy& p) const {
        for (const auto& c : clients_)
            if (c.present && ignores(c.settings).code == errc::none &&
                detail::ignores(p, c.settings).code != errc::none)
                return errc::invalid_specification;
        std::uint32_t i = 0;
        const auto undo = [&] {
            while (i-- > 0)
                if (clients_[i].present) p.remove({i, clients_[i].generation});
        };
        try {
            for (; i < clients_.size(); ++i) {
                if (!clients_[i].present) continue;
                const auto why = p.add({i, clients_[i].generation}, clients_[i].settings);
                if (why.code == errc::none) continue;
                undo();
                return why.code;
            }
        } catch (...) {
            undo();
            throw;
        }
        return errc::none;
    }

    // Updates the level's bounds if the longest time of a client has changed from `before`.
    void update_longest(const client_state& client, ns before) noexcept {
        const ns longest = client.longest();
        if (longest > before) budget_.raise_longest(client.level, client.lasts());
        if (longest >= before && ++learnt_ <= std::max<std::uint64_t>(detail::recent_longest::window, clients_.size()))
            return;
        learnt_ = 0;
        budget_.survey(client.level, clients_);
    }

    void note(limiter_event::kind what, const admission& g, ns took, ns bound) noexcept {
        report({.what = what, .client = g.client, .took = took, .bound = bound, .key = g.key});
    }

    void correct(const admission& g, ns delta) noexcept {
        if (g.policy == policies_) detail::correct(policy_, g.client, delta, g.lent);
        // charged by an earlier policy; lent time isn't paid back
        else if (g.lent == 0 || delta > ns{0})
            detail::correct(policy_, g.client, delta, 0);
    }

    // The part of the submission's time in flight that neither its own length nor work of its level
    // and above explains; this work has had `served` so far. Its own length counts as the longest
    // of its kind, so only a certain wait counts.
    [[nodiscard]] static ns waited_for_others(const admission& g, const charge& o, ns lasted, ns served) noexcept {
        if (o.in_flight <= ns{0} || g.longest <= ns{0}) return ns{0};
        return saturating_add(o.in_flight - std::max(lasted, g.longest), g.served_before - served);
    }

    // More submissions of its request are to come: lower levels wait for them. If the request goes
    // above its client's level, this time is charged to its client's share, since no other client
    // has the device meanwhile.
    void expect_more(const admission& g, instant now) noexcept {
        budget_.hold_for(g.level_index, g.client.index, saturating_add(now, options_.anticipation));
        if (g.level > clients_[g.client.index].settings.level) correct(g, options_.anticipation);
    }

    // It is the turn of a client whose hard cap admits no more. Another client's call behind that
    // work would take the turn. So the others wait, though no longer than the published bound.
    [[nodiscard]] bool keeps_turn(client_state& client, const admission& a, instant now) noexcept {
        if (client.turn_until == instant{})
            client.turn_until = saturating_add(now, budget_.bound_now(a.level_index, a.width));
        if (now >= client.turn_until) return false;
        resume_at_ = client.turn_until;
        return true;
    }

    // Whether `a` may go alongside the work in flight under the same hard cap. Work in flight can't
    // be taken back, and dozens of short calls say nothing of the next one. So the cap allows one
    // submission, or several side by side that fill the device together, or several that take at
    // most half of the horizon if each takes as long as its client's settings declare.
    [[nodiscard]] bool fits_cap(const admission& a) const noexcept {
        const auto cap = detail::hard_cap_of(policy_, a.client);
        if (cap == 0) return true;
        const auto& own = clients_[a.client.index];
        std::uint32_t in_flight = own.usage.in_flight;
        double width = own.width_in_flight;
        ns at_most = own.surely_within(1, now_);
        if (cap != detail::own_hard_cap(a.client)) {  // a class's cap, which its clients share
            for (std::uint32_t i = 0; i < clients_.size(); ++i) {
                const auto& other = clients_[i];
                if (&other == &own || !other.present || other.usage.in_flight == 0 ||
                    detail::hard_cap_of(policy_, {i, other.generation}) != cap)
                    continue;
                in_flight += other.usage.in_flight;
                width += other.width_in_flight;
                at_most = saturating_add(at_most, other.surely_within(0, now_));
            }
        }
        if (in_flight == 0) return true;
        if (a.width.known() && !own.overran && width + a.width.part() <= 1 + detail::ratios::width_error) return true;
        return at_most <= quantum();
    }

    client_state& remove_from_flight(const admission& g, std::uint32_t times = 1) noexcept {
        if (const auto first = budget_.leave(g, times); first != detail::no_client && clients_[first].streams > 0)
            --clients_[first].streams;
        auto& client = clients_[g.client.index];
        if (!blocked_.empty()) unblock(g.timeline, g.client);
        client.usage.in_flight -= times;
        client.since = now_;
        client.width_in_flight -= client.usage.in_flight == 0 ? client.width_in_flight : g.width.part() * times;
        if (client.usage.in_flight == 0 && client.usage.waiting == 0) --num_active_;
        return client;
    }

    // The first waiting submission of `c` can't be admitted yet. Other clients may find room
    // meanwhile.
    void block(client_state& client, client_id c) noexcept {
        client.blocked = true;
        blocked_.add(c.index);
        detail::hold(policy_, c);
    }
    // Unblocks clients after an end of work of `c` on this timeline, and after a change of
    // settings. `c` may have more work for that timeline behind its first submission. The event may
    // also have made room alongside a kept part.
    void unblock(std::uint64_t timeline = 0, client_id c = {detail::no_client}) noexcept {
        blocked_.erase_if([&](std::uint32_t i) {
            auto& client = clients_[i];
            if (client.blocked && !client.kept_off && i != c.index && client.timeline(i) != timeline) return false;
            if (std::exchange(client.blocked, false)) policy_.wake({i, client.generation}, client.next.head, now_);
            return true;
        });
    }

    limiter_options options_;
    bool turns_;
    std::uint32_t policies_ = 0;    // the number of changes of policy
    std::uint32_t num_active_ = 0;  // clients with work waiting or in flight
    std::uint64_t num_waiting_ = 0;
    std::uint64_t learnt_ = 0;           // lengths learnt since the last survey of the longest
    instant resume_at_ = never, now_{};  // now_: the latest time that the core was told
    Policy policy_;
    detail::plain_list<client_state> clients_;
    detail::index_set blocked_;    // blocked clients, and some that were blocked
    detail::index_set watched_;    // clients that may be back soon
    detail::index_set unsettled_;  // clients with unsettled charges
    budget budget_{options_.depth, options_.horizon};
    detail::cost_model costs_;
    detail::attendance attendance_;
    detail::event_queue events_;  // the last member: its memory isn't touched while no event occurs
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
