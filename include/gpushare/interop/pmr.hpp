// SPDX-License-Identifier: Apache-2.0
// Turns any memory resource into a std::pmr::memory_resource, for containers in memory that the
// host reaches: pinned memory and the host backend's. In memory that only a device reaches, a
// container crashes at its first write.
//
//   gpushare::pmr_adaptor mine{resource};  // resource: a quota_resource, a pool_resource ...
//   std::pmr::vector<float> v(&mine);
//
// The other direction needs no adaptor: a std::pmr::memory_resource models
// gpushare::memory_resource, so that a quota or a pool can use it directly:
//
//   gpushare::quota_resource limited{quota, *std::pmr::new_delete_resource(), "chat"};
#pragma once

#include <cstddef>
#include <memory_resource>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/interop/detail/free_by_address.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

static_assert(memory_resource<std::pmr::memory_resource>);

/// Refers to `Resource`, which must outlive the adaptor. Sizes and alignments are in bytes. Throws
/// what the resource throws, a std::bad_alloc. Any thread may use the adaptor if the resource
/// allows that.
///
/// std::pmr can't report a wrong free. If the size isn't that of the allocation, the block goes
/// back by its address if the resource can look it up. If the resource checks frees, any other
/// wrong free changes nothing, and the resource may report the free (to a tenant's event sink). Two
/// adaptors are equal if they refer to one resource, or to two resources that compare equal,
/// because only then can each adaptor free the other's blocks.
template <memory_resource Resource>
class pmr_adaptor final : public std::pmr::memory_resource {
public:
    /// Refers to `of`.
    explicit pmr_adaptor(Resource& of) noexcept : resource_(&of) {}

    /// The resource below.
    [[nodiscard]] Resource& resource() const noexcept { return *resource_; }

private:
    void* do_allocate(std::size_t size, std::size_t alignment) override { return resource_->allocate(size, alignment); }
    void do_deallocate(void* p, std::size_t size, std::size_t alignment) override {
        (void)detail::free_by_address(*resource_, p, size, alignment);
    }
    [[nodiscard]] bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        const auto* const same = dynamic_cast<const pmr_adaptor*>(&other);
        if (same == nullptr) return false;
        if (same->resource_ == resource_) return true;
        if constexpr (requires(const Resource& a) { a == a; })
            return *same->resource_ == *resource_;
        else
            return false;
    }

    Resource* resource_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
