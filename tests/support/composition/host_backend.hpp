// SPDX-License-Identifier: Apache-2.0
// The host node as the composition matrix drives a backend.
#pragma once

#include <cstdint>

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
    using virtual_memory = gpushare::host::virtual_memory;

    explicit host_backend(bytes capacity)
        : node_{{.devices = 1, .memory = capacity, .sms = 1, .timing = gpushare::host::timing::modelled}} {}

    [[nodiscard]] node_type& node() { return node_; }
    [[nodiscard]] memory_type& memory() { return node_.memory(d); }
    [[nodiscard]] virtual_memory& chunks() { return chunks_; }
    [[nodiscard]] stream make_stream() { return node_.make_stream(d); }
    /// Of the device, by whoever.
    [[nodiscard]] bytes used() { return memory().used(); }
    void fail_allocation(std::uint64_t after) { memory().fail_allocations(after, 1); }
    void heal() { memory().fail_allocations(0, 0); }
    void hold(stream& s) { node_.faults(d).stall(s); }
    void let_go(stream& s) { node_.faults(d).resume(s); }
    void lose() { node_.faults(d).lose_device(); }

private:
    static constexpr gpushare::device_id d{0};
    node_type node_;
    virtual_memory chunks_{memory(), bytes{unit}};
};

}  // namespace support::composition
