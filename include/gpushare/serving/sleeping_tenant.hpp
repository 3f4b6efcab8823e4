// SPDX-License-Identifier: Apache-2.0
// A tenant that goes to sleep when nobody asks for it, and wakes for the next request: scale to zero
// and back. Nothing runs by itself: a thread of the server's calls tick().
//
//   gpushare::sleeping_tenant model{chat, {.spill_after = 1min, .release_after = 10min},
//                                   {.release = [&] { engine.reset(); }, .restore = [&] { engine = load(path); }}};
//   { auto awake = model.use(deadline);  if (awake) answer(request); }              // a request: wakes it first
//   wait_until(model.tick());                                                       // idle: sleeps when it is time
//
// By levels: pools and caches are trimmed; submissions stop and its spillable blocks go to the host
// (tenant::sleep); the engine itself is released. Its quota and share remain promised; what the
// quota leaves free is lent where tenant_spec::lends_asleep says so, and comes back before it
// wakes. To give the promise up too, park it (tenant/move.hpp).
//
// How deep a model sleeps, and how long it takes to wake, is decided by a plain state machine: time comes in as an
// argument, and it says what to do. A sleeping_tenant does it.
//
//   gpushare::sleep_levels levels{{.drop_caches_after = 10s, .spill_after = 1min, .release_after = 10min, .wake_within = 2s}};
//   levels.request_began(now);  ...  levels.request_ended(now);
//   if (auto to = levels.next(now)) { levels.began(*to, now); ...; levels.ended(true, later); }         // again at levels.next_at()
//   levels.predicted_wake();                                                    // if a request came now
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string_view>
#include <thread>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How deep a model sleeps. Each has what the ones before it have.
enum class sleep_level : std::uint8_t {
    awake,             ///< all is there
    caches_dropped,    ///< pools, KV pages that nobody needs and other caches are given back
    weights_spilled,   ///< weights are on the host
    weights_released,  ///< weights are nowhere: they are loaded anew
};
/// How many there are.
inline constexpr std::size_t sleep_levels_count = 4;

/// In English.
[[nodiscard]] constexpr std::string_view to_string(sleep_level l) noexcept {
    switch (l) {
        case sleep_level::awake: return "awake";
        case sleep_level::caches_dropped: return "caches dropped";
        case sleep_level::weights_spilled: return "weights spilled";
        case sleep_level::weights_released: return "weights released";
    }
    return "unknown level";
}

/// After how long without a request it goes how deep; 0: not that deep by itself.
struct sleep_rule {
    ns drop_caches_after{};  ///< to caches_dropped
    ns spill_after{};        ///< to weights_spilled
    ns release_after{};      ///< to weights_released
    /// Not so deep that waking is predicted to take longer. 0: however long.
    ns wake_within{};
    ns retry_after = std::chrono::seconds(1);  ///< a change that failed is tried again then
    /// A wake that took longer than wake_within keeps it from sleeping so deep for that long. Then
    /// it may have been one bad day.
    ns distrust_for = std::chrono::hours(1);
};

/// The state of one model. A value; not thread-safe.
class sleep_levels {
public:
    /// Awake, without requests since `now`.
    explicit sleep_levels(const sleep_rule& rule = {}, instant now = {}) noexcept
        : rule_(rule), idle_since_(now), seen_(now) {}

    /// A request is there, or waits until it can be served.
    void request_began(instant now) noexcept {
        seen_ = std::max(seen_, now);
        ++requests_;
    }
    /// One of them is over.
    void request_ended(instant now) noexcept {
        seen_ = std::max(seen_, now);
        if (requests_ != 0 && --requests_ == 0) idle_since_ = now;
    }
    /// Requests that have begun and aren't over.
    [[nodiscard]] std::uint64_t requests() const noexcept { return requests_; }

    /// The next step: the level to go to. Nothing if it is where it should be, a change is under
    /// way, or the last one failed just now; a request retries at once.
    [[nodiscard]] std::optional<sleep_level> next(instant now) const noexcept {
        if (changing_) return {};
        const sleep_level wanted = wanted_at(now);
        if (wanted == level_ || (requests_ == 0 && now < not_before_)) return {};
        return wanted;
    }
    /// When next() may answer something else, if nothing happens until then. `never`: not by time.
    [[nodiscard]] instant next_at(instant now) const noexcept {
        if (changing_ || requests_ != 0) return never;
        if (now < not_before_) return not_before_;
        instant first = never;
        for (const auto l : deeper)
            if (l > level_)
                if (const instant at = from_when(l); at > now) first = std::min(first, at);
        return first;
    }

    /// The change to `to` begins; requests wait meanwhile.
    void began(sleep_level to, instant now) noexcept {
        changing_ = to;
        changed_at_ = now;
    }
    /// It is over. One that failed leaves the model where it was.
    void ended(bool succeeded, instant now) noexcept {
        seen_ = std::max(seen_, now);
        if (!changing_) return;
        const sleep_level to = *changing_;
        changing_.reset();
        if (!succeeded) {
            not_before_ = saturating_add(now, rule_.retry_after);
            return;
        }
        not_before_ = instant::min();
        if (to == sleep_level::awake) measured(level_, now - changed_at_);
        level_ = to;
    }
    /// As if waking from `from` had been measured when something was told last: from an earlier run, or a first guess.
    void measured(sleep_level from, ns took) noexcept {
        auto& all = wakes_[static_cast<std::size_t>(from)];
        all.when[all.count % all.last.size()] = seen_;
        all.last[all.count++ % all.last.size()] = took;
    }

    /// Where it is; while it changes, where it was.
    [[nodiscard]] sleep_level level() const noexcept { return level_; }
    /// Where it is going, if it is.
    [[nodiscard]] std::optional<sleep_level> changing() const noexcept { return changing_; }
    /// How long a request that comes now waits until it is awake: the longest of the last eight
    /// times from this level. 0 if none was measured.
    [[nodiscard]] ns predicted_wake() const noexcept { return predicted_wake(level_); }
    /// The same from any level.
    [[nodiscard]] ns predicted_wake(sleep_level from) const noexcept {
        if (from == sleep_level::awake) return {};
        const auto& all = wakes_[static_cast<std::size_t>(from)];
        return *std::max_element(all.last.begin(), all.last.end());
    }
    /// How long it took the last time; 0 if it never did.
    [[nodiscard]] ns last_wake(sleep_level from) const noexcept {
        const auto& all = wakes_[static_cast<std::size_t>(from)];
        return all.count == 0 ? ns{} : all.last[(all.count - 1) % all.last.size()];
    }
    /// From now on.
    void set_rule(const sleep_rule& rule) noexcept { rule_ = rule; }

private:
    static constexpr std::array deeper{sleep_level::caches_dropped, sleep_level::weights_spilled,
                                       sleep_level::weights_released};
    struct wake_times {
        std::array<ns, 8> last{};
        std::array<instant, 8> when{};
        std::uint64_t count = 0;
    };

    [[nodiscard]] ns after(sleep_level l) const noexcept {
        return l == sleep_level::caches_dropped    ? rule_.drop_caches_after
               : l == sleep_level::weights_spilled ? rule_.spill_after
                                                   : rule_.release_after;
    }
    // When it has been idle for long enough, and waking may be as fast as it must be. `never`: not by itself.
    [[nodiscard]] instant from_when(sleep_level l) const noexcept {
        if (after(l) <= ns{}) return never;
        instant at = saturating_add(idle_since_, after(l));
        const auto& all = wakes_[static_cast<std::size_t>(l)];
        for (std::size_t i = 0; i < all.last.size(); ++i)
            if (rule_.wake_within != ns{} && all.last[i] > rule_.wake_within)
                at = std::max(at, saturating_add(all.when[i], rule_.distrust_for));
        return at;
    }
    // The deepest that it has been idle for long enough. It never sleeps less deep but by waking.
    [[nodiscard]] sleep_level wanted_at(instant now) const noexcept {
        if (requests_ != 0) return sleep_level::awake;
        sleep_level wanted = level_;
        for (const auto l : deeper)
            if (l > wanted && now >= from_when(l)) wanted = l;
        return wanted;
    }

    sleep_rule rule_;
    sleep_level level_ = sleep_level::awake;
    std::optional<sleep_level> changing_{};
    instant idle_since_, changed_at_{}, not_before_ = instant::min();
    instant seen_;  // the latest time that was told
    std::uint64_t requests_ = 0;
    std::array<wake_times, sleep_levels_count> wakes_{};
};

/// A server's actions on an engine. Each may be empty. Called by one thread at a time, under no
/// lock. An exception makes the change fail, and it is tried again. On waking, submissions go on
/// before `restore` and `unspill`, which may need them: work still queued when the tenant fell
/// asleep would find no engine. So keep a request's lease until its work is over: then none is
/// queued. `restore` and `unspill` may call use() themselves, to warm the engine up: they have it
/// at once. In the others, use() returns errc::in_flight.
struct sleep_actions {
    std::function<void()> drop_caches{};  ///< free what can be made anew in no time: KV pages, scratch
    std::function<void()> spill{};        ///< move weights that aren't spillable blocks to the host
    std::function<void()> release{};      ///< destroy the engine, weights and all
    std::function<void()> restore{};      ///< make it anew; after release only
    std::function<void()> unspill{};      ///< bring back what `spill` moved; after spill only
};

/// Drives one tenant through its levels of sleep. Thread-safe; neither copied nor moved. The tenant must outlive it.
template <class Tenant>
class sleeping_tenant {
public:
    /// Keeps the tenant awake. Movable; must not outlive the sleeping_tenant.
    class lease {
    public:
        /// Takes over `other`'s.
        lease(lease&& other) noexcept
            : of_(std::exchange(other.of_, nullptr)), why_(other.why_), waited_(other.waited_) {}
        lease& operator=(lease&&) = delete;
        ~lease() {
            if (of_ != nullptr) of_->end();
        }
        /// Whether it is awake.
        [[nodiscard]] explicit operator bool() const noexcept { return why_ == errc::none; }
        /// Why it isn't: deadline_exceeded (others still use the memory that it lent, perhaps),
        /// stopped, closed, in_flight (asked by an action that lets it sleep), or what an action
        /// threw (submission_failed for what is no gpushare::error).
        [[nodiscard]] errc code() const noexcept { return why_; }
        /// How long the request has waited for it.
        [[nodiscard]] ns waited() const noexcept { return waited_; }

    private:
        friend sleeping_tenant;
        lease(sleeping_tenant& of, errc why, ns waited) noexcept : of_(&of), why_(why), waited_(waited) {}

        sleeping_tenant* of_;
        errc why_;
        ns waited_;
    };

    /// Awake.
    explicit sleeping_tenant(Tenant& of, const sleep_rule& rule = {}, sleep_actions actions = {})
        : tenant_(&of), actions_(std::move(actions)), state_(rule, of.now()) {}
    sleeping_tenant(const sleeping_tenant&) = delete;
    sleeping_tenant& operator=(const sleeping_tenant&) = delete;

    /// For a request: wakes the tenant, or waits until another thread has, or until it has the
    /// memory back that it lent; a stop request ends both. Times are of its node's clock.
    [[nodiscard]] lease use(instant deadline = never, const std::stop_token& stop = {}) {
        std::unique_lock lock(mutex_);
        const instant came = tenant_->now();
        state_.request_began(came);
        errc why = errc::none;
        while (why == errc::none && (state_.changing() || state_.level() != sleep_level::awake)) {
            if (tenant_->closed())
                why = errc::closed;
            else if (stop.stop_requested())
                why = errc::stopped;
            else if (tenant_->now() >= deadline)
                why = errc::deadline_exceeded;
            else if (state_.changing() && changer_ == std::this_thread::get_id()) {
                if (state_.changing() == sleep_level::awake) break;  // it is awake as far as this thread has come
                why = errc::in_flight;                               // it would wait for itself
            } else if (!state_.changing())
                why = change(sleep_level::awake, deadline, lock, stop);
            else  // a piece at a time, as the node's time may be another than that of condition variables
                changed_.wait_for(lock, std::chrono::milliseconds(1));
        }
        return {*this, why, tenant_->now() - came};
    }

    /// Goes to sleep if it is time for it, and returns when it is time for more; `never`: a request
    /// must come first. It may wait for work in flight, until `patience` from now.
    instant tick(ns patience = std::chrono::seconds(1)) {
        std::unique_lock lock(mutex_);
        instant now = tenant_->now();
        if (tenant_->closed()) return never;
        if (const auto to = state_.next(now); to && *to != sleep_level::awake) {
            (void)change(*to, saturating_add(now, patience), lock);
            now = tenant_->now();
        }
        return state_.next_at(now);
    }

    /// As it is now: level, predicted and measured wake times.
    [[nodiscard]] sleep_levels state() const {
        const std::lock_guard lock(mutex_);
        return state_;
    }
    /// Likewise, from now on.
    void set_rule(const sleep_rule& rule) {
        const std::lock_guard lock(mutex_);
        state_.set_rule(rule);
    }
    /// A wake time of an earlier run, or a guess.
    void measured(sleep_level from, ns took) {
        const std::lock_guard lock(mutex_);
        state_.measured(from, took);
    }

private:
    void end() noexcept {
        const std::lock_guard lock(mutex_);
        state_.request_ended(tenant_->now());
    }

    // With the lock, but for what is done.
    errc change(sleep_level to, instant deadline, std::unique_lock<std::mutex>& lock,
                const std::stop_token& stop = {}) {
        state_.began(to, tenant_->now());
        const sleep_level from = state_.level();
        changer_ = std::this_thread::get_id();
        lock.unlock();
        errc why = errc::none;
        try {
            why = to == sleep_level::awake ? wake(deadline, stop) : deepen(from, to, deadline);
        } catch (const error& e) {
            why = e.code();
        } catch (...) {
            why = errc::submission_failed;
        }
        // A tenant that sleeps on, since others still have its memory, sleeps as deep as intended:
        // the next request wakes it.
        if (why != errc::none && from < sleep_level::weights_spilled && rouse(deadline) != errc::none) why = errc::none;
        lock.lock();
        changer_ = {};
        state_.ended(why == errc::none, tenant_->now());
        changed_.notify_all();
        return why;
    }

    // A step that was made isn't made again by a second try.
    errc deepen(sleep_level from, sleep_level to, instant deadline) {
        if (from < sleep_level::caches_dropped) {
            call(actions_.drop_caches);
            const auto parts = tenant_->spec().on.size();
            for (std::size_t part = 0; part < parts; ++part) tenant_->memory(part).trim();
        }
        if (to >= sleep_level::weights_spilled && !asleep_) {
            if (!tenant_->sleep(deadline)) return tenant_->closed() ? errc::closed : errc::deadline_exceeded;
            asleep_ = true;
        }
        if (to == sleep_level::weights_spilled && !spilled_) {
            call(actions_.spill);
            spilled_ = true;
        }
        if (to == sleep_level::weights_released && !released_) {
            call(actions_.release);
            released_ = true;
        }
        if constexpr (requires { tenant_->lend_more(); })
            if (asleep_) tenant_->lend_more();
        return errc::none;
    }
    // Its memory comes back first, if it was lent.
    errc rouse(instant deadline, const std::stop_token& stop = {}) {
        if (!asleep_) return errc::none;
        if constexpr (requires { tenant_->try_wake(deadline, stop); }) {
            if (const auto why = tenant_->try_wake(deadline, stop); why.code != errc::none) return why.code;
        } else {
            tenant_->wake();
        }
        asleep_ = false;
        return errc::none;
    }
    errc wake(instant deadline, const std::stop_token& stop) {
        if (const errc why = rouse(deadline, stop); why != errc::none) return why;
        if (released_) call(actions_.restore);
        if (spilled_ && !released_) call(actions_.unspill);
        released_ = spilled_ = false;
        return errc::none;
    }
    static void call(const std::function<void()>& action) {
        if (action) action();
    }

    Tenant* tenant_;
    sleep_actions actions_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    sleep_levels state_;
    std::thread::id changer_{};  // whose actions run
    // Owned by the thread that changes it.
    bool asleep_ = false, spilled_ = false, released_ = false;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
