// SPDX-License-Identifier: Apache-2.0
// The overhead account of a device: what takes the memory that no tenant has. CUDA only tells how much memory is free,
// so the account measures before and after each step that takes some.
//
//   gpushare::cuda::overhead_account account{node, d};          // so far: contexts and other processes
//   account.measure("modules", [&] { load_kernels(); });
//   account.measure("vendor workspaces", [&] { make_blas_handles(); });
//   for (const auto& e : account.entries()) log(e.label, e.size);
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/memory.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// Not thread-safe. Refers to the node's memory, which must outlive it. Memory that other processes
/// take or return during a step is put down to the step: CUDA can't tell them apart. Allocations
/// from the device's memory aren't counted; allocations of pools and virtual memory are.
class overhead_account {
public:
    /// The memory that a step took.
    struct entry {
        std::string label{};    ///< the step's
        std::int64_t size = 0;  ///< bytes; negative where memory came back
    };

    /// Throws operation_error: errc::no_device.
    overhead_account(node& on, device_id d)
        // The entry by name: of braces within braces nvcc 13 loses the inner ones.
        : memory_(&on.memory(d)),
          entries_(1, entry{"contexts and other processes", signed_bytes(memory_->taken_by_others())}) {}

    /// Runs `step` and puts down the device memory that it took. Exceptions pass through, with no
    /// entry made.
    template <std::invocable F>
    void measure(std::string label, F&& step) {
        const auto before = signed_bytes(memory_->taken_by_others());
        std::forward<F>(step)();
        entries_.push_back({std::move(label), signed_bytes(memory_->taken_by_others()) - before});
    }

    /// In order; the first is what was taken when the account was opened.
    [[nodiscard]] const std::vector<entry>& entries() const noexcept { return entries_; }

    /// Memory taken between the steps, or by others since: bytes, negative if more came back than
    /// was put down.
    [[nodiscard]] std::int64_t unexplained() const noexcept {
        auto rest = signed_bytes(memory_->taken_by_others());
        for (const entry& e : entries_) rest -= e.size;
        return rest;
    }

private:
    // No device has 2^63 bytes.
    static std::int64_t signed_bytes(bytes b) noexcept { return static_cast<std::int64_t>(b.count()); }

    device_memory* memory_;
    std::vector<entry> entries_;
};

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
