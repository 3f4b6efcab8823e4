// SPDX-License-Identifier: Apache-2.0
// When a submission that comes now would probably begin and end, and whether an objective can be met at all. A part of
// limiter_core.hpp; functions of its clients and of what is in flight.
//
//   const auto e = detail::estimate(clients, kinds, budget, chat, key, first_guess, bound);
//   if (const auto why = detail::beyond_reach(settings, clients); why.code != errc::none) ...     // refuse it
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/cost_model.hpp>
#include <gpushare/compute/detail/in_flight_budget.hpp>
#include <gpushare/compute/detail/limiter_client.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// As if the policy shared each level's time by weight, and nobody else came (generalised processor sharing; Parekh, Gallager,
/// IEEE/ACM ToN 1, 1993). Linear in the clients.
[[nodiscard]] inline submission_estimate estimate(const std::vector<limiter_client>& clients, const cost_model& kinds,
                                                  const in_flight_budget& budget, client_id c, std::uint64_t key,
                                                  ns first_guess, ns bound) noexcept {
    const auto& own = clients[c.index];
    const auto all = [&](std::uint32_t i) {
        const client_id id{i, clients[i].generation};
        return static_cast<double>(clients[i].predict(0, id, kinds, first_guess).count()) * clients[i].usage.waiting;
    };
    const auto weight = [](const limiter_client& of) { return std::max<double>(of.settings.weight.permille(), 1); };
    const ns took = own.predict(key, c, kinds, first_guess);
    const double mine = all(c.index) + static_cast<double>(took.count());
    double ahead = all(c.index);
    for (std::uint32_t i = 0; i < clients.size(); ++i) {
        const auto& other = clients[i];
        if (i == c.index || !other.present || other.quarantined || other.settings.level < own.settings.level) continue;
        const bool above = other.settings.level > own.settings.level;
        ahead += above ? all(i) : std::min(all(i), mine * weight(other) / weight(own));
    }
    submission_estimate e;
    e.bound = bound;
    const auto kind = kinds.next(c, key, own.costs);
    e.wait = saturating_add(budget.predicted(), ns{static_cast<ns::rep>(std::min(ahead, 9e18))});
    e.lasts = lasting(took, own.width_of(c, key, {}, kinds));
    e.longest = kind.longest > ns{0} ? kind.longest : own.longest();
    e.known = kind.known;
    return e;
}

/// Why a client's objective can't be met: what another one may have there when it comes, the longest that it declared or lately
/// showed, leaves too little. Work above isn't counted, nor that below a level that keeps SMs. Figures in microseconds: the
/// objective, what is left of it, and what is needed. `self`: who has other settings, and isn't counted; it keeps its objective.
[[nodiscard]] inline failure beyond_reach(const client_settings& s, const std::vector<limiter_client>& clients,
                                          const limiter_client* self = nullptr) noexcept {
    if (s.slo <= ns{0} || (self != nullptr && s.slo == self->settings.slo)) return {};
    ns others{};
    for (const auto& c : clients) {
        const bool is_kept_off = s.keeps.known() && c.settings.level < s.level;
        if (c.present && &c != self && c.settings.level <= s.level && !is_kept_off)
            others = std::max(others, c.longest());
    }
    const ns least = saturating_add(others, s.longest);
    if (least <= s.slo) return {};
    const auto us = [](ns t) { return static_cast<std::uint64_t>(t.count() / 1000); };
    return {.code = errc::slo_unreachable,
            .asked = us(s.slo),
            .left = us(std::max(s.slo - others, ns{0})),
            .limit = us(least)};
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
