// SPDX-License-Identifier: Apache-2.0
// A tenant's memory as the allocator of a TensorRT runtime, builder or execution context.
//
//   using chat_memory = gpushare::tenant<gpushare::cuda::node>::memory_type;
//   using allocator = gpushare::tensorrt_allocator<nvinfer1::IGpuAsyncAllocator, chat_memory, gpushare::cuda::node>;
//   allocator mine{tenant.memory(), node, gpushare::device_id{0}};
//   runtime->setGpuAllocator(&mine);                        // before the engine is deserialised
//
// The interface is a template argument, so this header needs no header of TensorRT and fits each
// version: IGpuAsyncAllocator of TensorRT 10 and later, IGpuAllocator of 8.6 and later.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/detail/native_stream.hpp>
#include <gpushare/interop/stream_resource.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {
template <class>
struct stream_named_by;
template <class C, class Stream>
struct stream_named_by<bool (C::*)(void*, Stream) noexcept> {
    using type = Stream;
};
}  // namespace detail

/// Refers to the memory and its node, which must outlive the allocator. TensorRT demands that the
/// allocator outlives every object that TensorRT made with it. Any thread may use it if the memory
/// allows that. Doesn't throw: a refusal is a null pointer, which TensorRT reports. The tenant's
/// memory counts refusals and their reasons.
///
/// A block is credited once the stream named by its free has done its work. The calls without a
/// stream, which TensorRT 10 deprecated, mean the default stream of the device, as in TensorRT's
/// own IGpuAsyncAllocator.
template <class Interface, class Memory, node Node>
requires stream_ordered_memory<Memory, typename Node::stream::point>
class tensorrt_allocator : public Interface {
public:
    /// The interface's type for streams.
    using stream_handle = typename detail::stream_named_by<decltype(&Interface::deallocateAsync)>::type;

    /// `d` is the memory's device. Calls without a stream mean its default stream.
    tensorrt_allocator(Memory& memory_of, Node& on, device_id d) : blocks_(memory_of), node_(&on), device_(d) {}
    tensorrt_allocator(const tensorrt_allocator&) = delete;
    tensorrt_allocator& operator=(const tensorrt_allocator&) = delete;

    // These functions override the interface's. They aren't marked `override`, because some
    // versions of the interface don't have all of them.

    /// Allocates bytes; an alignment of 0 means any. Returns null for 0 bytes, and if there is no
    /// memory.
    void* allocateAsync(std::uint64_t size, std::uint64_t alignment, std::uint32_t /*flags*/,
                        stream_handle /*stream*/) noexcept {
        if (size == 0) return nullptr;
        return blocks_.try_allocate(size, alignment == 0 ? any_alignment : alignment);
    }
    /// See allocateAsync.
    void* allocate(std::uint64_t size, std::uint64_t alignment, std::uint32_t flags) noexcept {
        return allocateAsync(size, alignment, flags, nullptr);
    }

    /// Returns the same block if it has room for `size` bytes. Otherwise returns null; TensorRT
    /// then keeps the block, and gets another block itself.
    void* reallocate(void* p, std::uint64_t alignment, std::uint64_t size) noexcept {
        return size != 0 && blocks_.holds(p, size, alignment) ? p : nullptr;
    }

    /// Frees the block once `stream` has done the work enqueued so far. On a captured stream, the
    /// block belongs to the graph until the graph is gone. Returns true for null. Returns false and
    /// does nothing for a block that isn't currently allocated, or if the library can't place a
    /// point on the stream, because the stream isn't on a device of the node or the host has no
    /// memory.
    bool deallocateAsync(void* p, stream_handle stream) noexcept {
        if (p == nullptr) return true;
        try {
            return blocks_.deallocate_after(detail::point_after(*node_, device_, stream), p) == errc::none;
        } catch (...) {  // freeing now could be too early
            return false;
        }
    }
    /// Frees on the default stream: see deallocateAsync.
    bool deallocate(void* p) noexcept { return deallocateAsync(p, nullptr); }

private:
    static constexpr std::size_t any_alignment = 256;  // as cudaMalloc's

    sizeless_memory<Memory> blocks_;
    Node* node_;
    device_id device_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
