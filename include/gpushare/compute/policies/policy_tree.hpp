// SPDX-License-Identifier: Apache-2.0
// Two policies, one above the other: the outer one divides the device between classes of clients,
// and in each class a policy of its own divides the class's part between its clients.
//
//   gpushare::policy_tree<gpushare::weighted_fair, gpushare::fair> policy;
//   policy.set_class(0, {.weight = 70_pct});  policy.set_class(1, {.weight = 30_pct});
//   policy.add(chat, {.group = 0});  policy.add(batch, {.group = 1});  // group: the client's class
//
// With any_policy as the inner type, each class can have a different kind of policy.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/client_heap.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// `Outer` decides between classes, an `Inner` for each class between its clients. A client's
/// `group` names its class; a class that was never set has default settings and a default policy.
/// The levels of clients and of submissions order work within a class. Between classes, the
/// classes' settings decide. A class is as urgent as the client that its policy would serve next. A
/// value; not thread-safe. A call costs as much as the calls of both policies. All members except
/// set_class are those of compute_policy.
template <compute_policy Outer, compute_policy Inner>
class policy_tree {
public:
    /// The number of classes: a group is below it. Refuses other groups with invalid_specification,
    /// because the memory of a tree grows with the highest group.
    static constexpr std::uint32_t most_classes = 1U << 16;

    policy_tree() = default;  ///< A default outer policy, no class yet.
    /// Takes another outer policy.
    template <std::same_as<Outer> O>  // no conversions: an any_policy would accept the tree itself
    explicit policy_tree(O outer) : outer_(std::move(outer)) {}

    /// Sets a class's entitlement, at any time. Refuses a group that isn't below most_classes, and
    /// the outer policy may refuse: then nothing has changed.
    failure set_class(std::uint32_t group, const client_settings& s) {
        if (has(group)) return outer_.change(id_of(group), s);
        return open(group, s, Inner{});
    }
    /// The same, and sets the policy within the class. Call before the first client of the class
    /// begins.
    failure set_class(std::uint32_t group, const client_settings& s, Inner inner) {
        if (const auto why = set_class(group, s); why.code != errc::none) return why;
        classes_[group].inside = std::move(detail::in_turn(inner, turns_));
        return {};
    }
    /// Calls take_turns() of the outer policy and of the policies of all classes, present and
    /// future, that have this member.
    void take_turns() noexcept {
        turns_ = true;
        (void)detail::in_turn(outer_, true);
        for (auto& c : classes_) (void)detail::in_turn(c.inside, true);
    }

    /// A client of class `group` begins. Either policy may refuse.
    failure add(client_id c, const client_settings& s) {
        if (clients_.size() <= c.index) clients_.resize(c.index + std::size_t{1});
        if (has(s.group)) return take_seat(c, s);
        if (const auto why = open(s.group, {}, Inner{}); why.code != errc::none) return why;
        try {
            const auto why = take_seat(c, s);
            if (why.code != errc::none) shut(s.group);
            return why;
        } catch (...) {
            shut(s.group);
            throw;
        }
    }

    /// Changes a client's settings, its class included. Either policy may refuse.
    failure change(client_id c, const client_settings& s) {
        auto& client = clients_[c.index];
        if (s.group == client.group) {
            if (const auto why = classes_[s.group].inside.change(id_of(client.seat), s); why.code != errc::none)
                return why;
            tell(client.group);
            return {};
        }
        const auto old = client;
        if (const auto why = add(c, s); why.code != errc::none) return why;
        leave(old);
        if (old.waits) wake(c, old.head, now_);
        return {};
    }

    /// A client ends.
    void remove(client_id c) noexcept { leave(std::exchange(clients_[c.index], {})); }

    /// See compute_policy.
    [[nodiscard]] static bool has_classes() noexcept { return true; }
    /// Whether the policy of the client's class enforces the cap in these settings.
    [[nodiscard]] bool honours(const client_settings& s) const noexcept {
        return has(s.group) ? detail::honours(classes_[s.group].inside, s) : detail::honours(usual_, s);
    }
    /// The hard cap of the class or, without one, of the client; see compute_policy.
    [[nodiscard]] std::uint64_t hard_cap_of(client_id c) const noexcept {
        constexpr auto of_class = std::uint64_t{1} << 63;
        const auto [group, seat] = place_of(c);
        if (detail::hard_cap_of(outer_, id_of(group)) != 0) return of_class | group;
        const auto inside = detail::hard_cap_of(classes_[group].inside, id_of(seat));
        if ((inside & of_class) != 0) return inside ^ (std::uint64_t{group} + 1) << 32;
        return inside != 0 ? detail::own_hard_cap(c) : 0;
    }
    /// Tells the client's standing with the policy of its class, then the class's standing with the
    /// outer policy; see client_standing.
    void tell_standing(client_id c, client_standing& s, instant now) const noexcept {
        const auto [group, seat] = place_of(c);
        detail::tell_standing(classes_[group].inside, id_of(seat), s, now);
        s.outwards();
        detail::tell_standing(outer_, id_of(group), s, now);
    }
    /// Continues from the client's standing with an earlier policy. Call before its first wake().
    void resume(client_id c, client_standing& s, instant now) noexcept {
        now_ = std::max(now_, now);
        const auto [group, seat] = place_of(c);
        detail::resume(classes_[group].inside, id_of(seat), s, now);
        s.outwards();
        detail::resume(outer_, id_of(group), s, now);
    }

    /// The client has waiting work.
    void wake(client_id c, const queue_head& head, instant now) noexcept {
        now_ = std::max(now_, now);
        auto& client = clients_[c.index];
        client.head = head;
        client.held = false;
        auto& group = classes_[client.group];
        if (!std::exchange(client.waits, true)) ++group.waiting;
        tell_how_much_was_had(group);
        group.inside.wake(id_of(client.seat), head, now_);
        tell(client.group);
    }

    /// The client has no waiting work any more.
    void sleep(client_id c) noexcept {
        auto& client = clients_[c.index];
        const bool waited = std::exchange(client.waits, false), held = std::exchange(client.held, false);
        if (!waited && !held) return;
        if (waited) --classes_[client.group].waiting;
        // After hold(), too: its policy would otherwise owe the client the time of its sleep.
        classes_[client.group].inside.sleep(id_of(client.seat));
        tell(client.group);
    }

    /// The client's work waits, but must not be picked until wake().
    void hold(client_id c) noexcept {
        auto& client = clients_[c.index];
        if (!std::exchange(client.waits, false)) return;
        client.held = true;
        --classes_[client.group].waiting;
        detail::hold(classes_[client.group].inside, id_of(client.seat));
        tell(client.group);
    }

    /// Within one class its policy decides; between two classes the outer policy does.
    [[nodiscard]] bool before(client_id a, client_id b) const noexcept {
        const auto its = place_of(a), other = place_of(b);
        if (its.group != other.group) return detail::goes_before(outer_, id_of(its.group), id_of(other.group));
        return detail::goes_before(classes_[its.group].inside, id_of(its.seat), id_of(other.seat));
    }

    /// The outer policy picks a class, and the policy of that class picks the client.
    [[nodiscard]] choice pick(instant now) noexcept {
        now_ = std::max(now_, now);
        while (!held_back_.empty() && held_back_.first_key() <= count(now_)) tell(held_back_.first());
        for (;;) {
            const choice group = outer_.pick(now_);
            const auto others = held_back_.empty() ? never : instant{ns{held_back_.first_key()}};
            if (!group) return choice(std::min(group.ask_again(), others));
            auto& of = classes_[group->index];
            if (const choice c = of.inside.pick(now_)) return of.members[c->index].who;
            tell(group->index);  // time has passed since the outer policy was told of this class
        }
    }

    /// Charges the client and its class the predicted time. Returns both policies' values, for
    /// correct: the outer policy's bits are the low ones.
    std::uint64_t serve(client_id c, ns cost, instant now) noexcept {
        now_ = std::max(now_, now);
        const auto [group, seat] = place_of(c);
        tell_how_much_was_had(classes_[group]);
        const auto inside = detail::serve(classes_[group].inside, id_of(seat), cost, now_);
        return shifted(inside, detail::lent_bits(outer_)) | detail::serve(outer_, id_of(group), cost, now_);
    }
    /// How many bits serve() uses: those of the outer policy, and of the class whose policy needs
    /// most.
    [[nodiscard]] unsigned lent_bits() const noexcept {
        unsigned inside = detail::lent_bits(usual_);
        for (const auto& c : classes_) inside = std::max(inside, detail::lent_bits(c.inside));
        return std::min(detail::lent_bits(outer_) + inside, 64U);
    }

    /// Charges the client and its class the difference to the true cost.
    void correct(client_id c, ns delta, std::uint64_t lent = 0) noexcept {
        const auto [group, seat] = place_of(c);
        const unsigned bits = detail::lent_bits(outer_);
        const auto inside = bits < 64 ? lent >> bits : 0, outside = lent ^ shifted(inside, bits);
        detail::correct(classes_[group].inside, id_of(seat), delta, inside);
        detail::correct(outer_, id_of(group), delta, outside);
        tell(group);
    }

    /// The device time that any client had; see compute_policy. The classes' policies learn it when
    /// they next need it.
    void ended(ns took) noexcept {
        all_had_ = saturating_add(all_had_, std::max(took, ns{0}));
        detail::ended(outer_, took);
    }

private:
    [[nodiscard]] static constexpr std::uint64_t shifted(std::uint64_t lent, unsigned by) noexcept {
        return by < 64 ? lent << by : 0;
    }

    static constexpr std::uint32_t no_member = std::numeric_limits<std::uint32_t>::max();

    struct member {
        client_id who{};
        std::uint32_t next_unused = 0;
    };
    // The class's policy knows the members by dense seat numbers, so it needs memory for the
    // members only, not for all clients.
    struct class_state {
        Inner inside{};
        std::vector<member> members;
        std::uint32_t unused = no_member;  // the first free seat
        bool open = false;
        std::size_t waiting = 0;
        ns told{};  // the part of all_had_ that the class's policy was told
    };
    struct place {
        std::uint32_t group = 0, seat = 0;
    };
    // One cache line: with many clients, a decision costs one cache miss.
    struct alignas(64) client_state {
        std::uint32_t group = 0, seat = 0;
        bool waits = false, held = false;
        queue_head head{};
    };

    [[nodiscard]] place place_of(client_id c) const noexcept {
        return {clients_[c.index].group, clients_[c.index].seat};
    }
    // The id of a class for the outer policy, or of a member for the inner one.
    [[nodiscard]] static client_id id_of(std::uint32_t index) noexcept { return {index, 1}; }
    [[nodiscard]] static std::int64_t count(instant t) noexcept { return t.time_since_epoch().count(); }
    [[nodiscard]] bool has(std::uint32_t group) const noexcept {
        return group < classes_.size() && classes_[group].open;
    }

    failure open(std::uint32_t group, const client_settings& s, Inner inside) {
        if (group >= most_classes)
            return {errc::invalid_specification, group + std::uint64_t{1}, 0, most_classes, reason::count_limit};
        if (classes_.size() <= group) classes_.resize(group + std::size_t{1});
        held_back_.reserve(classes_.size());
        if (const auto why = outer_.add(id_of(group), s); why.code != errc::none) return why;
        classes_[group].inside = std::move(detail::in_turn(inside, turns_));
        classes_[group].open = true;
        return {};
    }

    // Ends a class without clients.
    void shut(std::uint32_t group) noexcept {
        outer_.remove(id_of(group));
        classes_[group].open = false;
    }

    // The client begins in its class, which is open.
    failure take_seat(client_id c, const client_settings& s) {
        auto& group = classes_[s.group];
        if (group.unused == no_member) {
            group.members.push_back({.next_unused = no_member});
            group.unused = static_cast<std::uint32_t>(group.members.size() - 1);
        }
        const auto seat = group.unused;
        if (const auto why = group.inside.add(id_of(seat), s); why.code != errc::none) return why;
        group.unused = group.members[seat].next_unused;
        group.members[seat].who = c;
        clients_[c.index] = {.group = s.group, .seat = seat};
        return {};
    }

    // Tells the class's policy how much device time all clients have had, in this class and in
    // others.
    void tell_how_much_was_had(class_state& group) noexcept {
        if (const ns more = all_had_ - std::exchange(group.told, all_had_); more > ns{0})
            detail::ended(group.inside, more);
    }

    void leave(const client_state& client) noexcept {
        auto& group = classes_[client.group];
        if (client.waits) --group.waiting;
        group.inside.remove(id_of(client.seat));
        group.members[client.seat].next_unused = std::exchange(group.unused, client.seat);
        tell(client.group);
    }

    // Tells the outer policy whether the class has a client to serve now, later or not at all, and
    // the head of that client's queue.
    void tell(std::uint32_t group) noexcept {
        auto& own = classes_[group];
        const choice c = own.waiting != 0 ? own.inside.pick(now_) : choice{};
        if (c) {
            held_back_.drop(group);
            auto head = clients_[own.members[c->index].who.index].head;
            head.level = no_priority;  // a submission's level counts within its class
            outer_.wake(id_of(group), head, now_);
            return;
        }
        outer_.sleep(id_of(group));
        if (c.ask_again() != never) {
            held_back_.put(group, {}, std::max(count(c.ask_again()), count(now_) + 1));
        } else {
            held_back_.drop(group);
        }
    }

    Outer outer_{};
    Inner usual_{};  // as for a class that isn't set; only asked, since making another may allocate
    std::vector<class_state> classes_;
    std::vector<client_state> clients_;
    detail::client_heap held_back_;  // classes whose policy serves no client before a time
    instant now_{};
    ns all_had_{};  // the device time of all completed work
    bool turns_ = false;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
