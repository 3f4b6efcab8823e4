// SPDX-License-Identifier: Apache-2.0
// A tenant's memory for Thrust: for thrust::device_vector, and for algorithms' temporary storage.
//
//   gpushare::stream_resource ordered{tenant.memory(), stream};  // frees in the stream's order
//   gpushare::thrust_allocator<float, decltype(ordered)> mine{ordered};
//   thrust::device_vector<float, decltype(mine)> v(1000, mine);
//   // by nvcc: thrust::sort(thrust::cuda::par_nosync(mine).on(stream.native_handle()), v.begin(), v.end());
//
// This header doesn't use thrust::mr, whose allocators of two tenants compare equal (CCCL 3.0 to
// 3.5), so containers would swap and move storage between tenants. The header is empty without
// Thrust.
#pragma once

#if __has_include(<thrust/device_ptr.h>)

#include <cstddef>
#include <limits>
#include <type_traits>

#include <thrust/device_ptr.h>
#include <thrust/device_reference.h>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/interop/detail/free_by_address.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Refers to `Resource`, which must outlive the allocator, its copies and their blocks. Allocates
/// whole objects at multiples of 256 bytes, as Thrust expects of temporary storage. Allocators are
/// equal only if they have the same resource, so each block goes back to the tenant that was
/// charged for it. Moving or swapping a vector takes its allocator along; copying into a vector
/// keeps the vector's own allocator. Any thread may use the allocator if the resource allows that.
///
/// Thrust frees without naming a stream. If the resource frees immediately, no work may still use a
/// vector, or temporary storage of par_nosync, when Thrust frees its memory. With stream_resource,
/// work on the resource's stream may still use them.
template <class T, memory_resource Resource>
class thrust_allocator {
public:
    using value_type = T;
    using pointer = ::thrust::device_ptr<T>;
    using const_pointer = ::thrust::device_ptr<const T>;
    using reference = ::thrust::device_reference<T>;
    using const_reference = ::thrust::device_reference<const T>;
    using size_type = std::size_t;
    using difference_type = std::ptrdiff_t;

    using propagate_on_container_copy_assignment = std::false_type;
    using propagate_on_container_move_assignment = std::true_type;
    using propagate_on_container_swap = std::true_type;
    using is_always_equal = std::false_type;
    template <class U>
    struct rebind {
        using other = thrust_allocator<U, Resource>;
    };

    // NOLINTNEXTLINE(google-explicit-constructor): as allocators are made from resources
    thrust_allocator(Resource& from) noexcept : resource_(&from) {}
    template <class U>
    thrust_allocator(const thrust_allocator<U, Resource>& other) noexcept : resource_(&other.resource()) {}

    /// Allocates `n` objects. Throws what the resource throws, a std::bad_alloc, also for
    /// impossible sizes.
    [[nodiscard]] pointer allocate(size_type n) {
        return pointer(static_cast<T*>(resource_->allocate(size_of(n), alignment)));
    }
    void deallocate(pointer p, size_type n) noexcept {
        (void)detail::free_by_address(*resource_, p.get(), size_of(n), alignment);
    }

    [[nodiscard]] static constexpr size_type max_size() noexcept {
        return static_cast<size_type>(std::numeric_limits<difference_type>::max()) / sizeof(T);
    }
    [[nodiscard]] Resource& resource() const noexcept { return *resource_; }

    template <class U>
    friend bool operator==(const thrust_allocator& a, const thrust_allocator<U, Resource>& b) noexcept {
        return &a.resource() == &b.resource();
    }

private:
    static constexpr std::size_t alignment = alignof(T) > 256 ? alignof(T) : 256;

    // If the size overflows, asks for more than any memory has, so that the resource refuses it
    // with its figures.
    [[nodiscard]] static constexpr std::size_t size_of(size_type n) noexcept {
        constexpr auto most = std::numeric_limits<std::size_t>::max();
        return n > most / sizeof(T) ? most : n * sizeof(T);
    }

    Resource* resource_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#endif
