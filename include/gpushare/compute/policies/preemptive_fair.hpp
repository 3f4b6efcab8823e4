// SPDX-License-Identifier: Apache-2.0
// The same share for everybody who has work: 1/N of those present, whatever their weights. Under strict priority between
// levels, as weighted_fair, which does the work.
//
//   gpushare::compute_limiter<stream, clock, gpushare::preemptive_fair> limiter{{}, clock};
#pragma once

#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A value; not thread-safe. Looks at the level.
class preemptive_fair {
public:
    static constexpr bool timeless = true;

    failure add(client_id c, const client_settings& s) { return inner_.add(c, equal(s)); }
    failure change(client_id c, const client_settings& s) { return inner_.change(c, equal(s)); }
    void remove(client_id c) noexcept { inner_.remove(c); }
    void wake(client_id c, const line_head& head, instant now) noexcept { inner_.wake(c, head, now); }
    void sleep(client_id c) noexcept { inner_.sleep(c); }
    [[nodiscard]] choice pick(instant now) const noexcept { return inner_.pick(now); }
    void serve(client_id c, ns cost, instant now) noexcept { inner_.serve(c, cost, now); }
    void correct(client_id c, ns delta) noexcept { inner_.correct(c, delta); }
    void take_turns() noexcept { inner_.take_turns(); }

private:
    [[nodiscard]] static client_settings equal(client_settings s) noexcept {
        s.weight = share::whole();
        return s;
    }

    weighted_fair inner_;
};
static_assert(compute_policy<preemptive_fair>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
