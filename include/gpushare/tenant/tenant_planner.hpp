// SPDX-License-Identifier: Apache-2.0
// Puts a tenancy's tenants where a plan says: a placement policy chooses, who finds no room waits, capacity is reserved
// for a time to come, somebody in the way is moved while it lives, and somebody of a lower level is told to go. Each
// plan is a value; the tenancy does it.
//
//   gpushare::tenant_planner plan{shared, gpushare::value_descent(gpushare::as_cluster(shared), usual)};
//   auto a = plan.arrive({.name = "chat", .memory = 24_GiB, .compute = 30_pct});       // a.who, or it waits
//   auto night = plan.reserve(training, tonight, tonight + 8h);     ...     auto job = plan.redeem(night->id, training);
//   if (auto moves = plan.make_room(big)) for (auto& m : *moves) plan.carry_out(m, handle_of(m.tenant), blocks_of(m.tenant));
//   a.who->close();    plan.left("chat");    for (auto& next : plan.advance()) ...      // who waited
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/placement/admission_queue.hpp>
#include <gpushare/placement/capacity_calendar.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/defragment.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/preemption.hpp>
#include <gpushare/tenant/move.hpp>
#include <gpushare/tenant/moving_block.hpp>
#include <gpushare/tenant/placed_by.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// What became of a tenant that asked to be admitted.
template <class Tenant>
struct arrival {
    std::uint64_t id = 0;                                          ///< of one that waits, as advance() says it again
    std::string name{};                                            ///< the tenant's
    admission_result::result outcome = admission_result::refused;  ///< placed, queued, refused, expired
    errc code = errc::none;  ///< why it was refused; also by the tenancy, where something is there that wasn't planned
    refusal why{};           ///< what one that waits lacks
    std::optional<Tenant> who{};  ///< one that was placed
};

/// A tenant that is to move, and where to.
struct tenant_move {
    std::string tenant{};   ///< its name
    placement_move plan{};  ///< from where to where
};

/// Tenants that have to go for another one, and until when they may take their time.
struct tenant_notice {
    std::uint64_t id = 0;                ///< for the planner
    std::vector<std::string> victims{};  ///< their names
    placement added{};                   ///< what fits then
    instant until{};                     ///< who is still there may be closed then
};

/// For all tenants of a tenancy, which must outlive it. A tenant that is admitted past it, and one that is closed without left(), make
/// plans wrong but no promise: then the tenancy refuses. Not thread-safe; its tenants are.
template <class Tenancy, placement_policy Policy>
class tenant_planner {
public:
    using tenant = typename Tenancy::tenant;    ///< the handle that arrive() gives
    using arrival = gpushare::arrival<tenant>;  ///< what arrive() and advance() return

    /// Tenants that are there already aren't known. Throws as as_cluster: at most 64 devices.
    tenant_planner(Tenancy& shared, Policy policy, admission_queue_options options = {})
        : shared_(&shared), policy_(std::move(policy)), calendar_(as_cluster(shared)), queue_(options) {}
    tenant_planner(const tenant_planner&) = delete;
    tenant_planner& operator=(const tenant_planner&) = delete;

    /// Admits a tenant where the policy puts it, lets it wait until `deadline` where there is no room for good, reservations
    /// counted, or refuses it. One that names its devices gets those. What isn't a matter of room is thrown, as by tenancy::admit.
    arrival arrive(tenant_spec spec, instant deadline = never) {
        const instant now = shared_->now();
        if (!spec.on.empty()) {
            const placement named = place_of(spec);
            if (const auto why = free(now).try_apply(named))
                return {.name = spec.name, .code = to_errc(why.missing), .why = why};
            return {.name = spec.name, .outcome = admission_result::placed, .who = admit(spec, named)};
        }
        cluster room = free(now);
        const auto a = queue_.submit(now, policy_, room,
                                     {.members = {placement_of(spec)}, .level = spec.level, .deadline = deadline});
        arrival all{.id = a.id, .name = spec.name, .outcome = a.outcome, .code = a.code, .why = a.why};
        if (a.outcome == admission_result::placed) all.who = admit(spec, a.placements.front());
        if (a.outcome == admission_result::queued) try {
                waiting_.emplace(a.id, std::move(spec));
            } catch (...) {
                queue_.withdraw(a.id);
                throw;
            }
        return all;
    }
    /// Those that waited and fit now, and those whose deadline has passed: once each. Call it when a tenant has left, and at
    /// next_deadline().
    std::vector<arrival> advance() {
        const instant now = shared_->now();
        calendar_.expire(now);
        cluster room = free(now);
        std::vector<arrival> all;
        all.reserve(queue_.waiting());  // from here on, nobody is lost
        for (auto& a : queue_.advance(now, policy_, room)) {
            auto waited = waiting_.extract(a.id);
            auto& one = all.emplace_back(arrival{.id = a.id, .outcome = a.outcome, .code = a.code});
            if (a.outcome == admission_result::placed) try {
                    one.who = admit(waited.mapped(), a.placements.front());
                } catch (...) {  // the others have been placed all the same
                    one.outcome = admission_result::refused;
                    one.code = code_of_current();
                }
            one.name = std::move(waited.mapped().name);
        }
        return all;
    }
    /// When advance() has something to do even if nobody leaves.
    [[nodiscard]] instant next_deadline() const noexcept { return queue_.next_deadline(); }
    /// One that waits doesn't any more. False if it isn't there.
    bool withdraw(std::uint64_t id) noexcept { return queue_.withdraw(id) && waiting_.erase(id) != 0; }

    /// The tenant is closed: its place is free.
    void left(const std::string& name) noexcept {
        if (const auto at = placed_.find(name); at != placed_.end()) {
            calendar_.cancel(at->second.booked);
            placed_.erase(at);
        }
    }

    /// Reserves room for such a tenant from `begin` until `end`, beside all that is there and reserved by now. Nobody
    /// is admitted into it who might still be there then, and none of it is on devices that somebody makes room on. The
    /// failure says what is missing.
    [[nodiscard]] result<booking> reserve(const tenant_spec& spec, instant begin, instant end) {
        if (begin >= end) return failure{.code = errc::invalid_specification, .because = reason::no_time};
        cluster room = calendar_.free_during(begin, end);
        hold_noticed(room);
        const auto where = choose(policy_, room, placement_of(spec));
        if (where) return calendar_.try_book_at(*where, begin, end);
        const refusal why = room.why_not(placement_of(spec));
        return to_failure(why);
    }
    /// As capacity_calendar::earliest: from when on it could be reserved for so long. Nobody knows when a notice ends,
    /// so none of it is on devices that somebody makes room on now.
    [[nodiscard]] instant earliest(const tenant_spec& spec, ns length) const {
        return calendar_.earliest(placement_of(spec), shared_->now(), length,
                                  [this](cluster& room) { hold_noticed(room); });
    }
    /// Gives a reservation up. False if it isn't there, or is redeemed: its tenant has the room.
    bool cancel(std::uint64_t reservation) noexcept { return !redeemed(reservation) && calendar_.cancel(reservation); }
    /// Admits the tenant that the room was reserved for, one only. Throws operation_error: invalid_specification if there is no such
    /// reservation for that much now, or it is redeemed, and what tenancy::admit throws. Once it has ended the tenant is overdue().
    [[nodiscard]] tenant redeem(std::uint64_t reservation, tenant_spec spec) {
        const instant now = shared_->now();
        const auto at = std::ranges::find(calendar_.bookings(), reservation, &booking::id);
        if (at == calendar_.bookings().end() || now < at->begin || now >= at->end ||
            at->where.request != placement_of(spec))
            raise({.code = errc::invalid_specification, .asked = reservation, .because = reason::unknown_number},
                  spec.name, "redeem a reservation");
        const booking b = *at;
        if (placed_.contains(spec.name)) raise({errc::duplicate_name}, spec.name, "redeem a reservation");
        if (redeemed(b.id))
            raise({.code = errc::invalid_specification, .asked = b.id, .because = reason::unknown_number}, spec.name,
                  "redeem a reservation once more");
        spec.on.assign(b.where.devices.begin(), b.where.devices.end());
        const auto there = placed_.emplace(spec.name, place{b.id, b.where, spec.level, b.end}).first;
        try {
            return shared_->admit(std::move(spec));
        } catch (...) {
            placed_.erase(there);
            throw;
        }
    }
    /// The same, with the reason instead of an exception; but std::bad_alloc where the host has no memory.
    [[nodiscard]] result<tenant> try_redeem(std::uint64_t reservation, tenant_spec spec) {
        return detail::or_why([&] { return redeem(reservation, std::move(spec)); });
    }
    /// Those whose reservation has ended: they stand in the way of whoever comes next.
    [[nodiscard]] std::vector<std::string> overdue() const {
        std::vector<std::string> names;
        for (const auto& [name, t] : placed_)
            if (t.until <= shared_->now()) names.push_back(name);
        return names;
    }

    /// Moves of tenants after which such a tenant fits, `most` at most: each has room when those before it are done. Nothing if that
    /// doesn't help. Whoever is on a device that somebody makes room on stays.
    [[nodiscard]] std::optional<std::vector<tenant_move>> make_room(const tenant_spec& spec, std::size_t most = 2) {
        std::vector<std::string> names;
        std::vector<placement> movable;
        for (const auto& [name, t] : placed_)
            if (t.until == never && !noticed(t.where)) names.push_back(name), movable.push_back(t.where);
        cluster room = free(shared_->now());
        auto plan = gpushare::make_room(policy_, room, movable, placement_of(spec), most);
        if (!plan) return std::nullopt;
        // On one node the first may need what only the second leaves.
        if (try_apply(room, *plan)) {
            std::ranges::reverse(plan->moves);
            if (try_apply(room, *plan)) return std::nullopt;
        }
        std::vector<tenant_move> moves;
        for (const auto& m : plan->moves) moves.push_back({names[m.which], m});
        return moves;
    }
    /// Moves a live tenant as the plan says, see move_tenant(): `who` is its handle, from now on that of the successor.
    /// On a device that is in both places it stays, so parts there keep their number, and the others go to the rest in
    /// ascending order. Throws what move_tenant() throws, and invalid_specification if it isn't where the plan was made
    /// for, or there is no room any more: then nothing has happened.
    move_report carry_out(const tenant_move& m, tenant& who, std::span<moving_block> blocks, instant deadline = never) {
        const auto at = placed_.find(m.tenant);
        if (at == placed_.end() || at->second.where != m.plan.from || who.name() != m.tenant)
            raise({.code = errc::invalid_specification, .because = reason::other_place}, m.tenant, "move, as planned");
        place& its = at->second;
        // On what it keeps it takes nothing more.
        cluster room = calendar_.free_without(its.booked, shared_->now(), never);
        hold_noticed(room, its.where.devices);
        if (const auto why = room.try_apply(m.plan.to)) raise(to_failure(why), m.tenant, "a move that was planned");
        auto moved = move_tenant(*shared_, who, in_place(who.spec().on, m.plan.to.devices), blocks, deadline);
        who = std::move(moved.successor);
        calendar_.move(its.booked, m.plan.to);
        its.where = m.plan.to;
        return std::move(moved.report);
    }
    /// The same, with the reason instead of an exception; but std::bad_alloc where the host has no memory.
    [[nodiscard]] result<move_report> try_carry_out(const tenant_move& m, tenant& who, std::span<moving_block> blocks,
                                                    instant deadline = never) {
        return detail::or_why([&] { return carry_out(m, who, blocks, deadline); });
    }

    /// Tells which tenants of lower levels have to go so that this one fits; they get `notice`, and then the caller may
    /// close them. Until take_place() or call_off(), however late, nobody else is admitted to these devices, moved
    /// there or promised them by reserve(), and who has been told to go isn't told so for somebody else. Nothing if it
    /// fits anyway, or doesn't help.
    [[nodiscard]] std::optional<tenant_notice> preempt(const tenant_spec& spec, ns notice) {
        std::vector<std::string> names;
        std::vector<placed_tenant> all;
        for (const auto& [name, t] : placed_)
            if (!told(name)) names.push_back(name), all.push_back({t.where, t.level});
        const instant now = shared_->now();
        const auto plan = plan_preemption(policy_, free(now), all, placement_of(spec), spec.level);
        if (!plan) return std::nullopt;
        tenant_notice given{.id = ++last_notice_, .added = plan->added, .until = saturating_add(now, notice)};
        for (const auto v : plan->victims) given.victims.push_back(names[v]);
        notices_.push_back(given);
        return given;
    }
    /// Those that were told to go and are still there.
    [[nodiscard]] std::vector<std::string> remaining(const tenant_notice& n) const {
        std::vector<std::string> names;
        std::ranges::copy_if(n.victims, std::back_inserter(names), [&](const auto& v) { return placed_.contains(v); });
        return names;
    }
    /// Ends the notice, and admits whom it was for. Throws operation_error (no_room) while somebody is still there, and what
    /// tenancy::admit throws: then the notice stands.
    [[nodiscard]] tenant take_place(const tenant_notice& n, tenant_spec spec) {
        const auto given = std::ranges::find(notices_, n.id, &tenant_notice::id);
        if (given == notices_.end())
            raise({.code = errc::invalid_specification, .asked = n.id, .because = reason::unknown_number}, spec.name,
                  "take a place by a notice");
        if (const auto there = remaining(n); !there.empty())
            raise({errc::no_room, there.size(), 0, n.victims.size(), reason::victims_left}, spec.name,
                  "take a place by a notice");
        tenant t = admit(std::move(spec), n.added);
        notices_.erase(given);
        return t;
    }
    /// The same, with the reason instead of an exception; but std::bad_alloc where the host has no memory.
    [[nodiscard]] result<tenant> try_take_place(const tenant_notice& n, tenant_spec spec) {
        return detail::or_why([&] { return take_place(n, std::move(spec)); });
    }
    /// Nobody has to go after all.
    void call_off(const tenant_notice& n) noexcept {
        std::erase_if(notices_, [&](const tenant_notice& one) { return one.id == n.id; });
    }

    /// What is free for good: beside what is there, what is reserved for later, and devices that somebody is making room on.
    [[nodiscard]] cluster free() const { return free(shared_->now()); }

private:
    struct place {
        std::uint64_t booked = 0;
        placement where{};
        priority level{};
        instant until = never;
    };

    [[nodiscard]] cluster free(instant now) const {
        cluster room = calendar_.free_during(now, never);
        for (const auto& [name, t] : placed_)
            if (t.until <= now) (void)room.try_apply(t.where);  // overdue, and there still
        hold_noticed(room);
        return room;
    }
    // Takes what is free on the devices that somebody makes room on.
    void hold_noticed(cluster& room, device_set but = {}) const {
        for (const auto& n : notices_)
            for (const auto d : n.added.devices) {
                if (but.contains(d)) continue;
                const free_device left = room[n.added.node].devices[d.index];
                room.apply({{.devices = 1, .each = share::of_permille(left.permille), .device_memory = left.memory},
                            n.added.node,
                            {d}});
            }
    }
    [[nodiscard]] bool noticed(const placement& where) const noexcept {
        return std::ranges::any_of(notices_, [&](const tenant_notice& n) {
            return std::ranges::any_of(where.devices, [&](device_id d) { return n.added.devices.contains(d); });
        });
    }
    [[nodiscard]] bool told(const std::string& name) const noexcept {
        return std::ranges::any_of(notices_,
                                   [&](const tenant_notice& n) { return std::ranges::count(n.victims, name) != 0; });
    }
    [[nodiscard]] bool redeemed(std::uint64_t reservation) const noexcept {
        return std::ranges::any_of(placed_, [&](const auto& p) { return p.second.booked == reservation; });
    }

    // `to`, in the order in which a tenant that is on `before` keeps what is in both.
    [[nodiscard]] static std::vector<device_id> in_place(const std::vector<device_id>& before, device_set to) {
        std::vector<device_id> order;
        std::vector<device_id> others;
        std::ranges::copy_if(to, std::back_inserter(others),
                             [&](device_id d) { return std::ranges::count(before, d) == 0; });
        auto next = others.begin();
        for (const auto d : before)
            if (to.contains(d))
                order.push_back(d);
            else if (next != others.end())
                order.push_back(*next++);
        order.insert(order.end(), next, others.end());  // too many: the move is refused
        return order;
    }

    // In a handler.
    [[nodiscard]] static errc code_of_current() noexcept try { throw; } catch (const error& e) {
        return e.code();
    } catch (const std::bad_alloc&) {
        return errc::out_of_memory;
    } catch (...) {
        return errc::backend_failed;
    }

    // Throws what the tenancy does, and then nothing is booked.
    [[nodiscard]] tenant admit(tenant_spec spec, const placement& where) {
        const auto booked = calendar_.try_book_at(where, shared_->now(), never);
        if (!booked) raise(booked.why(), spec.name, "a place that was planned");
        spec.on.assign(where.devices.begin(), where.devices.end());
        const auto there = placed_.find(spec.name);
        try {
            if (there != placed_.end()) raise({errc::duplicate_name}, spec.name, "admission");
            const auto entry = placed_.emplace(spec.name, place{booked->id, where, spec.level}).first;
            try {
                return shared_->admit(std::move(spec));
            } catch (...) {
                placed_.erase(entry);
                throw;
            }
        } catch (...) {
            calendar_.cancel(booked->id);
            throw;
        }
    }

    Tenancy* shared_;
    Policy policy_;
    capacity_calendar calendar_;  // a booking for each tenant that is there, without an end, and each reservation
    admission_queue queue_;
    std::map<std::string, place> placed_;
    std::map<std::uint64_t, tenant_spec> waiting_;  // by their ids in the queue
    std::vector<tenant_notice> notices_;
    std::uint64_t last_notice_ = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
