// SPDX-License-Identifier: Apache-2.0
// Internals of the machine: the state of blocks and threads while they run.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "machine.hpp"

namespace ptx {

inline constexpr std::uint32_t warp_size = 32;

enum class state : std::uint8_t { ready, asleep, at_barrier, at_shuffle, over };

/// The frame of a function that a thread is executing.
struct machine::frame {
    const function* in = nullptr;
    std::uint32_t next = 0;  // instruction
    std::unique_ptr<word[]> slots{};
    std::vector<std::byte> own_parameters{}, locals{};
    std::vector<bool> locals_known{};  // whether each byte has been written
    std::byte* parameters = nullptr;   // of a kernel: the grid's
};

/// A store that its thread has made and that no other thread sees yet.
struct machine::delayed_store {
    word address = 0, value = 0;
    std::uint8_t bytes = 0;
    std::uint32_t fences = 0;  // the thread's fences before it: no store overtakes stores before an earlier fence
    std::uint64_t due = 0;     // the machine's instruction count at which others see it
    std::uint64_t number = 0;  // its number among the thread's stores, in program order
    std::optional<release> releases{};
    std::uint64_t released = 0;  // it releases the thread's stores before this number
};

struct machine::thread {
    block* of = nullptr;
    std::uint32_t index = 0;
    state is = state::ready;
    std::uint32_t barrier = 0;        // the barrier at which it waits
    const instruction* at = nullptr;  // the barrier or shuffle at which it waits
    std::uint64_t wakes = 0;
    actor order{};
    std::vector<frame> frames{};
    std::vector<delayed_store> delayed{};  // in the order in which others see them
    std::uint64_t changes = 0;             // the machine's changes at its last strong load
    std::uint32_t looks = 0;               // strong loads since then
    std::uint32_t fences = 0;
    std::uint64_t stores = 0, fenced_stores = 0;  // delayed stores in all, and before its last release fence

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
    std::uint64_t wakes = ~std::uint64_t{0};  // when its first sleeping thread wakes
    std::uint32_t eagerness = 64;             // how many of 64 turns it takes
    std::vector<std::byte> shared{};
    std::unique_ptr<area> shared_area{};
};

}  // namespace ptx
