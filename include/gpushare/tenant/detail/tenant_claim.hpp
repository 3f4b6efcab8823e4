// SPDX-License-Identifier: Apache-2.0
// The memory, shares and name that an admission claims before the tenant exists. The claim is made
// under the tenancy's mutex. Streams are made afterwards under no lock, since a driver may take
// milliseconds for one stream. The destructor gives everything back unless keep() was called.
//
//   // under the mutex of `shared`
//   detail::tenant_claim claim(shared, spec, std::move(memory), tag);
//   make_streams();     claim.keep();                                      // under none
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/partition/reservation.hpp>
#include <gpushare/tenant/detail/shared_node.hpp>
#include <gpushare/tenant/specification.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// One owner, one thread. While the claim lives, other tenants can't get its name and shares.
template <node Node, compute_policy Policy>
class tenant_claim {
public:
    using shared = shared_node<Node, Policy>;

    /// Under the mutex, with devices and their memory chosen; `kept` as in tenant_admission. Throws
    /// std::bad_alloc, and then nothing is taken.
    tenant_claim(shared& all, tenant_spec chosen, reservation<quota_draw> memory, std::uint32_t its_tag,
                 plain_list<typename shared::slice*> kept)
        : spec(std::move(chosen)), tag(its_tag), memory_(std::move(memory)), kept_(std::move(kept)) {
        for (std::size_t i = 0; i < spec.on.size(); ++i)
            slices.push_back(stays(i) && spec.slice == any_slice
                                 ? kept_[i]
                                 : all.devices[spec.on[i].index].slice_for(spec.slice, level_of(spec)));
        for (auto* const s : slices) s->promised.open(level_of(spec));
        all.names.push_back(spec.name);
        promise(spec.compute.permille());
        all_ = &all;
    }
    tenant_claim(const tenant_claim&) = delete;
    tenant_claim& operator=(const tenant_claim&) = delete;
    /// Not under the mutex.
    ~tenant_claim() {
        if (all_ == nullptr) return;
        const std::lock_guard lock(all_->mutex);
        promise(0 - spec.compute.permille());
        all_->forget(spec.name);
    }

    /// From now on the tenant has everything, with the memory as its quotas' guarantees.
    void keep() noexcept {
        memory_.dismiss();
        all_ = nullptr;
    }

    /// Whether the tenant takes over its predecessor's memory on that device.
    [[nodiscard]] bool stays(std::size_t part) const noexcept { return part < kept_.size() && kept_[part] != nullptr; }

    tenant_spec spec;
    const std::uint32_t tag;
    plain_list<typename shared::slice*> slices;  // one on each of spec.on

private:
    // A tenant that stays in its slice already has its share.
    void promise(std::uint32_t more) noexcept {
        for (std::size_t i = 0; i < slices.size(); ++i)
            if (!stays(i) || slices[i] != kept_[i]) slices[i]->promised.add(level_of(spec), more);
    }

    reservation<quota_draw> memory_;
    plain_list<typename shared::slice*> kept_;
    shared* all_ = nullptr;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
