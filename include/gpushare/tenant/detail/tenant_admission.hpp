// SPDX-License-Identifier: Apache-2.0
// Chooses the devices of a tenant and reserves their memory, on all of them or none.
//
//   // under shared's mutex; sets spec.on
//   auto memory = detail::tenant_admission(node, shared, choice).reserve(spec);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/partition/node_view.hpp>
#include <gpushare/partition/reservation.hpp>
#include <gpushare/tenant/detail/shared_node.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Throws operation_error: "tenant 'chat': the name is taken".
[[noreturn]] inline void refuse_admission(const failure& f, std::string_view name, std::string_view why) {
    message m;
    m.of(name).add(why);
    throw operation_error(f, name, m);
}

/// Whether the device is lost, where the node can tell.
template <node Node>
[[nodiscard]] bool is_lost(const Node& of, device_id d) {
    if constexpr (requires { static_cast<bool>(of.lost(d)); })
        return of.lost(d);
    else
        return false;
}

/// For one request. Refers to all of its arguments. `kept` is for a tenant that succeeds another:
/// for each named device, the other tenant's slice if that tenant is in the same place there,
/// otherwise null. On such a device the memory passes on, and the share, too, if the slice is the
/// same.
template <node Node, compute_policy Policy>
class tenant_admission {
public:
    using slice_type = typename shared_node<Node, Policy>::slice;

    tenant_admission(const Node& of, shared_node<Node, Policy>& all, const device_choice& choice,
                     const plain_list<slice_type*>& kept) noexcept
        : node_(&of), all_(&all), choice_(&choice), kept_(&kept) {}

    // Chooses the devices and takes their memory, all at once. Bursts of other tenants need no
    // mutex of the library; they wait meanwhile. So the choice fits, and a refusal is right for one
    // instant on all devices.
    reservation<quota_draw> reserve(tenant_spec& spec) {
        const bytes unit = std::exchange(spec.unit, all_->unit_of(spec));
        if (spec.unit != unit && spec.memory % spec.unit != bytes{})
            refuse_admission({errc::not_whole, spec.memory.count(), 0, spec.unit.count(), reason::whole_sizes},
                             spec.name, "memory of an arena comes in whole chunks on each device");
        auto all = reserve_whole(spec);
        spec.unit = unit;
        return all;
    }

private:
    reservation<quota_draw> reserve_whole(tenant_spec& spec) {
        std::vector<quota_draw> draws;
        plain_list<bool> lost;
        for (std::uint32_t i = 0; i < all_->devices.size(); ++i) {
            draws.emplace_back(all_->devices[i].memory);
            lost.push_back(is_lost(*node_, {i}));
        }
        prepared_together held(draws);
        const auto rooms = rooms_for(spec, draws, lost);
        const auto chosen = split(spec, rooms, draws, lost);
        if (spec.burst != all_burst) {
            if (const bytes step = spec.unit * chosen.devices.size(); spec.burst % step != bytes{})
                refuse_admission({errc::not_whole}, spec.name,
                                 "burst does not divide into whole units over the devices");
            const bytes most = chosen.per_device + spec.burst / chosen.devices.size();
            if (most > quota::max_limit())
                raise({errc::invalid_specification, most.count(), 0, quota::max_limit().count(), reason::burst_limit},
                      spec.name, "admission");
        }
        spec.devices = static_cast<std::uint32_t>(chosen.devices.size());
        spec.on = chosen.devices;
        for (std::size_t i = 0; i < chosen.devices.size(); ++i)
            if (kept_in(i) == nullptr) draws[chosen.devices[i].index].take(chosen.per_device);
        held.commit();
        return reservation(std::move(draws));
    }
    [[nodiscard]] partition split(const tenant_spec& spec, const std::vector<device_room>& rooms,
                                  const std::vector<quota_draw>& draws, const plain_list<bool>& lost) const {
        if (spec.memory == bytes{}) {  // nothing is taken: one unit on each device says where
            const auto count = spec.on.empty() ? spec.devices : static_cast<std::uint32_t>(rooms.size());
            auto chosen = spec.on.empty() ? equal_split(spec.unit * count, count, rooms, spec.unit)
                                          : equal_split_over(spec.unit * count, rooms, spec.unit);
            chosen.per_device = {};
            return chosen;
        }
        return !spec.on.empty() ? equal_split_over(spec.memory, rooms, spec.unit)
               : *choice_       ? choose(spec, rooms, draws, lost)
                                : equal_split(spec.memory, spec.devices, rooms, spec.unit);
    }
    // Chooses by the embedder's function, which sees all devices.
    [[nodiscard]] partition choose(const tenant_spec& spec, const std::vector<device_room>& rooms,
                                   const std::vector<quota_draw>& draws, const plain_list<bool>& lost) const {
        node_description whole{.devices = static_cast<std::uint32_t>(draws.size())};
        plain_list<free_device> left(draws.size());
        for (std::uint32_t i = 0; i < draws.size(); ++i) {
            whole.device_memory = std::max(whole.device_memory, all_->devices[i].overhead.available());
            left[i] = lost[i] ? free_device{.open = false} : free_device{left_on(i, spec), room_on(i, draws)};
        }
        auto chosen = (*choice_)(spec, rooms, {.whole = whole, .devices = left});
        for (const auto d : chosen.devices) {  // the embedder's choice is checked
            bool offered = false;
            for (const auto& r : rooms) offered = offered || r.device == d;
            int taken = 0;
            for (const auto other : chosen.devices) taken += other == d ? 1 : 0;
            if (!offered || room_on(d.index, draws) < chosen.per_device || taken != 1)
                refuse_admission({errc::no_room, chosen.per_device.count(), 0, 0}, spec.name,
                                 "the choice of devices took one without room, or twice");
        }
        if (chosen.devices.empty() || chosen.total() != spec.memory)
            refuse_admission({errc::not_whole, spec.memory.count(), chosen.total().count(), 0}, spec.name,
                             "the choice of devices split another amount of memory");
        return chosen;
    }
    // The bytes left, without those that sleeping tenants must get back. As many as possible of
    // these come out of lent burst.
    [[nodiscard]] bytes room_on(std::uint32_t device, const std::vector<quota_draw>& draws) const noexcept {
        const bytes left = draws[device].left(), asleep = all_->devices[device].asleep();
        return asleep == bytes{} ? left : std::min(left, left + draws[device].lent() - asleep);
    }
    [[nodiscard]] const slice_type* kept_in(std::size_t part) const noexcept {
        return part < kept_->size() ? (*kept_)[part] : nullptr;
    }
    [[nodiscard]] bool stays_in_slice(std::size_t part, const tenant_spec& spec) const noexcept {
        const auto* const in = kept_in(part);
        return in != nullptr && (spec.slice == any_slice || spec.slice == in->index);
    }
    // The permille of a device that a tenant could have.
    [[nodiscard]] std::uint32_t left_on(std::uint32_t device, const tenant_spec& spec) const noexcept {
        const auto* const slice = all_->devices[device].slice_for(spec.slice, level_of(spec));
        return slice != nullptr ? slice->left(level_of(spec)) : 0;
    }

    // The devices that the tenant may use: the devices that it named, or those with enough device
    // time left. For a tenant without memory a full device has room for a unit, too, so the order
    // of the devices is the same.
    std::vector<device_room> rooms_for(const tenant_spec& spec, const std::vector<quota_draw>& draws,
                                       const plain_list<bool>& lost) const {
        const auto asked = spec.compute.permille();
        const auto room = [&](std::uint32_t i) {
            const bytes more = spec.memory == bytes{} ? spec.unit : bytes{};
            return device_room{{i}, 0, room_on(i, draws) + more, all_->devices[i].overhead.available()};
        };
        const auto lacks_slice = [&](const device_room& r) {
            return all_->devices[r.device.index].slice_for(spec.slice, level_of(spec)) == nullptr;
        };
        std::vector<device_room> fit;
        if (spec.on.empty()) {
            std::vector<device_room> all;
            for (std::uint32_t i = 0; i < draws.size(); ++i)
                if (const auto one = room(i); !lost[i]) all.push_back(one);
            if (!all.empty() && all_where(all, lacks_slice))
                refuse_admission({errc::invalid_specification}, spec.name, "names a slice that no device has");
            for (const auto& r : all)
                if (asked <= left_on(r.device.index, spec)) fit.push_back(r);
            if (fit.size() < spec.devices && all.size() >= spec.devices) refuse_share(spec, all);
        } else {
            for (const auto d : spec.on) {
                if (d.index >= draws.size())
                    raise({errc::no_device, d.index, 0, draws.size(), reason::no_such_device}, spec.name, "admission");
                if (lost[d.index]) refuse_admission({errc::device_lost}, spec.name, "a device that it names is lost");
                const bool stays = kept_in(fit.size()) != nullptr;
                auto one = room(d.index);
                if (stays) one.free += spec.memory / spec.on.size();
                fit.push_back(std::as_const(one));
            }
            if (spec.on.size() != spec.devices && spec.devices != 1)
                refuse_admission({errc::invalid_specification}, spec.name,
                                 "names another number of devices than it asks for");
            if (any_where(fit, lacks_slice))
                refuse_admission({errc::invalid_specification}, spec.name, "names a slice that its device hasn't");
            for (std::size_t i = 0; i < fit.size(); ++i)
                if (!stays_in_slice(i, spec) && asked > left_on(fit[i].device.index, spec)) refuse_share(spec, fit);
        }
        return fit;
    }

    [[noreturn]] void refuse_share(const tenant_spec& spec, const std::vector<device_room>& rooms) const {
        // The largest share that the requested number of devices, or all devices, have left.
        const auto wanted = std::min<std::size_t>(std::max(spec.devices, 1U), rooms.size());
        std::uint32_t fits = 0;
        for (const auto& r : rooms) {
            const auto left = left_on(r.device.index, spec);
            std::size_t have = 0;
            for (const auto& other : rooms) have += left_on(other.device.index, spec) >= left ? 1U : 0U;
            if (have >= wanted) fits = std::max(fits, left);
        }
        raise({errc::share_exceeded, spec.compute.permille(), fits, 1000}, spec.name, "admission");
    }

    const Node* node_;
    shared_node<Node, Policy>* all_;
    const device_choice* choice_;
    const plain_list<slice_type*>* kept_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
