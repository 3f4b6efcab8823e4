// SPDX-License-Identifier: Apache-2.0
// Pinned host memory, which devices reach directly. Copies from and to pinned memory don't block
// the host, and run at the speed of the link.
//
//   gpushare::cuda::pinned_memory staging{node};
//   // readable by the host, and by kernels at the same address
//   void* p = staging.allocate(1_MiB, 64);
#pragma once

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include <gpushare/backend/cuda/detail/block_registry.hpp>
#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// Pinned memory for all devices. Models memory_resource. Each allocation is slow (a system call
/// that pins pages), so use it for long-lived buffers. Safe from any thread. The destructor frees
/// blocks that are still allocated.
class pinned_memory {
public:
    /// The alignment of every block, in bytes. A larger alignment can be requested, and is charged.
    static constexpr std::size_t natural_alignment = 256;
    /// The host's page size, 4 KiB on most hosts and 64 KiB on some. A block takes whole pages,
    /// since pages are pinned.
    [[nodiscard]] static bytes page() noexcept {
        static const long size = ::sysconf(_SC_PAGESIZE);
        return bytes{size > 0 ? static_cast<std::uint64_t>(size) : std::uint64_t{4096}};
    }

    /// `d`: the device in whose context memory is pinned. Throws operation_error: errc::no_device.
    explicit pinned_memory(node& on, device_id d = {}) : device_(on.state(d)) {}
    pinned_memory(const pinned_memory&) = delete;
    pinned_memory& operator=(const pinned_memory&) = delete;
    ~pinned_memory() {
        blocks_.for_each([this](const detail::block& b) { give_back(b); });
    }

    /// Allocates pinned memory. Throws memory_error: errc::out_of_memory (of the host, or of memory
    /// that it lets pin), size_overflow, bad_alignment.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment) {
        failure why;
        void* const p = obtain(size, alignment, why);
        if (p == nullptr) throw memory_error(why, {}, "allocating pinned host memory");
        return p;
    }
    /// Returns null if `allocate` would throw; `why`, unless null, receives the reason.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, failure* why = nullptr) noexcept {
        failure unused;
        return obtain(size, alignment, why != nullptr ? *why : unused);
    }

    /// Frees a block. Work that uses the block must be done. errc::unknown_block or
    /// errc::wrong_size, and nothing has changed. Null is ignored.
    errc deallocate(void* p, byte_count size, std::size_t alignment) noexcept {
        if (p == nullptr) return errc::none;
        detail::block b;
        if (const errc why = blocks_.remove(p, size, alignment, b); why != errc::none) return why;
        give_back(b);
        blocks_.release(b);
        return errc::none;
    }

    /// The bytes of host memory that a request takes; bytes::max() if no host has that much.
    [[nodiscard]] static bytes charged(byte_count size, std::size_t alignment) noexcept {
        if (!std::has_single_bit(alignment)) return bytes::max();
        const auto asked = detail::padded(size, alignment, natural_alignment);
        return asked == 0 ? bytes::max() : page() * ((asked + page().count() - 1) / page().count());
    }
    /// The reason why a request can never be granted: too big for any host, a bad alignment;
    /// errc::none if it can be.
    [[nodiscard]] static failure refuses(byte_count size, std::size_t alignment) noexcept {
        return gpushare::detail::never_had(size, alignment, bytes::max(),
                                           [&](std::size_t a) { return charged(size, a); });
    }
    /// Not known.
    [[nodiscard]] static constexpr bytes largest_free() noexcept { return bytes::max(); }
    /// No owner: shared by all.
    [[nodiscard]] static constexpr std::string_view owner() noexcept { return {}; }
    /// Never closes.
    [[nodiscard]] static close_token closing() noexcept { return {}; }
    /// The charged bytes of the allocated blocks.
    [[nodiscard]] bytes used() const noexcept { return blocks_.charged(); }

private:
    void* obtain(std::size_t size, std::size_t alignment, failure& why) noexcept {
        detail::block b{.size = size, .alignment = alignment, .charge = charged(size, alignment)};
        if (const failure never = refuses(size, alignment); never.code != errc::none) {
            why = never;
            return nullptr;
        }
        const auto asked = static_cast<std::size_t>(detail::padded(size, alignment, natural_alignment));
        // Portable: pinned for every device, not only for the current one.
        const cudaError_t code =
            device_->call_beside_captures([&] { return cudaHostAlloc(&b.base, asked, cudaHostAllocPortable); });
        const errc refused = device_->health().note(code, "cudaHostAlloc");
        if (refused == errc::none) {
            void* const p = detail::aligned(b.base, alignment);
            if (blocks_.add(p, b)) return p;
            give_back(b);
        }
        why = {.code = refused == errc::device_lost ? refused : errc::out_of_memory,
               .asked = b.charge.count(),
               .because = reason::size};
        return nullptr;
    }

    void give_back(const detail::block& b) noexcept {
        const cudaError_t code = device_->call_beside_captures([&] { return cudaFreeHost(b.base); });
        (void)device_->health().keep(code, "cudaFreeHost");
    }

    const std::shared_ptr<detail::device_state> device_;
    detail::block_registry blocks_;
};
static_assert(upstream<pinned_memory>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
