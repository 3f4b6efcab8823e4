// SPDX-License-Identifier: Apache-2.0
// What a compute limiter has let in and the device hasn't finished: which points to watch, what is done, and what it
// cost. A part of compute_limiter.hpp, which holds its mutex around every call.
//
//   detail::flights<stream> flights;
//   auto slot = flights.free_slot();  flights.to_be_taken(slot) = grant;  flights.take(slot);
//   auto seat = flights.board(slot, s, now);           // then, under no lock, the points that it asks for, and the work
//   flights.land(seat, begin, end, errc::none, &work);
//   flights.settle(now, true, [&](const auto& done) { charge(done.what, done.cost); });
//
// A point costs as much as a short kernel does. So short submissions of one client on one stream share a batch (batch.hpp
// says when), which ends at one point, and its true cost is split in proportion to what was predicted of each.
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

#include <gpushare/compute/batch.hpp>
#include <gpushare/compute/finished.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/questions.hpp>
#include <gpushare/compute/span_meter.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI::detail {

/// Not thread-safe. Allocates while more are in flight than ever before.
template <timeline Stream>
class flights {
public:
    using point = typename Stream::point;
    using batch = detail::batch<Stream>;
    static constexpr std::size_t none = batch::none;
    static constexpr std::size_t usual = 64;

    using finished = detail::finished<Stream>;

    /// What is to be done around the work of one submission.
    struct seat {
        std::size_t slot = none, in = none;
        std::size_t ends = none;  // the batch that the first point is the end of, too
        bool needs_begin = false, needs_end = false;
        bool may_stay_open = false;  // an end that can't be recorded now may be later
    };

    /// `quantum`: how long a batch may be predicted to take.
    explicit flights(ns quantum) : quantum_(quantum) {
        // With room for one, running out of memory delays what waits and never strands it; with this, nothing is
        // allocated later unless there are many levels.
        slots_.reserve(usual);
        batches_.reserve(usual);
        watched_.reserve(usual);
    }

    /// A slot for one more; `none` when memory runs out, and then others are in flight.
    [[nodiscard]] std::size_t free_slot() noexcept {
        if (free_ == none) {
            try {
                if (batches_.capacity() <= slots_.size()) batches_.reserve(slots_.size() * 2 + 1);
                slots_.emplace_back();
                free_ = slots_.size() - 1;
            } catch (const std::bad_alloc&) {
                return none;
            }
        }
        return free_;
    }

    /// Its grant, to be written before take().
    [[nodiscard]] grant& to_be_taken(std::size_t index) noexcept { return slots_[index].what; }
    void take(std::size_t index) noexcept { free_ = std::exchange(slots_[index].next, none); }

    [[nodiscard]] const grant& what(std::size_t index) const noexcept { return slots_[index].what; }

    [[nodiscard]] std::span<batch> batches() noexcept { return batches_; }

    /// What is in flight on other streams than `s`, and the last batch on this one.
    struct neighbours {
        std::size_t last = none;
        bool elsewhere = false, of_others = false;
    };
    /// Batches of two clients on two streams would run into each other, and their points would tell nothing of either:
    /// while others are in flight elsewhere, everything has points of its own.
    neighbours mark_others(client_id c, const Stream& s) noexcept {
        neighbours n;
        for (std::size_t i = 0; i < batches_.size(); ++i) {
            batch& b = batches_[i];
            if (b.at == batch::state::free) continue;
            if (b.is_on(s)) {
                if (n.last == none || b.order > batches_[n.last].order) n.last = i;
                continue;
            }
            n.elsewhere = b.contended = true;
            if (b.client == c) continue;
            b.end_wanted = ends_wanted_ = true;
            n.of_others = true;
        }
        return n;
    }

    /// The submission in `slot` is about to be enqueued on `s`.
    [[nodiscard]] seat board(std::size_t slot, Stream& s, instant now) noexcept {
        const grant& g = slots_[slot].what;
        const auto [last, elsewhere, of_others] = mark_others(g.client, s);
        const bool share = batch::shares && g.may_share && !of_others;
        if (last != none && share && batches_[last].takes(g, quantum_)) {
            batch& b = batches_[last];
            b.enter(g, now);
            return {.slot = slot,
                    .in = last,
                    .needs_end = b.is_full(g, quantum_) && b.entering == 1,
                    .may_stay_open = true};
        }
        seat at{.slot = slot, .in = free_batch(), .needs_begin = true};
        batch& b = batches_[at.in];
        b.begin_with(g, s, ++boarded_);
        b.contended = elsewhere;
        b.busy_until = saturating_add(now, g.predicted);
        at.may_stay_open = share && b.stay_open(s);
        at.needs_end = !at.may_stay_open;
        if (last == none) return at;
        batch& before = batches_[last];
        if (before.at == batch::state::ended && (!before.known || now < before.busy_until)) {
            b.begin = before.end;  // still to come, and so as good a begin as a point of its own
            at.needs_begin = false;
        } else if (before.can_end()) {
            before.at = batch::state::ending;
            before.doubtful |= now > before.busy_until;
            at.ends = last;
        }
        b.busy_until = saturating_add(std::max(now, before.busy_until), g.predicted);
        return at;
    }

    /// It was enqueued. `code`: what is known to have failed already.
    void land(const seat& at, std::optional<point> begin, std::optional<point> end, errc code,
              submission<Stream>* owner) noexcept {
        batch& b = batches_[at.in];
        auto& s = slots_[at.slot];
        s.owner = owner;
        s.code = code;
        s.next = none;
        (b.num_members++ == 0 ? b.first : slots_[b.last].next) = at.slot;
        b.last = at.slot;
        --b.entering;
        b.trouble |= code != errc::none;
        if (code == errc::device_lost) b.end_wanted = ends_wanted_ = true;
        if (begin) {
            if (at.ends != none) end_batch(at.ends, *begin);
            b.begin = *std::move(begin);
        }
        if (end) end_batch(at.in, *std::move(end));
    }

    /// The work of this seat won't come; the slot stays taken. `begin`: if it was recorded.
    void unboard(const seat& at, std::optional<point> begin = {}) noexcept {
        batch& b = batches_[at.in];
        if (at.ends != none) begin ? end_batch(at.ends, *std::move(begin)) : not_ended(at.ends);
        b.predicted -= slots_[at.slot].what.predicted;
        if (--b.entering == 0 && b.num_members == 0) b.clear();
    }

    /// Nothing was enqueued after all.
    grant leave(std::size_t slot) noexcept { return release(slot); }

    /// What the device has finished, in the order in which it finished; never blocks. Of each stream only the oldest is
    /// asked for, because asking may cost as much as a launch.
    /// `give_back(client, time)`: of what was charged earlier, it turned out to be others'. Unless it is to look `anyway`,
    /// it asks for nothing that is predicted to take longer.
    template <std::invocable<const finished&> F, std::invocable<client_id, ns> G>
    void settle(instant now, bool anyway, F on_finished, G give_back) noexcept {
        questions<point> ask;
        while (num_ended_ > 0) {
            batch* first = nullptr;
            ns length{};
            for (auto& b : batches_) {
                if (b.at != batch::state::ended || !(anyway || b.is_due(now)) || !is_oldest(b)) continue;
                const auto span = ask.span(b.begin, b.end);
                if (!span) {
                    if (b.is_due(now)) shift(b, now - b.busy_until + b.predicted / 2);
                    continue;
                }
                if (first != nullptr && elapsed(first->end, b.end) >= ns{0}) continue;
                first = &b;
                length = *span;
            }
            if (first == nullptr) return;
            shift(*first, -first->predicted / 64);
            settle(*first, length, on_finished, give_back);
        }
    }

    /// Calls `f(grant, owner)` for what has been first on its stream for longer than `limit`, and takes its owner from it.
    template <std::invocable<const grant&, submission<Stream>*> F>
    void write_off(instant now, ns limit, F f) noexcept {
        for (auto& b : batches_) {
            if (b.at != batch::state::ended || b.written_off || !is_oldest(b, true)) continue;
            b.head_since = std::min(b.head_since, now);
            if (now - b.head_since < limit) continue;
            b.written_off = true;
            for (auto i = b.first; i != none; i = slots_[i].next)
                f(slots_[i].what, std::exchange(slots_[i].owner, nullptr));
        }
    }

    /// Open batches whose end is wanted: `owner`'s; where nothing else is to be watched, if `quiet`; and those that were
    /// marked. The caller records a point on `b.handle` under no lock and says so with ended() or not_ended().
    /// `now()` is asked only where there is one.
    template <std::invocable F>
    [[nodiscard]] std::size_t next_to_end(const submission<Stream>* owner, bool quiet, F now) noexcept {
        if constexpr (batch::shares) {
            quiet = quiet && !any_ended();
            if (!quiet && owner == nullptr && !std::exchange(ends_wanted_, false)) return none;
            for (std::size_t i = 0; i < batches_.size(); ++i) {
                batch& b = batches_[i];
                if (b.at != batch::state::open) continue;
                b.end_wanted |= quiet || (owner != nullptr && holds(b, owner));
                ends_wanted_ |= b.end_wanted;  // also of those behind this one
                if (!b.end_wanted || !b.can_end()) continue;
                b.at = batch::state::ending;
                b.doubtful |= now() > b.busy_until;
                return i;
            }
        }
        return none;
    }
    [[nodiscard]] const typename batch::handle_type& handle(std::size_t i) const noexcept { return batches_[i].handle; }
    void ended(std::size_t i, point end) noexcept { end_batch(i, std::move(end)); }
    void not_ended(std::size_t i) noexcept {
        batches_[i].at = batch::state::open;
        ends_wanted_ |= batches_[i].end_wanted;
    }

    /// Whether there is a point to watch.
    [[nodiscard]] bool any_ended() const noexcept { return num_ended_ > 0; }
    /// Whether it may be reached by now.
    [[nodiscard]] bool any_due(instant now) const noexcept {
        const auto due = [now](const batch& b) { return b.at == batch::state::ended && b.is_due(now); };
        return std::ranges::any_of(batches_, due);
    }
    /// Whether anything is enqueued and waits for its batch to end.
    [[nodiscard]] bool any_open() const noexcept {
        return std::ranges::any_of(batches_,
                                   [](const batch& b) { return b.at == batch::state::open && b.num_members > 0; });
    }

    /// The ends of what was enqueued, for one watcher at a time: they stay until the next call. Without memory for
    /// all, some of them.
    [[nodiscard]] std::span<const point> watch() noexcept {
        watched_.clear();
        try {
            for (const auto& b : batches_)
                if (b.at == batch::state::ended) watched_.push_back(b.end);
        } catch (const std::bad_alloc&) {  // the first fitted
        }
        return watched_;
    }

    /// The end of this one's work, if there is a point for it.
    [[nodiscard]] std::optional<point> end_of(const submission<Stream>* owner) const noexcept {
        if (owner != nullptr)
            for (const auto& b : batches_)
                if (b.at == batch::state::ended && holds(b, owner)) return b.end;
        return std::nullopt;
    }

    /// Calls `f(client)` once for each batch in flight.
    template <std::invocable<client_id> F>
    void each_client(F f) const {
        for (const auto& b : batches_)
            if (b.num_members > 0) f(b.client);
    }

    /// Ends everything without waiting: calls `end_of(submission)` for each that wasn't a permit.
    template <std::invocable<submission<Stream>&> F>
    void abandon(F end_of) {
        for (auto& s : slots_)
            if (auto* const owner = std::exchange(s.owner, nullptr)) end_of(*owner);
    }

private:
    struct flight {
        grant what{};
        submission<Stream>* owner = nullptr;
        std::size_t next = none;  // in its batch, or of the free ones
        errc code = errc::none;
    };

    void end_batch(std::size_t i, point end) noexcept {
        batches_[i].end = std::move(end);
        batches_[i].at = batch::state::ended;
        batches_[i].handle = {};
        ++num_ended_;
    }

    const grant& release(std::size_t slot) noexcept {
        flight& f = slots_[slot];
        f.owner = nullptr;
        f.next = std::exchange(free_, slot);
        return f.what;
    }

    [[nodiscard]] std::size_t free_batch() noexcept {
        for (std::size_t i = 0; i < batches_.size(); ++i)
            if (batches_[i].at == batch::state::free) return i;
        batches_.emplace_back();  // within what free_slot() reserved: a batch has a member
        return batches_.size() - 1;
    }

    [[nodiscard]] bool is_oldest(const batch& b, bool of_hopeful = false) const noexcept {
        return std::ranges::none_of(batches_, [&](const batch& other) {
            return other.num_members > 0 && other.stream == b.stream && other.order < b.order &&
                   !(of_hopeful && other.written_off);
        });
    }

    [[nodiscard]] bool holds(const batch& b, const submission<Stream>* owner) const noexcept {
        for (auto i = b.first; i != none; i = slots_[i].next)
            if (slots_[i].owner == owner) return true;
        return false;
    }

    // Predictions err, and each rests on the one before it. A question that came too early makes us later by much, one
    // that came in time, perhaps late, earlier by little: so few come too early, as each costs as much as a launch.
    void shift(const batch& from, ns by) noexcept {
        if (!from.known) return;
        for (auto& b : batches_)
            if (b.at != batch::state::free && b.stream == from.stream && b.order >= from.order)
                b.busy_until = saturating_add(b.busy_until, by);
    }

    template <class F, class G>
    void settle(batch& b, ns length, F& on_finished, G& give_back) noexcept {
        using source = outcome::source;
        const bool shared = b.num_members > 1;
        auto left =
            meter_.charge(b.begin, b.end, length, b.client, shared ? ns{0} : slots_[b.first].what.at_least, give_back);
        // The span of a batch that may have had gaps says little: the prediction is better.
        if (b.doubtful) left = std::min(left, b.predicted);
        const auto from = b.doubtful    ? source::doubt
                          : shared      ? source::shared
                          : b.contended ? source::own
                                        : source::alone;
        const auto status = b.end.status();
        const bool written_off = b.written_off;
        const part_of cost_of(left, b.predicted), span_of(length, b.predicted);
        const auto first = b.first;
        const point end = std::exchange(b.end, {});
        b.clear();
        --num_ended_;
        for (auto i = first; i != none;) {
            const flight& s = slots_[i];
            const auto next = s.next;
            const ns part = next == none ? left : std::min(cost_of(s.what.predicted), left);
            const ns span = next == none ? length : std::min(span_of(s.what.predicted), length);
            left -= part;
            length -= span;
            on_finished(finished{.what = s.what,
                                 .slot = i,
                                 .end = end,
                                 .span = span,
                                 .after = length,
                                 .owner = s.owner,
                                 .code = s.code != errc::none ? s.code : status,
                                 .cost = part,
                                 .from = from,
                                 .written_off = written_off});
            (void)release(i);
            i = next;
        }
    }

    std::vector<flight> slots_;
    std::vector<batch> batches_;
    std::vector<point> watched_;
    std::size_t free_ = none;
    std::uint64_t boarded_ = 0;
    std::size_t num_ended_ = 0;  // batches that are ended
    bool ends_wanted_ = false;   // an open one may be marked
    ns quantum_;
    span_meter<point> meter_;
};

}  // namespace gpushare::inline GPUSHARE_ABI::detail
