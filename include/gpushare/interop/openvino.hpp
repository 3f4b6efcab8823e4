// SPDX-License-Identifier: Apache-2.0
// A tenant's memory as an allocator of OpenVINO, for tensors in the tenant's memory: inputs,
// outputs, KV caches.
//
//   gpushare::openvino_allocator mine{chat.memory()};  // converts to ov::Allocator
//   ov::Tensor cache{ov::element::f32, shape, mine};
//
// OpenVINO takes any object with three members of this shape, so this header needs no header of
// OpenVINO. The allocator doesn't see memory that OpenVINO allocates itself (weights, its own
// buffers): see tenant/foreign_memory.hpp.
#pragma once

#include <algorithm>
#include <cstddef>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/interop/detail/free_by_address.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Refers to `Resource`, which must outlive all tensors. Copies are equal and free each other's
/// blocks. Any thread may use the allocator if the resource allows that. The host must be able to
/// reach the memory.
template <memory_resource Resource>
class openvino_allocator {
public:
    /// Refers to `of`.
    explicit openvino_allocator(Resource& of) noexcept : resource_(&of) {}

    /// Allocates `size` bytes; 0 bytes count as 1. Throws what the resource throws; OpenVINO passes
    /// the error on as an ov::Exception with its text.
    void* allocate(std::size_t size, std::size_t alignment = alignof(std::max_align_t)) {
        return resource_->allocate(std::max<std::size_t>(size, 1), aligned(alignment));
    }
    /// Frees a block. If the size isn't that of the allocation, the block goes back by its address
    /// if the resource can look it up. If the resource checks frees, any other wrong free changes
    /// nothing, and the resource may report the free.
    void deallocate(void* p, std::size_t size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        (void)detail::free_by_address(*resource_, p, std::max<std::size_t>(size, 1), aligned(alignment));
    }
    /// Whether each of the two allocators can free the other's blocks.
    [[nodiscard]] bool is_equal(const openvino_allocator& other) const noexcept { return resource_ == other.resource_; }

private:
    // OpenVINO asks for 16 bytes, but its kernels are faster on whole cache lines.
    static constexpr std::size_t aligned(std::size_t asked) noexcept { return std::max<std::size_t>(asked, 64); }

    Resource* resource_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
