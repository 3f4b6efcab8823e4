// SPDX-License-Identifier: Apache-2.0
// The host node as the composition matrix drives a backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/units.hpp>

#include "support/composition/stacks.hpp"

namespace support::composition {

class host_backend {
public:
    using node_type = gpushare::host::node;
    using stream = gpushare::host::stream;
    using memory_type = gpushare::host::device_memory;
    using pinned_type = gpushare::host::device_memory;  // some more of the host's
    using virtual_memory = gpushare::host::virtual_memory;

    explicit host_backend(bytes capacity)
        : node_{{.devices = 1, .memory = capacity, .sms = 1, .timing = gpushare::host::timing::modelled}},
          pinned_{{.capacity = capacity}} {}

    [[nodiscard]] node_type& node() { return node_; }
    [[nodiscard]] memory_type& memory() { return node_.memory(d); }
    [[nodiscard]] virtual_memory& chunks() { return chunks_; }
    [[nodiscard]] stream make_stream() { return node_.make_stream(d); }
    [[nodiscard]] pinned_type& pinned() { return pinned_; }
    /// Of the device and of pinned memory, by whoever.
    [[nodiscard]] bytes used() { return memory().used() + memory().taken_by_others() + pinned_.used(); }
    /// A block past all allocators; null if there is none.
    [[nodiscard]] void* take_for_library() {
        const std::lock_guard lock(library_);
        const bytes before = memory().taken_by_others(), wanted = before + bytes{unit};
        if (!memory().lost() && memory().take_for_others(wanted) == wanted) return new std::byte;
        (void)memory().take_for_others(before);
        return nullptr;
    }
    void give_for_library(void* p) {
        const std::lock_guard lock(library_);
        delete static_cast<std::byte*>(p);
        (void)memory().take_for_others(memory().taken_by_others() - bytes{unit});
    }
    void fail_allocation(std::uint64_t after) { memory().fail_allocations(after, 1); }
    void heal() { memory().fail_allocations(0, 0); }
    void hold(stream& s) { node_.faults(d).stall(s); }
    void let_go(stream& s) { node_.faults(d).resume(s); }
    void lose() { node_.faults(d).lose_device(); }

private:
    static constexpr gpushare::device_id d{0};
    node_type node_;
    pinned_type pinned_;
    std::mutex library_;
    virtual_memory chunks_{memory(), bytes{unit}};
};

}  // namespace support::composition
