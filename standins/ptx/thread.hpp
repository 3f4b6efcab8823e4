// SPDX-License-Identifier: Apache-2.0
// Inside of a machine: what a block and a thread are while they run.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "machine.hpp"

namespace ptx {

inline constexpr std::uint32_t warp_size = 32;

enum class state : std::uint8_t { ready, asleep, at_barrier, at_shuffle, over };

/// A function that a thread is in.
struct machine::frame {
    const function* in = nullptr;
    std::uint32_t next = 0;  // instruction
    std::unique_ptr<word[]> slots{};
    std::vector<std::byte> own_parameters{}, locals{};
    std::vector<bool> locals_known{};  // bytes that somebody has written
    std::byte* parameters = nullptr;   // of a kernel: the grid's
};

/// A store that its thread has done and nobody else sees yet.
struct machine::delayed_store {
    word address = 0, value = 0;
    std::uint8_t bytes = 0;
    std::uint32_t fences = 0;  // of the thread, before it: no store overtakes one behind an earlier fence
    std::uint64_t due = 0;     // instructions of the machine
    std::uint64_t number = 0;  // among its thread's, in program order
    std::optional<release> releases{};
    std::uint64_t released = 0;  // the thread's stores before this number
};

struct machine::thread {
    block* of = nullptr;
    std::uint32_t index = 0;
    state is = state::ready;
    std::uint32_t barrier = 0;        // that it waits at
    const instruction* at = nullptr;  // the barrier or shuffle that it waits at
    std::uint64_t wakes = 0;
    actor order{};
    std::vector<frame> frames{};
    std::vector<delayed_store> delayed{};  // the first to be seen first
    std::uint64_t changes = 0;             // of the machine, at its last look: a strong load
    std::uint32_t looks = 0;               // since then
    std::uint32_t fences = 0;
    std::uint64_t stores = 0, fenced_stores = 0;  // that were delayed; and by its last release fence

    [[nodiscard]] std::uint32_t lane() const { return index % warp_size; }
};

struct machine::block {
    grid* of = nullptr;
    std::uint32_t index = 0, sm = 0;
    block_clock clock{};
    std::vector<thread> threads{};
    std::vector<std::uint32_t> ready{}, asleep{};
    std::uint32_t over = 0;
    std::array<std::uint32_t, 16> arrived{};  // at each barrier
    std::uint64_t wakes = ~std::uint64_t{0};  // the first of those asleep
    std::uint32_t eagerness = 64;             // of 64 turns, how many it takes
    std::vector<std::byte> shared{};
    std::unique_ptr<area> shared_area{};
};

}  // namespace ptx
