// SPDX-License-Identifier: Apache-2.0
// A device with virtual memory in small chunks, a chunk pool, and two tenants with a quota each.
// The test decides when time passes.
//
//   support::arena_rig rig;
//   auto chat = rig.arena(rig.chat, 1);
//   chat.commit(0_B, rig.chunks(4));      support::paint(chat.data(), rig.chunks(4), 0xaa);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/backend/host/memory.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/units.hpp>

#include "support/fault_virtual_memory.hpp"
#include "support/manual_scrubber.hpp"

namespace support {

using namespace gpushare::literals;

inline void paint(void* at, gpushare::bytes size, int value) {
    std::fill_n(static_cast<unsigned char*>(at), size.count(), static_cast<unsigned char>(value));
}
/// Whether every byte is `value`.
[[nodiscard]] inline bool painted(const void* at, gpushare::bytes size, int value) {
    const std::span all(static_cast<const unsigned char*>(at), static_cast<std::size_t>(size.count()));
    return std::ranges::all_of(all, [&](unsigned char c) { return c == value; });
}
[[nodiscard]] inline void* advanced(void* at, gpushare::bytes by) { return static_cast<std::byte*>(at) + by.count(); }

template <bool FreshIsZero = true>
struct basic_arena_rig {
    using memory_type = basic_fault_virtual_memory<FreshIsZero>;
    using arena_type = gpushare::virtual_arena<memory_type, manual_scrubber>;

    static constexpr gpushare::bytes chunk = 16_KiB;
    [[nodiscard]] static constexpr gpushare::bytes chunks(std::uint64_t n) { return chunk * n; }

    explicit basic_arena_rig(gpushare::chunk_pool_options options = {.capacity = 16, .window = 4})
        : pool(memory, scrubber, options) {}

    basic_arena_rig(const basic_arena_rig&) = delete;
    basic_arena_rig& operator=(const basic_arena_rig&) = delete;
    /// The pool's destructor waits for points, in any order.
    ~basic_arena_rig() {
        kernels.on_wait([this] {
            while (scrubber.reach_next()) {
            }
            kernels.reach_all();
        });
    }

    /// From now on every wait on the device first reaches the next point of both streams.
    void work_by_itself() {
        kernels.on_wait([this] {
            scrubber.reach_next();
            kernels.reach_next();
        });
    }

    [[nodiscard]] arena_type arena(gpushare::quota& limit, std::uint32_t tenant, std::uint64_t slots = 16) {
        return arena_type(pool, limit, gpushare::tenant_tag{tenant}, chunks(slots), tenant == 1 ? "chat" : "code");
    }

    gpushare::host::device_memory device{{.capacity = 1_MiB}};
    memory_type memory{device, chunk};
    manual_scrubber scrubber;
    manual_stream kernels = scrubber.neighbour();
    gpushare::quota whole{chunks(16)};
    gpushare::quota chat{whole, chunks(4), chunks(8)}, code{whole, chunks(4), chunks(8)};
    gpushare::chunk_pool<memory_type, manual_scrubber> pool;
};
using arena_rig = basic_arena_rig<>;

}  // namespace support
