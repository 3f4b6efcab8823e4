// SPDX-License-Identifier: Apache-2.0
// The gang order of a node, with a record of the gangs that are on its devices. Blocks of a gang
// wait for each other, so all of them must be resident at once, and devices don't start gangs in
// the order in which they were enqueued. So a gang that doesn't fit alongside earlier gangs waits
// for them on the devices.
//
//   gpushare::detail::gang_residents<stream::point> gangs{node.num_devices()};
//   auto entered = gangs.enter(devices);
//   // for each device d and its stream s:
//   // what 2 blocks take of d
//   const auto part = gangs.part_of(2, s.max_cooperative_blocks(kernel, 256));
//   entered.make_room(d, part, channel, s);
//   s.launch_cooperative(shape, kernel);    entered.add(d, part, channel, s.record());
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/device_order_lock.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Safe from any thread, as device_order_lock. A gang waits only for earlier gangs, and all its
/// devices are locked when it enters, so no cycle can form. The gangs that may run side by side on
/// a device always fit there, since the last of them waits for others until it fits.
///
/// The cost of a gang doesn't depend on how many gangs are in flight: a wait, a query and a point
/// for each of its devices. If the gangs of several channels don't fit side by side, each other
/// channel adds three operations.
template <timeline_point Point>
class gang_residents {
    // Gangs of a channel run one after the other, so one entry for the last of them suffices.
    struct resident {
        Point done;
        std::uint64_t part;
        const void* channel;
        std::uint64_t gang;
        // The previous gang of the channel, which may still run, and its part of the device until
        // it ends.
        Point before_done{};
        std::uint64_t before_part = 0;

        [[nodiscard]] std::uint64_t takes() const noexcept { return part > before_part ? part : before_part; }
        void look_at_before() {
            if (before_part != 0 && before_done.reached()) before_part = 0;
        }
    };

public:
    /// The unit in which parts of a device are counted: the whole device is this many.
    static constexpr std::uint64_t whole_device = std::uint64_t{1} << 32;

    /// The part of a device that `blocks` take if `at_most` blocks of their kind fit. Several kinds
    /// fit together if the sum of their parts does. The sum is exact if each block takes a whole
    /// SM. If blocks share SMs, the sum is exact only if the device spreads blocks evenly.
    [[nodiscard]] static constexpr std::uint64_t part_of(std::uint32_t blocks, std::uint32_t at_most) noexcept {
        return blocks >= at_most ? (blocks == at_most ? whole_device : 2 * whole_device)
                                 : whole_device / at_most * blocks;
    }

    /// Holds the devices that were entered until it is destroyed.
    class [[nodiscard]] guard {
    public:
        /// Lets `stream`, of device `d`, wait for the earlier gangs alongside which this one
        /// doesn't fit, and for those of the same `channel`; `part` is this gang's part of the
        /// device. Throws what the stream's wait throws, and std::bad_alloc.
        template <copier S>
        requires std::same_as<typename S::point, Point>
        void make_room(device_id d, std::uint64_t part, const void* channel, S& stream) {
            auto& there = of_->residents_[d.index];
            there.reserve(there.size() + ++rooms_);  // for add(), which comes after a launch
            std::uint64_t sum = part;
            for (const resident& r : there) {
                if (r.channel != channel)
                    sum += r.takes();
                else if (r.gang != gang_)
                    stream.wait(r.done);
            }
            if (sum <= whole_device) return;
            std::erase_if(there, [&](const resident& r) { return r.channel != channel && r.done.reached(); });
            sum = part;
            for (resident& r : there) {
                if (r.channel == channel) continue;
                r.look_at_before();
                sum += r.takes();
            }
            for (const resident& r : there) {  // the oldest first
                if (sum <= whole_device) return;
                if (r.channel == channel) continue;
                sum -= r.takes();
                stream.wait(r.done);
            }
        }
        /// The work just launched on `d` is on the device until `done`. Needs no memory after a
        /// make_room() of its own.
        void add(device_id d, std::uint64_t part, const void* channel, Point done) {
            auto& there = of_->residents_[d.index];
            resident r{.done = std::move(done), .part = part, .channel = channel, .gang = gang_};
            const auto before = std::find_if(there.begin(), there.end(), [&](const resident& other) {
                return other.channel == channel && other.gang != gang_;
            });
            if (before != there.end()) {
                before->look_at_before();
                r.before_part = before->takes();
                r.before_done = std::move(before->done);
                there.erase(before);
            }
            there.push_back(std::move(r));
        }

    private:
        friend gang_residents;
        guard(gang_residents& of, device_order_lock::guard lock) noexcept
            // Only to tell gangs apart: relaxed.
            : of_(&of), lock_(std::move(lock)), gang_(of.gangs_.fetch_add(1, std::memory_order_relaxed)) {}

        gang_residents* of_;
        device_order_lock::guard lock_;
        std::uint64_t gang_;
        std::size_t rooms_ = 0;  // how often make_room() was called
    };

    /// See device_order_lock.
    explicit gang_residents(std::uint32_t devices) : order_(devices), residents_(devices) {}
    /// See device_order_lock::enter.
    [[nodiscard]] guard enter(std::span<const device_id> devices) { return guard(*this, order_.enter(devices)); }

private:
    device_order_lock order_;
    // of each device, in the order in which they came; under its lock
    std::vector<std::vector<resident>> residents_;
    std::atomic<std::uint64_t> gangs_{0};
};
static_assert(gang_order<gang_residents<immediate_point>>);

/// A gang order that makes room for launches on streams of type S.
template <class G, class S>
concept room_making_order = gang_order<G> && copier<S> &&
    requires(G& g, std::span<const device_id> devices, device_id d, std::uint64_t part, const void* channel, S& s) {
    g.enter(devices).make_room(d, part, channel, s);
    g.enter(devices).add(d, part, channel, s.record());
    { G::part_of(std::uint32_t{}, std::uint32_t{}) } -> std::same_as<std::uint64_t>;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
