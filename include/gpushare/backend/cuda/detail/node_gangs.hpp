// SPDX-License-Identifier: Apache-2.0
// The order in which a node's gangs are enqueued, among those of all nodes of the process: two
// nodes may have the same devices, under other numbers.
//
//   node_gangs gangs{count_devices(), {2, 0}};       // CUDA's numbers of the node's devices
//   auto entered = gangs.enter(devices);      entered.make_room(d, part, channel, stream);
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/process_wide.hpp>
#include <gpushare/backend/cuda/point.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/gang_residents.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// The gang order of one node; see gang_residents.
class node_gangs {
    using shared_order = gpushare::detail::gang_residents<point>;

public:
    static constexpr std::uint64_t whole_device = shared_order::whole_device;
    [[nodiscard]] static constexpr std::uint64_t part_of(std::uint32_t blocks, std::uint32_t at_most) noexcept {
        return shared_order::part_of(blocks, at_most);
    }

    class [[nodiscard]] guard {
    public:
        template <copier S>
        requires std::same_as<typename S::point, point>
        void make_room(device_id d, std::uint64_t part, const void* channel, S& stream) {
            entered_.make_room(of_->there(d), part, channel, stream);
        }
        void add(device_id d, std::uint64_t part, const void* channel, point done) {
            entered_.add(of_->there(d), part, channel, std::move(done));
        }

    private:
        friend node_gangs;
        guard(const node_gangs& of, shared_order::guard entered) noexcept : of_(&of), entered_(std::move(entered)) {}

        const node_gangs* of_;
        shared_order::guard entered_;
    };

    /// `ordinals`: CUDA's numbers of the node's devices. `devices`: how many devices CUDA shows.
    node_gangs(std::uint32_t devices, const std::vector<int>& ordinals)
        : order_(process_wide<shared_order>(static_cast<int>(devices), devices)) {
        for (const int o : ordinals) there_.push_back(device_id{static_cast<std::uint32_t>(o)});
    }

    /// As device_order_lock::enter. Allocates nothing for up to 16 devices.
    [[nodiscard]] guard enter(std::span<const device_id> devices) {
        constexpr std::size_t few = 16;
        device_id some[few];
        if (devices.size() > few) {
            std::vector<device_id> all;
            for (const device_id d : devices) all.push_back(there(d));
            return guard(*this, order_->enter(all));
        }
        for (std::size_t i = 0; i < devices.size(); ++i) some[i] = there(devices[i]);
        return guard(*this, order_->enter(std::span<const device_id>(some, devices.size())));
    }

private:
    [[nodiscard]] device_id there(device_id d) const {
        if (d.index >= there_.size())
            raise({.code = errc::no_device, .asked = d.index, .limit = there_.size()}, {}, "entering a gang");
        return there_[d.index];
    }

    std::shared_ptr<shared_order> order_;
    std::vector<device_id> there_;
};
static_assert(gang_order<node_gangs>);

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
