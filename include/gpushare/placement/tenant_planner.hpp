// SPDX-License-Identifier: Apache-2.0
// Plans where the tenants of a tenancy go. A placement policy chooses their devices, and a tenant
// for which there is no room waits. The planner can also reserve capacity for a future time, move
// live tenants that are in the way, and give tenants of lower levels notice to go. Each plan is a
// value; the tenancy carries it out.
//
//   gpushare::tenant_planner plan{shared, gpushare::value_descent(gpushare::as_cluster(shared), usual)};
//   // a.who is the tenant's handle, unless the tenant waits
//   auto a = plan.arrive({.name = "chat", .memory = 24_GiB, .compute = 30_pct});
//   auto night = plan.reserve(training, tonight, tonight + 8h);     ...
//   auto job = plan.redeem(night->id, training);
//   if (auto moves = plan.make_room(big)) for (auto& m : *moves) plan.carry_out(m, handle_of(m.tenant), blocks_of(m.tenant));
//   a.who->close();    plan.left("chat");    for (auto& next : plan.advance()) ...      // next: a tenant that waited
//   plan.drain(gpushare::device_id{3});  // no new tenant is placed there
//
// Before each decision the planner looks at the tenancy's devices. It learns how much of each
// device other processes take, which tenants were admitted without the planner, and which devices
// are lost. If the tenancy still refuses a choice, the planner records the refusal in its view, and
// the policy chooses again.
//
// Without a planner, placed_by lets a placement policy choose the devices of a tenancy's tenants,
// instead of the devices with the most room. So later tenants find room: whole devices stay whole,
// and a device's memory and device time run out together.
//
//   gpushare::tenancy shared{node};
//   const auto devices = gpushare::as_cluster(shared);
//   shared.choose_devices(gpushare::placed_by(gpushare::value_descent(devices, gpushare::workload(expected))));
//   auto chat = shared.admit({.name = "chat", .memory = 24_GiB, .compute = 30_pct});
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
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
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/placement/admission_queue.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/defragment.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/tenant/move.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A tenant's specification as a placement request: device memory and device time of its level, but
/// no cores and no host memory, which a tenancy doesn't promise.
[[nodiscard]] inline placement_request placement_of(const tenant_spec& spec) noexcept {
    const auto named = static_cast<std::uint32_t>(spec.on.size());
    const auto devices = std::max(named != 0 ? named : spec.devices, 1U);
    return {.devices = devices, .each = spec.compute, .device_memory = spec.memory / devices, .level = spec.level};
}

/// The place of an admitted tenant, on the node of as_cluster(). `granted` is its spec().
[[nodiscard]] inline placement place_of(const tenant_spec& granted) {
    placement where{.request = placement_of({.memory = granted.memory,
                                             .devices = static_cast<std::uint32_t>(granted.on.size()),
                                             .compute = granted.compute,
                                             .level = granted.level}),
                    .node = node_id{0}};
    for (const auto d : granted.on) where.devices.add(d);
    return where;
}

namespace detail {

/// A node whose devices have the `whole` of these rooms. Devices without memory count as gone.
[[nodiscard]] inline cluster cluster_of(const std::vector<device_room>& rooms) {
    cluster c;
    c.add({.devices = static_cast<std::uint32_t>(rooms.size())});
    for (const auto& r : rooms)
        if (r.whole != bytes{}) c.resize({0}, r.device, r.whole);
    for (const auto& r : rooms)
        if (r.whole == bytes{}) c.remove({0}, r.device);
    return c;
}

}  // namespace detail

/// A tenancy's devices as a cluster of one empty node, for policies that learn from the nodes'
/// sizes. Each device has the memory that could be promised there; a lost device is gone. Throws as
/// cluster::add: at most 64 devices.
template <class Tenancy>
requires requires(const Tenancy& t) {
    { t.rooms() } -> std::same_as<std::vector<device_room>>;
}
[[nodiscard]] cluster as_cluster(const Tenancy& shared) { return detail::cluster_of(shared.rooms()); }

/// A choice for tenancy::choose_devices: among the devices with room, those that `policy` would
/// take. A tenant that names its devices gets those devices. The policy is called under the
/// tenancy's mutex.
template <placement_policy Policy>
[[nodiscard]] device_choice placed_by(Policy policy) {
    return [policy = std::move(policy)](const tenant_spec& spec, const std::vector<device_room>& rooms,
                                        const node_view& node) mutable {
        const placement_request request = placement_of(spec);
        const auto with_room = std::ranges::count_if(node.devices, [&](const auto& d) { return fits(request, d); });
        // Too few devices have room. The plain split has the best message for this case.
        if (with_room < static_cast<std::ptrdiff_t>(request.devices))
            return equal_split(spec.memory, spec.devices, rooms, spec.unit);
        const device_set taken = detail::rated(policy, node, request).devices;
        std::vector<device_room> chosen;
        std::ranges::copy_if(rooms, std::back_inserter(chosen),
                             [&](const device_room& r) { return taken.contains(r.device); });
        return equal_split_over(spec.memory, chosen, spec.unit);
    };
}

/// The outcome for a tenant that asked to be admitted.
template <class Tenant>
struct arrival {
    /// The number of a waiting tenant; advance() returns the same number for it.
    std::uint64_t id = 0;
    std::string name{};  ///< the tenant's name
    /// placed, queued, refused or expired
    admission_result::result outcome = admission_result::refused;
    /// The reason for a refusal by the planner, or by the tenancy, which may refuse for a reason
    /// that the plan doesn't know.
    errc code = errc::none;
    refusal why{};                ///< the resource that a waiting tenant lacks
    std::optional<Tenant> who{};  ///< the tenant, if placed
};

/// A move that is planned for a tenant.
struct tenant_move {
    std::string tenant{};   ///< the tenant's name
    placement_move plan{};  ///< the old place and the new place
};

/// Tenants that have to go for another tenant, and their deadline.
struct tenant_notice {
    std::uint64_t id = 0;                ///< the notice's number in the planner
    std::vector<std::string> victims{};  ///< the names of the tenants that have to go
    placement added{};                   ///< the place for the other tenant
    instant until{};                     ///< from then on, the caller may close remaining victims
};

/// Plans for all tenants of one tenancy, which must outlive the planner. A tenant that is closed
/// without a call of left() keeps its place in the plan. One thread at a time uses the planner; any
/// thread may use the tenants.
template <class Tenancy, placement_policy Policy>
class tenant_planner {
public:
    using tenant = typename Tenancy::tenant;    ///< a tenant's handle
    using arrival = gpushare::arrival<tenant>;  ///< the result of arrive() and advance()

    /// Tenants that exist already count as taken capacity. Throws as as_cluster() does: there may
    /// be at most 64 devices.
    tenant_planner(Tenancy& shared, Policy policy, admission_queue_options options = {})
        : shared_(&shared),
          policy_(std::move(policy)),
          calendar_(detail::cluster_of(shared.promisable()), shares_sum::of_each_level),
          queue_(options) {}
    tenant_planner(const tenant_planner&) = delete;
    tenant_planner& operator=(const tenant_planner&) = delete;

    /// Admits a tenant where the policy puts it, or on the devices that it names. If there is no
    /// lasting room alongside present tenants and reservations, the tenant waits until `deadline`.
    /// Refuses the tenant if its devices could never have room, even without other tenants, and
    /// with duplicate_name if a tenant of this name already waits. Throws all other errors, as
    /// tenancy::admit does.
    arrival arrive(tenant_spec spec, instant deadline = never) {
        check(spec);
        if (std::ranges::any_of(waiting_, [&](const auto& w) { return w.second.name == spec.name; }))
            return {.name = spec.name, .code = errc::duplicate_name};
        const instant now = look();
        views room([&](priority level) { return free(now, level); });
        attempt its{*this, spec};
        arrival all{.name = spec.name};  // the copy may throw: before the tenant is admitted
        const auto a = queue_.submit(now, policy_, room, request_of(spec, deadline), std::ref(its));
        if (its.thrown) std::rethrow_exception(its.thrown);
        all.id = a.id;
        all.outcome = a.outcome;
        all.code = a.code;
        all.why = a.why;
        all.who = std::move(its.who);
        if (a.outcome == admission_result::queued) try {
                waiting_.emplace(a.id, std::move(spec));
            } catch (...) {
                queue_.withdraw(a.id);
                throw;
            }
        return all;
    }
    /// Reports each of these once: waiting tenants that fit now; tenants whose deadline has passed;
    /// and, as refused, tenants that could never have room any more, or that the tenancy refuses
    /// for a reason other than room. Call advance() when a tenant has left, when a device was lost,
    /// drained or resumed, and at next_deadline().
    std::vector<arrival> advance() {
        const instant now = look();
        calendar_.expire(now);
        views room([&](priority level) { return free(now, level); });
        std::vector<arrival> all;
        all.reserve(queue_.waiting());  // no tenant is lost from here on
        std::map<std::uint64_t, attempt> attempts;
        const auto carry_for = [&](const admission_result& a) {
            return std::ref(attempts.try_emplace(a.id, attempt{*this, waiting_.at(a.id)}).first->second);
        };
        for (auto& a : queue_.advance(now, policy_, room, carry_for)) {
            auto waited = waiting_.extract(a.id);
            auto& one = all.emplace_back(arrival{.id = a.id, .outcome = a.outcome, .code = a.code, .why = a.why});
            if (const auto its = attempts.find(a.id); its != attempts.end()) {
                one.who = std::move(its->second.who);
                if (its->second.thrown) one.code = code_of(its->second.thrown);
            }
            one.name = std::move(waited.mapped().name);
        }
        return all;
    }
    /// Puts no new tenant on that device from now on; present tenants stay. Throws operation_error
    /// (no_device).
    void drain(device_id d) {
        check(d);
        drained_.add(d);
        (void)look();
    }
    /// Ends a drain. Throws operation_error (no_device), also for a removed device.
    void resume(device_id d) {
        check(d);
        device_set others;
        for (const auto other : drained_)
            if (other != d) others.add(other);
        drained_ = others;
        (void)look();
    }
    /// Removes a device permanently: tenants that need the device stop waiting. A lost device
    /// counts as removed without this call. Throws as drain() does.
    void remove(device_id d) {
        check(d);
        removed_.add(d);
        (void)look();
    }
    /// The reservations that can't be kept any more, because one of their devices is drained, lost
    /// or removed. For such a reservation, redeem() puts the tenant elsewhere if there is room.
    [[nodiscard]] std::vector<booking> unkept() {
        const instant now = look();
        auto all = calendar_.unkept(now);
        std::erase_if(all, [&](const booking& b) { return redeemed(b.id); });
        return all;
    }

    /// The time at which advance() has something to do even if no tenant leaves before.
    [[nodiscard]] instant next_deadline() const noexcept { return queue_.next_deadline(); }
    /// Removes a waiting tenant from the queue. Returns false if the tenant doesn't wait there.
    bool withdraw(std::uint64_t id) noexcept { return queue_.withdraw(id) && waiting_.erase(id) != 0; }

    /// Call this when the tenant is closed. Frees the tenant's place in the plan.
    void left(const std::string& name) noexcept {
        if (const auto at = placed_.find(name); at != placed_.end()) {
            calendar_.cancel(at->second.booked);
            placed_.erase(at);
        }
    }

    /// Reserves room for such a tenant from `begin` until `end`, alongside present tenants and
    /// earlier reservations. From then on, the planner admits no tenant into this room that might
    /// still be there at `begin`. None of the room is on devices that are being cleared (see
    /// preempt()). The failure says which resource is missing. A reservation takes no capacity from
    /// waiting tenants that have been overtaken too often, as an arrival doesn't.
    [[nodiscard]] result<booking> reserve(const tenant_spec& spec, instant begin, instant end) {
        if (begin >= end) return failure{.code = errc::invalid_specification, .because = reason::no_time};
        for (const auto there = calendar_.nodes()[{0}].whole.devices; const auto d : spec.on)
            if (d.index >= there) return failure{errc::no_device, d.index, 0, there, reason::no_such_device};
        (void)look();
        views room([&](priority level) {
            cluster c = calendar_.free_during(begin, end, level);
            hold_strangers(c, level);
            hold_noticed(c);
            return c;
        });
        const auto found = queue_.plan(policy_, room, request_of(spec, never));
        if (!found) return to_failure(found.why);
        auto booked = calendar_.try_book_at(found.placements->front(), begin, end);
        if (booked) try {
                queue_.note_overtaken(room, spec.level, *found.placements);
            } catch (...) {
                calendar_.cancel(booked->id);
                throw;
            }
        return booked;
    }
    /// The first time from which the tenant could have room for `length`, as
    /// capacity_calendar::earliest finds it. The end of a notice is unknown, so none of the room is
    /// on devices that are being cleared now.
    [[nodiscard]] instant earliest(const tenant_spec& spec, ns length) const {
        return calendar_.earliest(placement_of(spec), shared_->now(), length, [&](cluster& room) {
            hold_strangers(room, spec.level);
            hold_noticed(room);
            drain_others(room, spec);
        });
    }
    /// Cancels a reservation. Returns false if there is no such reservation, or if the reservation
    /// was redeemed, because its tenant then has the room.
    bool cancel(std::uint64_t reservation) noexcept { return !redeemed(reservation) && calendar_.cancel(reservation); }
    /// Admits the tenant for which the room was reserved. Works once for each reservation. Throws
    /// operation_error: invalid_specification if there is no reservation of this size for this
    /// time, if the tenant names devices other than the reserved ones, or if the reservation was
    /// redeemed before; and the errors of tenancy::admit. If the reserved devices are drained or no
    /// longer available, the tenant goes where the policy finds room until the reservation's end. A
    /// tenant that names its devices doesn't, and gets no_room. After the reservation's end, the
    /// tenant is overdue().
    [[nodiscard]] tenant redeem(std::uint64_t reservation, tenant_spec spec) {
        const instant now = shared_->now();
        const auto at = std::ranges::find(calendar_.bookings(), reservation, &booking::id);
        if (at == calendar_.bookings().end() || now < at->begin || now >= at->end || !is_for(at->where, spec))
            raise({.code = errc::invalid_specification, .asked = reservation, .because = reason::unknown_number},
                  spec.name, "redeem a reservation");
        const booking b = *at;
        if (placed_.contains(spec.name)) raise({errc::duplicate_name}, spec.name, "redeem a reservation");
        if (redeemed(b.id))
            raise({.code = errc::invalid_specification, .asked = b.id, .because = reason::unknown_number}, spec.name,
                  "redeem a reservation once more");
        (void)look();
        const auto there = placed_.emplace(spec.name, place{b.id, b.where, spec.level, b.end}).first;
        try {
            return redeem_at(b, there->second, spec);
        } catch (...) {
            calendar_.move(b.id, b.where);
            placed_.erase(there);
            throw;
        }
    }
    /// redeem(), but returns the library's errors instead of throwing them. Other exceptions
    /// propagate, such as the std::bad_alloc of a host without memory.
    [[nodiscard]] result<tenant> try_redeem(std::uint64_t reservation, tenant_spec spec) {
        return detail::or_why([&] { return redeem(reservation, std::move(spec)); });
    }
    /// The names of tenants whose reservation has ended. They are in the way of the next
    /// reservation.
    [[nodiscard]] std::vector<std::string> overdue() const {
        std::vector<std::string> names;
        for (const auto& [name, t] : placed_)
            if (t.until <= shared_->now()) names.push_back(name);
        return names;
    }

    /// Plans at most `most` moves of tenants after which such a tenant fits. Each move has room
    /// once the moves before it are done. Returns no plan if moves don't help. A tenant on a device
    /// that is being cleared stays. If `spec` names devices, the plan makes room on these devices,
    /// and only tenants on these devices move.
    [[nodiscard]] std::optional<std::vector<tenant_move>> make_room(const tenant_spec& spec, std::size_t most = 2) {
        const instant now = look();
        if (auto moves = moves_for(spec, most, now, true)) return moves;
        return moves_for(spec, most, now, false);
    }
    /// Moves a live tenant as planned, by move_tenant(). `who` is the tenant's handle, and becomes
    /// the handle of the successor. A device that is in both places keeps its part number; the
    /// other parts go to the remaining devices in ascending order. Throws what move_tenant()
    /// throws. Also throws, before anything has changed, invalid_specification if the tenant isn't
    /// in the place from which the plan moves it, or the shortage if there is no room any more.
    move_report carry_out(const tenant_move& m, tenant& who, std::span<moving_block> blocks, instant deadline = never) {
        const auto at = placed_.find(m.tenant);
        if (at == placed_.end() || at->second.where != m.plan.from || who.name() != m.tenant)
            raise({.code = errc::invalid_specification, .because = reason::other_place}, m.tenant, "move, as planned");
        place& its = at->second;
        // A notice doesn't stand in the way on devices that the tenant keeps: the tenant takes no
        // more there.
        cluster room = calendar_.free_without(its.booked, look(), never, its.level);
        hold_strangers(room, its.level);
        hold_noticed(room, its.where.devices);
        if (const auto why = room.try_apply(m.plan.to)) raise(to_failure(why), m.tenant, "a move that was planned");
        auto moved = move_tenant(*shared_, who, in_place(who.spec().on, m.plan.to.devices), blocks, deadline);
        who = std::move(moved.successor);
        calendar_.move(its.booked, m.plan.to);
        its.where = m.plan.to;
        return std::move(moved.report);
    }
    /// carry_out(), but returns the library's errors instead of throwing them. Other exceptions
    /// propagate, such as the std::bad_alloc of a host without memory.
    [[nodiscard]] result<move_report> try_carry_out(const tenant_move& m, tenant& who, std::span<moving_block> blocks,
                                                    instant deadline = never) {
        return detail::or_why([&] { return carry_out(m, who, blocks, deadline); });
    }

    /// Chooses the tenants of lower levels that have to go so that such a tenant fits, and gives
    /// them notice. After `notice` has passed, the caller may close them. Their devices are being
    /// cleared until take_place() or call_off(), however late that is: the planner admits no other
    /// tenant to these devices, moves none there, and reserves nothing there. A tenant under notice
    /// gets no second notice for another arrival. Returns no notice if the tenant fits anyway, or
    /// if no choice of tenants helps.
    [[nodiscard]] std::optional<tenant_notice> preempt(const tenant_spec& spec, ns notice) {
        std::vector<std::string> names;
        std::vector<placed_tenant> all;
        for (const auto& [name, t] : placed_)
            if (!told(name)) names.push_back(name), all.push_back({seen_at(t.where, spec.level), t.level});
        const instant now = look();
        views room([&](priority level) { return free(now, level); });
        cluster free_now = room.of(spec.level);
        drain_others(free_now, spec);
        const auto plan = plan_preemption(policy_, free_now, all, placement_of(spec), spec.level);
        if (!plan) return std::nullopt;
        tenant_notice given{.id = ++last_notice_, .added = plan->added, .until = saturating_add(now, notice)};
        for (const auto v : plan->victims) given.victims.push_back(names[v]);
        notices_.push_back(given);
        try {
            queue_.note_overtaken(room, spec.level, std::span(&plan->added, 1));
        } catch (...) {
            notices_.pop_back();
            throw;
        }
        return given;
    }
    /// The names of the victims that are still there.
    [[nodiscard]] std::vector<std::string> remaining(const tenant_notice& n) const {
        std::vector<std::string> names;
        std::ranges::copy_if(n.victims, std::back_inserter(names), [&](const auto& v) { return placed_.contains(v); });
        return names;
    }
    /// Ends the notice, and admits the tenant for which the notice was given. Throws
    /// operation_error: no_room while a victim is still there or a device of the notice is drained,
    /// invalid_specification for an unknown notice or for a tenant of another size, level or place,
    /// and the errors of tenancy::admit. After an error the notice remains in force.
    [[nodiscard]] tenant take_place(const tenant_notice& n, tenant_spec spec) {
        const auto given = std::ranges::find(notices_, n.id, &tenant_notice::id);
        if (given == notices_.end() || !is_for(given->added, spec))
            raise({.code = errc::invalid_specification, .asked = n.id, .because = reason::unknown_number}, spec.name,
                  "take a place by a notice");
        if (const auto there = remaining(n); !there.empty())
            raise({errc::no_room, there.size(), 0, n.victims.size(), reason::victims_left}, spec.name,
                  "take a place by a notice");
        (void)look();
        tenant t = admit(std::move(spec), given->added);
        notices_.erase(given);
        return t;
    }
    /// take_place(), but returns the library's errors instead of throwing them. Other exceptions
    /// propagate, such as the std::bad_alloc of a host without memory.
    [[nodiscard]] result<tenant> try_take_place(const tenant_notice& n, tenant_spec spec) {
        return detail::or_why([&] { return take_place(n, std::move(spec)); });
    }
    /// Withdraws the notice: no tenant has to go.
    void call_off(const tenant_notice& n) noexcept {
        std::erase_if(notices_, [&](const tenant_notice& one) { return one.id == n.id; });
    }

    /// The lasting room for tenants of that level: the capacity that present tenants, reservations
    /// and devices that are being cleared leave free. Shares are promised level by level, as in the
    /// tenancy.
    [[nodiscard]] cluster free(priority level = {}) const { return free(shared_->now(), level); }

private:
    struct place {
        std::uint64_t booked = 0;
        placement where{};
        priority level{};
        instant until = never;
    };

    /// The free room, as the tenants of each level see it: shares of different levels don't
    /// compete.
    class views {
    public:
        explicit views(std::function<cluster(priority)> free_at) : free_at_(std::move(free_at)) {}

        cluster& of(priority level) {
            if (const auto at = by_level_.find(level); at != by_level_.end()) return at->second;
            cluster c = free_at_(level);
            for (const auto& p : held_) c.hold(p);
            for (const auto& [at, where] : drained_)
                if (at == level) c.drain(where.node, *where.devices.begin());
            return by_level_.emplace(level, std::move(c)).first->second;
        }
        static placement seen(const placement& p, priority level) noexcept { return seen_at(p, level); }
        void took(priority, cluster&&) noexcept { by_level_.clear(); }
        /// Records that these placements also take capacity. If these placements don't explain the
        /// refusal, drains the place's first device for this level.
        void learn(std::vector<placement> held, priority level, const placement& where) {
            by_level_.clear();
            held_.insert(held_.end(), held.begin(), held.end());
            if (cluster copy = of(level); copy.try_apply(where)) return;
            drained_.emplace_back(level, where);
            by_level_.clear();
        }

    private:
        std::function<cluster(priority)> free_at_;
        std::map<priority, cluster> by_level_;
        std::vector<placement> held_;
        std::vector<std::pair<priority, placement>> drained_;
    };
    static_assert(level_views<views>);

    /// Carries out a plan of the queue. The tenancy may still refuse it.
    struct attempt {
        tenant_planner& of;
        const tenant_spec& spec;
        std::optional<tenant> who{};
        std::exception_ptr thrown{};

        carried operator()(std::span<const placement> where, views& view) try {
            who = of.admit(spec, where.front());
            return carried::out;
        } catch (const operation_error& e) {
            if (!is_of_room(e.code())) {
                thrown = std::current_exception();
                return carried::dropped;
            }
            of.learn(where.front(), view);
            return carried::elsewhere;
        } catch (...) {
            thrown = std::current_exception();
            return carried::dropped;
        }
    };

    [[nodiscard]] static bool is_of_room(errc code) noexcept {
        return code == errc::no_room || code == errc::share_exceeded || code == errc::too_few_devices ||
               code == errc::device_lost;
    }
    [[nodiscard]] static admission_request request_of(const tenant_spec& spec, instant deadline) {
        if (spec.on.empty()) return {.members = {placement_of(spec)}, .level = spec.level, .deadline = deadline};
        const placement named = place_of(spec);
        return {.members = {named.request}, .level = spec.level, .deadline = deadline, .on = named.devices};
    }

    // Whether a place that is kept is of this tenant's size, and on the devices that it names.
    [[nodiscard]] static bool is_for(const placement& kept, const tenant_spec& spec) noexcept {
        return kept.request == placement_of(spec) &&
               std::ranges::all_of(spec.on, [&](device_id d) { return kept.devices.contains(d); });
    }
    // Checks that don't depend on room, made before a tenant waits.
    void check(const tenant_spec& spec) const {
        Tenancy::check_specification(spec);
        for (const auto d : spec.on)
            if (d.index >= calendar_.nodes()[{0}].whole.devices)
                raise({errc::no_device, d.index, 0, calendar_.nodes()[{0}].whole.devices, reason::no_such_device},
                      spec.name, "report an arrival");
            else if (std::ranges::count(spec.on, d) != 1)
                raise({.code = errc::duplicate_device, .asked = d.index, .because = reason::device_twice}, spec.name,
                      "report an arrival");
        if (placed_.contains(spec.name)) raise({errc::duplicate_name}, spec.name, "report an arrival");
    }
    void check(device_id d) const {
        const auto there = calendar_.nodes()[{0}].whole.devices;
        if (d.index >= there || removed_.contains(d))
            raise({errc::no_device, d.index, 0, there, reason::no_such_device});
    }

    // Looks at the present devices, and returns the time.
    instant look() {
        (void)shared_->remeasure();
        calendar_.change_nodes([&](cluster& c) {
            c = detail::cluster_of(shared_->promisable());
            for (const auto d : drained_)
                if (c.could_serve({}, {0}, d)) c.drain({0}, d);
            for (const auto d : removed_)
                if (c.could_serve({}, {0}, d)) c.remove({0}, d);
        });
        return shared_->now();
    }
    // Call this when the tenancy has refused a place. Takes the capacity that the place lacks from
    // `view`, or else drains a device of the place there.
    void learn(const placement& where, views& view) {
        const cluster now = free(look(), where.request.level);
        std::vector<placement> lent;
        for (const auto& r : shared_->rooms())  // burst that is lent and in use
            if (const auto& d = now[where.node].devices[r.device.index];
                where.devices.contains(r.device) && r.free < d.memory)
                lent.push_back({{.devices = 1, .device_memory = d.memory - r.free}, where.node, {r.device}});
        view.learn(std::move(lent), where.request.level, where);
    }

    // Implements make_room(). Without `any_level`, only tenants of the specification's level move.
    [[nodiscard]] std::optional<std::vector<tenant_move>> moves_for(const tenant_spec& spec, std::size_t most,
                                                                    instant now, bool any_level) {
        std::vector<const std::pair<const std::string, place>*> who;
        std::vector<placement> movable;
        for (const auto& one : placed_) {
            const place& t = one.second;
            if (t.until != never || noticed(t.where) || (!any_level && t.level != spec.level)) continue;
            if (!spec.on.empty() && !any_named(t.where.devices, spec)) continue;
            who.push_back(&one);
            movable.push_back(seen_at(t.where, spec.level));
        }
        device_set named;
        for (const auto d : spec.on) {
            if (d.index >= calendar_.nodes()[{0}].whole.devices) return std::nullopt;
            named.add(d);
        }
        const auto plan = gpushare::make_room(policy_, free(now, spec.level), movable, placement_of(spec), most, named);
        if (!plan) return std::nullopt;
        std::vector<tenant_move> moves;
        for (const auto& m : plan->moves) {
            placement_move its = m;
            its.from.request = its.to.request = who[m.which]->second.where.request;
            moves.push_back({who[m.which]->first, its});
        }
        if (!have_room(moves, now)) return std::nullopt;
        return moves;
    }
    // Whether each move has room, in the view of every level concerned, once the moves before it
    // are done.
    [[nodiscard]] bool have_room(const std::vector<tenant_move>& moves, instant now) const {
        std::map<priority, cluster> rooms;
        for (const auto& m : moves) {
            const priority level = m.plan.from.request.level;
            if (!rooms.contains(level)) rooms.emplace(level, free(now, level));
        }
        for (const auto& m : moves)
            for (auto& [level, room] : rooms)
                if (!room.try_release(seen_at(m.plan.from, level)) || room.try_apply(seen_at(m.plan.to, level)))
                    return false;
        return true;
    }

    [[nodiscard]] cluster free(instant now, priority level) const {
        cluster room = calendar_.free_during(now, never, level);
        hold_overdue(room, now, level);
        hold_strangers(room, level);
        hold_noticed(room);
        return room;
    }
    // Takes the places of tenants whose reservation has ended, but which are still there.
    void hold_overdue(cluster& room, instant now, priority level) const {
        for (const auto& [name, t] : placed_)
            if (t.until <= now) room.hold(seen_at(t.where, level));
    }
    // Takes the part of each device that isn't taken by the planner's own tenants, in the view of
    // that level: the parts of tenants that were admitted without the planner, of other processes,
    // and bytes that a tenant got by a resize. `absent` is a tenant that isn't there yet.
    void hold_strangers(cluster& room, priority level, const place* absent = nullptr) const {
        for (const auto& r : shared_->promisable()) {
            if (r.whole == bytes{}) continue;  // lost
            bytes memory = r.free;
            std::uint32_t permille = shared_->admissible(r.device, level).permille();
            for (const auto& [name, t] : placed_)
                if (&t != absent && t.where.devices.contains(r.device)) {
                    memory += t.where.request.device_memory;
                    permille += seen_at(t.where, level).request.each.permille();
                }
            const std::uint32_t whole = share::whole().permille();
            room.hold({{.devices = 1,
                        .each = share::of_permille(whole - std::min(whole, permille)),
                        .device_memory = r.whole - memory},
                       {0},
                       {r.device}});
        }
    }
    // Whether the tenant names this device.
    [[nodiscard]] static bool is_named(device_id d, const tenant_spec& spec) noexcept {
        return std::ranges::find(spec.on, d) != spec.on.end();
    }
    [[nodiscard]] static bool any_named(device_set devices, const tenant_spec& spec) noexcept {
        return std::ranges::any_of(devices, [&](device_id d) { return is_named(d, spec); });
    }
    // If the tenant names devices, drains all other devices.
    static void drain_others(cluster& room, const tenant_spec& spec) {
        if (spec.on.empty()) return;
        for (std::uint32_t d = 0; d < room[{0}].devices.size(); ++d)
            if (room[{0}].devices[d].open && !is_named({d}, spec)) room.drain({0}, {d});
    }
    // Takes the free capacity of devices that are being cleared.
    void hold_noticed(cluster& room, device_set but = {}) const {
        for (const auto& n : notices_)
            for (const auto d : n.added.devices) {
                if (but.contains(d)) continue;
                const free_device left = room[n.added.node].devices[d.index];
                room.hold({{.devices = 1, .each = share::of_permille(left.permille), .device_memory = left.memory},
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

    // The devices of `to` by part: a device that is in `before` and in `to` keeps its part number.
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

    [[nodiscard]] static errc code_of(const std::exception_ptr& thrown) noexcept try {
        std::rethrow_exception(thrown);
    } catch (const error& e) {
        return e.code();
    } catch (const std::bad_alloc&) {
        return errc::out_of_memory;
    } catch (...) {
        return errc::backend_failed;
    }

    // Admits the tenant to the reserved devices, or where there is room until the reservation's
    // end.
    [[nodiscard]] tenant redeem_at(const booking& b, place& its, tenant_spec& spec) {
        const bool named = !spec.on.empty();
        if (!named) spec.on.assign(b.where.devices.begin(), b.where.devices.end());
        const auto devices = calendar_.nodes()[{0}].devices;
        if (std::ranges::all_of(b.where.devices, [&](device_id d) { return devices[d.index].open; })) try {
                return shared_->admit(spec);
            } catch (const operation_error& e) {
                if (named || !is_of_room(e.code())) throw;
                if (auto t = redeem_elsewhere(b, its, spec)) return *std::move(t);
                throw;
            }
        if (!named)
            if (auto t = redeem_elsewhere(b, its, spec)) return *std::move(t);
        raise(to_failure({.missing = shortage::drained}), spec.name, "redeem a reservation");
    }
    [[nodiscard]] std::optional<tenant> redeem_elsewhere(const booking& b, place& its, tenant_spec& spec) {
        const instant now = shared_->now();
        cluster room = calendar_.free_without(b.id, now, b.end, spec.level);
        hold_overdue(room, now, spec.level);
        hold_strangers(room, spec.level, &its);
        hold_noticed(room);
        for (const auto d : b.where.devices)
            if (room.could_serve({}, {0}, d)) room.drain({0}, d);
        const auto where = choose(policy_, room, b.where.request);
        if (!where) return std::nullopt;
        spec.on.assign(where->devices.begin(), where->devices.end());
        tenant t = shared_->admit(spec);
        calendar_.move(b.id, *where);
        its.where = *where;
        return t;
    }
    // Throws the errors of the tenancy; nothing is booked then.
    [[nodiscard]] tenant admit(tenant_spec spec, const placement& where) {
        if (spec.on.empty()) spec.on.assign(where.devices.begin(), where.devices.end());
        const auto booked = calendar_.try_book_at(where, shared_->now(), never);
        if (!booked) raise(booked.why(), spec.name, "a place that was planned");
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
    // a booking without an end for each present tenant, and a booking for each reservation
    capacity_calendar calendar_;
    admission_queue queue_;
    std::map<std::string, place> placed_;
    std::map<std::uint64_t, tenant_spec> waiting_;  // by their ids in the queue
    std::vector<tenant_notice> notices_;
    device_set drained_, removed_;
    std::uint64_t last_notice_ = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
