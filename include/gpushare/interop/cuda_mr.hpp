// SPDX-License-Identifier: Apache-2.0
// A tenant's memory as a memory resource of libcu++ (cuda::mr), for cuda::mr::resource_ref, device
// containers and CUB. Each free is in the order of the stream that it names.
//
//   auto mr = gpushare::as_cuda_mr<::cuda::mr::device_accessible>(tenant.memory(), node);
//   // CCCL 3.1+: resource_ref
//   ::cuda::mr::async_resource_ref<::cuda::mr::device_accessible> ref{mr};
//
// libcu++ renamed its calls in CCCL 3.1. One class has both spellings, without a header of CCCL:
//  - In CCCL 3.0, `resource` has allocate(bytes, alignment), and `async_resource` has
//    allocate_async(bytes, alignment, stream).
//  - From CCCL 3.1 on, `synchronous_resource` has allocate_sync(bytes, alignment), and `resource`
//    has allocate(stream, bytes, alignment).
#pragma once

#include <concepts>
#include <cstddef>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/detail/free_by_address.hpp>
#include <gpushare/interop/stream_resource.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A reference to a stream, such as ::cuda::stream_ref, of a device that a node has.
template <class S, class Node>
concept borrowable_stream = requires(const S& s, Node& n) {
    n.device_of(s.get());
    n.point_after(s.get());
};

/// Refers to memory and to its node, such as cuda::node. Both must outlive the resource and its
/// copies, which compare equal. Sizes and alignments are in bytes. Any thread may use the resource
/// if the memory allows that. `Properties` are libcu++'s, such as ::cuda::mr::device_accessible.
template <class Memory, class Node, class... Properties>
requires stream_ordered_memory<Memory, typename Node::stream::point>
class cuda_mr_resource {
public:
    /// `on` is the node of the memory.
    cuda_mr_resource(Memory& memory_of, Node& on) noexcept : memory_(&memory_of), node_(&on) {}

    /// Throws memory_error, a std::bad_alloc.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment = default_alignment) {
        return memory_->allocate(size, alignment);
    }
    /// Frees a block, which no work may use any more.
    void deallocate(void* p, std::size_t size, std::size_t alignment = default_alignment) noexcept {
        (void)detail::free_by_address(*memory_, p, size, alignment);
    }
    /// See allocate().
    [[nodiscard]] void* allocate_sync(std::size_t size, std::size_t alignment = default_alignment) {
        return allocate(size, alignment);
    }
    /// See deallocate() without a stream.
    void deallocate_sync(void* p, std::size_t size, std::size_t alignment = default_alignment) noexcept {
        deallocate(p, size, alignment);
    }

    /// Allocates a block that work on any stream may use at once. A null handle is the default
    /// stream of the current device. Throws memory_error, and operation_error if no free can be
    /// ordered on `stream` later, because `stream` is a per-thread default stream, or is on a
    /// device that the node doesn't have.
    template <borrowable_stream<Node> Stream>
    [[nodiscard]] void* allocate(Stream stream, std::size_t size, std::size_t alignment = default_alignment) {
        (void)node_->device_of(stream.get());  // throws here, because a free can't
        return memory_->allocate(size, alignment);
    }
    /// Frees the block once `stream` has done the work enqueued so far, or, if the stream is
    /// captured, once the graph is gone. If the library can't place a point on the stream, for
    /// example because the host has no memory, the block stays charged until its tenant closes, and
    /// the close report counts it.
    template <borrowable_stream<Node> Stream>
    void deallocate(Stream stream, void* p, std::size_t size, std::size_t alignment = default_alignment) noexcept {
        if (p == nullptr) return;
        try {
            const auto used = node_->point_after(stream.get());
            (void)detail::free_by_address(*memory_, p, size, alignment, [&](std::size_t n, std::size_t a) {
                return memory_->deallocate_after(used, p, n, a);
            });
        } catch (...) {  // freeing now could be too early
        }
    }
    /// Allocates for a stream, in the spelling of CCCL 3.0.
    template <borrowable_stream<Node> Stream>
    [[nodiscard]] void* allocate_async(std::size_t size, std::size_t alignment, Stream stream) {
        return allocate(stream, size, alignment);
    }
    /// Frees in the order of a stream, in the spelling of CCCL 3.0.
    template <borrowable_stream<Node> Stream>
    void deallocate_async(void* p, std::size_t size, std::size_t alignment, Stream stream) noexcept {
        deallocate(stream, p, size, alignment);
    }

    /// Whether each of the two resources can free the other's blocks.
    friend bool operator==(const cuda_mr_resource& a, const cuda_mr_resource& b) noexcept {
        return a.memory_ == b.memory_;
    }
    /// Says that the type has a property.
    template <class Property>
    requires(std::same_as<Property, Properties> || ...) friend constexpr void get_property(const cuda_mr_resource&,
                                                                                           Property) noexcept {}

private:
    static constexpr std::size_t default_alignment = 256;  // as cudaMalloc's

    Memory* memory_;
    Node* node_;
};

/// The other direction: a resource of libcu++, for example one of RMM's, as memory below this
/// library's. Allocates and frees on one stream, a ::cuda::stream_ref. If the resource orders its
/// work by streams, uses on other streams must be in that stream's order. The object has a copy of
/// `of`: a copied resource_ref refers to the resource, and a copied any_resource owns it. Any
/// thread may use the object if the resource allows that.
///
///   gpushare::cuda_mr_upstream below{rmm_resource, stream};     gpushare::quota_resource mine{limit, below, "chat"};
template <class Resource, class Stream>
class cuda_mr_upstream {
public:
    /// Adapts `of`, on the stream `on`, which must outlive the adaptor.
    cuda_mr_upstream(Resource of, Stream on) : of_(std::move(of)), on_(on) {}

    /// Throws what the resource throws.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment) {
        if constexpr (requires { of_.allocate_async(size, alignment, on_); })
            return of_.allocate_async(size, alignment, on_);
        else
            return of_.allocate(on_, size, alignment);
    }
    /// Frees in the order of the stream.
    void deallocate(void* p, std::size_t size, std::size_t alignment) {
        if constexpr (requires { of_.deallocate_async(p, size, alignment, on_); })
            of_.deallocate_async(p, size, alignment, on_);
        else
            of_.deallocate(on_, p, size, alignment);
    }

private:
    Resource of_;
    Stream on_;
};

/// A cuda_mr_resource with these properties.
template <class... Properties, class Memory, class Node>
[[nodiscard]] cuda_mr_resource<Memory, Node, Properties...> as_cuda_mr(Memory& memory_of, Node& on) noexcept {
    return {memory_of, on};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
