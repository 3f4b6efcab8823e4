// SPDX-License-Identifier: Apache-2.0
// A compute limiter: shares one device's time among clients, by holding submissions back and letting them in one by
// one, a few in flight. A gate (enqueue, acquire) lets the calling thread enqueue; a queue (submit) takes a callable and
// enqueues it when its turn comes.
//
//   gpushare::compute_limiter<stream, clock> limiter{{.depth = 3}, clock};
//   auto chat = limiter.add({.weight = 70_pct, .level = {1}});
//   limiter.enqueue(chat, s, [&](auto& s) { s.launch(shape, kernel); });               // the gate
//   auto ticket = limiter.submit(chat, s, [&](auto& s) { s.launch(shape, kernel); });  // the queue
//
// There is no thread in here. Whoever calls drives: a submitter lets in what can go at once; whoever waits (at the gate,
// for a ticket, in run()) watches the device for the others too, one thread at a time. A server that only submits and
// never waits gives run() a thread of its own. A thread that waits for each submission of its client leaves the others
// asleep; what ends that nobody expected to have to look at is seen within a millisecond.
//
// A client is charged the device time between the points recorded around its work (span_meter says how), but for the time
// that its thread was held up between them (held_up.hpp). Where points cost something, short submissions of a client that
// alone uses the device share theirs (batch.hpp): then tickets are done together, when the batch ends, and whoever waits or
// polls ends it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <stop_token>
#include <utility>

#include <gpushare/compute/detail/limiter_gate.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/limiter_event.hpp>
#include <gpushare/compute/permit.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/compute/submission_log.hpp>
#include <gpushare/compute/ticket.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Thread-safe; neither copied nor moved. It is destroyed once every call, a permit's too, has returned, and ends all its
/// tickets with errc::closed then. Streams, and everything submitted, must outlive their use. Callables run on whichever
/// thread drives, under no lock, those of one level and of one client one at a time and in the order in which they were let
/// in; those of several levels don't wait for each other, and use a stream that they share from several threads. One that
/// waits for this limiter never returns.
///
/// Faults: a callable that throws and work that fails end their own ticket with that error (of short submissions that
/// are timed together, each of these). A client that fails `quarantine_after` times in a row is refused until it is
/// pardoned: errc::quarantined. Once the device is lost, so is everything in flight and waiting, and everything that
/// comes: errc::device_lost; take_event() names who was in flight. Recovery is another limiter on another node, or in
/// another process: close() and the destructor return, and accounts can still be read.
template <timeline Stream, clock Clock, compute_policy Policy = weighted_fair>
class compute_limiter : private detail::limiter_gate<Stream, Clock, Policy> {
    using base = detail::limiter_gate<Stream, Clock, Policy>;
    using typename base::flight;
    using typename base::hold;
    using typename base::look;
    using typename base::node;

public:
    using stream = Stream;
    using point = typename Stream::point;
    using ticket = gpushare::ticket<compute_limiter>;
    using permit = gpushare::permit<compute_limiter>;

    explicit compute_limiter(limiter_options options = {}, Clock time = {}, Policy policy = {})
        : base(options, std::move(time), std::move(policy)) {}

    [[nodiscard]] client_id add(const client_settings& s) {
        const std::lock_guard lock(mutex_);
        if (clients_.size() <= core_.num_indices()) clients_.resize(core_.num_indices() + std::size_t{1});
        const auto c = core_.add(s);
        clients_[c.index].begin(s.level);
        return c;
    }

    /// Live: in force for what is let in from now on. errc::closed: no such client; share_exceeded: the policy refuses.
    errc change(client_id c, const client_settings& s) {
        std::unique_lock lock(mutex_);
        if (!core_.contains(c)) return errc::closed;
        auto& client = clients_[c.index];
        const auto why = core_.change(c, at_level(s, client.level_with(s.level)));
        if (why == errc::none) client.own_level = s.level;
        this->advance(lock, this->policy_time(), look::now);  // there may be room on another level
        return why;
    }

    /// Live: `p`, which has no clients yet, decides from now on; nobody is owed the past. share_exceeded: it refuses.
    errc set_policy(Policy p) {
        std::unique_lock lock(mutex_);
        const auto now = this->policy_time();
        const auto why = core_.set_policy(p, now);
        this->advance(lock, now, look::now);
        return why;
    }

    /// Takes no more submissions of `c`, cancels those that wait, waits until `deadline` for those in flight, held permits
    /// included, and forgets the client, leaving in `account`, if given, what it has used. False at the deadline: call again.
    bool close(client_id c, instant deadline = never, const std::stop_token& stop = {},
               client_usage* account = nullptr) {
        const std::stop_callback on_stop(stop, [this] { this->wake_all(); });
        std::unique_lock lock(mutex_);
        if (!core_.contains(c)) return true;
        core_.close(c);
        this->cancel_waiting(lock, clients_[c.index], errc::closed);
        this->advance(lock, this->policy_time(), look::now);
        const auto drained = [&] { return !core_.contains(c) || core_.usage(c).in_flight == 0; };
        if (this->wait(lock, drained, nullptr, deadline, stop) != errc::none) return false;
        if (!core_.contains(c)) return true;
        if (account != nullptr) *account = core_.usage(c);
        core_.remove(c);
        return true;
    }

    /// Waits at the gate for a permit. Codes: deadline_exceeded, stopped, closed, queue_full, quarantined, device_lost.
    /// Without contention: one mutex, no allocation, no system call.
    [[nodiscard]] result<permit> acquire(client_id c, instant deadline = never, const std::stop_token& stop = {},
                                         const submit_options& o = no_options) {
        const std::stop_callback on_stop(stop, [this] { this->wake_all(); });
        std::unique_lock lock(mutex_);
        const auto now = this->policy_time();
        if constexpr (!base::shares_points) this->retire(look::if_due);
        if (const auto why = this->no_entry(c); why != errc::none) return turn_away(lock, now, why);
        if (flight* const slot = this->pass(c, now, o)) return permit(*this, *slot, slot->what.bound);
        return wait_at_gate(lock, c, now, o, deadline, stop);
    }

    /// A permit if there is one at once, else deadline_exceeded.
    [[nodiscard]] result<permit> try_acquire(client_id c) { return acquire(c, instant::min()); }

    /// acquire(c)->enqueue(s, work) in one step: cheaper where streams share points. What `work` throws passes through. Codes are those of acquire,
    /// and then `work` wasn't called.
    template <std::invocable<Stream&> F>
    errc enqueue(client_id c, Stream& s, F&& work, instant deadline = never, const std::stop_token& stop = {},
                 const submit_options& o = no_options) {
        const auto go = [&](result<permit> p) {
            if constexpr (base::shares_points) {
                if (!p) return p.code();
                this->await_turn(*p->slot_, s);
                this->board(*p->slot_, s);
                p->enqueue_boarded(s, work);
            } else if (p) {
                p->enqueue(s, work);
            }
            return p.code();
        };
        if (!base::shares_points || core_.options().take_turns) return go(acquire(c, deadline, stop, o));
        const auto now = this->batch_time();
        const std::stop_callback on_stop(stop, [this] { this->wake_all(); });
        std::unique_lock lock(mutex_);
        if (flights_.any_due(now)) this->retire(look::if_due);
        if (const auto why = this->no_entry(c); why != errc::none) return turn_away(lock, now, why);
        flight* const slot = this->pass(c, now, o);
        if (slot == nullptr) {
            auto p = wait_at_gate(lock, c, now, o, deadline, stop);
            lock.unlock();
            return go(std::move(p));
        }
        permit p(*this, *slot, {});
        flights_.board(*slot, s, now);
        lock.unlock();
        p.enqueue_boarded(s, work);
        return errc::none;
    }

    /// Queues `work`, which enqueues onto `s` when its turn comes: in this call if that is now. `on_done`, if given, is
    /// called once it is done, failed or was cancelled. Codes: closed, queue_full (after waiting until `room_by`),
    /// stopped, quarantined, device_lost, invalid_specification (no callable). Nothing is allocated once as many
    /// submissions were out as ever are.
    [[nodiscard]] result<ticket> submit(client_id c, Stream& s, submission_work<Stream> work,
                                        const submit_options& o = no_options, submission_callback on_done = {},
                                        const std::stop_token& stop = {}) {
        const std::stop_callback on_stop(stop, [this] { this->wake_all(); });
        if (!work) return errc::invalid_specification;
        auto& n = pool_->acquire();
        ticket t(*this, pool_, n);
        n.work = std::move(work);
        n.stream = &s;
        std::unique_lock lock(mutex_);
        const auto now = this->policy_time();
        auto why = this->enter(n, c, now, o);
        if (why == errc::queue_full && o.room_by != instant::min()) why = wait_for_room(lock, n, c, o, stop);
        if (why != errc::none) {
            lock.unlock();
            pool_->drop(n);
            return why;
        }
        n.on_done = std::move(on_done);
        this->advance(lock, now, look::if_due);
        return result<ticket>(std::move(t));  // nvcc doesn't move a local into another type by itself
    }

    /// Lets in what can go and takes note of what is done, without waiting.
    void poll() {
        std::unique_lock lock(mutex_);
        this->advance(lock, this->policy_time(), look::now);
    }

    /// Drives the limiter until a stop is requested: the dispatcher, on a thread of the embedder's.
    void run(const std::stop_token& stop) {
        const std::stop_callback on_stop(stop, [this] { this->wake_all(); });
        std::unique_lock lock(mutex_);
        this->advance(lock, this->policy_time(), look::now);
        this->wait(
            lock, [] { return false; }, nullptr, never, stop);
    }

    /// What `c` has used, as far as it is known now. Zero for a client that isn't there.
    [[nodiscard]] client_usage usage(client_id c) {
        std::unique_lock lock(mutex_);
        this->advance(lock, this->policy_time(), look::now);
        return core_.contains(c) ? core_.usage(c) : client_usage{};
    }

    /// When to poll() though nothing happened, if nobody waits or runs; the longest wait of the highest level. See
    /// limiter_core.
    [[nodiscard]] instant resume_at() const {
        const std::lock_guard lock(mutex_);
        return core_.resume_at();
    }
    [[nodiscard]] ns wait_bound() const {
        const std::lock_guard lock(mutex_);
        return core_.wait_bound();
    }

    /// What happened that nobody asked for, oldest first; the latest 64 are kept.
    template <class Event = limiter_event>  // so that including this costs no more than it must
    std::optional<Event> take_event() {
        const std::lock_guard lock(mutex_);
        return core_.events().take();
    }
    [[nodiscard]] std::uint64_t events_dropped() const {
        const std::lock_guard lock(mutex_);
        return core_.events().dropped();
    }

    /// On the wait of a submission of `c` that comes now; see limiter_core. Its ticket or permit says it, too. Zero for a
    /// client that isn't there, and where no length is known.
    [[nodiscard]] ns bound_of(client_id c) const {
        const std::lock_guard lock(mutex_);
        return core_.contains(c) ? core_.bound_of(c) : ns{0};
    }

    /// Keeps a record of the latest `most` submissions that end and haven't been taken, from now on; 0: of none, as in the
    /// beginning. Costs a few readings of the clock each. Forgets those there are. Throws std::bad_alloc.
    void record(std::size_t most) {
        const std::lock_guard lock(mutex_);
        log_.start(most, clock_.now());
        flights_.keep_apart(log_.on());
    }
    /// Takes the oldest that fit, in the order in which the device finished them. Returns how many.
    std::size_t take_records(std::span<submission_record> into) noexcept {
        const std::lock_guard lock(mutex_);
        return log_.take(into);
    }
    /// Records that made room for later ones.
    [[nodiscard]] std::uint64_t records_lost() const noexcept {
        const std::lock_guard lock(mutex_);
        return log_.lost();
    }

    /// Ends a quarantine. errc::closed: no such client.
    errc pardon(client_id c) {
        const std::lock_guard lock(mutex_);
        if (!core_.contains(c)) return errc::closed;
        core_.pardon(c);
        return errc::none;
    }

    /// A request of `c` begins or ends; see request.hpp, which says so by itself. `level`: the client goes at this level
    /// until then, if that is above its own. closed: no such client; share_exceeded: the policy refuses the level.
    errc begin_request(client_id c, priority level = no_priority) {
        std::unique_lock lock(mutex_);
        if (!core_.contains(c)) return errc::closed;
        auto& client = clients_[c.index];
        if (level != no_priority) {
            client.raised.reserve(client.raised.size() + 1);
            const auto& now = core_.settings(c);
            if (level > now.level)
                if (const auto why = core_.change(c, at_level(now, level)); why != errc::none) return why;
            client.raised.push_back(level);
        }
        ++client.requests;
        if (level != no_priority) this->advance(lock, this->policy_time(), look::now);
        return errc::none;
    }
    void end_request(client_id c, priority level = no_priority) noexcept {
        std::unique_lock lock(mutex_);
        if (!core_.contains(c)) return;
        auto& client = clients_[c.index];
        const auto raised = std::ranges::find(client.raised, level);
        if (raised != client.raised.end()) client.raised.erase(raised);
        const auto then = client.level_with(client.own_level);
        const auto& now = core_.settings(c);
        if (--client.requests == 0 || then != now.level) core_.end_request(c);
        if (then != now.level) try {
                (void)core_.change(c, at_level(now, then));  // which it had: nothing to refuse
            } catch (const std::bad_alloc&) {                // stays where it is until the next request ends
            }
        this->advance(lock, this->policy_time(), look::now);
    }

private:
    friend ticket;
    friend permit;
    using base::clients_;
    using base::clock_;
    using base::core_;
    using base::flights_;
    using base::log_;
    using base::mutex_;
    using base::pool_;

    [[nodiscard]] static client_settings at_level(client_settings s, priority level) noexcept {
        s.level = level;
        return s;
    }

    errc wait_for_room(hold& lock, node& n, client_id c, const submit_options& o, const std::stop_token& stop) {
        auto why = errc::queue_full;
        const auto entered = [&] { return (why = this->enter(n, c, this->policy_time(), o)) != errc::queue_full; };
        ++clients_[c.index].waits_for_room;
        const auto waited = this->wait(lock, entered, nullptr, o.room_by, stop);
        --clients_[c.index].waits_for_room;
        return waited == errc::stopped ? waited : why;
    }

    errc turn_away(hold& lock, instant now, errc why) noexcept {
        this->advance(lock, now, look::if_due);  // what was noticed on the way
        return why;
    }
    // It arrived at `now` and didn't pass.
    result<permit> wait_at_gate(hold& lock, client_id c, instant now, const submit_options& o, instant deadline,
                                const std::stop_token& stop) {
        node waiting;
        this->line_up(waiting, c, now, o);
        this->advance(lock, now, look::if_due);
        const auto let_in = [&] { return waiting.at.load(std::memory_order_relaxed) != detail::phase::waiting; };
        if (!let_in()) {
            if (const auto why = this->wait(lock, let_in, &waiting, deadline, stop); why != errc::none) {
                clients_[c.index].waiting.remove(waiting);
                core_.withdraw(c, this->policy_time(), this->head_of());
                return why;
            }
        }
        if (waiting.code != errc::none) return waiting.code;
        return permit(*this, *waiting.slot, waiting.facts.bound);
    }

    // --- for tickets

    bool wait_for(node& n, instant deadline, const std::stop_token& stop) {
        const std::stop_callback on_stop(stop, [this] { this->wake_all(); });
        std::unique_lock lock(mutex_);
        this->advance(lock, this->policy_time(), look::now);
        const auto done = [&] { return n.at.load(std::memory_order_acquire) == detail::phase::done; };
        return this->wait(lock, done, &n, deadline, stop) == errc::none;
    }
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
