// SPDX-License-Identifier: Apache-2.0
// How many blocks of a kernel an SM holds. CUDA is asked once for each kernel and number of
// threads, since the answer never changes. A part of device_state.
//
//   if (auto known = device->occupancy().find(entry, 256)) ...      device->occupancy().add(entry, 256, blocks);
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Safe from any thread.
class occupancy_cache {
public:
    /// The key is the kernel's address on the host. Several files may have addresses of their own
    /// for the same kernel; each of them then costs one query.
    [[nodiscard]] std::optional<std::uint32_t> find(const void* entry, std::uint32_t threads) const noexcept {
        const std::lock_guard lock(mutex_);
        const auto known = blocks_.find({entry, threads});
        return known == blocks_.end() ? std::nullopt : std::optional(known->second);
    }
    /// If memory runs out, CUDA is asked again the next time.
    void add(const void* entry, std::uint32_t threads, std::uint32_t blocks) noexcept {
        try {
            const std::lock_guard lock(mutex_);
            blocks_.insert_or_assign({entry, threads}, blocks);
        } catch (const std::bad_alloc&) {
        }
    }

private:
    mutable std::mutex mutex_;
    std::map<std::pair<const void*, std::uint32_t>, std::uint32_t> blocks_;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
