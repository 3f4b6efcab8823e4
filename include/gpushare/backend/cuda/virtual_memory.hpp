// SPDX-License-Identifier: Apache-2.0
// Virtual memory of a CUDA device: address ranges and physical chunks are separate, so that a chunk can move from one
// owner's addresses to another's without a copy.
//
//   cuda::virtual_memory memory{node, device_id{0}};
//   auto range = *memory.reserve(64 << 20);    auto chunk = *memory.create();
//   memory.map(range.data(), chunk);           // readable and writable until unmapped
//   auto last_use = stream.record();           // behind the last kernel that uses it: unmap() waits for that first
//   memory.unmap(range.data(), memory.granularity().count(), {&last_use, 1}, deadline);
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/owned.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/driver.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/point.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// How virtual memory is used.
struct virtual_memory_options {
    bytes chunk{};                     ///< a power of two, from what the device can do on: the default, 2 MiB so far
    std::vector<device_id> open_to{};  ///< other devices whose kernels may use what is mapped
};

namespace detail {
struct memory_chunk_kind {
    using native_type = CUmemGenericAllocationHandle;
    static constexpr const char* destroys = "cuMemRelease";
    static cudaError_t destroy(const driver& api, native_type chunk) noexcept {
        return to_runtime(api.mem_release(chunk));
    }
};
}  // namespace detail

/// Models gpushare::virtual_memory; see there. Safe from any thread; ranges and chunks may outlive it.
class virtual_memory {
public:
    /// CUDA doesn't promise to clear what another owner of this process had.
    static constexpr bool fresh_is_zero = false;

    /// Throws operation_error: errc::no_device, not_supported, not_whole (the chunk).
    virtual_memory(const node& on, device_id d, const virtual_memory_options& options = {})
        : device_(on.state(d)), chunk_size_(whole_chunk(options.chunk)) {
        grant_to(d, on);
        for (const device_id other : options.open_to) {
            if (other == d) continue;
            int reach = 0;
            check(cudaDeviceCanAccessPeer(&reach, on.state(other)->ordinal(), device_->ordinal()),
                  "opening virtual memory to another device");
            if (reach == 0) fail(cudaErrorPeerAccessUnsupported, "opening virtual memory to another device");
            grant_to(other, on);
        }
    }

    /// Addresses that nothing else gets; null once it was moved from. Nothing may be mapped when it goes.
    class range {
    public:
        /// Leaves nothing behind.
        range(range&& other) noexcept
            : device_(std::move(other.device_)), at_(std::exchange(other.at_, 0)), size_(other.size_) {}
        /// What it had goes.
        range& operator=(range other) noexcept {
            device_.swap(other.device_);
            std::swap(at_, other.at_);
            std::swap(size_, other.size_);
            return *this;
        }
        ~range() {
            if (at_ == 0) return;
            const auto code = device_->api().mem_address_free(at_, size_);
            (void)device_->health().keep(code, "cuMemAddressFree");
        }
        /// The first address.
        [[nodiscard]] void* data() const noexcept { return reinterpret_cast<void*>(at_); }
        /// Bytes.
        [[nodiscard]] std::size_t size() const noexcept { return size_; }

    private:
        friend virtual_memory;
        range(std::shared_ptr<detail::device_state> device, CUdeviceptr at, std::size_t size) noexcept
            : device_(std::move(device)), at_(at), size_(size) {}

        std::shared_ptr<detail::device_state> device_;
        CUdeviceptr at_;
        std::size_t size_;
    };

    /// granularity() bytes of the device, which device_memory counts as allocated here. What is still mapped keeps its memory
    /// until it is unmapped.
    class chunk {
    public:
        /// Leaves nothing behind.
        chunk(chunk&& other) noexcept = default;
        /// What it had goes.
        chunk& operator=(chunk other) noexcept {
            std::swap(native_, other.native_);
            std::swap(size_, other.size_);
            return *this;
        }
        ~chunk() { leave(); }
        /// Still owned by this.
        [[nodiscard]] CUmemGenericAllocationHandle native_handle() const noexcept { return native_.get(); }
        /// The caller's to release from now on.
        [[nodiscard]] CUmemGenericAllocationHandle release() noexcept {
            leave();
            return native_.release();
        }

    private:
        friend virtual_memory;
        chunk(std::shared_ptr<detail::device_state> device, CUmemGenericAllocationHandle native, bytes size) noexcept
            : native_(std::move(device), native), size_(size) {
            native_.device()->chunks().enter(size_);
        }
        void leave() noexcept {
            if (native_.get() != CUmemGenericAllocationHandle{}) native_.device()->chunks().leave(size_);
        }

        detail::owned<detail::memory_chunk_kind> native_;
        bytes size_;
    };

    /// Of a chunk.
    [[nodiscard]] bytes granularity() const noexcept { return bytes{chunk_size_}; }

    /// not_whole: `size` is zero or no multiple of the granularity; size_overflow: no process has as many addresses;
    /// out_of_memory, device_lost.
    [[nodiscard]] result<range> reserve(std::size_t size) noexcept {
        if (size == 0 || size % chunk_size_ != 0)
            return failure{
                .code = errc::not_whole, .asked = size, .limit = chunk_size_, .because = reason::whole_sizes};
        if (size > std::numeric_limits<std::size_t>::max() / 4)
            return failure{.code = errc::size_overflow, .asked = size, .because = reason::no_addresses};
        CUdeviceptr at = 0;
        if (const errc why = answer(api().mem_address_reserve(&at, size, chunk_size_, 0, 0), "cuMemAddressReserve");
            why != errc::none)
            return failure{.code = why, .asked = size, .because = reason::size};
        return range{device_, at, size};
    }

    /// out_of_memory, device_lost.
    [[nodiscard]] result<chunk> create() noexcept {
        const CUmemAllocationProp kind = properties(*device_);
        CUmemGenericAllocationHandle made = 0;
        if (const errc why = answer(api().mem_create(&made, chunk_size_, &kind, 0), "cuMemCreate"); why != errc::none)
            return failure{.code = why, .asked = chunk_size_, .because = reason::size};
        return chunk{device_, made, bytes{chunk_size_}};
    }

    /// Either readable and writable by all the devices, or nothing has changed. backend_failed if something is mapped
    /// there already, or `at` is in no range; device_lost.
    errc map(void* at, const chunk& c) noexcept {
        const auto address = reinterpret_cast<CUdeviceptr>(at);
        const detail::relaxed_capture relaxed(api());
        if (const errc why = answer(api().mem_map(address, chunk_size_, 0, c.native_.get(), 0), "cuMemMap");
            why != errc::none)
            return why;
        const errc why =
            answer(api().mem_set_access(address, chunk_size_, access_.data(), access_.size()), "cuMemSetAccess");
        if (why != errc::none) (void)device_->health().keep(api().mem_unmap(address, chunk_size_), "cuMemUnmap");
        return why;
    }

    /// For one or several whole chunks side by side. Not ordered with any stream: no work may use them any more.
    errc unmap(void* at, std::size_t size) noexcept {
        const detail::relaxed_capture relaxed(api());
        return answer(api().mem_unmap(reinterpret_cast<CUdeviceptr>(at), size), "cuMemUnmap");
    }
    /// The same, once all of `users` are reached: the last points of every stream that used them.
    /// errc::deadline_exceeded, and nothing has changed, if one of them isn't by then.
    errc unmap(void* at, std::size_t size, std::span<const point> users, instant deadline) noexcept {
        for (const point& p : users)
            if (!p.wait(deadline)) return errc::deadline_exceeded;
        return unmap(at, size);
    }

private:
    [[nodiscard]] const driver& api() const noexcept { return device_->api(); }

    errc answer(CUresult code, const char* call) noexcept {
        return code == CUDA_SUCCESS ? errc::none : device_->health().note(code, call);
    }

    static CUmemAllocationProp properties(const detail::device_state& device) noexcept {
        CUmemAllocationProp p{};
        p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;  // its layout is another one from CUDA 13.5 on
        p.location.id = device.ordinal();
        return p;
    }

    [[nodiscard]] std::size_t whole_chunk(bytes wanted) const {
        if (!device_->api().has_virtual_memory()) fail(cudaErrorNotSupported, "using a device's virtual memory");
        const CUmemAllocationProp kind = properties(*device_);
        std::size_t smallest = 0;
        check(device_->api().mem_get_granularity(&smallest, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
              "asking a device for the granularity of its virtual memory");
        if (wanted == bytes{}) return smallest;
        // Ranges begin at a multiple of a chunk, and the driver aligns them to powers of two only.
        if (smallest == 0 || wanted.count() % smallest != 0 || !std::has_single_bit(wanted.count()))
            raise({.code = errc::not_whole, .asked = wanted.count(), .limit = smallest, .because = reason::whole_sizes},
                  {}, "the chunks of virtual memory, powers of two in bytes");
        return static_cast<std::size_t>(wanted.count());
    }

    void grant_to(device_id d, const node& on) {
        CUmemAccessDesc desc{};
        desc.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        desc.location.id = on.state(d)->ordinal();
        desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        access_.push_back(desc);
    }

    const std::shared_ptr<detail::device_state> device_;
    const std::size_t chunk_size_;
    std::vector<CUmemAccessDesc> access_;
};
static_assert(gpushare::virtual_memory<virtual_memory>);

/// A chunk in its place: unmapped at the latest when it is destroyed, by when no work may use it any more. Refers to
/// the memory; the chunk and the range are somebody else's.
class mapping {
public:
    /// Throws what map() returns: operation_error, memory_error.
    mapping(virtual_memory& in, void* at, const virtual_memory::chunk& c)
        : memory_(&in), at_(at), size_(static_cast<std::size_t>(in.granularity().count())) {
        if (const errc why = in.map(at, c); why != errc::none)
            raise({.code = why, .asked = size_, .because = reason::size}, {}, "mapping a chunk");
    }
    /// Leaves nothing behind.
    mapping(mapping&& other) noexcept
        : memory_(other.memory_), at_(std::exchange(other.at_, nullptr)), size_(other.size_) {}
    /// What it had is unmapped.
    mapping& operator=(mapping other) noexcept {
        std::swap(memory_, other.memory_);
        std::swap(at_, other.at_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~mapping() {
        if (at_ != nullptr) (void)memory_->unmap(at_, size_);
    }

    /// Where it is; null once it is unmapped.
    [[nodiscard]] void* data() const noexcept { return at_; }
    /// Unmaps once all of `users` are reached. On an error it stays mapped: errc::deadline_exceeded, say.
    errc close(std::span<const point> users, instant deadline) noexcept {
        if (at_ == nullptr) return errc::none;
        const errc why = memory_->unmap(at_, size_, users, deadline);
        if (why == errc::none) at_ = nullptr;
        return why;
    }

private:
    virtual_memory* memory_;
    void* at_;
    std::size_t size_;
};

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
