// SPDX-License-Identifier: Apache-2.0
// A tenant's part on one of its devices: memory, streams, and a client of the limiter.
//
//   detail::tenant_part<Node, Policy> part(node, shared, spec, device, slice, tag);     part.memory.limit().adopt(guaranteed, burst);
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/tenant/detail/scrub_stream.hpp>
#include <gpushare/tenant/detail/shared_node.hpp>
#include <gpushare/tenant/detail/spill_list.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/tenant/tenant_memory.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A tenant's state on one device, except its device time. A successor that stays on the device
/// takes the state over as it is, with everything that is built on it.
template <node Node, compute_policy Policy>
struct part_memory {
    using shared = shared_node<Node, Policy>;
    using memory_type = tenant_memory<typename Node::memory_type, typename Node::stream::point>;

    // Has no bytes at first: they come when all parts exist.
    part_memory(Node& whole, shared& all, const tenant_spec& spec, device_id d, typename shared::slice& s,
                std::uint32_t tag)
        : scrubber([&whole, &s, d, level = spec.level, tag] { return s.stream_for(whole, d, level, tag); }),
          memory(all.devices[d.index].memory, whole.memory(d), spec.name, d, bytes{}, bytes{}, all.options.events,
                 made_by(whole, all, spec, all.devices[d.index])) {
        if (*spec.spill == bytes{}) return;
        if constexpr (copier<typename Node::stream>)
            if (all.options.spill_to != nullptr) {
                spills.emplace(memory, *all.options.spill_to, *spec.spill / spec.devices,
                               s.stream_for(whole, d, spec.level, tag),
                               [time = whole.get_clock()] { return time.now(); });
                return;
            }
        raise({.code = errc::not_supported, .because = reason::no_spill_target}, spec.name, "admission");
    }
    part_memory(const part_memory&) = delete;
    part_memory& operator=(const part_memory&) = delete;

    scrub_stream<typename Node::stream> scrubber;
    memory_type memory;
    std::optional<typename spills_of<typename Node::stream, memory_type>::type> spills;

private:
    [[nodiscard]] tenant_memory_options<typename Node::stream::point> made_by(Node& whole, const shared& all,
                                                                              const tenant_spec& spec,
                                                                              typename shared::device& on) {
        tenant_memory_options<typename Node::stream::point> o{
            .stack = *spec.stack, .scrub = *spec.scrub, .wait = *spec.wait, .trace = all.options.trace};
        if constexpr (gpushare::scrubber<typename Node::stream>)
            o.fill = [this](auto* after, void* p, std::size_t n) { return scrubber.fill(after, p, n); };
        o.now = [time = whole.get_clock()] { return time.now(); };
        o.make_room = [&on] { return on.trim(); };
        // before any memory
        if (o.scrub != scrub_policy::off) on.minded.store(true, std::memory_order_relaxed);
        o.minded = &on.minded;
        if (o.stack == memory_stack::arena) o.source = on.arena.get();
        if (o.stack == memory_stack::stream_ordered) o.source = on.stream_ordered.get();
        if (o.source == nullptr && (o.stack == memory_stack::arena || o.stack == memory_stack::stream_ordered))
            raise({.code = errc::not_supported, .because = reason::no_such_stack}, spec.name, "admission");
        return o;
    }
};

/// A tenant's part of one device.
template <node Node, compute_policy Policy>
struct tenant_part {
    using shared = shared_node<Node, Policy>;
    using memory_type = typename part_memory<Node, Policy>::memory_type;

    // With memory of its own, or with the memory of the `predecessor` that the tenant succeeds on
    // this device. If the tenant stays in the slice, it takes over the predecessor's share, too.
    tenant_part(Node& whole, shared& all, const tenant_spec& spec, device_id d, typename shared::slice& s,
                std::uint32_t tag, const tenant_part* predecessor = nullptr)
        : device(d),
          on(all.devices[d.index]),
          slice(s),
          store(predecessor != nullptr ? predecessor->store
                                       : std::make_shared<part_memory<Node, Policy>>(whole, all, spec, d, s, tag)),
          memory(store->memory),
          streams(make_streams(whole, s, spec, d, tag)),
          client(slice.compute.add(settings_of(spec, tag, slice.size))),
          has_memory(predecessor == nullptr),
          has_share(predecessor == nullptr || &predecessor->slice != &s) {
        on.parts.fetch_add(1, std::memory_order_relaxed);
    }
    tenant_part(const tenant_part&) = delete;
    tenant_part& operator=(const tenant_part&) = delete;
    ~tenant_part() {
        slice.compute.close(client, instant::min());
        on.parts.fetch_sub(1, std::memory_order_relaxed);
    }

    device_id device;
    typename shared::device& on;
    typename shared::slice& slice;
    const std::shared_ptr<part_memory<Node, Policy>> store;
    memory_type& memory;
    std::vector<typename Node::stream> streams;  // the number never changes
    client_id client;
    client_usage account{};  // set once the client is closed; under the limiter's mutex
    // false: another tenant has it. Relaxed: the memory itself doesn't change
    std::atomic<bool> has_memory;
    bool has_share;  // likewise; under the mutex

private:
    [[nodiscard]] static std::vector<typename Node::stream> make_streams(Node& whole, typename shared::slice& in,
                                                                         const tenant_spec& spec, device_id d,
                                                                         std::uint32_t tag) {
        std::vector<typename Node::stream> all;
        all.reserve(spec.streams);
        while (all.size() < spec.streams) all.push_back(in.stream_for(whole, d, level_of(spec), tag));
        return all;
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
