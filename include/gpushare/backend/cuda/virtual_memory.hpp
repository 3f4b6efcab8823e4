// SPDX-License-Identifier: Apache-2.0
// Virtual memory of a CUDA device: address ranges and physical chunks are separate, so that a chunk
// can move from one owner's addresses to another's without a copy.
//
//   gpushare::cuda::virtual_memory memory{node, gpushare::device_id{0}};
//   auto range = *memory.reserve(64 << 20);    auto chunk = *memory.create();
//   memory.map(range.data(), chunk);           // readable and writable until unmapped
//   // behind the last kernel that uses it: unmap() waits for that first
//   auto last_use = stream.record();
//   memory.unmap(range.data(), memory.granularity().count(), {&last_use, 1}, deadline);
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
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

/// Options of virtual memory.
struct virtual_memory_options {
    /// Chunk size, a power of two; the default is the device's smallest, so far 2 MiB.
    bytes chunk{};
    /// Whether the memory is open to the node's other devices, if they reach this one; see
    /// node_options::peer_access.
    bool peers = true;
    /// Devices to which the memory is always open, whatever `peers` says. A device that can't reach
    /// the memory is refused.
    std::vector<device_id> open_to{};
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

/// The virtual memory of one device. Models gpushare::virtual_memory; see there. Safe from any
/// thread; ranges and chunks may outlive it.
class virtual_memory {
public:
    /// CUDA doesn't promise to clear memory that another owner in this process had.
    static constexpr bool fresh_is_zero = false;

    /// Kernels and copies of the device, and of the devices it is open to, can use mapped memory.
    /// (Driver API, cuMemSetAccess: cuCtxEnablePeerAccess doesn't cover it.) Each such device makes
    /// mapping a little slower. Throws operation_error: errc::no_device, not_supported, not_whole
    /// (the chunk).
    virtual_memory(const node& on, device_id d, const virtual_memory_options& options = {})
        : device_(on.state(d)), kind_(properties(*device_)), chunk_size_(whole_chunk(options.chunk)) {
        grant_to(d, on);
        if (options.peers)
            for (const device_id other : on.peers_of(d)) grant_to(other, on);
        for (const device_id other : options.open_to) {
            if (is_open_to(other, on)) continue;
            int reach = 0;
            check(cudaDeviceCanAccessPeer(&reach, on.state(other)->ordinal(), device_->ordinal()),
                  "opening virtual memory to another device");
            if (reach == 0) fail(cudaErrorPeerAccessUnsupported, "opening virtual memory to another device");
            grant_to(other, on);
        }
    }

    /// A reserved range of addresses; null after a move. Nothing may be mapped in it when it is
    /// destroyed.
    class range {
    public:
        /// `other` is empty afterwards.
        range(range&& other) noexcept
            : device_(std::move(other.device_)), at_(std::exchange(other.at_, 0)), size_(other.size_) {}
        /// The old value's range is released.
        range& operator=(range other) noexcept {
            device_.swap(other.device_);
            std::swap(at_, other.at_);
            std::swap(size_, other.size_);
            return *this;
        }
        ~range() {
            if (at_ == 0) return;
            // Not checked: the call below reports a failure, too.
            cudaError_t entered = cudaSuccess;
            const device_guard on(device_->context(), entered);
            const auto code = device_->api().mem_address_free(at_, size_);
            (void)device_->health().keep(code, "cuMemAddressFree");
        }
        /// The first address.
        [[nodiscard]] void* data() const noexcept { return reinterpret_cast<void*>(at_); }
        /// The size in bytes.
        [[nodiscard]] std::size_t size() const noexcept { return size_; }

    private:
        friend virtual_memory;
        range(std::shared_ptr<detail::device_state> device, CUdeviceptr at, std::size_t size) noexcept
            : device_(std::move(device)), at_(at), size_(size) {}

        std::shared_ptr<detail::device_state> device_;
        CUdeviceptr at_;
        std::size_t size_;
    };

    /// A chunk: granularity() bytes of the device, which device_memory counts as allocated here. A
    /// mapped chunk keeps its memory until it is unmapped.
    class chunk {
    public:
        /// `other` is empty afterwards.
        chunk(chunk&& other) noexcept = default;
        /// The old value's chunk is released.
        chunk& operator=(chunk other) noexcept {
            std::swap(native_, other.native_);
            std::swap(size_, other.size_);
            return *this;
        }
        ~chunk() { leave(); }
        /// The native handle, which this object still owns.
        [[nodiscard]] CUmemGenericAllocationHandle native_handle() const noexcept { return native_.get(); }
        /// Releases the handle: from now on the caller releases the memory.
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

    /// The size of a chunk.
    [[nodiscard]] bytes granularity() const noexcept { return bytes{chunk_size_}; }

    /// Reserves a range. not_whole: `size` is zero or no multiple of the granularity;
    /// size_overflow: no process has as many addresses; out_of_memory, device_lost.
    [[nodiscard]] result<range> reserve(std::size_t size) noexcept {
        if (size == 0 || size % chunk_size_ != 0)
            return failure{
                .code = errc::not_whole, .asked = size, .limit = chunk_size_, .because = reason::whole_sizes};
        if (size > std::numeric_limits<std::size_t>::max() / 4)
            return failure{.code = errc::size_overflow, .asked = size, .because = reason::no_addresses};
        CUdeviceptr at = 0;
        const errc why =
            ask("cuMemAddressReserve", [&] { return api().mem_address_reserve(&at, size, chunk_size_, 0, 0); });
        if (why != errc::none) return failure{.code = why, .asked = size, .because = reason::size};
        return range{device_, at, size};
    }

    /// Makes a chunk. Errors: out_of_memory, device_lost.
    [[nodiscard]] result<chunk> create() noexcept {
        CUmemGenericAllocationHandle made = 0;
        const errc why = ask("cuMemCreate", [&] { return api().mem_create(&made, chunk_size_, &kind_, 0); });
        if (why != errc::none) return failure{.code = why, .asked = chunk_size_, .because = reason::size};
        return chunk{device_, made, bytes{chunk_size_}};
    }

    /// Maps the chunk, readable and writable by all the devices except lost ones. After an error
    /// nothing has changed. backend_failed if the place is mapped already, or `at` is in no range;
    /// device_lost.
    errc map(void* at, const chunk& c) noexcept {
        const auto address = reinterpret_cast<CUdeviceptr>(at);
        errc why = ask("cuMemMap", [&] { return api().mem_map(address, chunk_size_, 0, c.native_.get(), 0); });
        if (why != errc::none) return why;
        why = open(address, access_);
        // If one of the other devices is lost, the remaining ones get access.
        if (why == errc::device_lost && !device_->health().lost()) {
            why = open(address, std::span(access_).first(1));
            for (const auto& other : std::span(access_).subspan(1))
                if (why == errc::none) (void)open(address, std::span(&other, 1));
        }
        if (why != errc::none) (void)unmap(at, chunk_size_);
        return why;
    }

    /// Unmaps one or several whole adjacent chunks. Not ordered with any stream: no work may use
    /// the chunks any more. On a lost device the mapping is gone, and the result is errc::none: the
    /// device's health reports the loss.
    errc unmap(void* at, std::size_t size) noexcept {
        const auto once = [&] {
            return ask("cuMemUnmap", [&] { return api().mem_unmap(reinterpret_cast<CUdeviceptr>(at), size); });
        };
        const errc why = once();
        if (why != errc::device_lost) return why;
        // The error may be another device's, and the driver may have stopped there. If it hadn't,
        // the second call finds nothing mapped, which does no harm.
        if (!device_->health().lost()) (void)once();
        return errc::none;
    }
    /// The same, once all of `users` are reached: the last points of all streams that used the
    /// chunks. If one of them isn't reached by the deadline, returns errc::deadline_exceeded, and
    /// nothing has changed.
    errc unmap(void* at, std::size_t size, std::span<const point> users, instant deadline) noexcept {
        for (const point& p : users)
            if (!p.wait(deadline)) return errc::deadline_exceeded;
        return unmap(at, size);
    }

private:
    [[nodiscard]] const driver& api() const noexcept { return device_->api(); }

    // Makes the call with this device current, since a call in another device's context may return
    // that device's errors.
    template <class Call>
    errc ask(const char* name, Call call) noexcept {
        const cudaError_t code = device_->call_beside_captures([&] { return to_runtime(call()); });
        if (code == cudaSuccess) return errc::none;
        // The call may report the loss of another device to which the memory is open.
        if (is_sticky(code) && device_->health().answers()) return errc::device_lost;
        return device_->health().note(static_cast<CUresult>(code), name);
    }
    errc open(CUdeviceptr at, std::span<const CUmemAccessDesc> to) noexcept {
        return ask("cuMemSetAccess", [&] { return api().mem_set_access(at, chunk_size_, to.data(), to.size()); });
    }

    static CUmemAllocationProp properties(const detail::device_state& device) noexcept {
        CUmemAllocationProp p{};
        p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        // Set as members, since the layout differs from CUDA 13.5 on.
        p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        p.location.id = device.ordinal();
        // Lets network cards read and write the memory, if the driver supports it: an arena can be
        // registered for RDMA. (Driver API,
        // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.)
        int rdma = 0;
        if (device.api().device_get_attribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                              device.context().device()) == CUDA_SUCCESS)
            p.allocFlags.gpuDirectRDMACapable = rdma != 0 ? 1 : 0;
        return p;
    }

    [[nodiscard]] std::size_t whole_chunk(bytes wanted) const {
        if (!device_->api().has_virtual_memory()) fail(cudaErrorNotSupported, "using a device's virtual memory");
        std::size_t smallest = 0;
        check(device_->api().mem_get_granularity(&smallest, &kind_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
              "querying the granularity of a device's virtual memory");
        if (wanted == bytes{}) return smallest;
        // Ranges begin at a multiple of a chunk, and the driver aligns them to powers of two only.
        if (smallest == 0 || wanted.count() % smallest != 0 || !std::has_single_bit(wanted.count()))
            raise({.code = errc::not_whole, .asked = wanted.count(), .limit = smallest, .because = reason::whole_sizes},
                  {}, "the chunks of virtual memory, powers of two in bytes");
        return static_cast<std::size_t>(wanted.count());
    }

    [[nodiscard]] bool is_open_to(device_id d, const node& on) const {
        const int ordinal = on.state(d)->ordinal();
        return std::any_of(access_.begin(), access_.end(), [&](const auto& a) { return a.location.id == ordinal; });
    }
    void grant_to(device_id d, const node& on) {
        CUmemAccessDesc desc{};
        desc.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        desc.location.id = on.state(d)->ordinal();
        desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        access_.push_back(desc);
    }

    const std::shared_ptr<detail::device_state> device_;
    const CUmemAllocationProp kind_;
    const std::size_t chunk_size_;
    std::vector<CUmemAccessDesc> access_;  // the entry of its own device comes first
};
static_assert(gpushare::virtual_memory<virtual_memory>);

/// A mapped chunk. The destructor unmaps it; by then no work may use it any more. Refers to the
/// memory; chunk and range have other owners.
class mapping {
public:
    /// Maps the chunk. Throws the error that map() returns, as operation_error or memory_error.
    mapping(virtual_memory& in, void* at, const virtual_memory::chunk& c)
        : memory_(&in), at_(at), size_(static_cast<std::size_t>(in.granularity().count())) {
        if (const errc why = in.map(at, c); why != errc::none)
            raise({.code = why, .asked = size_, .because = reason::size}, {}, "mapping a chunk");
    }
    /// `other` is empty afterwards.
    mapping(mapping&& other) noexcept
        : memory_(other.memory_), at_(std::exchange(other.at_, nullptr)), size_(other.size_) {}
    /// The old value's mapping is unmapped.
    mapping& operator=(mapping other) noexcept {
        std::swap(memory_, other.memory_);
        std::swap(at_, other.at_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~mapping() {
        if (at_ != nullptr) (void)memory_->unmap(at_, size_);
    }

    /// The address of the mapping; null once it is unmapped.
    [[nodiscard]] void* data() const noexcept { return at_; }
    /// Unmaps once all of `users` are reached. After an error, such as errc::deadline_exceeded, the
    /// chunk stays mapped.
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
