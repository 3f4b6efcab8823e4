// SPDX-License-Identifier: Apache-2.0
// A tenant's successor: the same name and the same grant, elsewhere. Only move_tenant() makes one,
// because until the successor has taken over, one promise covers both tenants together.
//
//   detail::succession to(shared, from, {device_id{3}}, any_slice);      to.next().memory();
//   to.take_over();      return std::move(to.next());
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// For one thread. The destructor closes the successor, unless the successor was moved away.
template <node Node, compute_policy Policy>
class succession {
public:
    /// `to` has as many devices as the tenant has. On a device that stays in the same place, the
    /// memory is still the predecessor's. Throws as tenancy::admit, and closed.
    succession(tenancy<Node, Policy>& shared, tenant<Node, Policy>& from, std::vector<device_id> to,
               std::uint32_t slice)
        : from_(&from), granted_(from.state_->granted()), next_([&] {
              auto spec = granted_.spec;
              spec.on = std::move(to);
              spec.slice = slice;
              return shared.admit_beside(&from, std::move(spec));
          }()) {}

    [[nodiscard]] tenant<Node, Policy>& next() noexcept { return next_; }
    /// From now on the successor has its predecessor's memory on the devices that both have, with
    /// everything built on that memory, and the predecessor isn't resized any more. Call while
    /// neither runs work. Throws std::bad_alloc; operation_error: closed, in_flight if the
    /// predecessor was resized meanwhile. Then nothing has happened.
    void take_over() { next_.state_->take_over(*from_->state_, granted_.changes); }

private:
    tenant<Node, Policy>* from_;
    const typename tenant<Node, Policy>::state::grant_state granted_;
    tenant<Node, Policy> next_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
