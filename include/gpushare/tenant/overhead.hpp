// SPDX-License-Identifier: Apache-2.0
// What a device's memory is taken by that no tenant allocated: contexts, modules, libraries' workspaces, other processes.
// It is measured and set aside, so that quotas that sum to the rest don't fail later. A library's workspace that is
// declared is charged to the tenant it works for, instead.
//
//   shared.remeasure();                                              // each admission does it, too
//   auto blas = chat.declare_workspace(32_MiB);                      // after the library took it; see tenant.hpp
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The overhead account of one device. Thread-safe.
class device_overhead {
public:
    template <memory Memory>
    explicit device_overhead(const Memory& m) noexcept : capacity_(m.capacity()) {
        measure(m);
    }

    /// Looks what is taken now, and returns what that leaves to tenants. Allocations that go on beside it may be seen as
    /// others' for a moment: the least of some readings counts.
    template <memory Memory>
    bytes measure(const Memory& m) noexcept {
        bytes taken = m.taken_by_others();
        for (int again = 0; again < 2; ++again) taken = std::min(taken, m.taken_by_others());
        const std::lock_guard lock(mutex_);
        // To be declared once it is taken: earlier, it would hide other overhead.
        const bytes aside = taken - declared_;
        available_.store((capacity_ - aside).count(), std::memory_order_relaxed);
        return capacity_ - aside;
    }

    /// What tenants may have, by the last measurement; declared workspaces are part of it.
    [[nodiscard]] bytes available() const noexcept { return bytes{available_.load(std::memory_order_relaxed)}; }
    /// All of the rest.
    [[nodiscard]] bytes set_aside() const noexcept { return capacity_ - available(); }

private:
    friend class workspace;

    void declare(bytes n) noexcept {
        const std::lock_guard lock(mutex_);
        declared_ += n;
    }
    void withdraw(bytes n) noexcept {
        const std::lock_guard lock(mutex_);
        declared_ -= n;
    }

    const bytes capacity_;
    std::mutex mutex_;
    bytes declared_{};
    std::atomic<std::uint64_t> available_{0};  // a figure of one moment, alone
};

/// Bytes that a library took of a device for a tenant, past the tenant's allocator. Charged as long as it lives; movable.
class workspace {
public:
    workspace() noexcept = default;
    /// `charged` bytes of `from` that are charged already. Both must outlive it.
    workspace(quota& from, device_overhead& on, bytes charged) noexcept : from_(&from), on_(&on), size_(charged) {
        on.declare(charged);
    }
    workspace(workspace&& other) noexcept : from_(other.from_), on_(other.on_), size_(other.size_) { other.forget(); }
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

    [[nodiscard]] bytes size() const noexcept { return size_; }

private:
    void forget() noexcept {
        from_ = nullptr;
        size_ = {};
    }
    void give_back() noexcept {
        if (from_ == nullptr) return;
        on_->withdraw(size_);
        from_->release(size_);
    }

    quota* from_ = nullptr;
    device_overhead* on_ = nullptr;
    bytes size_{};
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
