// SPDX-License-Identifier: Apache-2.0
// What a compute limiter has let in and the device hasn't finished: which points to watch, what is done, and what it
// cost. A part of compute_limiter.hpp, which holds its mutex around every call but those that boarding.hpp
// names.
//
//   detail::flights<stream> flights(quantum, turns);   // and what boarding.hpp shows
//   if (flights.any_ended()) flights.settle(now, true, [&](const auto& done) { charge(done.what, done.cost); }, give_back);
//
// The true cost of a batch is split in proportion to what was predicted of each member.
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

#include <gpushare/compute/detail/boarding.hpp>
#include <gpushare/compute/detail/finished.hpp>
#include <gpushare/compute/detail/held_up.hpp>
#include <gpushare/compute/detail/questions.hpp>
#include <gpushare/compute/grant.hpp>
#include <gpushare/compute/span_meter.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Not thread-safe, as a boarding. Allocates while more are in flight than ever before.
template <timeline Stream>
class flights : public boarding<Stream> {
    using base = boarding<Stream>;

public:
    using base::none;
    using typename base::batch;
    using typename base::flight;
    using typename base::point;
    using finished = detail::finished<Stream>;
    using interval = typename batch::interval;

    /// As a boarding.
    flights(ns quantum, bool turns) : base(quantum, turns) { watched_.reserve(slots_.size()); }

    /// What the device has finished, in the order in which it finished; never blocks. Of each stream only the oldest is
    /// asked for, because asking may cost as much as a launch. Of what has landed by the last call of any_ended().
    /// `give_back(client, time)`: of what was charged earlier, it turned out to be others'. Unless it is to look `anyway`,
    /// it asks for nothing that is predicted to take longer.
    template <std::invocable<const finished&> F, std::invocable<client_id, ns> G>
    void settle(instant now, bool anyway, F on_finished, G give_back) noexcept {
        questions<point> ask;
        while (num_ended_ > 0) {
            batch* first = nullptr;
            for (auto& b : in_use()) {
                if (b.at != batch::state::ended || !(anyway || b.is_due(now)) || !is_oldest(b)) continue;
                if (!b.found && !find(b, ask)) {
                    if (b.is_due(now)) shift(b, now - b.busy_until + b.predicted / 2);
                    continue;
                }
                if (first == nullptr || b.when.end < first->when.end) first = &b;
            }
            if (first == nullptr) return;
            if constexpr (batch::shares) {  // nobody else predicts ends
                if (turns_ && now < first->busy_until)
                    move_behind(*first, now - first->busy_until);  // nobody is busy with it until then
                else
                    shift(*first, -first->predicted / 64);
            }
            settle(*first, on_finished, give_back);
            shrink_in_use();
        }
    }

    /// Calls `f(grant, times, owner)` for what has been first on its stream for longer than `limit`, and takes its owner
    /// from it.
    template <std::invocable<const grant&, std::uint32_t, submission<Stream>*> F>
    void write_off(instant now, ns limit, F f) noexcept {
        gather();
        for (auto& b : in_use()) {
            if (b.at != batch::state::ended || b.written_off || !is_oldest(b, true)) continue;
            b.head_since = std::min(b.head_since, now);
            if (now - b.head_since < limit) continue;
            b.written_off = true;
            for (auto* i = b.first; i != nullptr; i = i->next) f(i->what, i->times, std::exchange(i->owner, nullptr));
        }
    }

    /// Open batches whose end is wanted: `owner`'s; where nothing else is to be watched, if `quiet`; and those that were
    /// marked. The caller records a point on `b.handle` under no lock and says so with ended() or not_ended().
    /// `now()` is asked only where there is one.
    template <std::invocable F>
    [[nodiscard]] std::size_t next_to_end(const submission<Stream>* owner, bool quiet, F now) noexcept {
        gather();
        if constexpr (batch::shares) {
            quiet = quiet && !any_ended();
            if (!quiet && owner == nullptr && !std::exchange(ends_wanted_, false)) return none;
            for (std::size_t i = 0; i < in_use().size(); ++i) {
                batch& b = batches_[i];
                if (b.at != batch::state::open) continue;
                b.end_wanted |= quiet || (owner != nullptr && holds(b, owner));
                if (b.end_wanted) want_ends();  // also of those behind this one
                if (!b.end_wanted || !b.can_end()) continue;
                b.at = batch::state::ending;
                b.doubtful |= now() > b.busy_until;
                return i;
            }
        }
        return none;
    }
    [[nodiscard]] const typename batch::handle_type& handle(std::size_t i) const noexcept { return batches_[i].handle; }

    /// Whether there is a point to look at.
    [[nodiscard]] bool any_ended() noexcept {
        gather();
        return num_ended_ > 0;
    }
    /// Whether there is one that no thread looks at which waits for it, other than `mine` and of clients whose work
    /// `is_expected` to be waited for soon.
    template <std::predicate<client_id> F>
    [[nodiscard]] bool any_unwatched(const submission<Stream>* mine, F is_expected) noexcept {
        return any_ended() && std::ranges::any_of(in_use(), [&](const batch& b) {
                   return b.at == batch::state::ended && !is_looked_at(b) && !is_expected(b.client) &&
                          (mine == nullptr || !holds(b, mine));
               });
    }
    /// Whether it may be reached by now.
    [[nodiscard]] bool any_due(instant now) noexcept {
        if (!any_ended()) return false;
        const auto due = [now](const batch& b) { return b.at == batch::state::ended && b.is_due(now); };
        return std::ranges::any_of(in_use(), due);
    }
    /// Whether anything is enqueued and waits for its batch to end.
    [[nodiscard]] bool any_open() noexcept {
        gather();
        return std::ranges::any_of(in_use(),
                                   [](const batch& b) { return b.at == batch::state::open && b.num_members > 0; });
    }

    /// The ends of what was enqueued and no thread looks at that waits for it, for one watcher at a time: they stay until
    /// the next call. Without memory for all, some of them.
    [[nodiscard]] std::span<const point> watch() noexcept {
        gather();
        known_ = boarded_;
        watched_.clear();
        try {
            for (const auto& b : in_use())
                if (b.at == batch::state::ended && !is_looked_at(b)) watched_.push_back(b.end);
        } catch (const std::bad_alloc&) {  // the first fitted
        }
        return watched_;
    }

    /// Whether something that boarded since has ended without anybody looking at it.
    [[nodiscard]] bool end_watch() noexcept {
        known_ = all;
        return std::exchange(missed_, false);
    }

    /// The end of this one's work, if there is a point for it.
    [[nodiscard]] std::optional<point> end_of(const submission<Stream>* owner) noexcept {
        gather();
        if (owner != nullptr)
            for (const auto& b : in_use())
                if (b.at == batch::state::ended && holds(b, owner)) return b.end;
        return std::nullopt;
    }

    /// Calls `f(client)` once for each batch in flight.
    template <std::invocable<client_id> F>
    void each_client(F f) {
        gather();
        for (const auto& b : in_use())
            if (b.num_members > 0) f(b.client);
    }

    /// Ends everything without waiting: calls `end_of(submission)` for each that wasn't a permit.
    template <std::invocable<submission<Stream>&> F>
    void abandon(F end_of) {
        for (auto& s : slots_.all())
            if (auto* const owner = std::exchange(s.owner, nullptr)) end_of(*owner);
    }

private:
    using base::batches_;
    using base::boarded_;
    using base::ends_wanted_;
    using base::gather;
    using base::in_use;
    using base::learn_stretch;
    using base::num_ended_;
    using base::shrink_in_use;
    using base::slots_;
    using base::turns_;
    using base::want_ends;

    [[nodiscard]] bool is_oldest(const batch& b, bool of_hopeful = false) noexcept {
        return in_use().size() == 1 || std::ranges::none_of(in_use(), [&](const batch& other) {
                   return other.num_members > 0 && other.timeline == b.timeline && other.order < b.order &&
                          !(of_hopeful && other.written_off);
               });
    }

    [[nodiscard]] static bool is_looked_at(const batch& b) noexcept {
        for (auto* i = b.first; i != nullptr; i = i->next)
            if (i->owner != nullptr && i->owner->looked_at > 0) return true;
        return false;
    }

    [[nodiscard]] bool holds(const batch& b, const submission<Stream>* owner) const noexcept {
        for (auto* i = b.first; i != nullptr; i = i->next)
            if (i->owner == owner) return true;
        return false;
    }

    // Predictions err, and each rests on the one before it. A question that came too early makes us later by much, one
    // that came in time, perhaps late, earlier by little: so few come too early, as each costs as much as a launch.
    void shift(const batch& from, ns by) noexcept {
        if (from.known) move_behind(from, by);
    }
    void move_behind(const batch& from, ns by) noexcept {
        for (auto& b : in_use())
            if (b.at != batch::state::free && b.order >= from.order &&
                (b.timeline == from.timeline || (turns_ && b.level == from.level)))
                b.busy_until = saturating_add(b.busy_until, by);
    }

    // Whether its end is reached; then, when its work was on the device. What begins where it ends is placed with it.
    [[nodiscard]] bool find(batch& b, questions<point>& ask) noexcept {
        const auto length = ask.span(b.begin, b.end);
        if (!length) return false;
        const auto between = [&](const point& x, const point& y) { return ask.between(x, y); };
        b.when = b.placed ? interval{b.when.begin, b.when.begin + length->count()}
                          : meter_.place(b.begin, b.end, *length, between);
        b.found = true;
        if (in_use().size() > 1) place_behind(b);
        return true;
    }

    void place_behind(const batch& b) noexcept {
        if constexpr (std::equality_comparable<point>)
            for (auto& next : in_use())
                if (next.timeline == b.timeline && next.order > b.order && next.begin == b.end) {
                    next.when.begin = b.when.end;
                    next.placed = true;
                }
    }

    // Of one that was overtaken: up to the begin of what came behind it, as far as that is known.
    template <class G>
    [[nodiscard]] ns charge_to_next(const batch& b, G& give_back) noexcept {
        const batch* next = nullptr;
        for (const auto& other : in_use())
            if (other.at != batch::state::free && other.timeline == b.timeline && other.order > b.order &&
                (next == nullptr || other.order < next->order))
                next = &other;
        // Whoever boarded behind it may not have said yet where; or it never came.
        if (next != nullptr && !next->begun) return ns{0};
        const auto between = [](const point& x, const point& y) { return elapsed(x, y); };
        // Or it began behind the end all the same, on another thread.
        if (next == nullptr || !next->begin.reached() || elapsed(next->begin, b.end) < ns{0})
            return meter_.charge(b.when, b.end, b.client, ns{0}, give_back);
        const auto when = meter_.place(b.begin, next->begin, elapsed(b.begin, next->begin), between);
        return meter_.charge(when, next->begin, b.client, ns{0}, give_back);
    }

    template <class F, class G>
    void settle(batch& b, F& on_finished, G& give_back) noexcept {
        using source = outcome::source;
        missed_ |= b.order > known_ && !is_looked_at(b);
        const bool shared = b.num_members > 1;
        ns length{b.when.end - b.when.begin};
        if (b.beside_others) learn_stretch(b.predicted, length);
        const ns at_least = shared ? ns{0} : b.first->what.at_least;
        auto left = b.overtaken ? std::max(b.predicted, charge_to_next(b, give_back))
                                : meter_.charge(b.when, b.end, b.client, at_least, give_back);
        // The span of a batch that may have had gaps says little: the prediction is better.
        if (b.doubtful) left = std::min(left, b.predicted);
        const auto from = b.doubtful || b.overtaken ? source::doubt
                          : shared                  ? source::shared
                          : b.contended             ? source::own
                                                    : source::alone;
        const auto status = b.end.status();
        const bool written_off = b.written_off;
        flight* next = b.first;
        const bool split = next->next != nullptr || next->times > 1;
        const auto enqueued =
            shared ? enqueue_time{} : enqueue_time::between(next->boarded, next->landed, next->in_front);
        const proportion cost_of(left, b.predicted, split), span_of(length, b.predicted, split);
        const point end = std::exchange(b.end, {});
        b.clear();
        --num_ended_;
        while (next != nullptr) {
            flight& f = *std::exchange(next, next->next);
            const auto code = f.code != errc::none ? f.code : status;
            const auto tell = [&](const grant& what, std::uint32_t times, bool is_last) {
                const ns part = is_last ? left : std::min(cost_of(what.predicted), left);
                const ns span = is_last ? length : std::min(span_of(what.predicted), length);
                left -= part;
                length -= span;
                on_finished(finished{.what = what,
                                     .slot = f.number,
                                     .times = times,
                                     .end = end,
                                     .span = span,
                                     .after = length,
                                     .enqueued = enqueued,
                                     .owner = f.owner,
                                     .code = code,
                                     .cost = part,
                                     .from = from,
                                     .written_off = written_off});
            };
            for (; code != errc::none && f.times > 1; --f.times) {  // failures in a row are counted
                grant one = f.what;
                one.predicted /= static_cast<ns::rep>(f.times);
                f.what.predicted -= one.predicted;
                tell(one, 1, false);
            }
            tell(f.what, f.times, next == nullptr);
            slots_.release(f);
        }
    }

    static constexpr std::uint64_t all = ~std::uint64_t{0};

    std::vector<point> watched_;
    std::uint64_t known_ = all;  // to the watch, up to this one
    bool missed_ = false;        // by it, of the others
    span_meter<point> meter_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
