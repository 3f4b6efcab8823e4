// SPDX-License-Identifier: Apache-2.0
// A node's gang order: the lock under which work for several devices is enqueued. Without the lock,
// two gangs that are enqueued on the same devices in different orders could deadlock.
//
//   gpushare::detail::device_order_lock order{node.num_devices()};
//   { auto guard = order.enter(devices);    for (auto d : devices) streams[d.index].launch(shape, kernel); }
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// One lock per device, always taken in ascending order. Safe from any thread; a thread that holds
/// a guard must not enter again.
class device_order_lock {
public:
    /// The most devices of a node; a guard stores one bit each instead of allocating.
    static constexpr std::uint32_t max_devices = 1024;

    /// Holds the devices that were entered until it is destroyed. Must not outlive the lock.
    class [[nodiscard]] guard {
    public:
        /// Takes over what `other` holds.
        guard(guard&& other) noexcept : lock_(std::exchange(other.lock_, nullptr)), held_(other.held_) {}
        /// Swaps the locks that the two guards hold.
        guard& operator=(guard&& other) noexcept {
            std::swap(lock_, other.lock_);
            std::swap(held_, other.held_);
            return *this;
        }
        ~guard() {
            if (lock_ == nullptr) return;
            for (std::size_t i = lock_->devices_.size(); i-- > 0;)
                if (held_.test(i)) lock_->devices_[i].unlock();
        }

    private:
        friend device_order_lock;
        explicit guard(device_order_lock& lock) noexcept : lock_(&lock) {}

        device_order_lock* lock_;
        std::bitset<max_devices> held_;
    };

    /// Throws operation_error: errc::invalid_specification above `max_devices`.
    explicit device_order_lock(std::uint32_t devices) : devices_(checked(devices)) {}

    /// Waits until no other guard holds any of `devices` (order and duplicates don't matter).
    /// Throws operation_error: errc::no_device for one that the node doesn't have, and then holds
    /// nothing.
    guard enter(std::span<const device_id> devices) {
        std::bitset<max_devices> wanted;
        for (const device_id d : devices) {
            if (d.index >= devices_.size())
                raise({.code = errc::no_device, .asked = d.index, .limit = devices_.size()}, {}, "entering a gang");
            wanted.set(d.index);
        }
        guard entered{*this};
        for (std::size_t i = 0; i < devices_.size(); ++i) {
            if (!wanted.test(i)) continue;
            devices_[i].lock();
            entered.held_.set(i);
        }
        return entered;
    }

private:
    static std::uint32_t checked(std::uint32_t devices) {
        if (devices > max_devices)
            raise({errc::invalid_specification, devices, 0, max_devices, reason::count_limit}, {}, "ordering gangs");
        return devices;
    }

    std::vector<std::mutex> devices_;
};
static_assert(gang_order<device_order_lock>);

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
