// SPDX-License-Identifier: Apache-2.0
// How much may be in flight, level by level, and how long that can take: the bound on a wait. A part of limiter_core.
//
//   detail::in_flight_budget budget{depth, horizon};
//   const auto level = budget.open(priority{1});                        // levels have indices, and stay
//   if (budget.has_room(level, longest, predicted, alone)) budget.enter(level, longest, predicted, false);  // ... leave()
//
// Few submissions keep a device full if they are long, many are needed if they are short. So there is room for `depth` of
// them, or for as many as take no longer than the horizon, each counted with the longest that its kind lately took: that
// bounds a wait. With several clients, what is in flight is out of the policy's hands: then they are as many as are
// predicted to take a quarter of that, which hides the latency of noticing an end. With somebody above, who would wait for
// all of it, the horizon is a quarter, and more than two are in flight only within it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Of one client alone: hides any latency, and holds two batches.
inline constexpr std::uint32_t most_in_flight = 128;

/// A value. Allocates in `open` alone.
class in_flight_budget {
public:
    struct level_state {
        priority level{};
        std::uint32_t in_flight = 0, clients = 0;
        std::uint32_t of_requests = 0;  // of these in flight
        ns counted{};                   // how long what is in flight may take; unknown ones count nothing
        ns predicted{};                 // how long it probably takes
        ns longest{};                   // of what its clients declared or lately showed; 0: unknown
        ns served{};                    // what all that ended has taken
        std::uint32_t unknown = 0;      // of these
        instant hold_until{};           // until then a request of this level is expected to go on
        bool enqueuing = false;         // a callable of its clients is being run
        // What follows from all of this, and is asked for by every submission.
        std::uint32_t depth = 0;  // how many are in flight however long they take
        ns horizon{}, bound{};
    };

    in_flight_budget(std::uint32_t depth, ns horizon) noexcept : depth_(depth), horizon_(horizon) {}

    /// Of this level, from now on: what the other calls name it by.
    [[nodiscard]] std::uint32_t open(priority p) {
        std::uint32_t i = 0;
        while (i < levels_.size() && levels_[i].level != p) ++i;  // they are few
        if (i == levels_.size()) levels_.push_back({.level = p});
        update();
        return i;
    }
    void add_client(std::uint32_t level) noexcept {
        ++of(level).clients;
        update();
    }
    void remove_client(std::uint32_t level) noexcept {
        --of(level).clients;
        update();
    }
    /// A client of this level declared or showed this length.
    void raise_longest(std::uint32_t level, ns length) noexcept {
        auto& l = of(level);
        if (length <= l.longest) return;
        l.longest = length;
        update();
    }
    void forget_longest(std::uint32_t level) noexcept {
        of(level).longest = {};
        update();
    }
    [[nodiscard]] level_state& of(std::uint32_t level) noexcept { return levels_[level]; }

    /// `longest`: what this one may take; 0: unknown. `predicted`: what it probably takes. `alone`: no other client has
    /// anything waiting or in flight.
    [[nodiscard]] bool has_room(std::uint32_t level, ns longest, ns predicted, bool alone) const noexcept {
        const auto& own = levels_[level];
        if (own.enqueuing) return false;
        std::uint32_t in_flight = own.in_flight, unknown = own.unknown;
        ns counted = own.counted, probably = own.predicted;
        if (only_ != level) {
            for (const auto& l : levels_) {
                if (l.level <= own.level) continue;
                in_flight += l.in_flight;
                unknown += l.unknown;
                counted = saturating_add(counted, l.counted);
                probably = saturating_add(probably, l.predicted);
            }
        }
        if (in_flight < own.depth) return true;
        if (longest <= ns{0} || unknown != 0 || in_flight >= most_in_flight) return false;
        if (saturating_add(counted, longest) > own.horizon) return false;
        return alone || in_flight < depth_ || saturating_add(probably, predicted) <= own.horizon / 4;
    }

    /// `n`: so many, all like this. `predicted`: of all of them.
    void enter(std::uint32_t level, ns longest, ns predicted, bool of_request, std::uint32_t n = 1) noexcept {
        auto& l = of(level);
        const bool first = l.in_flight == 0;
        l.in_flight += n;
        if (first && l.clients == 0) update();
        if (of_request) l.of_requests += n;
        l.counted = saturating_add(l.counted, times(longest, n));
        l.predicted = saturating_add(l.predicted, predicted);
        if (longest <= ns{0}) l.unknown += n;
    }
    void leave(std::uint32_t level, ns longest, ns predicted, bool of_request, std::uint32_t n = 1) noexcept {
        auto& l = of(level);
        if (of_request) l.of_requests -= n;
        l.in_flight -= n;
        // At the end of time the sum has lost its parts: then only none is certain.
        l.counted = l.in_flight == 0 ? ns{0} : less(l.counted, times(longest, n));
        l.predicted = l.in_flight == 0 ? ns{0} : less(l.predicted, predicted);
        if (longest <= ns{0}) l.unknown -= n;
        if (l.in_flight == 0 && l.clients == 0) update();
    }

    /// Whether work of this level is held back for a request above it, and if only a time ends that, until when.
    struct hold {
        bool held = false;
        instant until = never;
    };
    [[nodiscard]] hold held(std::uint32_t level, instant now) const noexcept {
        hold h;
        if (only_ == level) return h;
        for (const auto& l : levels_) {
            if (l.level <= levels_[level].level) continue;
            if (l.of_requests > 0) return {.held = true};
            if (now < l.hold_until)
                h = {.held = true, .until = h.held ? std::max(h.until, l.hold_until) : l.hold_until};
        }
        return h;
    }
    [[nodiscard]] bool is_held_until(instant t) const noexcept {
        return std::ranges::any_of(levels_, [=](const level_state& l) { return l.hold_until == t; });
    }
    [[nodiscard]] bool any_hold() const noexcept {
        for (const auto& l : levels_)
            if (l.hold_until > instant{}) return true;
        return false;
    }

    /// The longest that what is admitted at this level waits for those below, if nothing takes longer than the longest of its
    /// level; with none below in use, that it waits for those of its own level that are in flight. 0: nothing is known.
    [[nodiscard]] ns bound(std::uint32_t level) const noexcept { return levels_[level].bound; }
    /// The same of the highest level in use.
    [[nodiscard]] ns bound() const noexcept {
        const level_state* top = nullptr;
        for (const auto& l : levels_)
            if (in_use(l) && (top == nullptr || l.level > top->level)) top = &l;
        return top != nullptr ? top->bound : ns{0};
    }

    /// What work of this level and above has taken that ended.
    [[nodiscard]] ns served_from(std::uint32_t level) const noexcept {
        ns sum = levels_[level].served;
        if (levels_.size() == 1) return sum;  // not one in use: what is known must go on to add up
        for (const auto& l : levels_)
            if (l.level > levels_[level].level) sum += l.served;
        return sum;
    }

private:
    [[nodiscard]] static bool in_use(const level_state& l) noexcept { return l.in_flight != 0 || l.clients != 0; }
    [[nodiscard]] static ns less(ns sum, ns part) noexcept { return sum == ns::max() ? sum : sum - part; }
    [[nodiscard]] static ns times(ns a, std::uint32_t n) noexcept {
        return n == 1 ? a : a > ns::max() / static_cast<ns::rep>(n) ? ns::max() : a * static_cast<ns::rep>(n);
    }

    void update() noexcept {
        ns any{};
        const auto used = std::ranges::find_if(levels_, in_use);
        const bool several =
            std::find_if(used + (used != levels_.end() ? 1 : 0), levels_.end(), in_use) != levels_.end();
        only_ = several ? none : static_cast<std::uint32_t>(used - levels_.begin());
        for (auto& l : levels_) {
            any = std::max(any, l.longest);
            bool top = true;
            for (const auto& other : levels_) top = top && (other.level <= l.level || other.clients == 0);
            l.horizon = top ? horizon_ : horizon_ / 4;
            l.depth = top ? depth_ : std::min(depth_, 2U);  // below somebody: one that runs and one behind it
        }
        for (auto& l : levels_) l.bound = bound_below(l, any);
    }
    // `any`: for levels of which no length is known.
    [[nodiscard]] ns bound_below(const level_state& level, ns any) const noexcept {
        if (any <= ns{0}) return ns{0};
        ns sum{}, own{};
        for (const auto& l : levels_) {
            if (l.level > level.level || !in_use(l)) continue;
            auto& to = l.level == level.level ? own : sum;
            const ns each = l.longest > ns{0} ? l.longest : any;
            to = saturating_add(to, std::max(times(each, l.depth), l.horizon));
        }
        return sum > ns{0} ? sum : own;
    }

    static constexpr std::uint32_t none = static_cast<std::uint32_t>(-1);

    std::uint32_t depth_;
    std::uint32_t only_ = none;  // level in use, if it is one: the usual case
    ns horizon_;
    std::vector<level_state> levels_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
