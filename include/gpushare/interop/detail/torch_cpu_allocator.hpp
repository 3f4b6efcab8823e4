// SPDX-License-Identifier: Apache-2.0
// Torch's allocator for the host with tenants in front of it. A thread in a scope allocates from
// the tenant's memory; other threads allocate from the previous allocator.
//
//   detail::torch_cpu_allocator::install();       // may be called again
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <mutex>

#include <gpushare/config.hpp>
#include <gpushare/interop/detail/torch_blocks.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// An allocator of torch's, which a derived class implements by `get(n)`. Torch 1.13 declares
/// allocate() const and has no copy_data(). Later versions declare allocate() without const, and
/// need copy_data().
template <class Base>
class torch_allocator_by : public Base {
public:
    c10::DataPtr allocate(std::size_t n) override { return get(n); }
    void copy_data(void* to, const void* from, std::size_t n) const override { this->default_copy_data(to, from, n); }

private:
    virtual c10::DataPtr get(std::size_t n) const = 0;
};
template <class Base>
requires requires(const Base& b) { b.allocate(std::size_t{}); }
class torch_allocator_by<Base> : public Base {
public:
    c10::DataPtr allocate(std::size_t n) const override { return get(n); }

private:
    virtual c10::DataPtr get(std::size_t n) const = 0;
};

/// Torch's allocator for the host with tenants in front of it. Any thread may use it.
class torch_cpu_allocator final : public torch_allocator_by<c10::Allocator> {
public:
    static constexpr int ordinal = -1;  ///< the host's number; CUDA's devices count from 0

    /// Puts the process's allocator in front of torch's, if it isn't there yet.
    static void install() {
        static std::mutex one_at_a_time;
        const std::lock_guard lock(one_at_a_time);
        torch_cpu_allocator& all = of_process();
        if (c10::GetAllocator(c10::kCPU) != &all) c10::SetAllocator(c10::kCPU, &all, 255);
    }

    c10::DeleterFnPtr raw_deleter() const override { return &free_any; }

private:
    explicit torch_cpu_allocator(c10::Allocator& next) noexcept : next_(&next) {}

    c10::DataPtr get(std::size_t n) const override {
        if (n == 0) return next_->allocate(n);
        const auto got = torch_blocks::of_process().try_allocate(ordinal, nullptr, n);
        if (got.whose == nullptr) return next_->allocate(n);
        if (got.p == nullptr)
            throw c10::OutOfMemoryError({__func__, "gpushare/interop/libtorch_cpu.hpp", 0},
                                        "out of memory. " + got.whose->sentence(got.why));
        return {got.p, got.p, &free_any, c10::Device(c10::kCPU)};
    }
    [[nodiscard]] static torch_cpu_allocator& of_process() {
        static torch_cpu_allocator* const all = new torch_cpu_allocator(*c10::GetAllocator(c10::kCPU));
        return *all;
    }
    static void free_any(void* p) {
        if (p != nullptr && !torch_blocks::of_process().deallocate(p)) of_process().next_->raw_deallocate(p);
    }

    c10::Allocator* next_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
