// SPDX-License-Identifier: Apache-2.0
// A tenant as a node: its devices, with the tenant's memory on them. An object that takes a node
// and allocates there, such as a communicator with its workspaces, is then charged to the tenant,
// and ends with it.
//
//   gpushare::tenant_node mine{node, chat};
//   gpushare::device_communicator group{mine, visible, chat.spec().on};         // its workspaces are of chat's memory
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Models `node`. Refers to the node and to the tenant's memory, so the tenant's handle must
/// outlive it, and what is made on it must be gone before the tenant closes: a close takes its
/// memory back like any other. Streams are the node's, outside of any slice. Thread-safe.
template <node Node, compute_policy Policy = weighted_fair>
class tenant_node {
public:
    using stream = typename Node::stream;                            ///< the node's
    using memory_type = typename tenant<Node, Policy>::memory_type;  ///< a tenant_memory

    /// Where `who` is now. Throws operation_error (closed); std::bad_alloc.
    tenant_node(Node& whole, tenant<Node, Policy>& who)
        : whole_(&whole), tag_(who.tag()), memory_(whole.num_devices()) {
        const auto on = who.spec().on;
        for (std::size_t part = 0; part < on.size(); ++part) memory_[on[part].index] = &who.memory(part);
    }

    /// As the node has.
    [[nodiscard]] std::uint32_t num_devices() const noexcept { return whole_->num_devices(); }
    /// The tenant's. Throws operation_error (no_device) for a device that it isn't on.
    [[nodiscard]] memory_type& memory(device_id d) const {
        if (d.index >= memory_.size() || memory_[d.index] == nullptr)
            raise({errc::no_device, d.index, 0, memory_.size()}, {}, "memory of a tenant's node");
        return *memory_[d.index];
    }
    /// A new one of the node's, whose work is the tenant's in ledgers.
    [[nodiscard]] stream make_stream(device_id d, priority level = {}, std::uint32_t /*tag*/ = 0) const {
        return whole_->make_stream(d, level, tag_);
    }
    /// The node's.
    [[nodiscard]] auto get_clock() const { return whole_->get_clock(); }
    /// The node's.
    [[nodiscard]] decltype(auto) gangs() const { return whole_->gangs(); }

private:
    Node* whole_;
    std::uint32_t tag_;
    std::vector<memory_type*> memory_;  // of each device; null where the tenant isn't
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
