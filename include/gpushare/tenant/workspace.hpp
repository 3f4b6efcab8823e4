// SPDX-License-Identifier: Apache-2.0
// A library's workspace: device memory that a vendor's library, such as cuBLAS, takes for a tenant by itself, past the
// tenant's allocator. (The workspaces of collectives are something else.) Declared, it is charged to that tenant instead
// of being set aside as overhead of the device.
//
//   auto blas = chat.declare_workspace(32_MiB);      // after the library took it; charged as long as `blas` lives
#pragma once

#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/tenant/detail/device_overhead.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Bytes that a library took of a device for a tenant, past the tenant's allocator. Charged as long as it lives; movable.
class workspace {
public:
    workspace() noexcept = default;
    /// `charged` bytes of `from` that are charged already. Both must outlive it.
    workspace(quota& from, detail::device_overhead& on, bytes charged) noexcept
        : from_(&from), on_(&on), size_(charged) {
        on.declare(charged);
    }
    /// The same of memory that the device doesn't know of.
    workspace(quota& from, bytes charged) noexcept : from_(&from), size_(charged) {}
    /// Takes over the charge.
    workspace(workspace&& other) noexcept : from_(other.from_), on_(other.on_), size_(other.size_) { other.forget(); }
    /// Gives back its own charge, and takes over `other`'s.
    workspace& operator=(workspace&& other) noexcept {
        if (this == &other) return *this;
        give_back();
        from_ = other.from_;
        on_ = other.on_;
        size_ = other.size_;
        other.forget();
        return *this;
    }
    ~workspace() { give_back(); }

    /// Bytes that are charged.
    [[nodiscard]] bytes size() const noexcept { return size_; }

private:
    void forget() noexcept {
        from_ = nullptr;
        size_ = {};
    }
    void give_back() noexcept {
        if (from_ == nullptr) return;
        if (on_ != nullptr) on_->withdraw(size_);
        from_->release(size_);
    }

    quota* from_ = nullptr;
    detail::device_overhead* on_ = nullptr;
    bytes size_{};
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
