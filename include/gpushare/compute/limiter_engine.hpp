// SPDX-License-Identifier: Apache-2.0
// What turns in a compute limiter while its threads come by: lets in, enqueues, takes note of what is done, and waits.
// The part of compute_limiter.hpp that nobody calls by name.
//
//   std::unique_lock lock(mutex_);   advance(lock, policy_time(), look_now);
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/compute/door.hpp>
#include <gpushare/compute/flights.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/limiter_event.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/sleepers.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/compute/submission_log.hpp>
#include <gpushare/compute/turns.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/exchange.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI::detail {

/// Every function that takes a lock may let go of it meanwhile; the others hold it throughout.
template <timeline Stream, clock Clock, compute_policy Policy>
class limiter_engine {
public:
    limiter_engine(const limiter_engine&) = delete;
    limiter_engine& operator=(const limiter_engine&) = delete;

protected:
    using point = typename Stream::point;
    using node = submission<Stream>;
    using flight_list = flights<Stream>;
    using flight = typename flight_list::flight;
    using mutex = door<limiter_engine>;
    using hold = std::unique_lock<mutex>;

    /// Whether to look at the device though nothing is predicted to be done, and to have the end of what is open.
    enum class look : bool { if_due, now };

    limiter_engine(limiter_options options, Clock time, Policy policy)
        : clock_(std::move(time)), core_(options, std::move(policy)), flights_(core_.quantum(), options.take_turns) {}

    ~limiter_engine() {
        hold lock(mutex_);
        for (auto& client : clients_) cancel_waiting(lock, client, errc::closed);
        flights_.abandon([this](node& n) { finish(n, errc::closed); });
        clear_up(lock);
    }

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
    [[nodiscard]] errc refusal(client_id c) const noexcept {
        if (!core_.contains(c) || core_.closing(c)) return errc::closed;
        if (lost_) return errc::device_lost;
        return core_.quarantined(c) ? errc::quarantined : errc::none;
    }

    [[nodiscard]] auto head_of(bool second = false) const noexcept {
        return [=, this](client_id c) noexcept { return clients_[c.index].head(second); };
    }

    // Reading a clock costs as much as the rest of a permit.
    [[nodiscard]] instant policy_time() const noexcept {
        return !is_timeless<Policy> || core_.holds_back() || log_.on() ? clock_.now() : instant{};
    }
    // What batches are timed with.
    [[nodiscard]] instant batch_time() const noexcept { return flight_list::batch::shares ? clock_.now() : instant{}; }

    // Notes what is done and lets in what can go. One thread at a time: another's submissions are seen by the one that
    // is at it, which keeps the order of enqueuing that of letting in.
    void advance(hold& lock, instant now, look how) noexcept {
        retire(how);
        if (how == look::now) write_off_stuck();
        if (faulty_) cancel_faulty(lock);
        if (!exchange(advancing_, true)) {
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
            advancing_ = false;
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
        n.at.store(phase::let_in, std::memory_order_relaxed);
        keep_watch();  // over what is in flight already: the callable may take its time
        try {
            await_turn(lock, f, *n.stream);
        } catch (...) {
            n.error = std::current_exception();
            return fail(f, n, errc::submission_failed);
        }
        flights_.board(f, *n.stream, batch_time());
        lock.unlock();
        const auto came = n.run();
        lock.lock();
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

    // Takes note of what the device has finished.
    void retire(look how) noexcept {
        if (!flights_.any_ended()) return;
        flights_.settle(
            batch_time(), how == look::now,
            [this](const auto& f) {
                const auto now = f.what.of_request || log_.on() ? clock_.now() : instant{};
                if (f.written_off) {
                    core_.complete_late(f.what, f.cost, f.times);
                    return log_end(f, {}, now);
                }
                const bool failed = f.code != errc::none;
                const bool timed = f.from == outcome::source::own || f.from == outcome::source::alone;
                const outcome o{f.cost, timed ? f.span : ns{0}, failed, f.from, f.times};
                const auto beyond = core_.complete(f.what, o, now);
                log_end(f, beyond, now);
                if (failed) note_failure(f.what.client, f.code);
                if (f.owner != nullptr) finish(*f.owner, f.code, f.cost);
                if (core_.closing(f.what.client)) sleepers_.wake_all();
            },
            [this](client_id c, ns time) { core_.give_back(c, time); });
    }

    void log_end(const typename flight_list::finished& f, ns beyond, instant now) noexcept {
        if (!log_.on()) return;
        const auto tag = core_.contains(f.what.client) ? core_.settings(f.what.client).tag : 0;
        log_.finish(f, {.client = f.what.client, .tag = tag, .beyond = beyond}, now);
    }

    void write_off_stuck() noexcept {
        if (core_.options().stuck_after <= ns{0}) return;
        const auto give_up = [this](const grant& g, std::uint32_t times, node* owner) {
            core_.write_off(g, times);
            faulty_ = true;
            if (owner != nullptr) finish(*owner, errc::stuck);
            if (core_.closing(g.client)) sleepers_.wake_all();
        };
        flights_.write_off(clock_.now(), core_.options().stuck_after, give_up);
    }

    void note_failure(client_id c, errc code) noexcept {
        faulty_ |= core_.quarantined(c);
        if (code != errc::device_lost) return;
        faulty_ = lost_ = true;
        tell_of_loss(c);
        flights_.each_client([this](client_id other) { tell_of_loss(other); });
    }
    void tell_of_loss(client_id c) noexcept {
        if (exchange(clients_[c.index].told_of_loss, true)) return;
        core_.events().push({.what = limiter_event::kind::device_lost, .client = c});
    }

    // What waits of those whose work isn't let in any more.
    void cancel_faulty(hold& lock) noexcept {
        faulty_ = false;
        for (std::size_t i = 0; i < clients_.size(); ++i)  // there may be more of them after each
            if (const node* const first = clients_[i].waiting.front())
                if (const auto why = refusal(first->client); why != errc::none) cancel_waiting(lock, clients_[i], why);
    }

    void finish(node& n, errc code, ns cost = {}) noexcept {
        n.code = code;
        n.device_time = cost;
        n.finished_at = clock_.now();
        n.at.store(phase::done, std::memory_order_release);
        sleepers_.wake(n);
        if (!n.error && !n.on_done) return pool_->drop(n);
        left_.push(n);  // the user's code, or its destructor: not under the lock
    }

    // One thread at a time, so that a callback that submits what is done at once isn't called from within itself.
    void clear_up(hold& lock) noexcept {
        if (exchange(clearing_up_, true)) return;
        while (node* n = left_.pop()) {
            lock.unlock();
            if (n->on_done) {
                n->on_done({n->code, n->device_time, n->finished_at, n->error});
                n->on_done.reset();
            }
            pool_->drop(*n);
            lock.lock();
        }
        clearing_up_ = false;
    }

    void cancel_waiting(hold& lock, client_queue<Stream>& client, errc why) noexcept {
        fifo<node> cancelled;
        while (node* n = client.waiting.pop()) {
            core_.withdraw(n->client);
            if (n->work) {
                cancelled.push(*n);
            } else {  // at the gate: lives on the waiting thread's stack
                n->code = why;
                n->at.store(phase::done, std::memory_order_release);
                sleepers_.wake(*n);
            }
        }
        while (node* n = cancelled.pop()) {
            lock.unlock();  // the callable is the user's, its destructor too
            n->work.reset();
            lock.lock();
            finish(*n, why);
        }
    }

    // Puts in the books what came in by a lease: whoever holds the mutex finds none.
    void come_in() noexcept {
        if (const auto n = flights_.recall(); n > 0) core_.have_passed(flights_.lent(), n);
    }

    // Waits for `done`, watching the device while nobody else does. Wakes up for `waits_for` and for the watch.
    template <class Done>
    errc wait(hold& lock, Done done, const node* waits_for, instant deadline, const std::stop_token& stop) {
        errc why = errc::none;
        while (!done()) {
            const auto now = clock_.now();
            if (stop.stop_requested()) why = errc::stopped;
            if (now >= deadline) why = errc::deadline_exceeded;
            if (why != errc::none) break;
            if (end_batches(lock, waits_for, true)) continue;
            // While another thread is at it, it will ask the policy again by itself.
            const auto resume = advancing_ ? never : core_.resume_at();
            if (now >= resume) {
                advance(lock, now, look::now);
                continue;
            }
            // An end that couldn't be recorded is tried again.
            const auto again = flights_.any_open() ? now + watch_slice : never;
            const auto until = std::min({deadline, resume, now + watch_slice});
            if (!watched_ && flights_.any_ended()) {
                watched_ = true;
                look_at(lock, flights_.watch(), until);
                watched_ = false;
                continue;
            }
            if (const auto own = flights_.end_of(waits_for)) {  // the watch may have begun before it was enqueued
                look_at(lock, {&*own, 1}, until);
                continue;
            }
            flights_.await();
            if (!watched_ && flights_.any_ended()) continue;  // just landed
            sleepers_.sleep(mutex_, waits_for, now, std::min(deadline, again), resume);
        }
        keep_watch();  // somebody else's turn
        return why;
    }

    void look_at(hold& lock, std::span<const point> points, instant until) noexcept {
        lock.unlock();
        try {
            (void)point::wait_any(points, until);  // retire() sees which
        } catch (...) {  // a device that can't be asked: again in a slice, its points may be reached then
            std::this_thread::sleep_for(watch_slice);
        }
        lock.lock();
        advance(lock, policy_time(), look::now);
    }

    void keep_watch() noexcept {
        if (!watched_ && !sleepers_.empty()) sleepers_.call_one(flights_.any_ended(), core_.resume_at());
    }

    void wake_all() noexcept {
        const std::lock_guard lock(mutex_);
        sleepers_.wake_all();
    }

    friend mutex;

    Clock clock_;
    mutable mutex mutex_{*this};
    limiter_core<Policy> core_;
    std::deque<client_queue<Stream>> clients_;  // stays put while a callable is destroyed under no lock
    flight_list flights_;
    submission_log<point> log_;
    sleepers<node> sleepers_;
    fifo<node> left_;  // done, with something of the user's to call or to destroy under no lock
    bool advancing_ = false, watched_ = false, clearing_up_ = false;
    bool lost_ = false, faulty_ = false;
    std::shared_ptr<submission_pool<Stream>> pool_ = std::make_shared<submission_pool<Stream>>();
};

}  // namespace gpushare::inline GPUSHARE_ABI::detail
