// SPDX-License-Identifier: Apache-2.0
// Injects faults into a host device, for tests of code that runs on it. A kernel's fault needs nothing from here: let
// the kernel throw.
//
//   node.faults(gpushare::device_id{0}).fail_allocations(10, 1);  // the 11th fails
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include <gpushare/backend/host/detail/engine.hpp>
#include <gpushare/backend/host/stream.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

/// Safe from any thread.
class fault_injector {
public:
    /// After `after` more allocations, the next `count` are refused as if the memory were full.
    void fail_allocations(std::uint64_t after, std::uint64_t count) noexcept {
        memory().fail_allocations(after, count);
    }

    /// Somebody outside takes device memory, `wanted` bytes in all, or what is left. Returns what they have.
    bytes take_memory(bytes wanted) noexcept { return memory().take_for_others(wanted); }

    /// The stream stops before its next operation: what has started ends, what is behind it waits for `resume`.
    void stall(stream& s) noexcept { s.engine_->stall(*s.state_); }
    /// Ends a stall.
    void resume(stream& s) noexcept { s.engine_->resume(*s.state_); }

    /// The device is gone, for good: queued work fails with errc::device_lost, blocks that run end, their work fails
    /// as well, and so does every later launch and allocation. All points are reached.
    void lose_device() noexcept { engine_->lose(device_); }

private:
    friend class node;
    fault_injector(std::shared_ptr<detail::engine> engine, std::uint32_t device) noexcept
        : engine_(std::move(engine)), device_(device) {}

    [[nodiscard]] device_memory& memory() noexcept { return engine_->device(device_).memory; }

    std::shared_ptr<detail::engine> engine_;
    std::uint32_t device_;
};

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
