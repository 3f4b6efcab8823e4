// SPDX-License-Identifier: Apache-2.0
// The memory of a CUDA device, by cudaMalloc and cudaFree.
//
//   // memory_error when it isn't there
//   void* p = node.memory(gpushare::device_id{0}).allocate(64_MiB, 256);
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include <gpushare/backend/cuda/detail/block_registry.hpp>
#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// The bytes that cudaMalloc takes for a request, which CUDA doesn't report: multiples of `step`
/// or, from `paged_from` bytes on, of `page`. The defaults are those of an H200 with driver 580;
/// `./dev gpu` checks them on a device. If small blocks don't fill the page that they share, the
/// rest of the page counts as taken by others, so no byte is unaccounted for.
struct allocation_model {
    bytes step{512};      ///< small blocks take multiples of this
    bytes page{2 << 20};  ///< larger blocks take multiples of this
    /// The size from which blocks take whole pages: half a page is a small block.
    bytes paged_from{(1 << 20) + 1};

    /// The bytes that a request takes; bytes::max() if rounding would overflow.
    [[nodiscard]] constexpr bytes charged(std::uint64_t size) const noexcept {
        const std::uint64_t unit = bytes{size} < paged_from ? step.count() : page.count();
        const bytes whole = bytes{size} + bytes{unit - 1};
        return whole == bytes::max() ? whole : bytes{whole.count() / unit * unit};
    }
};

/// The memory of one device. Safe from any thread. Free all blocks before it is destroyed; the
/// destructor frees blocks that are still out. Keeps the device's state alive.
class device_memory {
public:
    /// The alignment of cudaMalloc. A larger alignment can be requested, and is charged.
    static constexpr std::size_t natural_alignment = 256;

    /// Called by the node.
    device_memory(std::shared_ptr<detail::device_state> device, const allocation_model& model)
        : device_(std::move(device)), model_(model), capacity_(figures().total) {}
    device_memory(const device_memory&) = delete;
    device_memory& operator=(const device_memory&) = delete;
    ~device_memory() {
        blocks_.for_each([this](const detail::block& b) { (void)give_back(b); });
    }

    /// `size` bytes at a multiple of `alignment` (a power of two); a unique address for 0 bytes.
    /// Contents undefined. Throws memory_error: errc::out_of_memory, size_overflow, bad_alignment,
    /// device_lost.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment) {
        failure why;
        void* const p = obtain(size, alignment, &why);
        if (p == nullptr) throw memory_error(why, {}, "allocating device memory");
        return p;
    }
    /// The same, for a size with a unit.
    [[nodiscard]] void* allocate(bytes size, std::size_t alignment) {
        return allocate(static_cast<std::size_t>(size.count()), alignment);
    }

    /// Whether the device is lost: then nothing is allocated any more. Acquire, like
    /// health::lost().
    [[nodiscard]] bool lost() const noexcept { return device_->health().lost(); }
    /// Returns null if `allocate` would throw; `why`, unless null, receives the reason.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, failure* why = nullptr) noexcept {
        return obtain(size, alignment, why);
    }
    /// The same, for a size with a unit.
    [[nodiscard]] void* try_allocate(bytes size, std::size_t alignment, failure* why = nullptr) noexcept {
        return try_allocate(static_cast<std::size_t>(size.count()), alignment, why);
    }

    /// errc::unknown_block or errc::wrong_size, changing nothing, if `p` isn't what an allocation
    /// of that size and alignment returned. Null is ignored. Waits for the device, as cudaFree
    /// does.
    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        if (p == nullptr) return errc::none;
        detail::block b;
        if (const errc why = blocks_.remove(p, size, alignment, b); why != errc::none) return why;
        // A block that CUDA refuses to free can't be freed again; the device's health keeps the
        // error.
        (void)give_back(b);
        blocks_.release(b);
        return errc::none;
    }
    /// The same, for a size with a unit.
    errc deallocate(void* p, bytes size, std::size_t alignment) noexcept {
        return deallocate(p, static_cast<std::size_t>(size.count()), alignment);
    }

    /// The bytes of the capacity that a request takes, by the allocation model; bytes::max() if no
    /// device can have it.
    [[nodiscard]] bytes charged(std::size_t size, std::size_t alignment) const noexcept {
        if (!std::has_single_bit(alignment)) return bytes::max();
        const auto asked = detail::padded(size, alignment, natural_alignment);
        return asked == 0 ? bytes::max() : model_.charged(asked);
    }
    /// The same, for a size with a unit.
    [[nodiscard]] bytes charged(bytes size, std::size_t alignment) const noexcept {
        return charged(static_cast<std::size_t>(size.count()), alignment);
    }

    /// The device's total memory, by cudaMemGetInfo.
    [[nodiscard]] bytes capacity() const noexcept { return capacity_; }
    /// Bytes that are neither free nor allocated here: contexts, modules, memory kept by pools,
    /// other processes. Chunks of virtual_memory and blocks of memory_pool count as allocated here.
    /// On a lost device, all memory that isn't allocated here. During concurrent allocations and
    /// frees the value may be too high for a moment, by their bytes; it is never too low.
    [[nodiscard]] bytes taken_by_others() const noexcept {
        const auto entered = blocks_.entered(), chunks = device_->chunks().entered();
        const bytes pools = device_->used_of_pools();
        cudaError_t code = cudaSuccess;
        const bytes free = figures(code).free;
        const bytes ours = blocks_.out_since(entered) + device_->chunks().out_since(chunks) +
                           std::min(pools, device_->used_of_pools());
        return capacity_ - (code == cudaSuccess ? free : bytes{}) - ours;
    }
    /// The reason why a request can never be granted: more than the device has, too large an
    /// alignment; errc::none if it can be.
    [[nodiscard]] failure refuses(std::size_t size, std::size_t alignment) const noexcept {
        if (charged(size, alignment) <= capacity_) return {};
        if (const failure why = never(size, alignment); why.code != errc::none) return why;
        return {
            .code = errc::out_of_memory, .asked = size, .limit = capacity_.count(), .because = reason::beyond_device};
    }
    /// The same, for a size with a unit.
    [[nodiscard]] failure refuses(bytes size, std::size_t alignment) const noexcept {
        return refuses(static_cast<std::size_t>(size.count()), alignment);
    }
    /// Not known.
    [[nodiscard]] static constexpr bytes largest_free() noexcept { return bytes::max(); }
    /// No owner: shared by all.
    [[nodiscard]] static constexpr std::string_view owner() noexcept { return {}; }
    /// Never closes.
    [[nodiscard]] static close_token closing() noexcept { return {}; }
    /// The bytes that its blocks take.
    [[nodiscard]] bytes used() const noexcept { return blocks_.charged(); }
    /// The allocation model given to the constructor.
    [[nodiscard]] const allocation_model& model() const noexcept { return model_; }

private:
    struct memory_figures {
        bytes free{}, total{};
    };

    [[nodiscard]] memory_figures figures(cudaError_t& code) const noexcept {
        std::size_t free = 0, total = 0;
        const device_guard on(device_->context(), code);
        if (code == cudaSuccess) code = cudaMemGetInfo(&free, &total);
        (void)device_->health().note(code, "cudaMemGetInfo");
        return {bytes{free}, bytes{total}};
    }
    [[nodiscard]] memory_figures figures() const {
        cudaError_t code = cudaSuccess;
        const auto now = figures(code);
        if (code != cudaSuccess) fail(code, "asking a device for its memory");
        return now;
    }

    [[nodiscard]] failure never(std::size_t size, std::size_t alignment) const noexcept {
        return gpushare::detail::never_had(size, alignment, capacity_, [&](std::size_t a) { return charged(size, a); });
    }
    void* obtain(std::size_t size, std::size_t alignment, failure* why) noexcept {
        detail::block b{.size = size, .alignment = alignment, .charge = charged(size, alignment)};
        if (b.charge > capacity_) {
            const failure no = never(size, alignment);
            if (no.code != errc::none && why != nullptr) *why = no;
            if (no.code != errc::none) return nullptr;
        }
        const auto asked = static_cast<std::size_t>(detail::padded(size, alignment, natural_alignment));
        cudaError_t code = cudaSuccess;
        {
            const device_guard on(device_->context(), code);
            const detail::relaxed_capture relaxed(device_->api());
            if (code == cudaSuccess) code = cudaMalloc(&b.base, asked);
        }
        const errc refused = device_->health().note(code, "cudaMalloc");
        if (refused == errc::none) {
            void* const p = detail::aligned(b.base, alignment);
            if (blocks_.add(p, b)) return p;
            (void)give_back(b);
        }
        if (why == nullptr) return nullptr;
        *why = {.code = refused == errc::device_lost ? refused : errc::out_of_memory,
                .asked = b.charge.count(),
                .left = figures(code).free.count(),
                .limit = capacity_.count()};
        return nullptr;
    }

    errc give_back(const detail::block& b) noexcept {
        cudaError_t code = cudaSuccess;
        {
            const device_guard on(device_->context(), code);
            const detail::relaxed_capture relaxed(device_->api());
            if (code == cudaSuccess) code = cudaFree(b.base);
        }
        return device_->health().keep(code, "cudaFree");
    }

    const std::shared_ptr<detail::device_state> device_;
    const allocation_model model_;
    const bytes capacity_;
    detail::block_registry blocks_;
};
static_assert(memory<device_memory>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
