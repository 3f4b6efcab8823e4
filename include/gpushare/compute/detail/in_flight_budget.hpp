// SPDX-License-Identifier: Apache-2.0
// Decides how much work may be in flight at each level, and computes how long that work can take:
// the bound on a wait. A part of limiter_core.
//
//   detail::in_flight_budget budget{depth, horizon};
//   const auto level = budget.open(priority{1});  // levels have indices, and stay
//   // ... budget.leave(admission, 1);
//   if (budget.room_for(admission, alone) == budget.room::yes) budget.enter(admission);
//
// A few long submissions keep a device full, but it takes many short ones. So there is always room
// for `depth` submissions, and for more while all together take no longer than the horizon. A
// hand-over means noticing an end and enqueuing the next submission. If its recent length is known,
// nothing is queued behind work that lasts more than fifty times as long. The next submission is
// then chosen only when the long work ends, and the device idles for about 2 % of the time. Each
// submission counts with the longest time that its kind lately took, since that time bounds a wait.
// Three cases get less:
//   several clients   The policy can't reorder work in flight. Beyond `depth`, a quarter of the
//                     horizon, as predicted, is enough to hide how late an end is noticed.
//   a level above     Its work would wait for all of this work. The horizon is a quarter, and the
//                     depth at most two.
//   narrow work       Work that doesn't fill the device is admitted as it fits side by side, and a
//                     little ahead.
//
// A level may keep a part of the SMs (client_settings::keeps). Long work of lower levels is
// admitted alongside that part. Short work, which ends within half of its own level's horizon
// (soon_part), may use the part. Work too wide for the rest can't be kept off the part, and is
// admitted as if nothing were kept.
//
// Namespace `ratios` has the numbers of these rules. A fraction is stored as its denominator:
//
//   name            value  what the number says, and where it comes from
//   idle_part       1/50   The device may wait this part of the time of the work that ended, for a
//                          hand-over or for a client's return. Chosen: 2 % of the device.
//   below_part      1/4    Horizon of a level below another one. Chosen: the bound of the level
//                          above grows with it.
//   below_depth     2      Depth of such a level: one submission runs, and one is behind it, so
//                          that the device has work while an end is noticed.
//   several_part    1/4    Part of the horizon, as predicted, that several clients may fill beyond
//                          `depth`: enough to hide how late an end is noticed.
//   soon_part       1/2    Work that ends within this part of the horizon is short: as long as a
//                          batch may be (limiter_core::quantum).
//   queued_ahead    2      Short narrow work may fill the free SMs this many times: the running
//                          work, and the work behind it. Otherwise an SM would idle until an end
//                          is noticed.
//   older_lead      2      Work may be in flight that an older lead let in. That lead was less than
//                          this many times as long as the present one.
//   smoothing       1/8    Part of a new value that goes into a mean. Chosen.
//   width_error     0.01   Widths that differ by less count as equal: they are learnt to a percent.
//   rounding_error  1e-9   A smaller sum of widths counts as 0: the rounding error of doubles.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include <gpushare/compute/admission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The most submissions that one client has in flight when it is alone: enough to hide any latency,
/// and for two batches.
inline constexpr std::uint32_t most_in_flight = 128;

/// The numbers of the table above.
namespace ratios {
inline constexpr ns::rep idle_part = 50;
inline constexpr ns::rep below_part = 4;
inline constexpr std::uint32_t below_depth = 2;
inline constexpr ns::rep several_part = 4;
inline constexpr ns::rep soon_part = 2;
inline constexpr int queued_ahead = 2;
inline constexpr ns::rep older_lead = 2;
inline constexpr ns::rep smoothing = 8;
inline constexpr double width_error = 0.01;
inline constexpr double rounding_error = 1e-9;
}  // namespace ratios

/// The index of no client.
inline constexpr std::uint32_t no_client = ~std::uint32_t{0};

/// Room reserved for clients that are expected back soon and would go first.
struct kept_for_return {
    bool any = false;       // whether work that fills the device must wait for them
    double width = 0;       // the free part of the SMs that is reserved for them
    instant until = never;  // the end of that reservation
};

/// How long the work of some clients may last, as declared or lately seen; 0: unknown.
struct work_lengths {
    ns longest{};          // of all work
    ns opaque{};           // of work that doesn't yield
    ns stretch{};          // between two yields, of work that yields
    bool unknown = false;  // a client that doesn't yield has neither declared nor shown a length

    void raise_to(const work_lengths& o) noexcept {
        longest = std::max(longest, o.longest);
        opaque = std::max(opaque, o.opaque);
        stretch = std::max(stretch, o.stretch);
        unknown = unknown || o.unknown;
    }
    /// Whether there are such clients and all of them yield.
    [[nodiscard]] bool all_yield() const noexcept { return stretch > ns{0} && opaque <= ns{0} && !unknown; }
};

/// A value. Only `open` allocates.
class in_flight_budget {
public:
    struct level_state {
        priority level{};
        std::uint32_t in_flight = 0, clients = 0;
        std::uint32_t of_requests = 0;  // how many of those in flight belong to requests
        // The longest possible time of the work in flight; work of unknown length isn't counted.
        ns counted{};
        ns predicted{};  // the probable time of the work in flight
        // The longest possible time of the work in flight that doesn't yield.
        ns in_the_way{};
        // By how much the work in flight has exceeded its longest time already.
        ns overdue{};
        work_lengths lasts{};       // how long work of its clients may last
        ns served{};                // the total time of completed work
        std::uint32_t unknown = 0;  // how many of those in flight have an unknown length
        // Until then a request of this level is expected to last.
        instant hold_until{};
        std::uint32_t hold_for = no_client;  // the client of that request
        bool enqueuing = false;              // a callable of one of its clients is running
        // The part of the SMs that its clients keep free of long work below.
        double keeps = 0;
        // The longest recent work that was too wide to be kept off the part that a higher level
        // keeps.
        ns not_kept_off{};
        // Derived values, which every submission reads.
        std::uint32_t depth = 0;  // how many may be in flight, however long they take
        ns horizon{};
        // The longest time for which work admitted at this level waits for lower levels, if no call
        // takes longer than the longest of its level. If no lower level is in use: the longest wait
        // for work of its own level in flight. 0: nothing is known.
        ns bound{};
        ns bound_on_kept{};  // the bound for work that fits on the part that this level keeps
        double kept = 0;     // the part that higher levels keep
    };

    in_flight_budget(std::uint32_t depth, ns horizon) noexcept : depth_(depth), horizon_(horizon) {}

    /// Opens this level and returns the index that the other functions take.
    [[nodiscard]] std::uint32_t open(priority p);
    void add_client(std::uint32_t level, sm_width keeps = {}) noexcept;
    void remove_client(std::uint32_t level, sm_width keeps = {}) noexcept;
    /// Records that a client of this level declared or showed these lengths.
    void raise_longest(std::uint32_t level, const work_lengths& lasts) noexcept;
    /// Recomputes a level's lengths from all of its clients, since old maxima are forgotten.
    /// Linear.
    template <class Clients>
    void survey(std::uint32_t level, const Clients& clients) noexcept {
        auto& l = levels_[level];
        l.not_kept_off = {};
        l.lasts = {};
        for (const auto& c : clients)
            if (c.present && c.level == level) l.lasts.raise_to(c.lasts());
        update();
    }
    [[nodiscard]] level_state& of(std::uint32_t level) noexcept { return levels_[level]; }

    /// Whether there is room for one more submission. If this one has to wait, others may still go:
    /// not_on_stream means that its stream has enough, and not_beside_kept that only the kept part
    /// is free.
    enum class room : std::uint8_t { yes, no, not_on_stream, not_beside_kept };
    /// Whether there is room for `a`. `alone`: no other client has anything waiting or in flight.
    /// `others`: the room reserved for clients that are about to come back.
    [[nodiscard]] room room_for(const admission& a, bool alone, const kept_for_return& others = {}) const noexcept;

    /// Whether work of this level is in flight on this stream.
    [[nodiscard]] bool is_busy(std::uint64_t name, std::uint32_t level) const noexcept;

    /// Whether there is room for work that fills the device. `longest`: its longest possible time;
    /// 0: unknown. `predicted`: its probable time. `alone`: no other client has anything waiting or
    /// in flight.
    [[nodiscard]] bool has_room(std::uint32_t level, ns longest, ns predicted, bool alone) const noexcept;

    /// Learns from the end of long work how long it took to notice the end (0: not known) and to
    /// enqueue the work: for that long the device may idle before the next submission.
    void learn_hand_over(const charge& o, ns lasted) noexcept;

    /// Counts `a` as in flight. Returns whether nothing else is on its stream.
    bool enter(const admission& a) noexcept;
    /// Counts `n` equal submissions as no longer in flight; `a` has the sum of their
    /// predictions. If nothing else is on their stream, returns the index of the client that was
    /// the first there; otherwise no_client.
    std::uint32_t leave(const admission& a, std::uint32_t n) noexcept;

    /// Whether work of this level is held back for a request of a higher level, and until what
    /// time, if only time ends the hold.
    struct hold {
        bool held = false;
        instant until = never;
    };
    [[nodiscard]] hold held(std::uint32_t level, instant now) const noexcept;
    /// Records that a request of this client at this level is expected to last until then.
    void hold_for(std::uint32_t level, std::uint32_t client, instant until) noexcept;
    /// Ends the holds for requests of this client; `at`: only those at this level.
    void end_holds(std::uint32_t client, priority at = no_priority) noexcept;
    [[nodiscard]] bool is_held_until(instant t) const noexcept;
    [[nodiscard]] bool any_hold() const noexcept;

    /// The longest time for which work admitted now waits: the level's bound, or the time that the
    /// work in flight may take, as declared, seen, or already taken, if that is longer. `width`:
    /// that of the waiting work. If it fits on the part that its level keeps, it doesn't wait for
    /// long work below that is kept off the part.
    [[nodiscard]] ns bound_now(std::uint32_t level, sm_width width = {}) const noexcept;
    /// Work in flight of this level has exceeded its longest expected time by `by`.
    void set_overdue(std::uint32_t level, ns by) noexcept;
    /// Whether all work in flight ends by then, by its declared and seen times; or `a` may run
    /// alongside it.
    [[nodiscard]] bool ends_within(const admission& a, ns time) const noexcept;
    /// Whether more than one level is in use.
    [[nodiscard]] bool several_levels() const noexcept { return only_ == none; }
    /// The bound of the highest level in use.
    [[nodiscard]] ns bound() const noexcept;

    /// The bound of a level, ignoring widths, if the work in flight of level `i` lasts as
    /// lengths_of(i) says. A level of unknown length counts with the longest of all. The stretches
    /// between yields say nothing of work that doesn't yield.
    template <std::invocable<std::uint32_t> F>
    [[nodiscard]] ns bound_if(std::uint32_t level, F lengths_of) const noexcept {
        work_lengths any;
        for (std::uint32_t i = 0; i < levels_.size(); ++i) any.raise_to(lengths_of(i));
        const ns guess = any.longest;
        ns own{}, below{};
        for (std::uint32_t i = 0; i < levels_.size(); ++i) {
            const auto& l = levels_[i];
            if (l.level > levels_[level].level || !in_use(l)) continue;
            const work_lengths lasts = lengths_of(i);
            if (i == level) {
                const ns longest = lasts.longest > ns{0} ? lasts.longest : guess;
                if (longest > ns{0}) own = std::max(in_flight_at_most(longest, l.depth), l.horizon);
                continue;
            }
            const ns opaque = lasts.opaque > ns{0} || lasts.all_yield() ? lasts.opaque : guess;
            if (opaque <= ns{0} && !lasts.all_yield()) return ns{0};
            // A yielding kernel delays the waiter once only: the work queued behind it runs after
            // the waiter.
            const ns all = saturating_add(in_flight_at_most(opaque, l.depth), lasts.stretch);
            below = saturating_add(below, std::max(all, l.horizon));
        }
        return below > ns{0} ? below : own;
    }

    /// When the work in flight probably leaves room for one more, as if all of it had just begun:
    /// immediately if some of the device is free; at the next end, with evenly spread ends, if all
    /// of it runs side by side; otherwise when all has ended.
    [[nodiscard]] ns until_room() const noexcept;
    /// Whether this level keeps a part of the SMs.
    [[nodiscard]] bool keeps(std::uint32_t level) const noexcept { return levels_[level].keeps > 0; }
    /// Total time of completed work of this level and above.
    [[nodiscard]] ns served_from(std::uint32_t level) const noexcept;

private:
    // The work in flight on one stream, one after the other.
    struct stream_load {
        std::uint64_t name = 0;
        std::uint32_t level = 0, in_flight = 0;
        std::uint32_t first = 0;  // the client that was first there
        double width = 0;         // the largest width on it; a guessed width counts as 0
        ns length{};              // the predicted time of all its work
        ns in_the_way{};          // the longest time of its work that doesn't yield
        // Whether any of its work is predicted to be long, and whether any was declared or lately
        // seen to be.
        bool has_long = false, may_be_long = false;
    };
    // The index of the stream; the number of streams if it isn't among them.
    [[nodiscard]] std::size_t find_stream(std::uint64_t name, std::uint32_t level) const noexcept;
    static constexpr double uncertain = ratios::width_error;

    // The first submissions of a kind may fill a part of the device. Below a level that keeps a
    // part, each counts as filling the whole rest, so they run one at a time next to the part.
    [[nodiscard]] double width_beside_kept(const admission& a) const noexcept;
    [[nodiscard]] bool is_kept_off(const admission& a) const noexcept;
    // The part that higher levels keep and haven't used up. Their own long work uses it up, and so
    // does short work of several submissions on a stream.
    [[nodiscard]] double still_kept(const admission& a) const noexcept;
    // Whether no long work is on the part that this level keeps. Work from before the part was kept
    // may be there until it ends.
    [[nodiscard]] bool is_free(const level_state& level) const noexcept;
    void note_if_on_kept(const admission& a) noexcept;
    // How long the work in flight below this level, or of it, may take if all of that runs side by
    // side; otherwise for ever.
    [[nodiscard]] ns side_by_side(const level_state& own, bool below) const noexcept;
    // Work that ends within this time is short. A stream gets this much work ahead.
    [[nodiscard]] ns soon(std::uint32_t level) const noexcept { return levels_[level].horizon / ratios::soon_part; }
    // The length of `a`, and at least the horizon if it is unproven: no such work was measured, and
    // its client's settings declare no length. A declared cost alone proves nothing.
    [[nodiscard]] ns counted(const admission& a) const noexcept;
    [[nodiscard]] bool is_long(const admission& a) const noexcept { return counted(a) > soon(a.level_index); }
    [[nodiscard]] static bool is_of(const stream_load& l, const admission& a) noexcept;

    // Whether `a` has room alongside work that doesn't fill the device. Long work keeps its SMs.
    // The rest is for short work and for `a`, which goes while some of the rest is free, even if
    // `a` could fill more. Short work may also be queued for as much again, or behind work of its
    // own stream, since an SM would otherwise idle until an end is noticed. The first submissions
    // of a kind, of unknown width, may fill the device or part of it. No work waits for that part,
    // and such a submission goes only if fewer than `depth` are in flight.
    [[nodiscard]] room room_beside(const admission& a, double for_others) const noexcept;

    [[nodiscard]] static bool in_use(const level_state& l) noexcept { return l.in_flight != 0 || l.clients != 0; }
    [[nodiscard]] static ns less(ns sum, ns part) noexcept { return sum == ns::max() ? sum : sum - part; }
    [[nodiscard]] static ns times(ns a, std::uint32_t n) noexcept;

    void update() noexcept;
    // The longest time of `depth` submissions in flight that last at most `each`. Work admitted
    // under an older lead is still there: that lead was less than twice as long.
    [[nodiscard]] ns in_flight_at_most(ns each, std::uint32_t depth) const noexcept;
    // The longest work that may occupy the part that this level keeps: short work, and work that
    // couldn't be kept off.
    [[nodiscard]] ns on_kept(const level_state& level) const noexcept;

    static constexpr std::uint32_t none = static_cast<std::uint32_t>(-1);

    std::uint32_t depth_;
    std::uint32_t only_ = none;  // level in use, if it is one: the usual case
    ns horizon_;
    ns hand_over_{}, lead_{};  // the smoothed hand-over, and the work that hides it; 0: not known
    plain_list<level_state> levels_;
    plain_list<stream_load> streams_;  // with something in flight
    std::uint32_t num_narrow_ = 0;     // in flight, of less than the whole width
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE std::uint32_t in_flight_budget::open(priority p) {
    std::uint32_t i = 0;
    while (i < levels_.size() && levels_[i].level != p) ++i;  // they are few
    if (i == levels_.size()) {
        streams_.reserve((levels_.size() + 1) * std::clamp(depth_, most_in_flight, 8 * most_in_flight));
        levels_.push_back({.level = p});
    }
    update();
    return i;
}

GPUSHARE_INLINE void in_flight_budget::add_client(std::uint32_t level, sm_width keeps) noexcept {
    auto& l = levels_[level];
    ++l.clients;
    if (keeps.known()) l.keeps += keeps.part();
    update();
}

GPUSHARE_INLINE void in_flight_budget::remove_client(std::uint32_t level, sm_width keeps) noexcept {
    auto& l = levels_[level];
    if (--l.clients == 0)
        l.keeps = 0;
    else if (keeps.known())
        l.keeps = l.keeps - keeps.part() > ratios::rounding_error ? l.keeps - keeps.part() : 0;
    update();
}

GPUSHARE_INLINE void in_flight_budget::raise_longest(std::uint32_t level, const work_lengths& lasts) noexcept {
    auto& l = levels_[level].lasts;
    if (lasts.longest <= l.longest && lasts.opaque <= l.opaque && lasts.stretch <= l.stretch &&
        (l.unknown || !lasts.unknown))
        return;
    l.raise_to(lasts);
    update();
}

GPUSHARE_INLINE auto in_flight_budget::room_for(const admission& a, bool alone,
                                                const kept_for_return& others) const noexcept -> room {
    if (levels_[a.level_index].enqueuing) return room::no;
    if (streams_.size() == streams_.capacity() && !is_busy(a.timeline, a.level_index)) return room::no;
    const bool may_be_narrow = !a.width.known() && levels_[a.level_index].kept > 0;
    if (num_narrow_ > 0 || a.width.part() < 1 || may_be_narrow) return room_beside(a, others.width);
    if (others.any) return room::no;
    return has_room(a.level_index, a.longest, a.predicted, alone) ? room::yes : room::no;
}

GPUSHARE_INLINE bool in_flight_budget::is_busy(std::uint64_t name, std::uint32_t level) const noexcept {
    return find_stream(name, level) < streams_.size();
}

GPUSHARE_INLINE bool in_flight_budget::has_room(std::uint32_t level, ns longest, ns predicted,
                                                bool alone) const noexcept {
    const auto& own = levels_[level];
    if (own.enqueuing) return false;
    std::uint32_t in_flight = own.in_flight, unknown = own.unknown;
    ns counted = saturating_add(own.counted, own.overdue), probably = own.predicted;
    if (only_ != level) {
        for (const auto& l : levels_) {
            if (l.level <= own.level) continue;
            in_flight += l.in_flight;
            unknown += l.unknown;
            counted = saturating_add(counted, saturating_add(l.counted, l.overdue));
            probably = saturating_add(probably, l.predicted);
        }
    }
    if (in_flight > 0 && lead_ > ns{0} && (unknown != 0 || counted > lead_)) return false;
    if (in_flight < own.depth) return true;
    if (longest <= ns{0} || unknown != 0 || in_flight >= most_in_flight) return false;
    if (saturating_add(counted, longest) > own.horizon) return false;
    return alone || in_flight < depth_ || saturating_add(probably, predicted) <= own.horizon / ratios::several_part;
}

GPUSHARE_INLINE void in_flight_budget::learn_hand_over(const charge& o, ns lasted) noexcept {
    if (o.noticed <= ns{0}) return;
    // A hand-over longer than the work itself changes nothing now, but would be remembered for
    // long: for example a first call, which loads and compiles.
    const ns took = std::min(saturating_add(o.noticed, std::max(o.enqueuing, ns{0})), lasted);
    hand_over_ += (took - hand_over_) / (hand_over_ > ns{0} ? ratios::smoothing : 1);
    lead_ = std::max(hand_over_ * ratios::idle_part, horizon_);
    update();
}

GPUSHARE_INLINE bool in_flight_budget::enter(const admission& a) noexcept {
    auto& level = levels_[a.level_index];
    const ns in_the_way = a.yields_within <= ns{0} ? a.longest : ns{0};
    if (level.in_flight++ == 0 && level.clients == 0) update();
    if (a.of_request) ++level.of_requests;
    if (a.longest <= ns{0}) ++level.unknown;
    level.counted = saturating_add(level.counted, a.longest);
    level.predicted = saturating_add(level.predicted, a.predicted);
    level.in_the_way = saturating_add(level.in_the_way, in_the_way);
    if (a.width.part() < 1) ++num_narrow_;
    const auto at = find_stream(a.timeline, a.level_index);
    const bool alone = at == streams_.size();
    // Within the reserve.
    if (alone) streams_.push_back({.name = a.timeline, .level = a.level_index, .first = a.client.index});
    auto& l = streams_[at];
    ++l.in_flight;
    if (a.width.known() || level.kept > 0) l.width = std::max(l.width, width_beside_kept(a));
    l.length = saturating_add(l.length, counted(a));
    l.in_the_way = saturating_add(l.in_the_way, in_the_way);
    l.has_long = l.has_long || is_long(a);
    l.may_be_long = l.has_long || l.may_be_long || a.longest > soon(a.level_index);
    note_if_on_kept(a);
    return alone;
}

GPUSHARE_INLINE std::uint32_t in_flight_budget::leave(const admission& a, std::uint32_t n) noexcept {
    auto& level = levels_[a.level_index];
    const ns longest = times(a.longest, n), in_the_way = a.yields_within <= ns{0} ? longest : ns{0};
    level.in_flight -= n;
    if (a.of_request) level.of_requests -= n;
    if (a.longest <= ns{0}) level.unknown -= n;
    if (level.in_flight == 0) {
        // A saturated sum has lost its parts: only this makes it exact again.
        level.counted = level.predicted = level.in_the_way = level.overdue = ns{0};
        if (level.clients == 0) update();
    } else {
        level.counted = less(level.counted, longest);
        level.predicted = less(level.predicted, a.predicted);
        level.in_the_way = less(level.in_the_way, in_the_way);
    }
    if (a.width.part() < 1) num_narrow_ -= n;
    auto& l = streams_[find_stream(a.timeline, a.level_index)];
    if ((l.in_flight -= n) == 0) {
        const auto first = l.first;
        if (&l != &streams_.back())
            l = streams_.back();  // often the one that was just written: a copy would wait for it
        streams_.pop_back();
        return first;
    }
    l.length -= std::min(l.length, counted(a));
    l.in_the_way = less(l.in_the_way, in_the_way);
    return no_client;
}

GPUSHARE_INLINE auto in_flight_budget::held(std::uint32_t level, instant now) const noexcept -> hold {
    hold h;
    // Another level may hold work back even if it has no clients, or nothing in flight.
    if (levels_.size() == 1) return h;
    for (const auto& l : levels_) {
        if (l.level <= levels_[level].level) continue;
        if (l.of_requests > 0) return {.held = true};
        if (now < l.hold_until) h = {.held = true, .until = h.held ? std::max(h.until, l.hold_until) : l.hold_until};
    }
    return h;
}

GPUSHARE_INLINE void in_flight_budget::hold_for(std::uint32_t level, std::uint32_t client, instant until) noexcept {
    levels_[level].hold_until = until;
    levels_[level].hold_for = client;
}

GPUSHARE_INLINE void in_flight_budget::end_holds(std::uint32_t client, priority at) noexcept {
    for (auto& l : levels_)
        if (l.hold_for == client && (at == no_priority || l.level == at)) l.hold_until = {};
}

GPUSHARE_INLINE bool in_flight_budget::is_held_until(instant t) const noexcept {
    return any_where(levels_, [=](const level_state& l) { return l.hold_until == t; });
}

GPUSHARE_INLINE bool in_flight_budget::any_hold() const noexcept {
    for (const auto& l : levels_)
        if (l.hold_until > instant{}) return true;
    return false;
}

GPUSHARE_INLINE ns in_flight_budget::bound_now(std::uint32_t level, sm_width width) const noexcept {
    const auto& own = levels_[level];
    const bool fits = own.keeps > 0 && width.known() && width.part() <= own.keeps + uncertain;
    if (fits && is_free(own)) return own.bound_on_kept;
    ns there{};
    bool any_below = false;
    if (only_ != level)
        for (const auto& l : levels_) {
            if (l.level >= own.level || !in_use(l)) continue;
            any_below = true;
            there = saturating_add(there, saturating_add(l.in_the_way, l.overdue));
        }
    if (!any_below) there = saturating_add(own.in_the_way, own.overdue);
    if (there > own.bound && num_narrow_ > 0) there = std::min(there, side_by_side(own, any_below));
    return std::max(own.bound, there);
}

GPUSHARE_INLINE void in_flight_budget::set_overdue(std::uint32_t level, ns by) noexcept {
    if (levels_[level].in_flight != 0) levels_[level].overdue = by;
}

GPUSHARE_INLINE bool in_flight_budget::ends_within(const admission& a, ns time) const noexcept {
    ns all{};
    bool unknown = false;
    double width = a.width.part();
    for (const auto& l : levels_) {
        all = saturating_add(all, saturating_add(l.counted, l.overdue));
        unknown = unknown || l.unknown != 0;
    }
    for (const auto& l : streams_) width += l.width > 0 && l.name != a.timeline ? l.width : 1;
    return streams_.empty() || width <= 1 + uncertain || (!unknown && all <= time);
}

GPUSHARE_INLINE ns in_flight_budget::bound() const noexcept {
    const level_state* top = nullptr;
    for (const auto& l : levels_)
        if (in_use(l) && (top == nullptr || l.level > top->level)) top = &l;
    return top != nullptr ? top->bound : ns{0};
}

GPUSHARE_INLINE ns in_flight_budget::until_room() const noexcept {
    double taken = 0, ends = 0;
    for (const auto& l : streams_) {
        taken += l.width > 0 ? l.width : 1;
        ends += 1 / std::max(static_cast<double>(l.length.count()), 1.0);
    }
    if (taken < 1 - uncertain) return ns{0};
    constexpr double almost_for_ever = 9e18;
    if (taken <= 1 + uncertain) return ns{static_cast<ns::rep>(std::min(1 / ends, almost_for_ever))};
    ns sum{};
    for (const auto& l : levels_) sum = saturating_add(sum, l.predicted);
    return sum;
}

GPUSHARE_INLINE ns in_flight_budget::served_from(std::uint32_t level) const noexcept {
    ns sum = levels_[level].served;
    // Counts all levels, not only those in use: the sum must never fall.
    if (levels_.size() == 1) return sum;
    for (const auto& l : levels_)
        if (l.level > levels_[level].level) sum = saturating_add(sum, l.served);
    return sum;
}

GPUSHARE_INLINE std::size_t in_flight_budget::find_stream(std::uint64_t name, std::uint32_t level) const noexcept {
    std::size_t i = 0;
    while (i < streams_.size() && (streams_[i].name != name || streams_[i].level != level)) ++i;
    return i;
}

GPUSHARE_INLINE auto in_flight_budget::width_beside_kept(const admission& a) const noexcept -> double {
    const double kept = levels_[a.level_index].kept;
    return a.width.known() || kept <= 0 ? a.width.part() : 1 - kept;
}

GPUSHARE_INLINE bool in_flight_budget::is_kept_off(const admission& a) const noexcept {
    // At 0, all SMs are kept, and work that is kept off would never run.
    const double rest = 1 - levels_[a.level_index].kept;
    return rest > uncertain && width_beside_kept(a) <= rest + uncertain;
}

GPUSHARE_INLINE auto in_flight_budget::still_kept(const admission& a) const noexcept -> double {
    const auto& own = levels_[a.level_index];
    double most = 0;
    for (const auto& above : levels_) {
        if (above.level <= own.level || above.keeps <= 0) continue;
        double free = std::min(above.kept + above.keeps, 1.0);
        for (const auto& l : streams_)
            if (l.length > soon(a.level_index) && levels_[l.level].level >= (l.has_long ? above.level : own.level))
                free -= l.width;
        most = std::max(most, free);
    }
    return most;
}

GPUSHARE_INLINE bool in_flight_budget::is_free(const level_state& level) const noexcept {
    double below = 0;
    for (const auto& l : streams_)
        if (levels_[l.level].level < level.level && l.length > soon(l.level) && l.may_be_long)
            below += l.width > 0 ? l.width : 1;
    return below <= 1 - level.keeps + uncertain;
}

GPUSHARE_INLINE void in_flight_budget::note_if_on_kept(const admission& a) noexcept {
    auto& l = levels_[a.level_index];
    if (l.kept <= 0 || !is_long(a) || is_kept_off(a)) return;
    ns waited_for = std::max(a.longest, a.length);
    if (a.yields_within > ns{0})
        waited_for = a.longest > ns{0} ? std::min(a.longest, a.yields_within) : a.yields_within;
    if (waited_for <= l.not_kept_off) return;
    l.not_kept_off = waited_for;
    update();
}

GPUSHARE_INLINE ns in_flight_budget::side_by_side(const level_state& own, bool below) const noexcept {
    double width = 0;
    ns most{};
    for (const auto& l : streams_) {
        const auto& level = levels_[l.level];
        if (below ? level.level >= own.level : &level != &own) continue;
        width += l.width > 0 ? l.width : 1;
        most = std::max(most, saturating_add(l.in_the_way, level.overdue));
    }
    return width <= 1 + uncertain ? most : ns::max();
}

GPUSHARE_INLINE ns in_flight_budget::counted(const admission& a) const noexcept {
    return a.longest <= ns{0} || a.unproven ? std::max(a.length, horizon_) : a.length;
}

GPUSHARE_INLINE bool in_flight_budget::is_of(const stream_load& l, const admission& a) noexcept {
    return l.name == a.timeline && l.level == a.level_index;
}

GPUSHARE_INLINE auto in_flight_budget::room_beside(const admission& a, double for_others) const noexcept -> room {
    const auto& own = levels_[a.level_index];
    const auto counts = [&](const stream_load& l) { return levels_[l.level].level >= own.level; };
    std::uint32_t in_flight = 0;
    double left = 1 - for_others;
    for (const auto& l : streams_) {
        if (!counts(l)) continue;
        in_flight += l.in_flight;
        if (l.length <= soon(a.level_index)) continue;
        if (is_of(l, a)) return room::not_on_stream;
        left -= l.width;
    }
    const double kept = is_long(a) && is_kept_off(a) ? still_kept(a) : 0;
    if (!a.width.known() && own.kept <= 0) return in_flight < own.depth ? room::yes : room::no;
    if (in_flight >= most_in_flight || left <= uncertain) return room::no;
    if (left - kept <= uncertain) return for_others > 0 ? room::no : room::not_beside_kept;
    double ends_soon = 0, behind = 0;
    for (const auto& l : streams_)
        if (counts(l) && l.length <= soon(a.level_index)) (is_of(l, a) ? behind : ends_soon) += std::min(l.width, left);
    // Long work needn't be queued ahead: the policy decides who gets the SM when the SM is
    // free.
    const double most = (is_long(a) ? left : ratios::queued_ahead * left) + (behind > 0 ? uncertain : -uncertain);
    return ends_soon + behind < most ? room::yes : room::no;
}

GPUSHARE_INLINE ns in_flight_budget::times(ns a, std::uint32_t n) noexcept {
    return n == 1 ? a : a > ns::max() / static_cast<ns::rep>(n) ? ns::max() : a * static_cast<ns::rep>(n);
}

GPUSHARE_INLINE void in_flight_budget::update() noexcept {
    only_ = static_cast<std::uint32_t>(levels_.size());
    for (std::uint32_t i = 0; i < levels_.size(); ++i)
        if (in_use(levels_[i])) only_ = only_ == levels_.size() ? i : none;
    for (auto& l : levels_) {
        bool top = true;
        for (const auto& other : levels_) top = top && (other.level <= l.level || other.clients == 0);
        l.horizon = top ? horizon_ : horizon_ / ratios::below_part;
        l.depth = top ? depth_ : std::min(depth_, ratios::below_depth);
        l.kept = 0;
        for (const auto& other : levels_)
            if (other.level > l.level) l.kept += other.keeps;
        l.kept = std::min(l.kept, 1.0);
    }
    for (std::uint32_t i = 0; i < levels_.size(); ++i) {
        auto& l = levels_[i];
        l.bound = bound_if(i, [this](std::uint32_t of) { return levels_[of].lasts; });
        l.bound_on_kept = l.keeps > 0 ? std::min(l.bound, on_kept(l)) : l.bound;
    }
}

GPUSHARE_INLINE ns in_flight_budget::in_flight_at_most(ns each, std::uint32_t depth) const noexcept {
    const ns all = times(each, depth);
    return lead_ > ns{0} && each > ns{0} ? std::min(all, saturating_add(each, ratios::older_lead * lead_)) : all;
}

GPUSHARE_INLINE ns in_flight_budget::on_kept(const level_state& level) const noexcept {
    ns sum{};
    for (const auto& l : levels_) {
        if (l.level >= level.level || !in_use(l)) continue;
        sum = saturating_add(sum, std::max(in_flight_at_most(l.not_kept_off, l.depth), l.horizon));
    }
    return sum;
}

#endif  // GPUSHARE_BODIES

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
