// SPDX-License-Identifier: Apache-2.0
// What turns in a compute limiter while its threads come by: lets in, enqueues, takes note of what is done, and waits.
// The part of compute_limiter.hpp that nobody calls by name.
//
//   std::unique_lock lock(mutex_);   advance(lock, policy_time(), look_now);
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/compute/detail/flights.hpp>
#include <gpushare/compute/detail/limiter_outcomes.hpp>
#include <gpushare/compute/detail/sleepers.hpp>
#include <gpushare/compute/detail/turns.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Every function that takes a lock may let go of it meanwhile; the others hold it throughout.
template <timeline Stream, clock Clock, compute_policy Policy>
class limiter_engine : public limiter_outcomes<Stream, Clock, Policy> {
    using base = limiter_outcomes<Stream, Clock, Policy>;

protected:
    using base::base;
    using typename base::flight_list;
    using typename base::hold;
    using typename base::look;
    using typename base::node;
    using typename base::point;
    using flight = typename flight_list::flight;

    using base::cancel_faulty;
    using base::clear_up;
    using base::clients_;
    using base::clock_;
    using base::core_;
    using base::faulty_;
    using base::finish;
    using base::flights_;
    using base::left_;
    using base::log_;
    using base::mutex_;
    using base::policy_time;
    using base::refusal;
    using base::retire;
    using base::sleepers_;
    using base::write_off_stuck;

    errc enter(node& n, client_id c, instant now, const submit_options& o) noexcept {
        if (const auto why = no_entry(c); why != errc::none) return why;
        line_up(n, c, now, o);
        core_.arrive(c, now, n.facts);
        return errc::none;
    }
    void line_up(node& n, client_id c, instant now, const submit_options& o) noexcept {
        n.client = c;
        n.facts = head_of_line(o, now, core_.bound_of(c));
        clients_[c.index].waiting.push(n);
    }
    [[nodiscard]] errc no_entry(client_id c) const noexcept {
        if (const auto why = refusal(c); why != errc::none) return why;
        return core_.usage(c).waiting >= core_.options().queue_limit ? errc::queue_full : errc::none;
    }
    [[nodiscard]] auto head_of(bool second = false) const noexcept {
        return [=, this](client_id c) noexcept { return clients_[c.index].head(second); };
    }

    // Notes what is done and lets in what can go. Of one level, one thread at a time enqueues: another's submissions are seen
    // by the one that is at it, which keeps the order of enqueuing that of letting in.
    void advance(hold& lock, instant now, look how) noexcept {
        retire(how);
        if (how == look::now) write_off_stuck();
        if (faulty_) cancel_faulty(lock);
        while (node* const n = let_in(now)) {
            if (n->work) {
                enqueue(lock, *n->slot, *n);
                retire(look::if_due);
                if (faulty_) cancel_faulty(lock);
                now = policy_time();
            } else {
                n->at.store(phase::let_in, std::memory_order_relaxed);
                sleepers_.wake(*n);
            }
        }
        // Who waits for room, or wants to know now, needs a point to watch.
        end_batches(lock, nullptr, how == look::now || core_.num_waiting() > 0);
        keep_watch();
        if (!left_.empty()) clear_up(lock);
    }

    // The next one, with a slot; null if there is none to be let in.
    node* let_in(instant now) noexcept {
        flight* const slot = flights_.free_slot();
        if (slot == nullptr || !core_.next(slot->what, now, head_of(true))) return nullptr;
        auto& client = clients_[slot->what.client.index];
        node* const n = client.waiting.pop();
        n->slot = slot;
        flights_.take(*slot);
        if (client.waits_for_room > 0) sleepers_.wake_all();
        if (log_.on()) log_.let_in(slot->number, n->facts.arrival, clock_.now());
        return n;
    }

    void enqueue(hold& lock, flight& f, node& n) noexcept {
        core_.set_enqueuing(f.what, true);
        n.at.store(phase::let_in, std::memory_order_relaxed);
        keep_watch();  // over what is in flight already: the callable may take its time
        try {
            await_turn(lock, f, *n.stream);
        } catch (...) {
            core_.set_enqueuing(f.what, false);
            n.error = std::current_exception();
            return fail(f, n, errc::submission_failed);
        }
        f.boarded = clock_.now();
        flights_.board(f, *n.stream, flight_list::batch::shares ? f.boarded : instant{});
        lock.unlock();
        const auto came = n.run();
        if (f.needs_end) f.landed = clock_.now();
        lock.lock();
        core_.set_enqueuing(f.what, false);
        if (came == node::came::to_its_end || (came == node::came::without_end && f.may_stay_open)) {
            flights_.put(f, n.code, &n);
        } else {
            flights_.unboard(f);
            fail(f, n, n.code);
        }
    }
    void fail(flight& f, node& n, errc why) noexcept {
        leave(f);
        finish(n, why);
    }

    // Makes `s` wait for others' work, if it isn't to run beside it. What throws is the stream's.
    void await_turn(hold& lock, const flight& f, Stream& s) {
        if constexpr (joining_timeline<Stream>) {
            if (!core_.options().take_turns) return;
            flights_.mark_others(f.what, s);
            end_batches(lock, nullptr, false);
            take_turn(lock, flights_, f.what, s);
        }
    }

    // Nothing was enqueued after all.
    void leave(flight& f) noexcept {
        core_.cancel(f.what);
        log_.leave(f.number);
        if (core_.closing(f.what.client)) sleepers_.wake_all();
        flights_.leave(f);
    }

    // Records the ends of batches that somebody wants. Returns whether there were any.
    bool end_batches(hold& lock, const node* wanted, bool quiet) noexcept {
        bool any = false;
        if constexpr (flight_list::batch::shares) {
            const auto now = [this] { return clock_.now(); };
            for (auto i = flights_.next_to_end(wanted, quiet, now); i != flight_list::none;
                 i = flights_.next_to_end(wanted, quiet, now)) {
                auto handle = flights_.handle(i);
                std::optional<point> end;
                lock.unlock();
                try {
                    end = handle.record();
                } catch (...) {  // it is captured, say: again later
                }
                lock.lock();
                if (!end) {
                    flights_.not_ended(i);
                    return any;
                }
                flights_.ended(i, *std::move(end));
                any = true;
                lock.unlock();
                handle = {};  // perhaps the last of its stream
                lock.lock();
            }
        }
        return any;
    }

    // Waits for `done`, watching the device while nobody else does. Wakes up for `waits_for` and for the watch.
    template <class Done>
    errc wait(hold& lock, Done done, node* waits_for, instant deadline, const std::stop_token& stop) {
        errc why = errc::none;
        const auto me = std::this_thread::get_id();
        instant patient_until = never;  // then it watches what others were expected to
        while (!done()) {
            const auto now = clock_.now();
            if (stop.stop_requested()) why = errc::stopped;
            if (now >= deadline) why = errc::deadline_exceeded;
            if (why != errc::none) break;
            if (end_batches(lock, waits_for, true)) continue;
            const auto resume = core_.resume_at();
            if (now >= resume) {
                advance(lock, now, look::now);
                continue;
            }
            // An end that couldn't be recorded is tried again.
            const auto again = flights_.any_open() ? now + slice_.length() : never;
            const auto until = std::min({deadline, resume, now + slice_.length()});
            const auto own = flights_.end_of(waits_for);
            if (!watched_ && any_unwatched(now >= patient_until, waits_for, me)) {
                watched_ = true;
                look_at(lock, flights_.watch(), own ? waits_for : nullptr, until);  // its own are among them
                slice_.learn(flights_.end_watch());
                watched_ = false;
                patient_until = never;
                continue;
            }
            if (own) {
                look_at(lock, {&*own, 1}, waits_for, until);
                continue;
            }
            flights_.await();
            if (!watched_ && any_unwatched(now >= patient_until, waits_for, me)) continue;  // just landed
            if (watched_ || !flights_.any_ended())
                patient_until = never;
            else if (now >= patient_until || patient_until == never)
                patient_until = now + watch_slice::patience;
            sleepers_.sleep(lock, waits_for, now, std::min(deadline, again), std::min(resume, patient_until));
        }
        keep_watch();  // somebody else's turn
        return why;
    }

    // `own`: among what the points are the ends of.
    void look_at(hold& lock, std::span<const point> points, node* own, instant until) noexcept {
        if (own != nullptr) ++own->looked_at, own->looker = std::this_thread::get_id();
        lock.unlock();
        try {
            (void)point::wait_any(points, until);  // retire() sees which
        } catch (...) {  // a device that can't be asked: again in a slice, its points may be reached then
            std::this_thread::sleep_for(watch_slice::shortest);
        }
        lock.lock();
        advance(lock, policy_time(), look::now);
        if (own != nullptr) --own->looked_at;
    }

    // Whether there is something to watch. Of work whose client's latest was waited for by a thread that isn't in here now,
    // it is expected that the same one comes and waits again, unless that is `me`; `all`: that, too.
    [[nodiscard]] bool any_unwatched(bool all, const node* mine = nullptr, std::thread::id me = {}) noexcept {
        return flights_.any_unwatched(mine, [&](client_id c) {
            const auto attendant = clients_[c.index].attendant;
            return !all && attendant != std::thread::id{} && attendant != me && !sleepers_.contains(attendant);
        });
    }
    // Who leaves, or brings work, calls one of those that sleep, if it doesn't wake up in time by itself.
    void keep_watch() noexcept {
        if (watched_ || sleepers_.empty()) return;
        if (any_unwatched(false)) return sleepers_.call_one(instant::min());
        const auto resume = core_.resume_at();
        const auto by = core_.is_held_until(resume) ? saturating_add(resume, watch_slice::patience) : resume;
        sleepers_.call_one(any_unwatched(true) ? std::min(by, clock_.now() + watch_slice::patience) : by);
    }

    void wake_all() noexcept {
        const std::lock_guard lock(mutex_);
        sleepers_.wake_all();
    }

    watch_slice slice_;
    bool watched_ = false;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
