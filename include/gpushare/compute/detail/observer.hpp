// SPDX-License-Identifier: Apache-2.0
// Observes the work in flight: which batches' ends are reached, when their work was on the device,
// and which points to watch. It asks the device as little as it can, since a query may cost as much
// as a launch.
//
//   detail::observer<stream> device;
//   for (typename point_questions<point>::type ask; auto* const b = device.next_done(batches, now, true, &ask);)
//       charge_for(device.seen(), ...);
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/batches.hpp>
#include <gpushare/compute/detail/charging.hpp>
#include <gpushare/compute/detail/in_flight_budget.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Queries points one by one. If a backend has a cheaper way for several points, its point names
/// it: `questions`, with the same members.
template <timeline_point Point>
struct one_by_one {
    /// The device time between the two points if `end` is reached. `begin` comes before `end` on
    /// the same device.
    [[nodiscard]] static std::optional<ns> span(const Point& begin, const Point& end) noexcept {
        if (!end.reached()) return std::nullopt;
        return elapsed(begin, end);
    }
    /// The device time from `a` to `b`, both reached; negative if `b` comes first.
    [[nodiscard]] static ns between(const Point& a, const Point& b) noexcept { return elapsed(a, b); }
};
template <timeline_point Point>
struct point_questions {
    using type = one_by_one<Point>;
};
template <timeline_point Point>
requires requires { typename Point::questions; }
struct point_questions<Point> {
    using type = typename Point::questions;
};

/// Whether the device is queried under no lock: if a query is a driver call, it may wait for
/// another thread's call, such as a free that waits for the device.
template <timeline Stream>
inline constexpr bool asks_unlocked = shared_timeline<Stream>;

/// Places the spans between points of one device on one axis, which begins with the first span. A
/// value.
template <timeline_point Point>
class device_axis {
public:
    /// The place in time of a span of `length`. Asking the device for a time isn't free:
    /// `ask.between(point, point)` is called at most once, and not for a span that begins at the
    /// end of the latest span given to follow().
    template <class Questions>
    [[nodiscard]] interval place(const Point& begin, const Point& end, ns length, Questions&& ask) {
        if (!known_) {
            latest_ = begin;
            known_ = true;
        }
        if constexpr (std::equality_comparable<Point>)
            if (begin == latest_) return {at_, at_ + length.count()};
        const auto to = at_ + ask.between(latest_, end).count();
        return {to - length.count(), to};
    }
    /// Records that `span` ends at this point. Later spans are placed by the latest end of all.
    void follow(interval span, const Point& end) {
        if (span.end <= span.begin || span.end <= at_) return;
        latest_ = end;
        at_ = span.end;
    }

private:
    Point latest_{};
    ns::rep at_ = 0;  // where the latest end is on the axis
    bool known_ = false;
};

/// Every function but ask() is called under the limiter's mutex.
template <timeline Stream>
class observer {
public:
    using point = typename Stream::point;
    using batch = detail::batch<Stream>;
    using submission = detail::submission<Stream>;
    using questions = typename point_questions<point>::type;

    observer() {
        watched_.reserve(most_in_flight);
        if (asks_unlocked<Stream>) asked_.reserve(most_in_flight);
    }

    /// Among the batches whose end is reached, the one that ended first; null if there is none.
    /// Never blocks. Asks the device only about the oldest batch of each stream and, without
    /// `anyway`, only if the batch is predicted to be done. Without `ask`, it considers only
    /// batches already found to be reached (note).
    [[nodiscard]] batch* next_done(batches<Stream>& all, instant now, bool anyway, questions* ask) noexcept {
        batch* first = nullptr;
        for (auto& b : all.in_use()) {
            const auto* const e = b.ended();
            if (e == nullptr || !(anyway || b.is_due(now)) || !all.is_oldest(b)) continue;
            if (b.timed != batch::timing::found) {
                if (ask == nullptr) continue;
                auto when = b.when;
                if (!place(b.begin, e->end, b.timed == batch::timing::placed, when, *ask)) {
                    all.end_was_asked_for(b, now);
                    continue;
                }
                found(all, b, when);
            }
            if (first == nullptr || b.when.end < first->when.end) first = &b;
        }
        if (first == nullptr) return nullptr;
        all.end_was_seen(*first, now);
        missed_ |= watching_ && !first->ended()->watched && !first->is_looked_at();
        describe(all, *first);
        return first;
    }

    // ---- the same with questions under no lock, by one thread at a time, from choose() until
    // next_done() returns null

    /// Chooses the batches to query, as next_done() does, up to the batch of order `newest`. False
    /// if there is none. If memory runs out, it chooses only some.
    [[nodiscard]] bool choose(batches<Stream>& all, instant now, bool anyway, std::uint64_t newest) noexcept {
        asked_.clear();
        try {
            for (std::size_t i = 0; auto& b : all.in_use()) {
                const auto at = i++;
                if (const auto* const e = b.ended(); e != nullptr && b.order <= newest &&
                                                     b.timed != batch::timing::found && (anyway || b.is_due(now)) &&
                                                     all.is_oldest(b))
                    asked_.push_back({at, b.order, b.begin, e->end, b.timed == batch::timing::placed, b.when, false});
            }
        } catch (const std::bad_alloc&) {  // keeps those for which memory sufficed
        }
        return !asked_.empty();
    }
    /// Asks the device about the chosen batches. Call under no lock.
    void ask() noexcept {
        questions ask;
        for (auto& q : asked_) q.reached = place(q.begin, q.end, q.placed, q.when, ask);
    }
    /// Records the answers. `now`: the time of choose().
    void note(batches<Stream>& all, instant now) noexcept {
        for (auto& q : asked_) {
            const auto in_flight = all.in_use();
            if (q.batch >= in_flight.size() || in_flight[q.batch].order != q.order) continue;
            batch& b = in_flight[q.batch];
            if (q.reached) {
                found(all, b, q.when);
                continue;
            }
            if (auto* const e = b.ended()) e->pending_at = std::max(e->pending_at, now);
            all.end_was_asked_for(b, now);
        }
        asked_.clear();
    }

    /// The observation of the batch that next_done() returned last.
    [[nodiscard]] const observation& seen() const noexcept { return seen_; }

    /// Calls `f(submission)`, once each, for submissions that have been first on their stream for
    /// longer than `limit`.
    template <std::invocable<submission&> F>
    void find_stuck(batches<Stream>& all, instant now, ns limit, F f) noexcept {
        for (auto& b : all.all()) {
            auto* const e = b.ended();
            if (e == nullptr || e->written_off || !all.is_oldest(b, true)) continue;
            e->head_since = std::min(e->head_since, now);
            if (now - e->head_since < limit) continue;
            e->written_off = true;
            for (auto* s = b.first; s != nullptr; s = s->next_member) f(*s);
        }
    }

    // ---- the watch: which points to look at, for one thread at a time

    /// Begins the watch. Returns the ends at which no thread looks that waits for their work. The
    /// points are valid until the next call. If memory runs out, only some are returned, and
    /// any_unknown() is true.
    [[nodiscard]] std::span<const point> begin_watch(batches<Stream>& all) noexcept {
        const auto in_flight = all.all();
        watching_ = true;
        watched_.clear();
        for (auto& b : in_flight)
            if (auto* const e = b.ended()) e->watched = false;
        try {
            for (auto& b : in_flight) {
                auto* const e = b.ended();
                if (e == nullptr || b.is_looked_at()) continue;
                watched_.push_back(e->end);
                e->watched = true;
            }
        } catch (const std::bad_alloc&) {  // keeps those for which memory sufficed
        }
        return watched_;
    }
    /// Records that at `then` none of the points at which a thread looked was reached: the watched
    /// ends if `watched`, and the end of `own` if given.
    static void none_reached_at(batches<Stream>& all, bool watched, const submission* own, instant then) noexcept {
        for (auto& b : all.in_use())
            if (auto* const e = b.ended();
                e != nullptr && ((watched && e->watched) || (own != nullptr && b.holds(own))))
                e->pending_at = std::max(e->pending_at, then);
    }
    /// Whether there is a point outside the watch at which no thread looks: it was recorded since,
    /// or the thread that looked at it is gone.
    [[nodiscard]] bool any_unknown(batches<Stream>& all) const noexcept {
        return all.any_ended() && any_where(all.in_use(), [](const batch& b) {
                   const auto* const e = b.ended();
                   return e != nullptr && !e->watched && !b.is_looked_at();
               });
    }
    /// Ends the watch. Returns whether work outside the watched set ended while no thread looked at
    /// that work.
    [[nodiscard]] bool end_watch() noexcept {
        watching_ = false;
        return std::exchange(missed_, false);
    }
    /// Whether there is a point at which no thread that waits for its work looks. Work of `mine`
    /// doesn't count, nor that of clients for whose work a thread `is_expected` to wait soon.
    template <std::predicate<client_id> F>
    [[nodiscard]] static bool any_unwatched(batches<Stream>& all, const submission* mine, F is_expected) noexcept {
        return all.any_ended() && any_where(all.in_use(), [&](const batch& b) {
                   return b.ended() != nullptr && !b.is_looked_at() && !is_expected(b.client) &&
                          (mine == nullptr || !b.holds(mine));
               });
    }
    /// The point at the end of the batch of `s`, if it is recorded.
    [[nodiscard]] static std::optional<point> end_of(batches<Stream>& all, const submission* s) noexcept {
        if (s != nullptr)
            for (const auto& b : all.all())
                if (const auto* const e = b.ended(); e != nullptr && b.holds(s)) return e->end;
        return std::nullopt;
    }

private:
    struct question {
        std::size_t batch;
        std::uint64_t order;  // tells whether the record still is the same batch
        point begin, end;
        bool placed;
        interval when;
        bool reached;
    };

    // Returns whether `end` is reached, and sets `when` to the work's time on the device.
    [[nodiscard]] bool place(const point& begin, const point& end, bool placed, interval& when,
                             questions& ask) noexcept {
        const auto length = ask.span(begin, end);
        if (!length) return false;
        when = placed ? interval{when.begin, when.begin + length->count()} : axis_.place(begin, end, *length, ask);
        return true;
    }
    // Records when the work of `b` was on the device. This also places a batch that begins where
    // `b` ends.
    static void found(batches<Stream>& all, batch& b, interval when) noexcept {
        b.when = when;
        b.timed = batch::timing::found;
        if constexpr (std::equality_comparable<point>)
            if (all.in_use().size() > 1)
                for (auto& next : all.in_use())
                    if (next.timeline == b.timeline && next.order > b.order && next.begin == b.ended()->end) {
                        next.when.begin = b.when.end;
                        next.timed = batch::timing::placed;
                    }
    }

    // Sets `seen_` to the observation of `b`.
    void describe(batches<Stream>& all, const batch& b) noexcept {
        const auto& end = b.ended()->end;
        auto& seen = seen_;
        seen.client = b.client;
        seen.span = b.when;
        seen.length = b.when.length();
        seen.predicted = b.predicted;
        seen.at_least = b.first->admitted.at_least;
        seen.width = b.filled();
        seen.members = b.num_members;
        seen.overtaken = b.overtaken;
        seen.doubtful = b.doubtful;
        seen.contended = b.contended;
        if constexpr (sm_timeline<Stream>) seen.used = used_between(b.begin, end);
        seen.enqueued = b.num_members == 1
                            ? enqueue_time::between(b.first->enqueue_began, b.first->enqueue_ended, b.first->in_front)
                            : enqueue_time{};
        if (b.overtaken)
            seen.span = span_up_to_next(all, b);
        else
            axis_.follow(b.when, end);
    }

    // The span of an overtaken batch: up to the begin of the batch behind it, as far as that is
    // known.
    [[nodiscard]] std::optional<interval> span_up_to_next(batches<Stream>& all, const batch& b) noexcept {
        const batch* const next = all.next_on_stream(b);
        // The thread that enqueues the next batch hasn't reported where that batch began, or never
        // will.
        if (next != nullptr && next->timed == batch::timing::unknown) return std::nullopt;
        // No batch overlaps: there is none behind, or another thread's began behind the end all the
        // same.
        if (next == nullptr || !next->begin.reached() || elapsed(next->begin, b.ended()->end) < ns{0}) {
            axis_.follow(b.when, b.ended()->end);
            return b.when;
        }
        const auto span = axis_.place(b.begin, next->begin, elapsed(b.begin, next->begin), one_by_one<point>{});
        axis_.follow(span, next->begin);
        return span;
    }

    device_axis<point> axis_;
    // A member, because clearing and copying it on the stack costs as much as the rest of charging.
    observation seen_;
    std::vector<point> watched_;
    std::vector<question> asked_;
    bool watching_ = false;
    bool missed_ = false;  // an end outside the watched points was reached during the watch
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
