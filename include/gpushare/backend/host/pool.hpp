// SPDX-License-Identifier: Apache-2.0
// Stream-ordered memory of a host device: blocks are freed in the order of a stream, and the pool
// keeps them for later requests, as CUDA's own pools do.
//
//   gpushare::host::memory_pool pool{node, gpushare::device_id{0}};
//   void* p = pool.allocate(stream, 1_MiB);     stream.launch(shape, kernel);     pool.deallocate(stream, p);
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gpushare/backend/host/memory.hpp>
#include <gpushare/backend/host/node.hpp>
#include <gpushare/backend/host/point.hpp>
#include <gpushare/backend/host/stream.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

/// A pool's bytes: `reserved` of the device, `used` of that in blocks that are out.
struct memory_pool_usage {
    bytes reserved{};  ///< taken from the device
    bytes used{};      ///< the bytes in blocks that are out
};

/// A pool of device memory. Neither copied nor moved. Safe from any thread. The node must outlive
/// it. The destructor frees blocks that are still out.
class memory_pool {
public:
    /// The alignment of blocks, as with cudaMallocAsync.
    static constexpr std::size_t natural_alignment = 256;

    /// An empty pool. Throws operation_error (no_device).
    memory_pool(node& on, device_id d) : memory_(&on.memory(d)) {}
    memory_pool(const memory_pool&) = delete;
    memory_pool& operator=(const memory_pool&) = delete;
    /// Waits until streams have reached pending frees.
    ~memory_pool();

    /// `size` bytes for work enqueued from now on: from the device, or a block of this size whose
    /// free is reached. Throws memory_error as the device's memory does.
    [[nodiscard]] void* allocate(stream& s, std::size_t size, std::size_t alignment = natural_alignment);
    /// The same, for a size with a unit.
    [[nodiscard]] void* allocate(stream& s, bytes size, std::size_t alignment = natural_alignment);
    /// Returns null if `allocate` would throw; `why`, unless null, receives the reason.
    [[nodiscard]] void* try_allocate(stream& s, bytes size, std::size_t alignment = natural_alignment,
                                     failure* why = nullptr) noexcept;
    /// The same, of a size in bytes.
    [[nodiscard]] void* try_allocate(stream& /*s*/, std::size_t size, std::size_t alignment = natural_alignment,
                                     failure* why = nullptr) noexcept;

    /// Frees the block once `s` has reached this point. unknown_block if the block isn't out. Null
    /// is ignored.
    errc deallocate(stream& s, void* p) noexcept;

    /// The bytes that a block takes; bytes::max() if no device can have it.
    [[nodiscard]] bytes charged(std::size_t size, std::size_t alignment) const noexcept;
    /// The same, for a size with a unit.
    [[nodiscard]] bytes charged(bytes size, std::size_t alignment) const noexcept;
    /// The pool's present bytes.
    [[nodiscard]] memory_pool_usage usage() const noexcept;
    /// Returns free blocks, whose frees are reached, to the device.
    void trim() noexcept;

private:
    struct block {
        std::size_t size = 0, alignment = 0;
        friend bool operator==(const block&, const block&) = default;
    };
    struct kept {
        void* at;
        block what;
        point freed;
    };

    device_memory* memory_;
    mutable std::mutex mutex_;
    std::unordered_map<void*, block> out_;
    std::vector<kept> kept_;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE memory_pool::~memory_pool() {
    for (auto& [p, b] : out_) (void)memory_->deallocate(p, b.size, b.alignment);
    for (auto& k : kept_) {
        (void)k.freed.wait(never);
        (void)memory_->deallocate(k.at, k.what.size, k.what.alignment);
    }
}

GPUSHARE_INLINE void* memory_pool::allocate(stream& s, std::size_t size, std::size_t alignment) {
    failure why;
    void* const p = try_allocate(s, size, alignment, &why);
    if (p == nullptr) raise(why, {}, "allocating from a memory pool");
    return p;
}

GPUSHARE_INLINE void* memory_pool::allocate(stream& s, bytes size, std::size_t alignment) {
    return allocate(s, static_cast<std::size_t>(size.count()), alignment);
}

GPUSHARE_INLINE void* memory_pool::try_allocate(stream& s, bytes size, std::size_t alignment, failure* why) noexcept {
    return try_allocate(s, static_cast<std::size_t>(size.count()), alignment, why);
}

GPUSHARE_INLINE void* memory_pool::try_allocate(stream& /*s*/, std::size_t size, std::size_t alignment,
                                                failure* why) noexcept try {
    const std::lock_guard lock(mutex_);
    const block wanted{size, alignment};
    const auto again =
        std::ranges::find_if(kept_, [&](const kept& k) { return k.what == wanted && k.freed.reached(); });
    if (again != kept_.end()) {
        void* const p = again->at;
        out_.emplace(p, wanted);
        kept_.erase(again);
        return p;
    }
    void* const p = memory_->try_allocate(size, alignment, why);
    if (p == nullptr) return nullptr;
    try {
        out_.emplace(p, wanted);
    } catch (...) {
        (void)memory_->deallocate(p, size, alignment);
        throw;
    }
    return p;
} catch (...) {
    if (why != nullptr) *why = gpushare::detail::no_host_memory;
    return nullptr;
}

GPUSHARE_INLINE errc memory_pool::deallocate(stream& s, void* p) noexcept {
    if (p == nullptr) return errc::none;
    const std::lock_guard lock(mutex_);
    const auto at = out_.find(p);
    if (at == out_.end()) return errc::unknown_block;
    try {
        kept_.push_back({p, at->second, s.record()});
    } catch (...) {
        return errc::out_of_memory;  // the host's memory; the block is still out
    }
    out_.erase(at);
    return errc::none;
}

GPUSHARE_INLINE bytes memory_pool::charged(std::size_t size, std::size_t alignment) const noexcept {
    return memory_->charged(size, alignment);
}

GPUSHARE_INLINE bytes memory_pool::charged(bytes size, std::size_t alignment) const noexcept {
    return charged(static_cast<std::size_t>(size.count()), alignment);
}

GPUSHARE_INLINE auto memory_pool::usage() const noexcept -> memory_pool_usage {
    const std::lock_guard lock(mutex_);
    memory_pool_usage u;
    for (const auto& [p, b] : out_) u.used += charged(b.size, b.alignment);
    u.reserved = u.used;
    for (const auto& k : kept_) u.reserved += charged(k.what.size, k.what.alignment);
    return u;
}

GPUSHARE_INLINE void memory_pool::trim() noexcept {
    const std::lock_guard lock(mutex_);
    std::erase_if(kept_, [&](const kept& k) {
        return k.freed.reached() && memory_->deallocate(k.at, k.what.size, k.what.alignment) == errc::none;
    });
}

#endif  // GPUSHARE_BODIES

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
