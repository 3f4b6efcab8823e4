// SPDX-License-Identifier: Apache-2.0
// A compute limiter: shares one device's time among clients, by holding submissions back and letting them in one by
// one, a few in flight. A gate (acquire) lets the calling thread enqueue; a queue (submit) takes a callable and enqueues
// it when its turn comes.
//
//   gpushare::compute_limiter<stream, clock> limiter{{.depth = 3}, clock};
//   auto chat = limiter.add({.weight = 70_pct, .level = {1}});
//   limiter.acquire(chat)->enqueue(s, [&](auto& s) { s.launch(shape, kernel); });      // the gate
//   auto ticket = limiter.submit(chat, s, [&](auto& s) { s.launch(shape, kernel); });  // the queue
//
// There is no thread in here. Whoever calls drives: a submitter lets in what can go at once; whoever waits (at the gate,
// for a ticket, in run()) watches the device for the others too, one thread at a time. A server that only submits and
// never waits gives run() a thread of its own.
//
// A client is charged the device time between the points recorded around its work (span_meter says how).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/compute/flights.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/permit.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/sleepers.hpp>
#include <gpushare/compute/ticket.hpp>
#include <gpushare/compute/weighted_fair.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// Thread-safe; neither copied nor moved. Streams, and everything submitted, must outlive their use. Callables run on
/// whichever thread drives, one at a time and in the order in which they were let in, under no lock; one that waits
/// for this limiter never returns. Destroying the limiter ends all its tickets with errc::closed.
template <timeline Stream, clock Clock, compute_policy Policy = weighted_fair>
class compute_limiter {
public:
    using stream = Stream;
    using point = typename Stream::point;
    using ticket = gpushare::ticket<compute_limiter>;
    using permit = gpushare::permit<compute_limiter>;

    explicit compute_limiter(limiter_options options = {}, Clock time = {}, Policy policy = {})
        : clock_(std::move(time)), core_(options, std::move(policy)) {}
    compute_limiter(const compute_limiter&) = delete;
    compute_limiter& operator=(const compute_limiter&) = delete;

    ~compute_limiter() {
        std::unique_lock lock(mutex_);
        for (auto& client : clients_) cancel_waiting(lock, client);
        flights_.abandon([this](node& n) { finish(n, errc::closed); });
        drop_failed(lock);
    }

    [[nodiscard]] client_id add(const client_settings& s) {
        const std::lock_guard lock(mutex_);
        if (clients_.size() <= core_.num_indices()) clients_.resize(core_.num_indices() + std::size_t{1});
        const auto c = core_.add(s);
        clients_[c.index].closing = false;
        return c;
    }

    /// Live: in force for what is let in from now on. errc::closed: no such client; share_exceeded: the policy refuses.
    errc change(client_id c, const client_settings& s) {
        std::unique_lock lock(mutex_);
        if (!core_.contains(c)) return errc::closed;
        const auto why = core_.change(c, s);
        advance(lock, policy_time());  // there may be room on another level
        return why;
    }

    /// Live: `p`, which has no clients yet, decides from now on; nobody is owed the past. share_exceeded: it refuses.
    errc set_policy(Policy p) {
        std::unique_lock lock(mutex_);
        const auto now = policy_time();
        const auto why = core_.set_policy(p, now);
        advance(lock, now);
        return why;
    }

    /// Takes no more submissions of `c`, cancels those that wait, waits until `deadline` for those in flight and then
    /// forgets the client, leaving in `account`, if given, what it has used. False at the deadline: call again. Permits
    /// that a thread holds count as in flight.
    bool close(client_id c, instant deadline = never, const std::stop_token& stop = {},
               client_usage* account = nullptr) {
        const std::stop_callback on_stop(stop, [this] { wake_all(); });
        std::unique_lock lock(mutex_);
        if (!core_.contains(c)) return true;
        clients_[c.index].closing = true;
        cancel_waiting(lock, clients_[c.index]);
        advance(lock, policy_time());
        const auto drained = [&] { return !core_.contains(c) || core_.usage(c).in_flight == 0; };
        if (wait(lock, drained, nullptr, deadline, stop) != errc::none) return false;
        if (!core_.contains(c)) return true;
        if (account != nullptr) *account = core_.usage(c);
        core_.remove(c);
        return true;
    }

    /// Waits at the gate for a permit. Codes: deadline_exceeded, stopped, closed, queue_full. Without contention: one
    /// mutex, no allocation, no system call.
    [[nodiscard]] result<permit> acquire(client_id c, instant deadline = never, const std::stop_token& stop = {}) {
        const std::stop_callback on_stop(stop, [this] { wake_all(); });
        node waiting;
        std::unique_lock lock(mutex_);
        const auto now = policy_time();
        if (const auto why = enter(waiting, c, now); why != errc::none) return why;
        advance(lock, now);
        const auto let_in = [&] { return waiting.at.load(std::memory_order_relaxed) != detail::phase::waiting; };
        if (!let_in()) {
            if (const auto why = wait(lock, let_in, &waiting, deadline, stop); why != errc::none) {
                clients_[c.index].waiting.remove(waiting);
                core_.withdraw(c, policy_time(), head_of());
                return why;
            }
        }
        if (waiting.code != errc::none) return waiting.code;
        return permit(*this, waiting.slot);
    }

    /// A permit if there is one at once, else deadline_exceeded.
    [[nodiscard]] result<permit> try_acquire(client_id c) { return acquire(c, instant::min()); }

    /// Queues `work`, which enqueues onto `s` when its turn comes: in this call if that is now. Codes: closed,
    /// queue_full, invalid_specification (no callable). Nothing is allocated once as many submissions were out as ever
    /// are.
    [[nodiscard]] result<ticket> submit(client_id c, Stream& s, submission_work<Stream> work) {
        if (!work) return errc::invalid_specification;
        auto& n = pool_->acquire();
        ticket t(*this, pool_, n);
        n.work = std::move(work);
        n.stream = &s;
        std::unique_lock lock(mutex_);
        const auto now = policy_time();
        if (const auto why = enter(n, c, now); why != errc::none) {
            lock.unlock();
            pool_->drop(n);
            return why;
        }
        advance(lock, now);
        return result<ticket>(std::move(t));  // nvcc doesn't move a local into another type by itself
    }

    /// Lets in what can go and takes note of what is done, without waiting.
    void poll() {
        std::unique_lock lock(mutex_);
        advance(lock, policy_time());
    }

    /// Drives the limiter until a stop is requested: the dispatcher, on a thread of the embedder's.
    void run(const std::stop_token& stop) {
        const std::stop_callback on_stop(stop, [this] { wake_all(); });
        std::unique_lock lock(mutex_);
        advance(lock, policy_time());
        wait(
            lock, [] { return false; }, nullptr, never, stop);
    }

    /// What `c` has used, as far as it is known now. Zero for a client that isn't there.
    [[nodiscard]] client_usage usage(client_id c) {
        std::unique_lock lock(mutex_);
        advance(lock, policy_time());
        return core_.contains(c) ? core_.usage(c) : client_usage{};
    }

    /// When to poll() though nothing happened, if nobody waits or runs; the longest wait of the highest level. See
    /// limiter_core.
    [[nodiscard]] instant resume_at() const {
        return locked([this] { return core_.resume_at(); });
    }
    [[nodiscard]] ns wait_bound() const {
        return locked([this] { return core_.wait_bound(); });
    }

private:
    friend ticket;
    friend permit;
    using node = detail::submission<Stream>;

    template <std::invocable F>
    auto locked(F f) const {
        const std::lock_guard lock(mutex_);
        return f();
    }

    errc enter(node& n, client_id c, instant now) noexcept {
        if (!core_.contains(c) || clients_[c.index].closing) return errc::closed;
        if (core_.usage(c).waiting >= core_.options().queue_limit) return errc::queue_full;
        n.client = c;
        n.facts = {.arrival = now};
        clients_[c.index].waiting.push(n);
        core_.arrive(c, now, n.facts);
        return errc::none;
    }

    [[nodiscard]] auto head_of(bool second = false) const noexcept {
        return [=, this](client_id c) noexcept { return clients_[c.index].head(second); };
    }

    // Reading a clock costs as much as the rest of a permit.
    [[nodiscard]] instant policy_time() const noexcept {
        if constexpr (is_timeless<Policy>)
            return {};
        else
            return clock_.now();
    }

    // Notes what is done and lets in what can go. One thread at a time: another's submissions are seen by the one that
    // is at it, which keeps the order of enqueuing that of letting in.
    void advance(std::unique_lock<std::mutex>& lock, instant now) noexcept {
        retire();
        if (std::exchange(advancing_, true)) return;
        while (const auto slot = flights_.free_slot()) {
            const auto g = core_.next(now, head_of(true));
            if (!g) break;
            flights_.take(*slot, *g);
            node& n = *clients_[g->client.index].waiting.pop();
            if (n.work) {
                enqueue(lock, *slot, n);
                retire();
                now = policy_time();
            } else {
                n.slot = *slot;
                n.at.store(detail::phase::let_in, std::memory_order_relaxed);
                sleepers_.wake(n);
            }
        }
        advancing_ = false;
        keep_watch();
        if (!failed_.empty()) drop_failed(lock);
    }

    void enqueue(std::unique_lock<std::mutex>& lock, std::size_t slot, node& n) noexcept {
        n.at.store(detail::phase::let_in, std::memory_order_relaxed);
        keep_watch();  // over what is in flight already: the callable may take its time
        auto begin = flights_.last_end(*n.stream);
        lock.unlock();
        point end;
        const bool enqueued = n.run(begin, end);
        lock.lock();
        if (enqueued) {
            flights_.land(slot, *n.stream, *std::move(begin), std::move(end), n.code, &n);
        } else {
            leave(slot);
            finish(n, n.code);
        }
    }

    // Nothing was enqueued after all.
    void leave(std::size_t slot) noexcept {
        const auto what = flights_.leave(slot);
        core_.cancel(what);
        if (clients_[what.client.index].closing) sleepers_.wake_all();
    }

    void land_permit(std::size_t slot, const Stream& s, point begin, point end, errc code) noexcept {
        const std::lock_guard lock(mutex_);
        flights_.land(slot, s, std::move(begin), std::move(end), code, nullptr);
        keep_watch();
    }

    void give_back(std::size_t slot) noexcept {
        std::unique_lock lock(mutex_);
        leave(slot);
        advance(lock, policy_time());
    }

    // Takes note of what the device has finished.
    void retire() noexcept {
        while (const auto f = flights_.take_finished()) {
            core_.complete(f->what, f->cost, f->code != errc::none);
            if (f->owner != nullptr) finish(*f->owner, f->code, f->cost);
            if (clients_[f->what.client.index].closing) sleepers_.wake_all();
        }
    }

    void finish(node& n, errc code, ns cost = {}) noexcept {
        n.code = code;
        n.device_time = cost;
        n.finished_at = clock_.now();
        n.at.store(detail::phase::done, std::memory_order_release);
        sleepers_.wake(n);
        if (n.error) {
            failed_.push(n);  // the exception is the user's, its destructor too: not under the lock
        } else {
            pool_->drop(n);
        }
    }

    void drop_failed(std::unique_lock<std::mutex>& lock) noexcept {
        auto failed = std::move(failed_);
        lock.unlock();
        while (node* n = failed.pop()) pool_->drop(*n);
        lock.lock();
    }

    void cancel_waiting(std::unique_lock<std::mutex>& lock, detail::client_queue<Stream>& client) noexcept {
        detail::fifo<node> cancelled;
        while (node* n = client.waiting.pop()) {
            core_.withdraw(n->client);
            if (n->work) {
                cancelled.push(*n);
            } else {  // at the gate: lives on the waiting thread's stack
                n->code = errc::closed;
                n->at.store(detail::phase::done, std::memory_order_release);
                sleepers_.wake(*n);
            }
        }
        while (node* n = cancelled.pop()) {
            lock.unlock();  // the callable is the user's, its destructor too
            n->work.reset();
            lock.lock();
            finish(*n, errc::closed);
        }
    }

    bool wait_for(const node& n, instant deadline, const std::stop_token& stop) {
        const std::stop_callback on_stop(stop, [this] { wake_all(); });
        std::unique_lock lock(mutex_);
        advance(lock, policy_time());
        const auto done = [&] { return n.at.load(std::memory_order_acquire) == detail::phase::done; };
        return wait(lock, done, &n, deadline, stop) == errc::none;
    }

    // Waits for `done`, watching the device while nobody else does. Wakes up for `waits_for` and for the watch.
    template <class Done>
    errc wait(std::unique_lock<std::mutex>& lock, Done done, const node* waits_for, instant deadline,
              const std::stop_token& stop) {
        errc why = errc::none;
        while (!done()) {
            const auto now = clock_.now();
            if (stop.stop_requested()) why = errc::stopped;
            if (now >= deadline) why = errc::deadline_exceeded;
            if (why != errc::none) break;
            const auto resume = advancing_ ? never : core_.resume_at();  // who advances asks the policy by itself
            if (now >= resume) {
                advance(lock, now);
                continue;
            }
            const auto until = std::min({deadline, resume, now + detail::watch_slice});
            if (!watched_ && flights_.any_enqueued()) {
                watched_ = true;
                look(lock, flights_.watch(), until);
                watched_ = false;
                continue;
            }
            if (const auto own = flights_.end_of(waits_for)) {  // the watch may have begun before it was enqueued
                look(lock, {&*own, 1}, until);
                continue;
            }
            sleepers_.sleep(lock, waits_for, now, deadline, resume);
        }
        keep_watch();  // somebody else's turn
        return why;
    }

    void look(std::unique_lock<std::mutex>& lock, std::span<const point> points, instant until) noexcept {
        lock.unlock();
        try {
            (void)point::wait_any(points, until);  // retire() sees which
        } catch (...) {  // a device that can't be asked: again in a slice, its points may be reached then
            std::this_thread::sleep_for(detail::watch_slice);
        }
        lock.lock();
        advance(lock, policy_time());
    }

    void keep_watch() noexcept {
        if (!watched_) sleepers_.call_one(flights_.any_enqueued(), core_.resume_at());
    }

    void wake_all() noexcept {
        const std::lock_guard lock(mutex_);
        sleepers_.wake_all();
    }

    Clock clock_;
    mutable std::mutex mutex_;
    limiter_core<Policy> core_;
    std::deque<detail::client_queue<Stream>> clients_;  // stays put while a callable is destroyed under no lock
    detail::flights<Stream> flights_;
    detail::sleepers<node> sleepers_;
    detail::fifo<node> failed_;  // done, to be dropped under no lock
    bool advancing_ = false, watched_ = false;
    std::shared_ptr<detail::submission_pool<Stream>> pool_ = std::make_shared<detail::submission_pool<Stream>>();
};

}  // namespace gpushare::inline GPUSHARE_ABI
