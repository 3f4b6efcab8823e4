// SPDX-License-Identifier: Apache-2.0
// How submissions that were let in get on their way: which batch each goes in, the points that are to be recorded around
// it, and what is known of it once it is enqueued. The first half of flights.hpp; under the limiter's mutex, but for
// land().
//
//   detail::boarding<stream> gate(quantum, options.take_turns);
//   auto* slot = gate.free_slot();  slot->what = grant;  gate.take(*slot);
//   gate.board(*slot, s, now);                   // then, under no lock, the points that it asks for, and the work
//   gate.put(*slot, errc::none, &work);          // or, under no lock, land()
//
// A point costs as much as a short kernel does. So short submissions of one client on one stream share a batch (batch.hpp
// says when), which ends at one point. Those that nothing tells apart become one with a count: then letting them in costs
// something each time, and taking them out of the books once a batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/batch.hpp>
#include <gpushare/compute/detail/flight_slots.hpp>
#include <gpushare/compute/grant.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Not thread-safe but for land(). Allocates while more are in flight than ever before.
template <timeline Stream>
class boarding {
public:
    using point = typename Stream::point;
    using batch = detail::batch<Stream>;
    using flight = detail::flight<Stream>;
    static constexpr std::size_t none = flight::none;

    /// `quantum`: how long a batch may be predicted to take. `turns`: streams of different clients wait for each other,
    /// where they can.
    boarding(ns quantum, bool turns) : quantum_(quantum), turns_(joining_timeline<Stream> && turns) {
        // With room for one, running out of memory delays what waits and never strands it; with this, nothing is
        // allocated later unless there are many levels.
        batches_.reserve(slots_.size());
    }

    /// A slot for one more, its grant to be written before take(); null when memory runs out, and then others are in
    /// flight.
    [[nodiscard]] flight* free_slot() noexcept {
        if (slots_.free() == nullptr) try {
                if (batches_.capacity() <= slots_.size()) batches_.reserve(slots_.size() * 2);
                slots_.grow();
            } catch (const std::bad_alloc&) {
            }
        return slots_.free();
    }
    void take(flight& f) noexcept { slots_.take(f); }

    [[nodiscard]] std::span<batch> batches() noexcept {
        gather();
        return in_use();
    }

    /// What is in flight on other streams than `s`, and the last batch on this one.
    struct neighbours {
        std::size_t last = none;
        bool elsewhere = false;
        bool beside = false;                  // others', not in turn
        ns in_front{};                        // what all of these take that don't run beside it, as predicted
        instant busy_until = instant::min();  // with others', in turn, as far as that can be relied on
    };
    /// Batches of two clients on two streams would run into each other, and their points would tell nothing of either:
    /// while others are in flight elsewhere, everything has points of its own. Where they take turns, a batch ends with
    /// the turn.
    void mark_others(const grant& g, const Stream& s) noexcept {
        gather();
        (void)mark_gathered(g, s, instant::min());
    }

    /// The submission in `f` is about to be enqueued on `s`, with the points around it that it says then.
    void board(flight& f, Stream& s, instant now) noexcept {
        gather();
        board_gathered(f, s, now);
    }

    /// It was enqueued. `code`: what is known to have failed already.
    void put(flight& f, errc code, submission<Stream>* owner) noexcept {
        f.owner = owner;
        f.code = code;
        join(f);
    }
    /// The same for a permit, by the thread that holds it, under no lock. True if somebody waits for it: then lock, and
    /// keep_awaiting() says when not to any longer.
    [[nodiscard]] bool land(flight& f, errc code) noexcept { return slots_.land(f, code); }

    /// Whoever lands from now on is to tell; what landed before shows itself to the next question.
    void await() noexcept { slots_.await(true); }
    /// Unless `wanted`, nobody waits any more for what lands.
    void keep_awaiting(bool wanted) noexcept { slots_.await(wanted || ends_wanted_); }

    /// The work of this one won't come; the slot stays taken.
    void unboard(flight& f) noexcept {
        batch& b = batches_[f.in];
        if (f.ends != none) f.begin ? ended(f.ends, *std::move(f.begin)) : not_ended(f.ends);
        f.ends = none;
        f.begin.reset();
        if (f.needs_end) b.ends_soon = false;
        b.predicted -= f.what.predicted;
        if (--b.entering == 0 && b.num_members == 0) b.clear();
    }

    /// Nothing was enqueued after all: the slot is free.
    void leave(flight& f) noexcept {
        f.begin.reset();
        slots_.release(f);
    }

    /// Whether members of a batch that are alike are kept apart, from now on, for somebody looks at each.
    void keep_apart(bool each) noexcept { apart_ = each; }

    /// A point was recorded behind the members of this open batch; or it couldn't be.
    void ended(std::size_t i, point end) noexcept {
        batches_[i].end = std::move(end);
        batches_[i].at = batch::state::ended;
        batches_[i].handle = {};
        batches_[i].followed_on = nullptr;  // who waits for what was enqueued when it came waits for this, too
        ++num_ended_;
    }
    void not_ended(std::size_t i) noexcept {
        batches_[i].at = batch::state::open;
        if (batches_[i].end_wanted) want_ends();
    }

protected:
    // Takes note of what permits have enqueued.
    void gather() noexcept {
        slots_.gather([this](flight& f) {
            if (f.in == none) board_gathered(f, *f.stream, {});
            join(f);
        });
    }

    // All that aren't free, and perhaps some that are.
    [[nodiscard]] std::span<batch> in_use() noexcept { return {batches_.data(), in_use_}; }
    void shrink_in_use() noexcept {
        while (in_use_ > 0 && batches_[in_use_ - 1].at == batch::state::free) --in_use_;
    }

    // An open batch is to end, and may have to wait for who enters it.
    void want_ends() noexcept {
        if constexpr (batch::shares)
            if (!std::exchange(ends_wanted_, true)) slots_.await(true);
    }

    // Beside others' work, what costs a certain time lasts longer: they take turns, or share it. By how much is learnt, so
    // that few ends are asked for too early.
    void learn_stretch(ns predicted, ns lasted) noexcept {
        if (predicted <= ns{0}) return;
        const auto seen = static_cast<double>(lasted.count()) / static_cast<double>(predicted.count());
        stretch_ += (std::clamp(seen, 1.0, most_stretch) - stretch_) / 8;
    }

    flight_slots<Stream> slots_;
    std::vector<batch> batches_;
    std::size_t in_use_ = 0;     // of these, the first ones
    std::size_t num_ended_ = 0;  // batches that are ended
    bool ends_wanted_ = false;   // an open one may be marked
    std::uint64_t boarded_ = 0;  // batches so far: the order of the latest
    ns quantum_;
    bool turns_;

private:
    static constexpr double most_stretch = 16;
    [[nodiscard]] ns stretched(ns cost) const noexcept {
        constexpr double almost_for_ever = 9e18;
        return ns{static_cast<ns::rep>(std::min(static_cast<double>(cost.count()) * stretch_, almost_for_ever))};
    }

    neighbours mark_gathered(const grant& g, const Stream& s, instant now) noexcept {
        neighbours n;
        std::uint64_t order = 0;
        for (std::size_t i = 0; batch & b : in_use()) {
            const auto at = i++;
            if (b.at == batch::state::free) continue;
            if (b.is_on(s)) {
                n.in_front = saturating_add(n.in_front, b.predicted);
                if (b.order > order) n.last = at;
                order = std::max(order, b.order);
                continue;
            }
            n.elsewhere = b.contended = true;
            if (b.client == g.client) continue;
            if (turns_ && b.level == g.level) {
                n.in_front = saturating_add(n.in_front, b.predicted);
                n.busy_until = std::max(n.busy_until, std::min(b.busy_until, saturating_add(now, quantum_)));
            } else {
                n.beside = true;
            }
            if (b.at == batch::state::ended) continue;
            b.end_wanted = true;
            want_ends();
        }
        return n;
    }

    void board_gathered(flight& f, Stream& s, instant now) noexcept {
        const grant& g = f.what;
        // The usual case: another one for the batch that was joined before. It takes nobody once another begins behind it, or
        // another client's elsewhere.
        if (batch::shares && latest_ != none && g.may_share && batches_[latest_].is_on(s) &&
            batches_[latest_].takes(g, quantum_))
            return enter(f, latest_, now);
        const auto n = mark_gathered(g, s, now);
        const bool share = batch::shares && g.may_share && !n.beside;
        if (n.last != none && share && batches_[n.last].takes(g, quantum_)) {
            latest_ = n.last;
            return enter(f, n.last, now);
        }
        f.in = free_batch();
        batch& b = batches_[f.in];
        b.begin_with(g, s, ++boarded_);
        b.contended = n.elsewhere;
        b.beside_others = n.beside;
        b.more = n.beside ? stretched(g.predicted) - g.predicted : ns{0};
        const auto from = std::max(now, n.busy_until);
        b.busy_until = saturating_add(from, g.predicted);
        f.in_front = n.in_front;
        f.needs_begin = true;
        f.may_stay_open = share && b.stay_open(s);
        f.needs_end = !f.may_stay_open;
        if (n.last == none) return;
        batch& before = batches_[n.last];
        if (before.at == batch::state::ended && before.is_to_come(now)) {
            b.begin = before.end;  // as good a begin as a point of its own
            b.begun = true;
            f.needs_begin = false;
        } else if (before.can_end()) {
            before.at = batch::state::ending;
            before.doubtful |= now > before.busy_until;
            f.ends = n.last;
        } else if (before.at == batch::state::open && static_cast<bool>(before.handle) && !before.ends_soon) {
            // Somebody enters it, and its end can only be recorded later.
            before.end_wanted = before.overtaken = true;
            want_ends();
        }
        b.busy_until = saturating_add(std::max(from, before.busy_until), g.predicted);
    }

    void enter(flight& f, std::size_t into, instant now) noexcept {
        batch& b = batches_[into];
        b.enter(f.what, now);
        f.in = into;
        f.needs_begin = false;
        f.needs_end = b.ends_soon = b.entering == 1 && b.is_full(f.what, quantum_);
        f.may_stay_open = true;
    }

    // It is enqueued: among the members of its batch, and one with the latest of these where nothing tells them apart.
    void join(flight& f) noexcept {
        batch& b = batches_[f.in];
        --b.entering;
        b.trouble |= f.code != errc::none;
        if (f.code == errc::device_lost) {
            b.end_wanted = true;
            want_ends();
        }
        if (f.begin) {
            if (f.ends != none) ended(f.ends, *f.begin);
            b.begin = *std::move(f.begin);
            b.begun = true;
            f.begin.reset();
        }
        if (f.end) {
            ended(f.in, *std::move(f.end));
            f.end.reset();
        } else if (f.needs_end) {  // it couldn't: somebody has to, whatever began behind it
            b.ends_soon = false;
            b.end_wanted = true;
            want_ends();
        }
        f.next = nullptr;
        flight* const last = b.last;
        const bool joins_last = b.num_members++ != 0 && !apart_ && is_plain(f) && is_like(*last, f.what);
        if (joins_last) {
            last->what.predicted += f.what.predicted;
            ++last->times;
            return slots_.release(f);
        }
        (last == nullptr ? b.first : last->next) = &f;
        b.last = &f;
    }
    // Of a permit, and went well.
    [[nodiscard]] static bool is_plain(const flight& f) noexcept { return f.owner == nullptr && f.code == errc::none; }
    // And was let in on these terms.
    [[nodiscard]] static bool is_like(const flight& f, const grant& g) noexcept {
        return is_plain(f) && f.what.key == g.key && f.what.longest == g.longest && f.what.policy == g.policy &&
               f.what.of_request == g.of_request;
    }

    [[nodiscard]] std::size_t free_batch() noexcept {
        for (std::size_t i = 0; i < in_use_; ++i)
            if (batches_[i].at == batch::state::free) return i;
        if (in_use_ == batches_.size())
            batches_.emplace_back();  // within what free_slot() reserved: a batch has a member
        return in_use_++;
    }

    std::size_t latest_ = none;  // that was joined
    double stretch_ = 1;
    bool apart_ = false;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
