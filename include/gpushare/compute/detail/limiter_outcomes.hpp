// SPDX-License-Identifier: Apache-2.0
// What has ended in a compute limiter: taken note of, charged, told to who waits for it, and what goes wrong. What
// limiter_engine.hpp rests on, which lets in.
//
//   std::unique_lock lock(mutex_);   retire(look::now);   if (faulty_) cancel_faulty(lock);   clear_up(lock);
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <gpushare/compute/detail/flights.hpp>
#include <gpushare/compute/detail/sleepers.hpp>
#include <gpushare/compute/grant.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/limiter_event.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/compute/submission_log.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Under the mutex. Every function that takes a lock may let go of it meanwhile; the others hold it throughout.
template <timeline Stream, clock Clock, compute_policy Policy>
class limiter_outcomes {
public:
    limiter_outcomes(const limiter_outcomes&) = delete;
    limiter_outcomes& operator=(const limiter_outcomes&) = delete;

protected:
    using point = typename Stream::point;
    using node = submission<Stream>;
    using flight_list = flights<Stream>;
    using hold = std::unique_lock<std::mutex>;

    /// Whether to look at the device though nothing is predicted to be done, and to have the end of what is open.
    enum class look : bool { if_due, now };

    limiter_outcomes(limiter_options options, Clock time, Policy policy)
        : clock_(std::move(time)), core_(options, std::move(policy)), flights_(core_.quantum(), options.take_turns) {}

    ~limiter_outcomes() {
        hold lock(mutex_);
        for (auto& client : clients_) cancel_waiting(lock, client, errc::closed);
        flights_.abandon([this](node& n) { finish(n, errc::closed); });
        clear_up(lock);
    }

    [[nodiscard]] errc refusal(client_id c) const noexcept {
        if (!core_.contains(c) || core_.closing(c)) return errc::closed;
        if (lost_) return errc::device_lost;
        return core_.quarantined(c) ? errc::quarantined : errc::none;
    }

    // Reading a clock costs as much as the rest of a permit.
    [[nodiscard]] instant policy_time() const noexcept {
        return !is_timeless<Policy> || core_.holds_back() || log_.on() ? clock_.now() : instant{};
    }
    // What batches are timed with.
    [[nodiscard]] instant batch_time() const noexcept { return flight_list::batch::shares ? clock_.now() : instant{}; }

    // Takes note of what the device has finished.
    void retire(look how) noexcept {
        if (!flights_.any_ended()) return;
        flights_.settle(
            batch_time(), how == look::now,
            [this](typename flight_list::finished f) {
                if (clients_[f.what.client.index].enqueuing.is_held_up(f.enqueued)) {
                    f.cost = enqueuing::without_gap(f.cost, f.what.predicted, f.enqueued);
                    f.from = outcome::source::doubt;
                }
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
                const bool attended = f.owner != nullptr && f.owner->looked_at > 0;
                clients_[f.what.client.index].attendant = attended ? f.owner->looker : std::thread::id{};
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
        if (std::exchange(clients_[c.index].told_of_loss, true)) return;
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
        if (std::exchange(clearing_up_, true)) return;
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

    Clock clock_;
    mutable std::mutex mutex_;
    limiter_core<Policy> core_;
    std::deque<client_queue<Stream>> clients_;  // stays put while a callable is destroyed under no lock
    flight_list flights_;
    submission_log<point> log_;
    sleepers<node> sleepers_;
    fifo<node> left_;  // done, with something of the user's to call or to destroy under no lock
    bool clearing_up_ = false, lost_ = false, faulty_ = false;
    std::shared_ptr<submission_pool<Stream>> pool_ = std::make_shared<submission_pool<Stream>>();
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
