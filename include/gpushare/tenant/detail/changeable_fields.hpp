// SPDX-License-Identifier: Apache-2.0
// The fields that a tenant_change and a tenant_spec have in common.
//
//   detail::apply_change(change, spec);
//   detail::for_each_changeable(change, spec, [](auto& to, const auto& field) { to = field; });
#pragma once

#include <gpushare/config.hpp>
#include <gpushare/tenant/specification.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Calls f(field of the change, same field of the specification) for each field. The change's field
/// is a std::optional; those of a specification are optional only if they have a default.
template <class Change, class Spec, class F>
void for_each_changeable(Change& change, Spec& spec, F f) {
    f(change.memory, spec.memory);
    f(change.burst, spec.burst);
    f(change.compute, spec.compute);
    f(change.level, spec.level);
    f(change.ceiling, spec.ceiling);
    f(change.narrowest, spec.narrowest);
    f(change.cap, spec.cap);
    f(change.soft_cap, spec.soft_cap);
    f(change.slo, spec.slo);
    f(change.group, spec.group);
    f(change.longest, spec.longest);
    f(change.yields_within, spec.yields_within);
    f(change.keeps, spec.keeps);
    f(change.queue_limit, spec.queue_limit);
    f(change.wait, spec.wait);
    f(change.lends_asleep, spec.lends_asleep);
    f(change.spill, spec.spill);
}

/// Applies the change to the specification.
inline void apply_change(const tenant_change& change, tenant_spec& spec) {
    for_each_changeable(change, spec, [](const auto& to, auto& field) {
        if (to) field = *to;
    });
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
