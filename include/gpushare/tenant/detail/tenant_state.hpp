// SPDX-License-Identifier: Apache-2.0
// The state behind a tenant's handle: its parts on the devices, what it was granted, and the order
// of its close. tenant.hpp is the handle; tenancy.hpp admits.
//
//   auto state = std::make_unique<detail::tenant_state<Node, Policy>>(node, shared);   state->open(claim, nullptr);
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/detail/stable_list.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/partition/reservation.hpp>
#include <gpushare/tenant/detail/changeable_fields.hpp>
#include <gpushare/tenant/detail/grant_followers.hpp>
#include <gpushare/tenant/detail/shared_node.hpp>
#include <gpushare/tenant/detail/tenant_claim.hpp>
#include <gpushare/tenant/detail/tenant_part.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <node Node, compute_policy Policy>
class tenant_state {
public:
    using shared = shared_node<Node, Policy>;
    using part = tenant_part<Node, Policy>;

    tenant_state(Node& whole, shared& all) : whole_(&whole), clock_(whole.get_clock()), all_(&all) {
        const std::lock_guard lock(all.mutex);
        all.handles.push_back(this);
    }
    tenant_state(const tenant_state&) = delete;
    tenant_state& operator=(const tenant_state&) = delete;

    ~tenant_state() {
        close_report late;  // the leaks of calls that overlapped the close
        if (closed())
            each_memory([&](part& p) {
                try {
                    (void)p.memory.take_back(late, patience{clock_, instant::min()});
                } catch (...) {  // the host lacks the memory for a list of leaks: they stay charged
                }
            });
        const std::lock_guard lock(all_->mutex);
        erase_equal(all_->handles, this);
    }

    // Makes the streams and takes over the claim. Call under no lock: drivers are slow, and a
    // limiter that a client leaves after a failure may admit another client's work. If it throws,
    // the claim still has everything.
    void open(tenant_claim<Node, Policy>& claim, const tenant_state* predecessor) {
        spec_ = claim.spec;
        fill_in(spec_, all_->options);
        tag_ = claim.tag;
        for (std::size_t i = 0; i < spec_.on.size(); ++i)
            parts_.emplace_back(*whole_, *all_, spec_, spec_.on[i], *claim.slices[i], tag_,
                                claim.stays(i) ? &predecessor->parts_[i] : nullptr);
        // so that neither a sleep nor the undoing of a change can run out of memory halfway
        lent_.reserve(parts_.size());
        resizes_.reserve(parts_.size());
        for (auto& p : parts_)
            if (p.has_memory) (void)p.memory.limit().adopt(spec_.memory / spec_.devices, burst_on(p, spec_));
        promised_ = spec_.compute;
        promised_at_ = level_of(spec_);
        named_ = true;
        claim.keep();
    }

    [[nodiscard]] const std::string& name() const noexcept { return spec_.name; }  // never changes
    [[nodiscard]] tenant_spec spec() const {
        const std::lock_guard lock(all_->mutex);
        return spec_;
    }
    // The grant, and the number of changes to it.
    struct grant_state {
        tenant_spec spec;
        std::uint64_t changes;
    };
    [[nodiscard]] grant_state granted() const {
        const std::lock_guard lock(all_->mutex);
        return {spec_, changes_};
    }
    // The functions that follow changes of the grant. They are made at the first call. Throws
    // std::bad_alloc.
    [[nodiscard]] std::shared_ptr<grant_followers> followers() {
        const std::lock_guard lock(all_->mutex);
        if (followers_ == nullptr) followers_ = std::make_shared<grant_followers>(spec_);
        return followers_;
    }
    void copy_grant(tenant_spec& into) const {
        const std::lock_guard lock(all_->mutex);
        into = spec_;
    }
    [[nodiscard]] std::uint32_t tag() const noexcept { return tag_; }
    [[nodiscard]] stable_list<part>& parts() noexcept { return parts_; }
    /// Null if there aren't that many parts.
    [[nodiscard]] part* find(std::size_t number) noexcept { return number < parts_.size() ? &parts_[number] : nullptr; }
    [[nodiscard]] shared& all() const noexcept { return *all_; }
    // Leaves the tenant to the tenancy, which closes it later. Needs no host memory.
    static void leave(std::unique_ptr<tenant_state> stuck) noexcept {
        shared& all = *stuck->all_;
        std::list<std::unique_ptr<tenant_state>> place(std::move(stuck->place_));
        place.front() = std::move(stuck);
        const std::lock_guard lock(all.mutex);
        all.stuck.splice(all.stuck.end(), place);
    }
    [[nodiscard]] instant now() const noexcept { return clock_.now(); }

    // For a successor on the devices `on`: the slices of those devices that the tenant has in the
    // same place; otherwise null.
    [[nodiscard]] plain_list<typename shared::slice*> stays_on(const std::vector<device_id>& on) const {
        plain_list<typename shared::slice*> in(on.size());
        for (std::size_t i = 0; i < std::min(on.size(), parts_.size()); ++i)
            if (parts_[i].device == on[i]) in[i] = &parts_[i].slice;
        return in;
    }
    // From now on this tenant has its predecessor's memory on the devices where the predecessor
    // stays. Both have the same grant, after `changes` changes. All or nothing: see
    // succession::take_over().
    void take_over(tenant_state& predecessor, std::uint64_t changes) {
        std::vector<std::function<typename Node::stream()>> make(parts_.size());
        for (std::size_t i = 0; i < parts_.size(); ++i)
            if (auto& now = parts_[i]; now.store == predecessor.parts_[i].store)
                make[i] = [whole = whole_, &s = now.slice, d = now.device, level = spec().level, tag = tag_] {
                    return s.stream_for(*whole, d, level, tag);
                };
        {
            const std::lock_guard lock(all_->mutex);  // no resize is under way, and none follows
            if (predecessor.closed()) raise({errc::closed}, name(), "take a tenant's place");
            if (!predecessor.lent_.empty())
                raise({errc::asleep}, name(), "take the place of a tenant that lends its memory");
            if (predecessor.changes_ != changes)
                raise({errc::in_flight}, name(), "take the place of a tenant that is being resized");
            predecessor.succeeded_ = true;
            for (std::size_t i = 0; i < parts_.size(); ++i) {
                if (!make[i]) continue;
                part &now = parts_[i], &before = predecessor.parts_[i];
                before.has_memory = false;
                now.has_memory = true;
                if (!std::exchange(now.has_share, true)) before.has_share = false;
            }
        }
        for (std::size_t i = 0; i < parts_.size(); ++i)
            if (make[i]) parts_[i].store->scrubber.made_by(std::move(make[i]));
    }

    // Acquire: a thread that sees the close sees the final accounts.
    [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

    [[nodiscard]] tenant_usage usage() {
        const auto granted = spec();
        tenant_usage sum{.memory = granted.memory};
        for (auto& p : parts_) {
            add(sum, p.slice.compute.usage(p.client, p.account));
            sum.burst += burst_on(p, granted);
            if (!p.has_memory) continue;
            p.memory.collect();
            const auto held = p.memory.limit().usage();
            sum.current += held.current;
            sum.peak += held.peak;
            sum.idle += p.memory.idle();
            sum.pending += p.memory.pending();
            sum.largest_free = std::max(sum.largest_free, p.memory.largest_free());
            const auto counts = p.memory.counts();
            sum.scrubbed += p.memory.scrubbed();
            sum.total += counts.total;
            sum.allocations += counts.allocations;
            sum.frees += counts.frees;
            sum.refused += counts.refused;
        }
        return sum;
    }

    // The order of closing: (1) on all devices, new work is refused and waiting work is cancelled;
    // (2) held permits and work in flight end; (3) frees in stream order are collected; (4) memory
    // is refused, on all devices; (5) the layers that keep memory of the tenant, pools and arenas,
    // give it back; (6) allocated blocks are reported and taken back; (7) frees that came meanwhile
    // are collected; (8) share and name return, once nothing is charged any more. A
    // deadline can end it in (2), (3), (5) or (7): memory taken back by then is never handed out.
    // The parts stay until the handle goes, so that an overlapping call is refused and not lost.
    close_report finish(instant deadline, const std::stop_token& stop = {}) {
        close_report report;
        for (auto& p : parts_) end_client(p, instant::min());
        for (auto& p : parts_)
            if (!end_client(p, deadline, stop)) return waiting(report, close_wait::work, p);
        for (auto& p : parts_) {
            for (auto& s : p.streams)
                if (!in_pieces([&](instant by) { return s.record().wait(by); }, deadline, stop))
                    return waiting(report, close_wait::streams, p);
            if (p.has_memory && !in_pieces([&](instant by) { return p.memory.drain(by); }, deadline, stop))
                return waiting(report, close_wait::frees, p);
        }
        {
            const std::lock_guard lock(all_->mutex);  // no resize is under way, and none follows
            closed_.store(true, std::memory_order_release);
            forget_lent();
        }
        each_memory([](part& p) { p.memory.close(); });  // drivers are slow: no lock
        const auto all = [&](bool (*f)(typename part::memory_type&, instant)) {
            return with_memory(
                [&](part& p) { return in_pieces([&](instant by) { return f(p.memory, by); }, deadline, stop); });
        };
        bool returned = all([](typename part::memory_type& m, instant by) { return m.limit().close(by); });
        if (returned) {  // otherwise pools still touch their blocks
            returned &= with_memory([&](part& p) {
                return p.memory.take_back(report, patience{clock_, deadline, stop});
            });
            returned &= all([](typename part::memory_type& m, instant by) { return m.drain(by); });
        }
        note(report);
        report.complete = returned && report.still_charged == bytes{};
        if (!report.complete) return blocked(report);
        const std::lock_guard lock(all_->mutex);
        // otherwise another close came first, and the name may be taken
        if (std::exchange(named_, false)) {
            promise({}, promised_at_);
            all_->forget(spec_.name);
        }
        return report;
    }

    // All or nothing, alongside wake() too. The tenant is asleep only if no wake() was under way at
    // any time, since a wake() may have passed some of its devices already. Acquire: a wake() that
    // is seen to have ended has woken everything that slept before. Hooks are called under no lock.
    bool sleep(instant deadline, const std::stop_token& stop, while_asleep what_waits) {
        const auto ended = wakes_ended_.load(std::memory_order_acquire);
        bool asleep = true;
        for (auto& p : parts_) asleep = asleep && p.slice.compute.sleep(p.client, deadline, stop, what_waits);
        // the limiters' mutexes order this
        if (!asleep || wakes_begun_.load(std::memory_order_relaxed) != ended) {
            if (!lends()) wake_clients();
            return false;
        }
        for (auto& p : parts_) {
            p.memory.collect();
            // caches give to the tenant's pool, the pool gives back
            for (int round = 0; round < 2; ++round)
                for (hook_cursor asked; p.memory.limit().ask_next(asked, p.memory.capacity());) {
                }
        }
        if (lend(ended)) return true;
        if (!lends()) wake_clients();
        return false;
    }
    // Takes back the lent bytes and wakes the tenant. Otherwise the tenant sleeps on, and the
    // failure says why. `recall`, called under no lock, waits for the bytes, and may throw.
    template <class Recall>
    failure wake(Recall recall) {
        const wake_under_way counted(*this);
        failure why = take_back_lent();
        if (why.code == errc::no_room) {
            const instant began = now();
            why = recall(why, [this] { return take_back_lent(); });
            if (why.code == errc::none) note_recall(now() - began);
        }
        if (why.code == errc::none)
            for (auto& p : parts_) p.slice.compute.wake(p.client);
        return why;
    }
    // While the tenant sleeps, and if its specification says so, the unused part of its guarantee
    // becomes burst, for itself and all others. Returns false, and nothing is lent, if the tenant
    // was woken after `ended` wakes had ended.
    bool lend(std::uint32_t ended) {
        const std::lock_guard lock(all_->mutex);
        if (wakes_begun_.load(std::memory_order_relaxed) != ended) return false;
        if (spec_.lends_asleep && !closed() && !succeeded_) lend_idle();
        return true;
    }
    // Lends again, to include memory that was freed since. Does nothing if the tenant doesn't lend.
    void lend_more() {
        // drivers are slow: under no lock
        each_memory([](part& p) { p.memory.trim(); });
        const std::lock_guard lock(all_->mutex);
        if (!lent_.empty()) lend_idle();
    }
    [[nodiscard]] bool lends() const {
        const std::lock_guard lock(all_->mutex);
        return !lent_.empty();
    }
    [[nodiscard]] recall_forecast recall() const {
        const std::lock_guard lock(all_->mutex);
        recall_forecast f{.usual_longest = *std::max_element(recalls_.begin(), recalls_.end())};
        for (std::size_t i = 0; i < lent_.size(); ++i) {
            f.lent += lent_[i];
            f.missing += lent_[i] - parts_[i].on.memory.free();
        }
        return f;
    }

    // All or nothing. The limiters are told last and under no lock, since they may admit work
    // immediately. If a policy refuses or throws then, the change is undone; memory that was given
    // away and taken by others meanwhile doesn't come back.
    template <std::same_as<tenant_change> Change>
    failure change(const Change& c) {
        open_level_for(c);
        tenant_spec old;
        {
            const std::lock_guard lock(all_->mutex);
            old = spec_;
            if (const auto why = grant(c); why.code != errc::none) return why;
        }
        failure why{};
        try {
            why = tell_limiters();
            if (why.code == errc::none) return why;
        } catch (...) {  // the policy lacks host memory
            undo<Change>(old);
            tell_undone();
            throw;
        }
        undo<Change>(old);
        tell_undone();
        return why;
    }

    // ---- Parts of a change of several tenants at once; see joint_change.hpp. Under the mutex,
    // except open_level_for, tell_limiters and tell_undone.

    // Why a change can't be made, whatever room there is.
    [[nodiscard]] failure unfit(const tenant_change& c) const {
        if (closed() || succeeded_) return {errc::closed};
        const bytes memory = c.memory.value_or(spec_.memory), burst = c.burst.value_or(spec_.burst);
        const bytes step = all_->unit_of(spec_) * spec_.devices;
        if (!lent_.empty() && (memory != spec_.memory || burst != spec_.burst)) return {.code = errc::asleep};
        if (memory == bytes{} && burst == bytes{})
            return {.code = errc::invalid_specification, .because = reason::no_memory_named};
        for (const bytes wanted : {memory, burst == all_burst ? bytes{} : burst})
            if (wanted % step != bytes{})
                return {errc::not_whole, wanted.count(), 0, step.count(), reason::whole_sizes};
        if (c.spill && !can_spill(*c.spill)) return {.code = errc::not_supported, .because = reason::no_spill};
        return {};
    }
    // The new limits for the quota of one of its parts.
    [[nodiscard]] quota_limits limits_of(part& p, const tenant_change& c) const {
        if (const auto now = p.memory.limit().usage(); !lent_.empty())  // as lent now
            return {&p.memory.limit(), now.guaranteed, now.burst};
        tenant_spec then{.memory = c.memory.value_or(spec_.memory), .devices = spec_.devices};
        then.burst = c.burst.value_or(spec_.burst);
        return {&p.memory.limit(), then.memory / spec_.devices, burst_on(p, then)};
    }
    [[nodiscard]] const tenant_spec& granted_now() const noexcept { return spec_; }
    // The level at which its share is promised after the change.
    [[nodiscard]] priority level_after(const tenant_change& c) const noexcept {
        return level_of(c.compute.value_or(spec_.compute), c.level.value_or(spec_.level));
    }
    // Records a change for which the memory has been resized.
    void note(const tenant_change& c) {
        promise(c.compute.value_or(spec_.compute), level_after(c));  // which is open
        if (c.wait) wait_for(*c.wait);
        if (c.spill) spill_to(*c.spill);
        apply_change(c, spec_);
        ++changes_;
    }
    // Opens the level now, so that telling a limiter can't run out of memory later.
    void open_level_for(const tenant_change& c) {
        tenant_spec then = spec();
        const auto now = level_of(then);
        then.level = c.level.value_or(then.level);
        then.compute = c.compute.value_or(then.compute);
        const auto ceiling = c.ceiling.value_or(then.ceiling.value_or(no_priority));
        if (const auto level = level_of(then); level != now || c.ceiling) open_level(level, ceiling);
    }
    // The change that undoes others.
    [[nodiscard]] static tenant_change back_to(const tenant_spec& old) {
        tenant_change back;
        for_each_changeable(back, old, [](auto& to, const auto& field) { to = field; });
        back.ceiling = old.ceiling.value_or(old.level);
        return back;
    }
    // Under the mutex. Undoes changes by grant(), as far as others haven't taken the memory or the
    // shares meanwhile: leaves out memory that grows first, then shares as well. `without(leave)`
    // calls leave(change, spec) for each.
    template <class Grant, class Without>
    static void undo_by(Grant grant, Without without) {
        if (grant().code == errc::none) return;
        without([](tenant_change& c, const tenant_spec& now) {
            if (c.memory > now.memory) c.memory.reset();
        });
        if (grant().code == errc::none) return;
        without([](tenant_change& c, const tenant_spec& now) {
            if (c.compute > now.compute || c.level != now.level) {
                c.compute.reset();
                c.level.reset();
            }
        });
        (void)grant();
    }
    // Under the mutex. A change sets a ceiling and removes none: back_to() alone would set one.
    void undo_ceiling(std::optional<priority> old) noexcept { spec_.ceiling = old; }

    // Tells the limiters, and last the functions that follow the grant.
    failure tell_limiters() {
        const auto why = tell_policies();
        if (why.code == errc::none) tell_followers();
        return why;
    }
    // After a refusal has undone the change. Other calls may have told the followers of the change
    // meanwhile, so this tells the followers again even if a policy refuses the old settings as
    // well, or lacks host memory for them.
    void tell_undone() noexcept {
        try {
            (void)tell_policies();
        } catch (...) {
        }
        tell_followers();
    }

private:
    // Two resizes may get here in either order: a resize that finds newer settings than its own
    // tells the newer ones.
    failure tell_policies() {
        for (auto& p : parts_) {
            client_settings told, now = settings(p.slice.size);
            do {
                told = now;
                const auto why = p.slice.compute.change(p.client, told);
                if (why != errc::none && why != errc::closed) return why;
                now = settings(p.slice.size);
            } while (now != told);
        }
        return {};
    }
    // Writes the present state into the report.
    void note(close_report& report) {
        report.usage = usage();
        report.still_charged = {};
        each_memory([&](part& p) { report.still_charged += p.memory.limit().usage().current; });
    }
    close_report& waiting(close_report& report, close_wait what, const part& p) {
        note(report);
        report.waits_for = what;
        report.device = p.device;
        return report;
    }
    // The report for memory that isn't back, with the first device that has such memory.
    close_report& blocked(close_report& report) {
        report.waits_for = close_wait::memory;
        report.device = parts_.front().device;
        (void)with_memory([&](part& p) {
            if (p.memory.limit().usage().current == bytes{}) return true;
            report.device = p.device;
            return false;
        });
        return report;
    }

    bool end_client(part& p, instant deadline, const std::stop_token& stop = {}) {
        return p.slice.compute.close(p.client, deadline, stop, &p.account);
    }

    // Runs a wait that doesn't take a stop request, until the deadline or a stop request.
    template <class Wait>
    bool in_pieces(Wait wait, instant deadline, const std::stop_token& stop) {
        if (!stop.stop_possible()) return wait(deadline);
        for (;;) {
            const bool over = stop.stop_requested();
            const instant by = over ? instant::min() : saturating_add(now(), look_slice);
            if (wait(std::min(by, deadline))) return true;
            if (over || now() >= deadline) return false;
        }
    }

    // A wake that throws has ended, too: otherwise no later sleep() would succeed.
    class wake_under_way {
    public:
        explicit wake_under_way(tenant_state& of) noexcept : of_(&of) {
            of.wakes_begun_.fetch_add(1, std::memory_order_relaxed);
        }
        wake_under_way(const wake_under_way&) = delete;
        wake_under_way& operator=(const wake_under_way&) = delete;
        ~wake_under_way() { of_->wakes_ended_.fetch_add(1, std::memory_order_release); }

    private:
        tenant_state* of_;
    };

    void wake_clients() {
        const wake_under_way counted(*this);
        for (auto& p : parts_) p.slice.compute.wake(p.client);
    }

    // Call these two under the mutex. Charged bytes stay guaranteed.
    void lend_idle() {
        const bytes guaranteed = spec_.memory / spec_.devices;
        lent_.resize(parts_.size());
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            part& p = parts_[i];
            auto& limit = p.memory.limit();
            const bytes keeps = std::min(guaranteed, limit.usage().current), lends = guaranteed - keeps;
            if (limit.resize(keeps, burst_on(p, spec_) + lends) != errc::none) continue;
            p.on.lends(lent_[i], lends);
            lent_[i] = lends;
        }
    }
    void forget_lent() noexcept {
        for (std::size_t i = 0; i < lent_.size(); ++i) parts_[i].on.lends(lent_[i], {});
        lent_.clear();
    }
    void note_recall(ns took) noexcept {
        const std::lock_guard lock(all_->mutex);
        recalls_[recalls_made_++ % recalls_.size()] = took;
    }
    // no_room, with the figures of one device, if other tenants use the lent memory.
    failure take_back_lent() {
        const std::lock_guard lock(all_->mutex);
        if (lent_.empty() || closed()) return {};
        const auto why = resize_parts(spec_.memory, spec_.burst);
        if (why.code == errc::none) forget_lent();
        return why;
    }

    // Calls `f` for each part whose memory is this tenant's.
    template <class F>
    void each_memory(F f) {
        for (auto& p : parts_)
            if (p.has_memory.load(std::memory_order_relaxed)) f(p);
    }
    // Returns whether all these calls returned true.
    template <class F>
    bool with_memory(F f) {
        bool all = true;
        each_memory([&](part& p) { all &= f(p); });
        return all;
    }

    static void add(tenant_usage& sum, const client_usage& ran) noexcept {
        sum.device_time += ran.device_time;
        sum.completed += ran.completed;
        sum.failed += ran.failed;
        sum.waiting += ran.waiting;
        sum.in_flight += ran.in_flight;
        sum.dropped += ran.dropped;
        sum.turned_away += ran.refused;
        sum.cancelled += ran.cancelled;
        sum.queueing += ran.queueing;
        sum.running += ran.running;
    }

    // Only a new level can make the limiter run out of memory later. So a client without a promise
    // opens the level now, and leaves.
    void open_level(priority level, priority ceiling) {
        for (auto& p : parts_)
            p.slice.compute.close(p.slice.compute.add({.weight = share{}, .level = level, .ceiling = ceiling}),
                                  instant::min());
    }

    // Under the mutex. The failure if the tenant can't be promised such a share at this level. The
    // level is open afterwards. Throws std::bad_alloc.
    failure lacks_share(share compute, priority level) {
        for (auto& p : parts_) {
            p.slice.promised.open(level);
            const auto left = p.slice.left(level) + (level == promised_at_ ? promised_.permille() : 0);
            if (compute.permille() > left)
                return {errc::share_exceeded, compute.permille(), left, p.slice.size, reason::shares_exceeded};
        }
        return {};
    }

    // Under the mutex.
    template <std::same_as<tenant_change> Change>
    failure grant(const Change& c) {
        if (const auto why = unfit(c); why.code != errc::none) return why;
        const share compute = c.compute.value_or(spec_.compute);
        const auto level = level_after(c);
        if (const auto why = lacks_share(compute, level); why.code != errc::none) return why;
        if (lent_.empty())
            if (const auto why = grow_and_shrink(c.memory.value_or(spec_.memory), c.burst.value_or(spec_.burst));
                why.code != errc::none)
                return why;
        note(c);
        return {};
    }

    template <std::same_as<tenant_change> Change>
    void undo(const tenant_spec& old) {
        const std::lock_guard lock(all_->mutex);
        auto back = back_to(old);
        undo_by([&] { return grant<Change>(back); }, [&](auto leave) { leave(back, spec_); });
        undo_ceiling(old.ceiling);
    }

    void tell_followers() noexcept {
        std::shared_ptr<grant_followers> all;
        {
            const std::lock_guard lock(all_->mutex);
            all = followers_;
        }
        if (all != nullptr) all->tell([this](tenant_spec& into) { copy_grant(into); });
    }

    void wait_for(ns longest) noexcept {
        for (auto& p : parts_) p.memory.wait_for(longest);
        spec_.wait = longest;
    }
    // A tenant that was admitted without spill has no list of spillable blocks.
    [[nodiscard]] bool can_spill(bytes most) const noexcept {
        return most == bytes{} || all_where(parts_, [](const part& p) { return p.store->spills.has_value(); });
    }
    void spill_to(bytes most) noexcept {
        if constexpr (copier<typename Node::stream>)
            for (auto& p : parts_)
                if (p.store->spills) p.store->spills->keep_aside(most / spec_.devices);
        spec_.spill = most;
    }

    // The most burst that the tenant gets on one device.
    [[nodiscard]] static bytes burst_on(const part& p, const tenant_spec& spec) noexcept {
        if (spec.burst != all_burst) return spec.burst / spec.devices;
        const bytes guaranteed = spec.memory / spec.devices, all = p.on.overhead.available();
        return all > guaranteed ? all - guaranteed : bytes{};
    }

    // Memory that others lend while they sleep isn't room to grow.
    failure grow_and_shrink(bytes memory, bytes burst) {
        const bytes each = memory / spec_.devices, more = each - spec_.memory / spec_.devices;
        for (auto& p : parts_) {
            if (p.on.asleep() == bytes{} || more == bytes{}) continue;
            if (const bytes room = p.on.memory.promisable() - p.on.asleep(); more > room)
                return {errc::no_room, each.count(), (each - more + room).count(), p.on.memory.usage().limit().count()};
        }
        return resize_parts(memory, burst);
    }
    // Figures are those of one device. Needs no memory, since it also undoes.
    failure resize_parts(bytes memory, bytes burst) noexcept {
        const tenant_spec wanted{
            .memory = memory, .devices = spec_.devices, .burst = burst, .unit = all_->unit_of(spec_)};
        resizes_.clear();
        for (auto& p : parts_) resizes_.emplace_back(p.memory.limit(), memory / spec_.devices, burst_on(p, wanted));
        return try_commit_together(resizes_);
    }

    [[nodiscard]] client_settings settings(std::uint32_t size) const {
        const std::lock_guard lock(all_->mutex);
        return settings_of(spec_, tag_, size);
    }

    // The level must be open.
    void promise(share compute, priority level) {
        for (auto& p : parts_) {
            if (!p.has_share) continue;
            p.slice.promised.add(promised_at_, 0 - promised_.permille());
            p.slice.promised.add(level, compute.permille());
        }
        promised_ = compute;
        promised_at_ = level;
    }

    Node* whole_;
    typename shared::clock_type clock_;
    shared* all_;
    tenant_spec spec_;  // fields that a resize changes are under the mutex
    std::uint32_t tag_ = 0;
    share promised_{};
    priority promised_at_{};
    bool named_ = false;                          // it has a name: under the mutex
    bool succeeded_ = false;                      // another tenant has taken over: likewise
    std::uint64_t changes_ = 0;                   // changes of the grant: likewise
    std::shared_ptr<grant_followers> followers_;  // likewise
    std::atomic<bool> closed_{false};
    std::atomic<std::uint32_t> wakes_begun_{0}, wakes_ended_{0};
    std::vector<bytes> lent_;            // of each part's guarantee, while it sleeps: under the mutex
    std::vector<quota_resize> resizes_;  // room for one for each part: likewise
    std::array<ns, 8> recalls_{};        // durations of the last recalls that had to wait: likewise
    std::size_t recalls_made_ = 0;       // likewise
    // See leave().
    std::list<std::unique_ptr<tenant_state>> place_ = std::list<std::unique_ptr<tenant_state>>(1);
    stable_list<part> parts_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
