// SPDX-License-Identifier: Apache-2.0
// A tenant that goes to sleep while no request comes, and wakes for the next request: scale to zero
// and back. Nothing happens by itself: one of the server's threads must call tick().
//
//   gpushare::sleeping_tenant model{chat, {.spill_after = 1min, .release_after = 10min},
//                                   {.release = [&] { engine.reset(); }, .restore = [&] { engine = load(path); }}};
//   // a request: wakes it first
//   { auto awake = model.use(deadline);  if (awake) answer(request); }
//   wait_until(model.tick());  // idle: sleeps when it is time
//
// The levels of sleep, from the lightest to the deepest: pools and caches are trimmed; submissions
// stop and the tenant's spillable blocks go to the host (tenant::sleep); the engine itself is
// released. Quota and share remain promised. With tenant_spec::lends_asleep, bytes that the quota
// leaves free are lent to other tenants, and come back before the tenant wakes. To give up the
// promise as well, park the tenant (tenant/move.hpp).
//
// A plain state machine decides how deep a model sleeps, and predicts how long it takes to wake.
// The caller passes the time, and gets the next step. A sleeping_tenant carries the step out.
//
//   gpushare::sleep_levels levels{{.drop_caches_after = 10s, .spill_after = 1min, .release_after = 10min, .wake_within = 2s}};
//   levels.request_began(now);  ...  levels.request_ended(now);
//   // again at levels.next_at()
//   if (auto to = levels.next(now)) { levels.began(*to, now); ...; levels.ended(true, later); }
//   levels.predicted_wake();  // if a request came now
//
// A model may also sleep in parts, which are named by tags: for example caches now, weights later,
// and on the way back weights first.
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
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How deep a model sleeps. Each level includes the levels above it in this list.
enum class sleep_level : std::uint8_t {
    awake,             ///< everything is in place
    caches_dropped,    ///< pools, unused KV pages and other caches are given back
    weights_spilled,   ///< weights are on the host
    weights_released,  ///< weights are gone, and must be loaded again
};
/// The number of levels.
inline constexpr std::size_t sleep_levels_count = 4;

/// The level in English.
[[nodiscard]] constexpr std::string_view to_string(sleep_level l) noexcept {
    switch (l) {
        case sleep_level::awake: return "awake";
        case sleep_level::caches_dropped: return "caches dropped";
        case sleep_level::weights_spilled: return "weights spilled";
        case sleep_level::weights_released: return "weights released";
    }
    return "unknown level";
}

/// How long a tenant must be without a request before it sleeps, for each level. With 0, the tenant
/// doesn't enter that level by itself.
struct sleep_rule {
    ns drop_caches_after{};  ///< to caches_dropped
    ns spill_after{};        ///< to weights_spilled
    ns release_after{};      ///< to weights_released
    /// The longest predicted time to wake, which limits how deep a tenant sleeps. 0 means no limit.
    ns wake_within{};
    ns retry_after = std::chrono::seconds(1);  ///< when a change that failed is tried again
    /// If a wake took longer than wake_within, the tenant doesn't sleep that deep for this long.
    /// After that time, the slow wake counts as an exception.
    ns distrust_for = std::chrono::hours(1);
};

/// The state of one model. A value; not thread-safe.
class sleep_levels {
public:
    /// An awake model without requests since `now`.
    explicit sleep_levels(const sleep_rule& rule = {}, instant now = {}) noexcept
        : rule_(rule), idle_since_(now), seen_(now) {}

    /// Says that a request has come, or waits until it can be served.
    void request_began(instant now) noexcept {
        seen_ = std::max(seen_, now);
        ++requests_;
    }
    /// Says that a request has ended.
    void request_ended(instant now) noexcept {
        seen_ = std::max(seen_, now);
        if (requests_ != 0 && --requests_ == 0) idle_since_ = now;
    }
    /// The number of requests under way.
    [[nodiscard]] std::uint64_t requests() const noexcept { return requests_; }

    /// The next step: the level to go to. There is none if the model is at the right level, if a
    /// change is under way, or if the last change has failed just now. A request makes the model
    /// retry immediately.
    [[nodiscard]] std::optional<sleep_level> next(instant now) const noexcept {
        if (changing_) return {};
        const sleep_level wanted = wanted_at(now);
        if (wanted == level_ || (requests_ == 0 && now < not_before_)) return {};
        return wanted;
    }
    /// The time from which next() may answer differently, if no event comes before. `never` means
    /// that time alone doesn't change the answer.
    [[nodiscard]] instant next_at(instant now) const noexcept {
        if (changing_ || requests_ != 0) return never;
        if (now < not_before_) return not_before_;
        instant first = never;
        for (const auto l : deeper)
            if (l > level_)
                if (const instant at = from_when(l); at > now) first = std::min(first, at);
        return first;
    }

    /// Says that the change to `to` begins. Requests wait until it ends.
    void began(sleep_level to, instant now) noexcept {
        changing_ = to;
        changed_at_ = now;
    }
    /// Says that the change has ended. After a failure the model stays at its level.
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
    /// Counts a wake from `from` as if it had been measured at the latest time that the object
    /// knows. For measurements of an earlier run, or a first guess.
    void measured(sleep_level from, ns took) noexcept {
        auto& all = wakes_[static_cast<std::size_t>(from)];
        all.when[all.count % all.last.size()] = seen_;
        all.last[all.count++ % all.last.size()] = took;
    }

    /// The current level; during a change, the level before the change.
    [[nodiscard]] sleep_level level() const noexcept { return level_; }
    /// The level to which the model is changing, if any.
    [[nodiscard]] std::optional<sleep_level> changing() const noexcept { return changing_; }
    /// How long a request that comes now would wait until the model is awake: the longest of the
    /// last eight wakes from this level. 0 if none was measured.
    [[nodiscard]] ns predicted_wake() const noexcept { return predicted_wake(level_); }
    /// The same for a wake from any level.
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
    /// Sets the rule.
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
    // The time from which the model may sleep that deep: it has been idle for long enough, and slow
    // wakes from that level are long enough ago. `never` if it doesn't sleep that deep by itself.
    [[nodiscard]] instant from_when(sleep_level l) const noexcept {
        if (after(l) <= ns{}) return never;
        instant at = saturating_add(idle_since_, after(l));
        const auto& all = wakes_[static_cast<std::size_t>(l)];
        for (std::size_t i = 0; i < all.last.size(); ++i)
            if (rule_.wake_within != ns{} && all.last[i] > rule_.wake_within)
                at = std::max(at, saturating_add(all.when[i], rule_.distrust_for));
        return at;
    }
    // The deepest level for which the model has been idle for long enough. The model returns to a
    // lighter level only by waking.
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
    instant seen_;  // the latest time that a caller has passed
    std::uint64_t requests_ = 0;
    std::array<wake_times, sleep_levels_count> wakes_{};
};

/// A server's actions on an engine. Each may be empty. One thread at a time calls them, without
/// holding a lock. An exception makes the change fail, and the change is tried again later.
///
/// On waking, submissions resume before `restore` and `unspill`, which may need them. Work that was
/// still queued when the tenant fell asleep would then find no engine, so keep a request's lease
/// until its work is over. `restore` and `unspill` may call use() themselves, to warm the engine
/// up, and get a lease immediately. In the other actions, use() returns errc::in_flight.
struct sleep_actions {
    /// free memory that is quickly made again, such as KV pages and scratch
    std::function<void()> drop_caches{};
    std::function<void()> spill{};    ///< move weights that aren't spillable blocks to the host
    std::function<void()> release{};  ///< destroy the engine, including its weights
    std::function<void()> restore{};  ///< make the engine again; only after release
    std::function<void()> unspill{};  ///< undo `spill`; only after spill
};

/// Drives one tenant through its levels of sleep. Any thread may use the object, which can't be
/// copied or moved. The tenant must outlive it.
template <class Tenant>
class sleeping_tenant {
public:
    /// Keeps the tenant awake. A lease can be moved but not copied, and must not outlive the
    /// sleeping_tenant.
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
        /// Why the tenant isn't awake: deadline_exceeded (perhaps other tenants still use the
        /// memory that it lent), stopped, closed, in_flight (an action of falling asleep called
        /// use()), or an action's exception (submission_failed for an exception that isn't a
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

    /// The tenant begins awake.
    explicit sleeping_tenant(Tenant& of, const sleep_rule& rule = {}, sleep_actions actions = {})
        : tenant_(&of), actions_(std::move(actions)), state_(rule, of.now()) {}
    sleeping_tenant(const sleeping_tenant&) = delete;
    sleeping_tenant& operator=(const sleeping_tenant&) = delete;

    /// Wakes the tenant for a request, or waits until another thread has woken it, or until the
    /// tenant has its lent memory back. A stop request ends these waits. Times are of the node's
    /// clock.
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
                // The thread that wakes the tenant may use the tenant as far as it is awake.
                if (state_.changing() == sleep_level::awake) break;
                why = errc::in_flight;  // the action would wait for itself
            } else if (!state_.changing())
                why = change(sleep_level::awake, deadline, lock, stop);
            // waits in pieces, because the node's clock may differ from that of condition variables
            else
                changed_.wait_for(lock, detail::short_look_slice);
        }
        return {*this, why, tenant_->now() - came};
    }

    /// Puts the tenant to sleep if it is time, or again after a wake that failed halfway. Returns
    /// the time at which the next step is due; `never` means that a request must come first. May
    /// wait for work in flight, for at most `patience`.
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

    /// The current state: level, predicted and measured wake times.
    [[nodiscard]] sleep_levels state() const {
        const std::lock_guard lock(mutex_);
        return state_;
    }
    /// Sets the rule.
    void set_rule(const sleep_rule& rule) {
        const std::lock_guard lock(mutex_);
        state_.set_rule(rule);
    }
    /// Counts a wake time of an earlier run, or a guess.
    void measured(sleep_level from, ns took) {
        const std::lock_guard lock(mutex_);
        state_.measured(from, took);
    }

private:
    // Whether a wake failed after its first step: the tenant then runs without a request to serve.
    [[nodiscard]] bool is_half_awake() const noexcept {
        return !state_.changing() && state_.requests() == 0 && state_.level() >= sleep_level::weights_spilled &&
               !asleep_;
    }
    void end() noexcept {
        const std::lock_guard lock(mutex_);
        state_.request_ended(tenant_->now());
    }

    // The caller holds the lock. It is released during the actions.
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
        // If other tenants still have its memory, the tenant stays asleep, as deep as intended; the
        // next request wakes it.
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

/// The fate of the memory of a group while the group sleeps.
enum class group_memory : std::uint8_t {
    moved,   ///< goes to the host with its contents and comes back; needs tenant_spec::spill
    dropped  ///< is freed; on waking, as much memory comes back elsewhere, with undefined contents
};

/// A set of a model's allocations that go to sleep and wake together.
struct sleep_group {
    /// such as "weights" or "kv_cache"; not empty, and different for each group
    std::string tag;
    /// The fate of the memory while the group sleeps.
    group_memory memory = group_memory::moved;
};

/// Groups of a tenant's allocations, each of which sleeps and wakes by its tag. A group is either
/// awake, with all of its blocks on the device, or asleep, with none of its blocks there. While a
/// group is awake, its blocks don't move to make room for other tenants. Nothing happens by itself;
/// combine the groups with a sleeping_tenant by its actions.
///
/// Any thread may use the object, which can't be copied or moved. One thread at a time changes a
/// group, and other threads wait for that change. The tenant's handle must outlive the object. Tags
/// are any range of strings; an empty range means all groups, in the constructor's order. Several
/// groups sleep and wake in the order of the tags. If a call fails, the groups of earlier tags keep
/// their new state.
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
        /// Made by sleep_groups only.
        block(group& of, bytes size, memory& from) noexcept : of_(&of), size_(size), memory_(&from) {}
        block(const block&) = delete;             ///< Not copied.
        block& operator=(const block&) = delete;  ///< Not copied.

        /// The address on the device, valid while a lease of the block's group is held. Null while
        /// the group sleeps.
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

    /// Keeps groups awake. A lease can be moved but not copied, and must not outlive the
    /// sleep_groups.
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
        /// Why the groups aren't awake: asleep (a group sleeps or is changing), or
        /// invalid_specification (no such tag).
        [[nodiscard]] errc code() const noexcept { return why_; }

    private:
        friend sleep_groups;
        explicit lease(errc why) noexcept : why_(why) {}
        sleep_groups* of_ = nullptr;
        std::vector<group*> groups_{};
        errc why_;
    };

    /// All groups begin awake and empty. Throws std::bad_alloc, and operation_error:
    /// invalid_specification (an empty tag, or no group) or duplicate_name.
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

    /// Allocates a block of the group, on one of the tenant's devices, with undefined contents. The
    /// block is valid until free(), or as long as this object lives. Throws operation_error: asleep
    /// (the group sleeps or is changing); invalid_specification (no such tag); the errors of the
    /// tenant's allocate or allocate_spillable.
    block& allocate(std::string_view tag, bytes size, std::size_t part = 0) {
        group* const g = find(tag);
        if (g == nullptr) refuse(no_group(), "allocate in a group");
        const lease awake = hold({g});  // no lock is held during the allocation
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
    /// Frees a block, which no work may use. Waits while the memory of the block's group is being
    /// moved, but not while a change waits for leases, because the caller may hold one of them.
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

    /// Keeps these groups awake for some work, as long as the result lives. The result must live
    /// until the device has done the work. Doesn't wait, and doesn't wake groups.
    template <std::ranges::input_range Tags = std::initializer_list<std::string_view>>
    [[nodiscard]] lease use(const Tags& tags = {}) {
        const auto chosen = choose(tags);
        return chosen.empty() ? lease(errc::invalid_specification) : hold(chosen);
    }

    /// Waits until no lease of these groups is held, and frees their memory on the device. Groups
    /// that sleep already stay as they are. Codes: invalid_specification (no such tag; nothing has
    /// changed), deadline_exceeded, out_of_memory (the host has no room), closed, or the error of a
    /// copy. The group that failed is awake again. If waking it fails, too, the group sleeps, and
    /// wake() brings moved memory back.
    template <std::ranges::input_range Tags = std::initializer_list<std::string_view>>
    failure try_sleep(const Tags& tags = {}, instant deadline = never) {
        return change(choose(tags), state::asleep, deadline);
    }
    /// try_sleep(), but throws operation_error with its codes.
    template <std::ranges::input_range Tags = std::initializer_list<std::string_view>>
    void sleep(const Tags& tags = {}, instant deadline = never) {
        if (const failure why = try_sleep(tags, deadline); why.code != errc::none) refuse(why, "sleep");
    }
    /// Brings back the memory of these groups: moved blocks with their contents, dropped blocks
    /// without. Waits for bytes until the deadline. Groups that are awake stay as they are. Codes:
    /// invalid_specification, deadline_exceeded, the error of an allocation, closed, or the error
    /// of a copy. The group that failed stays asleep, and has no memory on the device: blocks that
    /// had come are copied back, which may take until after the deadline.
    template <std::ranges::input_range Tags = std::initializer_list<std::string_view>>
    failure try_wake(const Tags& tags = {}, instant deadline = never) {
        return change(choose(tags), state::awake, deadline);
    }
    /// try_wake(), but throws operation_error with its codes.
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
        leaving,   ///< one thread is going to change it, and waits for the last lease
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

    [[nodiscard]] static failure no_group() noexcept {
        return {.code = errc::invalid_specification, .because = reason::no_such_group};
    }
    [[noreturn]] void refuse(const failure& why, std::string_view what) const { raise(why, tenant_->name(), what); }
    [[nodiscard]] group* find(std::string_view tag) noexcept {
        const auto at = std::ranges::find(groups_, tag, &group::tag);
        return at == groups_.end() ? nullptr : &*at;
    }
    // All groups if there are no tags; no groups if a tag doesn't exist.
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
        // Waits in pieces, because the node's clock may differ from that of condition variables.
        const auto wait_for = [&](auto met) {
            while (!met()) {
                if (tenant_->now() >= deadline) return false;
                changed_.wait_for(lock, detail::short_look_slice);
            }
            return true;
        };
        const auto is_settled = [&] { return g.is == state::awake || g.is == state::asleep; };
        if (!wait_for(is_settled)) return {.code = errc::deadline_exceeded};
        if (g.is == to) return {};
        // no caller gets a lease from now on
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
            // The deadline has usually passed by now. Blocks that came are copied back
            // nevertheless.
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
        b.at_ =
            b.memory_->try_allocate(b.size_, default_alignment, patience{detail::clock_of(*tenant_), deadline}, &why);
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
        b.memory_->trim();  // otherwise the block's pool would keep the memory
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
