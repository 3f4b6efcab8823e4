// SPDX-License-Identifier: Apache-2.0
// A tenant that goes to sleep when no request comes, and wakes for the next request: scale to zero
// and back. Nothing runs by itself: one of the server's threads must call tick().
//
//   gpushare::sleeping_tenant model{chat, {.spill_after = 1min, .release_after = 10min},
//                                   {.release = [&] { engine.reset(); }, .restore = [&] { engine = load(path); }}};
//   // a request: wakes it first
//   { auto awake = model.use(deadline);  if (awake) answer(request); }
//   wait_until(model.tick());  // idle: sleeps when it is time
//
// The levels of sleep, from the lightest: pools and caches are trimmed; submissions stop and the
// tenant's spillable blocks go to the host (tenant::sleep); the engine itself is released. Quota
// and share remain promised. With tenant_spec::lends_asleep, bytes that the quota leaves free are
// lent, and come back before the tenant wakes. To give the promise up too, park the tenant
// (tenant/move.hpp).
//
// A plain state machine decides how deep a model sleeps, and predicts how long it takes to wake:
// the caller passes the time, and gets the next step. A sleeping_tenant carries the step out.
//
//   gpushare::sleep_levels levels{{.drop_caches_after = 10s, .spill_after = 1min, .release_after = 10min, .wake_within = 2s}};
//   levels.request_began(now);  ...  levels.request_ended(now);
//   // again at levels.next_at()
//   if (auto to = levels.next(now)) { levels.began(*to, now); ...; levels.ended(true, later); }
//   levels.predicted_wake();  // if a request came now
//
// A model may also sleep in parts, by tags: caches now, weights later; on the way back weights
// first.
//
//   gpushare::sleep_groups groups{chat, {{"weights"}, {"kv_cache", gpushare::group_memory::dropped}}};
//   auto& weights = groups.allocate("weights", 1_GiB);    auto& cache = groups.allocate("kv_cache", 4_GiB);
//   groups.sleep({"kv_cache"});   groups.wake({"weights"});   groups.wake();
//   // all are awake, and stay so
//   if (auto in = groups.use()) answer(request, weights.data(), cache.data());
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <list>
#include <mutex>
#include <optional>
#include <ranges>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How deep a model sleeps. Each level includes the levels before it.
enum class sleep_level : std::uint8_t {
    awake,             ///< everything is there
    caches_dropped,    ///< pools, unused KV pages and other caches are given back
    weights_spilled,   ///< weights are on the host
    weights_released,  ///< weights are gone: they are loaded again
};
/// The number of levels.
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

/// How long a tenant must be without a request before it sleeps, for each depth. 0: it doesn't
/// sleep that deep by itself.
struct sleep_rule {
    ns drop_caches_after{};  ///< to caches_dropped
    ns spill_after{};        ///< to weights_spilled
    ns release_after{};      ///< to weights_released
    /// The longest predicted time to wake, which limits how deep a tenant sleeps. 0: no limit.
    ns wake_within{};
    ns retry_after = std::chrono::seconds(1);  ///< a change that failed is tried again then
    /// If a wake took longer than wake_within, the tenant doesn't sleep that deep for this long.
    /// Later the slow wake counts as an exception.
    ns distrust_for = std::chrono::hours(1);
};

/// The state of one model. A value; not thread-safe.
class sleep_levels {
public:
    /// Awake, without requests since `now`.
    explicit sleep_levels(const sleep_rule& rule = {}, instant now = {}) noexcept
        : rule_(rule), idle_since_(now), seen_(now) {}

    /// A request has come, or waits until it can be served.
    void request_began(instant now) noexcept {
        seen_ = std::max(seen_, now);
        ++requests_;
    }
    /// A request has ended.
    void request_ended(instant now) noexcept {
        seen_ = std::max(seen_, now);
        if (requests_ != 0 && --requests_ == 0) idle_since_ = now;
    }
    /// The number of requests under way.
    [[nodiscard]] std::uint64_t requests() const noexcept { return requests_; }

    /// The next step: the level to go to. Nothing if the model is at the right level, if a change
    /// is under way, or if the last change failed just now; a request retries at once.
    [[nodiscard]] std::optional<sleep_level> next(instant now) const noexcept {
        if (changing_) return {};
        const sleep_level wanted = wanted_at(now);
        if (wanted == level_ || (requests_ == 0 && now < not_before_)) return {};
        return wanted;
    }
    /// When next() may answer differently if nothing happens until then. `never`: time alone
    /// changes nothing.
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
    /// The change has ended. After a failure the model stays where it was.
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
    /// Counts a wake from `from` as if it had been measured at the latest time that the model was
    /// told. For times of an earlier run, or a first guess.
    void measured(sleep_level from, ns took) noexcept {
        auto& all = wakes_[static_cast<std::size_t>(from)];
        all.when[all.count % all.last.size()] = seen_;
        all.last[all.count++ % all.last.size()] = took;
    }

    /// The present level; during a change, the level before.
    [[nodiscard]] sleep_level level() const noexcept { return level_; }
    /// The level that it is changing to, if any.
    [[nodiscard]] std::optional<sleep_level> changing() const noexcept { return changing_; }
    /// How long a request that comes now would wait until the model is awake: the longest of the
    /// last eight times from this level. 0 if none was measured.
    [[nodiscard]] ns predicted_wake() const noexcept { return predicted_wake(level_); }
    /// The same from any level.
    [[nodiscard]] ns predicted_wake(sleep_level from) const noexcept {
        if (from == sleep_level::awake) return {};
        const auto& all = wakes_[static_cast<std::size_t>(from)];
        return *std::max_element(all.last.begin(), all.last.end());
    }
    /// How long the last wake from that level took; 0 if there was none.
    [[nodiscard]] ns last_wake(sleep_level from) const noexcept {
        const auto& all = wakes_[static_cast<std::size_t>(from)];
        return all.count == 0 ? ns{} : all.last[(all.count - 1) % all.last.size()];
    }
    /// Sets the rule from now on.
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
    // When the model may sleep that deep: it has been idle for long enough, and slow wakes from
    // there are long enough ago. `never`: not by itself.
    [[nodiscard]] instant from_when(sleep_level l) const noexcept {
        if (after(l) <= ns{}) return never;
        instant at = saturating_add(idle_since_, after(l));
        const auto& all = wakes_[static_cast<std::size_t>(l)];
        for (std::size_t i = 0; i < all.last.size(); ++i)
            if (rule_.wake_within != ns{} && all.last[i] > rule_.wake_within)
                at = std::max(at, saturating_add(all.when[i], rule_.distrust_for));
        return at;
    }
    // The deepest level for which it has been idle for long enough. It returns to a lighter level
    // only by waking.
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
    instant seen_;  // the latest time that it was told
    std::uint64_t requests_ = 0;
    std::array<wake_times, sleep_levels_count> wakes_{};
};

/// A server's actions on an engine. Each may be empty. They are called by one thread at a time,
/// under no lock. An exception makes the change fail, and the change is tried again. On waking,
/// submissions go on before `restore` and `unspill`, which may need them. Work that was still
/// queued when the tenant fell asleep would then find no engine, so keep a request's lease until
/// its work is over. `restore` and `unspill` may themselves call use(), to warm the engine up: they
/// get a lease at once. In the other actions, use() returns errc::in_flight.
struct sleep_actions {
    /// free memory that is quickly made anew: KV pages, scratch
    std::function<void()> drop_caches{};
    std::function<void()> spill{};    ///< move weights that aren't spillable blocks to the host
    std::function<void()> release{};  ///< destroy the engine, including its weights
    std::function<void()> restore{};  ///< make the engine anew; only after release
    std::function<void()> unspill{};  ///< undo `spill`; only after spill
};

/// Drives one tenant through its levels of sleep. Thread-safe; neither copied nor moved. The tenant
/// must outlive it.
template <class Tenant>
class sleeping_tenant {
public:
    /// Keeps the tenant awake. Movable; must not outlive the sleeping_tenant.
    class lease {
    public:
        /// Takes over the other's lease.
        lease(lease&& other) noexcept
            : of_(std::exchange(other.of_, nullptr)), why_(other.why_), waited_(other.waited_) {}
        lease& operator=(lease&&) = delete;
        ~lease() {
            if (of_ != nullptr) of_->end();
        }
        /// Whether the tenant is awake.
        [[nodiscard]] explicit operator bool() const noexcept { return why_ == errc::none; }
        /// Why the tenant isn't awake: deadline_exceeded (perhaps others still use the memory that
        /// it lent), stopped, closed, in_flight (use() was called by an action of falling asleep),
        /// or an action's exception (submission_failed for an exception that isn't a
        /// gpushare::error).
        [[nodiscard]] errc code() const noexcept { return why_; }
        /// How long the request has waited for the tenant.
        [[nodiscard]] ns waited() const noexcept { return waited_; }

    private:
        friend sleeping_tenant;
        lease(sleeping_tenant& of, errc why, ns waited) noexcept : of_(&of), why_(why), waited_(waited) {}

        sleeping_tenant* of_;
        errc why_;
        ns waited_;
    };

    /// Begins awake.
    explicit sleeping_tenant(Tenant& of, const sleep_rule& rule = {}, sleep_actions actions = {})
        : tenant_(&of), actions_(std::move(actions)), state_(rule, of.now()) {}
    sleeping_tenant(const sleeping_tenant&) = delete;
    sleeping_tenant& operator=(const sleeping_tenant&) = delete;

    /// For a request: wakes the tenant. Or waits until another thread has done so, or until the
    /// tenant has its lent memory back; a stop request ends both. Times are of the node's clock.
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
                // it may use what its wake has reached
                if (state_.changing() == sleep_level::awake) break;
                why = errc::in_flight;  // it would wait for itself
            } else if (!state_.changing())
                why = change(sleep_level::awake, deadline, lock, stop);
            else  // in pieces: the node's clock may be another than that of condition variables
                changed_.wait_for(lock, std::chrono::milliseconds(1));
        }
        return {*this, why, tenant_->now() - came};
    }

    /// Puts the tenant to sleep if it is time, or again after a wake that failed half way. Returns
    /// when the next step is due; `never`: a request must come first. May wait for work in flight,
    /// until `patience` from now.
    instant tick(ns patience = std::chrono::seconds(1)) {
        std::unique_lock lock(mutex_);
        instant now = tenant_->now();
        if (tenant_->closed()) return never;
        auto to = state_.next(now);
        if (!to && is_half_awake()) to = state_.level();
        if (to && *to != sleep_level::awake) {
            (void)change(*to, saturating_add(now, patience), lock);
            now = tenant_->now();
        }
        return state_.next_at(now);
    }

    /// The present state: level, predicted and measured wake times.
    [[nodiscard]] sleep_levels state() const {
        const std::lock_guard lock(mutex_);
        return state_;
    }
    /// Sets the rule from now on.
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
    // A wake failed after its first step: the tenant runs, but there is nobody to serve.
    [[nodiscard]] bool is_half_awake() const noexcept {
        return !state_.changing() && state_.requests() == 0 && state_.level() >= sleep_level::weights_spilled &&
               !asleep_;
    }
    void end() noexcept {
        const std::lock_guard lock(mutex_);
        state_.request_ended(tenant_->now());
    }

    // Holds the lock, except during the actions.
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
        // If others still have its memory, the tenant sleeps on, as deep as intended: the next
        // request wakes it.
        if (why != errc::none && from < sleep_level::weights_spilled && undo(deadline) != errc::none) why = errc::none;
        lock.lock();
        changer_ = {};
        state_.ended(why == errc::none, tenant_->now());
        changed_.notify_all();
        return why;
    }

    // A second try doesn't repeat steps that succeeded.
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
    // Lent memory comes back first.
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
    // The weights may be gone already, if a later step failed.
    errc undo(instant deadline) noexcept try { return wake(deadline, {}); } catch (...) {
        return errc::submission_failed;
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
    std::thread::id changer_{};  // the thread whose actions run
    // Owned by the changing thread.
    bool asleep_ = false, spilled_ = false, released_ = false;
};

/// Where a group's memory is while the group sleeps.
enum class group_memory : std::uint8_t {
    moved,   ///< goes to the host with its contents, and comes back; needs tenant_spec::spill
    dropped  ///< is freed; on waking the same amount comes back, elsewhere, with undefined contents
};

/// A set of a model's allocations that sleep and wake together.
struct sleep_group {
    /// "weights", "kv_cache", ...: not empty, and no other group's
    std::string tag;
    group_memory memory = group_memory::moved;  ///< while it sleeps
};

/// Groups of a tenant's allocations, each of which sleeps and wakes by its tag. A group is awake
/// with all of its blocks on the device, or asleep with none of them there. While a group is awake,
/// its blocks don't move for the needs of others. Nothing runs by itself; combine the groups with a
/// sleeping_tenant by its actions.
///
/// Thread-safe; neither copied nor moved. One thread at a time changes a group, and other threads
/// wait for that change. The tenant's handle must outlive the object. Tags are any range of
/// strings; no tags mean all groups, in the constructor's order. Several groups sleep and wake in
/// the order of the tags. A call that fails doesn't undo the tags that came first.
template <class Tenant>
class sleep_groups {
    using movable = decltype(std::declval<Tenant&>().allocate_spillable(bytes{}, std::size_t{}));
    using stays = decltype(std::declval<movable&>().use());
    using memory = typename Tenant::memory_type;
    struct group;

public:
    /// One allocation of a group.
    class block {
    public:
        /// For the groups.
        block(group& of, bytes size, memory& from) noexcept : of_(&of), size_(size), memory_(&from) {}
        block(const block&) = delete;             ///< Not copied.
        block& operator=(const block&) = delete;  ///< Not copied.

        /// The address on the device, valid while a lease of its group is held. Null while the
        /// group sleeps.
        [[nodiscard]] void* data() const noexcept { return at_; }
        /// The requested size.
        [[nodiscard]] bytes size() const noexcept { return size_; }

    private:
        friend sleep_groups;
        group* of_;
        bytes size_;
        memory* memory_;
        void* at_ = nullptr;
        std::optional<movable> moved_{};
        std::optional<stays> stays_{};  // while its group is awake
    };

    /// Keeps groups awake. Movable; must not outlive the sleep_groups.
    class lease {
    public:
        /// Takes over the other's lease.
        lease(lease&& other) noexcept
            : of_(std::exchange(other.of_, nullptr)), groups_(std::move(other.groups_)), why_(other.why_) {}
        lease& operator=(lease&&) = delete;
        ~lease() {
            if (of_ != nullptr) of_->let_go(groups_);
        }
        /// Whether all groups are awake.
        [[nodiscard]] explicit operator bool() const noexcept { return why_ == errc::none; }
        /// Why the groups aren't awake: asleep (one of them sleeps or is changing);
        /// invalid_specification (no such tag).
        [[nodiscard]] errc code() const noexcept { return why_; }

    private:
        friend sleep_groups;
        explicit lease(errc why) noexcept : why_(why) {}
        sleep_groups* of_ = nullptr;
        std::vector<group*> groups_{};
        errc why_;
    };

    /// All groups begin awake and empty. Throws operation_error: invalid_specification (an empty
    /// tag, or no group), duplicate_name; std::bad_alloc.
    sleep_groups(Tenant& of, const std::vector<sleep_group>& groups) : tenant_(&of) {
        for (const auto& g : groups) {
            if (g.tag.empty()) refuse(no_group(), "groups");
            if (find(g.tag) != nullptr) refuse({.code = errc::duplicate_name}, "groups");
            groups_.emplace_back(g);
        }
        if (groups_.empty()) refuse(no_group(), "groups");
    }
    sleep_groups(const sleep_groups&) = delete;
    sleep_groups& operator=(const sleep_groups&) = delete;
    /// Frees all blocks. No lease may be held.
    ~sleep_groups() {
        for (auto& g : groups_)
            for (auto& b : g.blocks) drop(b);
    }

    /// A block of the group, on one of the tenant's devices, contents undefined. Valid until
    /// free(), or as long as this object lives. Throws operation_error: asleep (the group sleeps or
    /// is changing); invalid_specification (no such tag); the errors of the tenant's allocate or
    /// allocate_spillable.
    block& allocate(std::string_view tag, bytes size, std::size_t part = 0) {
        group* const g = find(tag);
        if (g == nullptr) refuse(no_group(), "allocate in a group");
        const lease awake = hold({g});  // no lock is held while memory is asked for
        if (!awake) refuse({.code = errc::asleep}, "allocate in a group");
        std::list<block> one;
        block& b = one.emplace_back(*g, size, tenant_->memory(part));
        if (g->how == group_memory::moved) {
            b.moved_.emplace(tenant_->allocate_spillable(size, part));
            if (const errc why = bring(b, never); why != errc::none) refuse({.code = why}, "allocate in a group");
        } else {
            b.at_ = b.memory_->allocate(size);
        }
        const std::lock_guard lock(mutex_);
        g->blocks.splice(g->blocks.end(), one);
        return b;
    }
    /// Frees a block, which no work may use. Waits while the memory of its group goes or comes, but
    /// not while a change waits for leases: the caller may hold one of them.
    void free(block& b) noexcept {
        std::list<block> one;
        group& g = *b.of_;
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return g.is != state::changing; });
        const auto at = std::ranges::find_if(g.blocks, [&](const block& other) { return &other == &b; });
        one.splice(one.end(), g.blocks, at);
        lock.unlock();
        drop(b);
    }

    /// For work: these groups stay awake as long as the result lives. It must live until the device
    /// has done the work. Doesn't wait, and wakes nothing.
    template <std::ranges::input_range Tags = std::initializer_list<std::string_view>>
    [[nodiscard]] lease use(const Tags& tags = {}) {
        const auto chosen = choose(tags);
        return chosen.empty() ? lease(errc::invalid_specification) : hold(chosen);
    }

    /// Waits until no lease of these groups is held, and frees their memory on the device. Groups
    /// that sleep already stay as they are. Codes: invalid_specification (no such tag: nothing has
    /// changed); deadline_exceeded; out_of_memory (the host has no room); closed; the error of a
    /// copy. The group that failed is awake again. If waking it fails, too, the group sleeps, and
    /// wake() brings moved memory back.
    template <std::ranges::input_range Tags = std::initializer_list<std::string_view>>
    failure try_sleep(const Tags& tags = {}, instant deadline = never) {
        return change(choose(tags), state::asleep, deadline);
    }
    /// As try_sleep. Throws operation_error with its codes.
    template <std::ranges::input_range Tags = std::initializer_list<std::string_view>>
    void sleep(const Tags& tags = {}, instant deadline = never) {
        if (const failure why = try_sleep(tags, deadline); why.code != errc::none) refuse(why, "sleep");
    }
    /// Brings back the memory of these groups: moved blocks with their contents, dropped ones
    /// without. Waits for bytes until the deadline. Groups that are awake stay as they are. Codes:
    /// invalid_specification; deadline_exceeded; the error of an allocation; closed; the error of a
    /// copy. The group that failed sleeps on, and has no memory on the device: blocks that had come
    /// are copied back, which may take until after the deadline.
    template <std::ranges::input_range Tags = std::initializer_list<std::string_view>>
    failure try_wake(const Tags& tags = {}, instant deadline = never) {
        return change(choose(tags), state::awake, deadline);
    }
    /// As try_wake. Throws operation_error with its codes.
    template <std::ranges::input_range Tags = std::initializer_list<std::string_view>>
    void wake(const Tags& tags = {}, instant deadline = never) {
        if (const failure why = try_wake(tags, deadline); why.code != errc::none) refuse(why, "wake");
    }

    /// The tags of the groups that aren't awake, in the order of the constructor.
    [[nodiscard]] std::vector<std::string> sleeping() const {
        const std::lock_guard lock(mutex_);
        std::vector<std::string> tags;
        for (const auto& g : groups_)
            if (g.is != state::awake) tags.push_back(g.tag);
        return tags;
    }

private:
    enum class state : std::uint8_t {
        awake,     ///< with all of its blocks
        leaving,   ///< one thread is to change it, and waits for the last lease
        changing,  ///< one thread changes it, and owns its blocks
        asleep     ///< with none of its blocks
    };
    struct group {
        explicit group(const sleep_group& g) : tag(g.tag), how(g.memory) {}
        std::string tag;
        group_memory how;
        std::list<block> blocks{};
        state is = state::awake;
        std::uint64_t users = 0;
    };
    // The clock of deadlines.
    struct time {
        const Tenant* of;
        [[nodiscard]] instant now() const noexcept { return of->now(); }
    };

    [[nodiscard]] static failure no_group() noexcept {
        return {.code = errc::invalid_specification, .because = reason::no_such_group};
    }
    [[noreturn]] void refuse(const failure& why, std::string_view what) const { raise(why, tenant_->name(), what); }
    [[nodiscard]] group* find(std::string_view tag) noexcept {
        const auto at = std::ranges::find(groups_, tag, &group::tag);
        return at == groups_.end() ? nullptr : &*at;
    }
    // All groups for no tags; none if a tag doesn't exist.
    template <class Tags>
    [[nodiscard]] std::vector<group*> choose(const Tags& tags) {
        std::vector<group*> chosen;
        bool any = false;
        for (const auto& tag : tags) {
            any = true;
            group* const g = find(tag);
            if (g == nullptr) return {};
            chosen.push_back(g);
        }
        if (!any)
            for (auto& g : groups_) chosen.push_back(&g);
        return chosen;
    }

    [[nodiscard]] lease hold(std::vector<group*> chosen) {
        const std::lock_guard lock(mutex_);
        if (!std::ranges::all_of(chosen, [](const group* g) { return g->is == state::awake; }))
            return lease(errc::asleep);
        lease in(errc::none);
        in.of_ = this;
        in.groups_ = std::move(chosen);
        for (group* const g : in.groups_) ++g->users;
        return in;
    }
    void let_go(const std::vector<group*>& held) noexcept {
        const std::lock_guard lock(mutex_);
        for (group* const g : held) --g->users;
        changed_.notify_all();
    }

    failure change(const std::vector<group*>& chosen, state to, instant deadline) {
        if (chosen.empty()) return no_group();
        for (group* const g : chosen)
            if (const failure why = change(*g, to, deadline); why.code != errc::none) return why;
        return {};
    }
    failure change(group& g, state to, instant deadline) {
        std::unique_lock lock(mutex_);
        // In pieces, because the node's clock may be another than that of condition variables.
        const auto wait_for = [&](auto met) {
            while (!met()) {
                if (tenant_->now() >= deadline) return false;
                changed_.wait_for(lock, std::chrono::milliseconds(1));
            }
            return true;
        };
        const auto is_settled = [&] { return g.is == state::awake || g.is == state::asleep; };
        if (!wait_for(is_settled)) return {.code = errc::deadline_exceeded};
        if (g.is == to) return {};
        // nobody gets a lease from now on
        const state before = std::exchange(g.is, state::leaving);
        const bool unused = wait_for([&] { return g.users == 0; });
        if (unused) g.is = state::changing;
        lock.unlock();
        failure why{.code = unused ? errc::none : errc::deadline_exceeded};
        state is = before;
        if (unused) is = to == state::asleep ? go_to_sleep(g, deadline, why) : come_back(g, deadline, why);
        lock.lock();
        g.is = is;
        changed_.notify_all();
        return why;
    }
    // The changing thread owns the blocks of the group.
    state go_to_sleep(group& g, instant deadline, failure& why) {
        for (auto& b : g.blocks) {
            why.code = part_with(b, deadline);
            if (why.code == errc::none) continue;
            failure ignored;
            return come_back(g, deadline, ignored);
        }
        return state::asleep;
    }
    state come_back(group& g, instant deadline, failure& why) {
        for (auto& b : g.blocks) {
            why = obtain(b, deadline);
            if (why.code == errc::none) continue;
            // The deadline has usually passed by now. Blocks that came are copied back all the
            // same.
            for (auto& back : g.blocks) (void)part_with(back, never);
            return state::asleep;
        }
        return state::awake;
    }

    errc part_with(block& b, instant deadline) {
        if (!b.moved_) {
            drop(b);
            return errc::none;
        }
        b.stays_.reset();
        b.at_ = nullptr;
        return b.moved_->leave(deadline);
    }
    failure obtain(block& b, instant deadline) {
        if (b.at_ != nullptr) return {};
        if (b.moved_) return {.code = bring(b, deadline)};
        failure why;
        b.at_ = b.memory_->try_allocate_until(b.size_, default_alignment, patience{time{tenant_}, deadline}, &why);
        return why;
    }
    errc bring(block& b, instant deadline) {
        b.stays_.emplace(b.moved_->use(deadline));
        b.at_ = b.stays_->data();
        const errc why = b.stays_->code();
        if (why != errc::none) b.stays_.reset();
        return why;
    }
    // If the tenant is closed, the block is gone already.
    static void drop(block& b) noexcept {
        void* const at = std::exchange(b.at_, nullptr);
        b.stays_.reset();
        if (b.moved_)
            b.moved_.reset();
        else if (at != nullptr)
            (void)b.memory_->deallocate(at, b.size_, default_alignment);
        b.memory_->trim();  // otherwise its pool would keep the memory
    }

    static constexpr std::size_t default_alignment = memory::default_alignment;

    Tenant* tenant_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::list<group> groups_;
};

/// The groups of that tenant.
template <class Tenant>
sleep_groups(Tenant&, const std::vector<sleep_group>&) -> sleep_groups<Tenant>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
