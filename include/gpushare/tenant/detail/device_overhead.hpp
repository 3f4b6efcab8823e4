// SPDX-License-Identifier: Apache-2.0
// The overhead account of a device: the memory in use there that no tenant allocated, such as
// contexts, modules, libraries' workspaces and other processes' memory. It is measured and set
// aside, so that the sum of all quotas is really there.
//
//   // each admission measures
//   device_overhead account{node.memory(d)};     account.measure(node.memory(d));
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The overhead account of one device. Thread-safe.
class device_overhead {
public:
    template <memory Memory>
    explicit device_overhead(const Memory& m) noexcept : capacity_(m.capacity()) {
        measure(m);
    }

    /// Measures the memory in use now, and returns the bytes that are left to tenants. No reading
    /// is too low (see `memory`). Allocations that are made meanwhile may count as others' for a
    /// moment, so the least of some readings counts.
    template <memory Memory>
    bytes measure(const Memory& m) noexcept {
        bytes taken = m.taken_by_others();
        for (int again = 0; again < 2; ++again) taken = std::min(taken, m.taken_by_others());
        const std::lock_guard lock(mutex_);
        // Declare a workspace once it is taken: earlier, it would hide other overhead.
        const bytes aside = taken - declared_;
        available_.store((capacity_ - aside).count(), std::memory_order_relaxed);
        return capacity_ - aside;
    }

    /// The bytes that tenants may have, by the last measurement; declared workspaces are part of
    /// it.
    [[nodiscard]] bytes available() const noexcept { return bytes{available_.load(std::memory_order_relaxed)}; }
    /// The device's total bytes.
    [[nodiscard]] bytes capacity() const noexcept { return capacity_; }
    /// The rest of the device's bytes.
    [[nodiscard]] bytes set_aside() const noexcept { return capacity_ - available(); }

    /// `n` of the taken bytes are charged to a tenant from now on, so they aren't set aside as
    /// well.
    void declare(bytes n) noexcept {
        const std::lock_guard lock(mutex_);
        declared_ += n;
    }
    /// Undoes declare() for `n` bytes.
    void withdraw(bytes n) noexcept {
        const std::lock_guard lock(mutex_);
        declared_ -= n;
    }

private:
    const bytes capacity_;
    std::mutex mutex_;
    bytes declared_{};
    std::atomic<std::uint64_t> available_{0};  // a figure of one moment, alone
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
