// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The budget of work in flight, compared at every step with its rules computed from scratch: its
// cached values must never be stale.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/in_flight_budget.hpp>
#include <gpushare/compute/detail/limiter_clients.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace in_flight_test {

using namespace std::chrono_literals;
using gpushare::instant;
using gpushare::ns;
using gpushare::priority;
using gpushare::detail::in_flight_budget;

namespace {

struct kernel {
    ns longest{}, predicted{};
};

struct rules {
    struct level {
        int height = 0;
        std::uint32_t clients = 0;
        ns longest{}, opaque{}, stretch{};
        bool unknown = false;
        std::vector<kernel> in_flight{};
        [[nodiscard]] bool in_use() const { return clients > 0 || !in_flight.empty(); }
    };

    [[nodiscard]] bool top(const level& l) const {
        return std::ranges::none_of(levels, [&](const level& o) { return o.height > l.height && o.clients > 0; });
    }
    [[nodiscard]] std::uint32_t depth_of(const level& l) const { return top(l) ? depth : std::min(depth, 2U); }
    [[nodiscard]] ns horizon_of(const level& l) const { return top(l) ? horizon : horizon / 4; }

    [[nodiscard]] bool has_room(const level& own, const kernel& k, bool alone) const {
        std::vector<kernel> before;
        for (const auto& l : levels)
            if (l.height >= own.height) before.insert(before.end(), l.in_flight.begin(), l.in_flight.end());
        const auto unknown = std::ranges::count(before, 0ns, &kernel::longest);
        ns counted{};
        for (const auto& each : before) counted += each.longest;
        if (!before.empty() && lead > 0ns && (unknown > 0 || counted > lead)) return false;
        if (before.size() < depth_of(own)) return true;
        if (k.longest == 0ns || unknown > 0) return false;
        if (before.size() >= gpushare::detail::most_in_flight) return false;
        kernel sum = k;
        for (const auto& each : before) {
            sum.longest += each.longest;
            sum.predicted += each.predicted;
        }
        return sum.longest <= horizon_of(own) &&
               (alone || before.size() < depth || sum.predicted <= horizon_of(own) / 4);
    }

    [[nodiscard]] ns bound(const level& own) const {
        ns any{}, below{}, of_own{};
        for (const auto& l : levels) any = std::max(any, l.longest);
        for (const auto& l : levels) {
            if (l.height > own.height || !l.in_use()) continue;
            const auto most = [&](ns each) {
                return lead > 0ns ? std::min(each * depth_of(l), each + 2 * lead) : each * depth_of(l);
            };
            if (l.height == own.height) {
                if (any > 0ns) of_own = std::max(most(l.longest > 0ns ? l.longest : any), horizon_of(l));
                continue;
            }
            const bool is_guess = l.opaque == 0ns && (l.unknown || l.stretch == 0ns);
            if (is_guess && any == 0ns) return 0ns;
            below += std::max(most(is_guess ? any : l.opaque) + l.stretch, horizon_of(l));
        }
        return below > 0ns ? below : of_own;
    }
    [[nodiscard]] ns bound() const {
        const level* highest = nullptr;
        for (const auto& l : levels)
            if (l.in_use() && (highest == nullptr || l.height > highest->height)) highest = &l;
        return highest != nullptr ? bound(*highest) : 0ns;
    }

    std::uint32_t depth;
    ns horizon;
    std::vector<level> levels;
    ns lead{};
};

/// Work that fills the device.
gpushare::admission like(std::uint32_t level, ns longest, ns predicted) {
    return {.predicted = predicted, .length = predicted, .longest = longest, .level_index = level};
}

/// The last one ends, perhaps together with equal ones before it.
void leave_some(in_flight_budget& budget, std::uint32_t level, std::vector<kernel>& in_flight, support::random& any) {
    const kernel last = in_flight.back();
    const auto equal = [=](const kernel& k) { return k.longest == last.longest && k.predicted == last.predicted; };
    const auto differs = std::find_if_not(in_flight.rbegin(), in_flight.rend(), equal);
    const auto n = 1 + any.below(static_cast<std::uint64_t>(differs - in_flight.rbegin()));
    (void)budget.leave(like(level, last.longest, last.predicted * static_cast<ns::rep>(n)),
                       static_cast<std::uint32_t>(n));
    in_flight.resize(in_flight.size() - n);
}

}  // namespace

TEST_CASE("the budget keeps as much work ready in flight as its rules say", "[compute]") {
    for (std::uint64_t nth = 0; nth < 50; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        rules rule{static_cast<std::uint32_t>(1 + any.below(5)), any.one_in(2) ? 1ms : 300us, {}, {}};
        in_flight_budget budget(rule.depth, rule.horizon);
        ns hand_over{};
        for (int step = 0; step < 400; ++step) {
            if (nth % 2 == 0 && any.one_in(50)) {
                const ns took{static_cast<ns::rep>(1000 + any.below(15'000))};
                budget.learn_hand_over({.noticed = took}, 1s);
                hand_over += (took - hand_over) / (hand_over > 0ns ? 8 : 1);
                rule.lead = std::max(50 * hand_over, rule.horizon);
            }
            if (rule.levels.empty() || (rule.levels.size() < 4 && any.one_in(50))) {
                const int height = static_cast<int>(any.below(7)) - 3;
                if (std::ranges::count(rule.levels, height, &rules::level::height) > 0) continue;
                REQUIRE(budget.open(priority{height}) == rule.levels.size());
                rule.levels.push_back({.height = height});
                REQUIRE(budget.open(priority{height}) == rule.levels.size() - 1);  // it is there
            }
            const auto i = static_cast<std::uint32_t>(any.below(rule.levels.size()));
            auto& l = rule.levels[i];
            const ns length = any.one_in(4) ? 0ns : ns{static_cast<ns::rep>(1000 + any.below(200'000))};
            const kernel one{length, ns{static_cast<ns::rep>(any.below(100'000))}};
            switch (any.below(8)) {
                case 0:
                    budget.add_client(i);
                    ++l.clients;
                    break;
                case 1:
                    if (l.clients == 0) break;
                    budget.remove_client(i);
                    --l.clients;
                    break;
                case 2:
                    if (any.one_in(3)) {  // it yields
                        const ns stretch = length > 0ns ? std::min(length, ns{50us}) : ns{50us};
                        budget.raise_longest(i, {.longest = length, .stretch = stretch});
                        l.stretch = std::max(l.stretch, stretch);
                    } else {
                        budget.raise_longest(i, {.longest = length, .opaque = length, .unknown = length == 0ns});
                        l.opaque = std::max(l.opaque, length);
                        l.unknown = l.unknown || length == 0ns;
                    }
                    l.longest = std::max(l.longest, length);
                    break;
                case 3:
                    if (!any.one_in(10)) break;
                    budget.survey(i, std::vector<gpushare::detail::limiter_client>{});
                    l.longest = l.opaque = l.stretch = 0ns;
                    l.unknown = false;
                    break;
                case 4:
                case 5:
                    if (!budget.has_room(i, length, one.predicted, false)) break;
                    for (std::uint64_t n = 1 + (any.one_in(2) ? any.below(3) : 0); n > 0; --n) {
                        (void)budget.enter(like(i, length, one.predicted));
                        l.in_flight.push_back(one);
                    }
                    break;
                default:
                    if (l.in_flight.empty()) break;
                    leave_some(budget, i, l.in_flight, any);
            }
            for (std::uint32_t k = 0; k < rule.levels.size(); ++k) {
                REQUIRE(budget.of(k).bound == rule.bound(rule.levels[k]));
                REQUIRE(budget.has_room(k, length, one.predicted, true) == rule.has_room(rule.levels[k], one, true));
                REQUIRE(budget.has_room(k, length, one.predicted, false) == rule.has_room(rule.levels[k], one, false));
            }
            REQUIRE(budget.bound() == rule.bound());
        }
    }
}

TEST_CASE("depth, and what is behind long work, to the last one", "[compute]") {
    in_flight_budget budget(3, 1ms);
    const auto low = budget.open(priority{0});
    budget.add_client(low);
    SECTION("of short ones of one client, as many as there are batches for") {
        std::uint32_t n = 0;
        for (; budget.has_room(low, 1us, 1us, true); ++n) (void)budget.enter(like(low, 1us, 1us));
        CHECK(n == gpushare::detail::most_in_flight);
    }
    SECTION("nothing goes behind what takes longer than fifty times what it takes to notice an end") {
        budget.learn_hand_over({.noticed = 40us}, 2ms);
        (void)budget.enter(like(low, 2ms, 2ms));
        CHECK(budget.has_room(low, 2ms, 2ms, false));
        (void)budget.leave(like(low, 2ms, 2ms), 1);
        (void)budget.enter(like(low, 2ms + 1ns, 2ms));
        CHECK_FALSE(budget.has_room(low, 2ms, 2ms, false));
    }
    SECTION("the first ones of a kind, of which nobody knows the width, beside narrow work; fewer below others") {
        const bool below = GENERATE(false, true);
        if (below) budget.add_client(budget.open(priority{1}));
        const auto goes = [&](std::uint64_t timeline, gpushare::sm_width width) {
            const gpushare::admission a{.predicted = 100us,
                                        .length = 100us,
                                        .width = width,
                                        .timeline = timeline,
                                        .longest = 100us,
                                        .level_index = low};
            if (budget.room_for(a, false) != in_flight_budget::room::yes) return false;
            budget.enter(a);
            return true;
        };
        CHECK(goes(1, gpushare::sm_width(0.25)));
        CHECK(goes(2, {}));
        CHECK(goes(3, {}) == !below);
        CHECK_FALSE(goes(4, {}));
        CHECK(goes(5, gpushare::sm_width(0.25)));  // there is room for what is known to be narrow
    }
}

TEST_CASE("unknown or endless work never overflows the budget", "[compute]") {
    in_flight_budget budget(3, 1ms);
    const auto low = budget.open(priority{0}), high = budget.open(priority{1});
    budget.add_client(low);
    budget.add_client(high);
    budget.raise_longest(low, {.longest = ns::max(), .opaque = ns::max()});
    CHECK(budget.of(high).bound == ns::max());
    (void)budget.enter(like(low, ns::max(), ns::max()));
    (void)budget.enter(like(low, ns::max(), ns::max()));
    CHECK_FALSE(budget.has_room(low, ns::max(), ns::max(), true));
    CHECK(budget.has_room(high, ns::max(), 1us, true));  // what is below takes none of its room
    (void)budget.leave(like(low, ns::max(), ns::max()), 1);
    (void)budget.leave(like(low, ns::max(), ns::max()), 1);
    CHECK(budget.has_room(low, 1us, 1us, false));
}

}  // namespace in_flight_test
