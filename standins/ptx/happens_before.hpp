// SPDX-License-Identifier: Apache-2.0
// Who has seen what: the causality order of the PTX memory model (ISA 9.0, chapter 8), kept as
// clocks.
//
// A thread's own clock counts its releases. An event is (thread, clock at that time); it happened
// before what another thread does now if that thread's view covers it. Views only come about by
//   - program order: a thread covers itself
//   - barriers: all threads of the block cover all that any of them covered
//   - release and acquire: who acquires from a location covers what the releasing thread covered, if each of the two operations
//     has a scope that includes the other one's thread ("morally strong", 8.7.3); read-modify-writes in between pass it on (8.9.2)
//   - fences, which make a release of later stores and an acquire of earlier loads
//   - the end of a grid, before whatever starts after it
// Shuffles order nothing.
//
// Grids have thousands of threads, so that a clock for each of them in every view is out of the
// question. Threads of a block mostly meet at barriers: a view has one number for a block (its
// `floor`: all its threads up to that clock), and single threads only where they released since.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "program.hpp"
#include "sight.hpp"

namespace ptx {

/// A thread of all that ever ran: the number of its block, and its own in there.
using agent = std::uint32_t;
inline constexpr unsigned threads_bits = 10;
[[nodiscard]] constexpr std::uint32_t block_of(agent a) { return a >> threads_bits; }
[[nodiscard]] constexpr std::uint32_t thread_of(agent a) { return a & ((1U << threads_bits) - 1); }

struct view {
    struct block {
        std::uint32_t number = 0, floor = 0;
        std::vector<std::pair<agent, std::uint32_t>> threads{};  // sorted; those above the floor
    };
    std::uint64_t finished = 0;   // blocks that ended up to this moment are covered
    std::vector<block> blocks{};  // sorted by number
    sight values{};               // of grids that came to their end

    void include(const view& other);
    [[nodiscard]] block& of(std::uint32_t number);
    [[nodiscard]] bool covers(agent a, std::uint32_t clock) const;
};
/// Views are shared by those who see the same, and never change.
using view_pointer = std::shared_ptr<const view>;

/// The smallest view that covers both.
[[nodiscard]] view_pointer join(const view_pointer& a, const view_pointer& b);

/// What a block's threads share.
struct block_clock {
    std::uint32_t number = 0, floor = 0;
    int device = 0;
};

/// A thread, as far as order is concerned.
struct actor {
    agent id = 0;
    std::uint32_t clock = 1;
    const block_clock* block = nullptr;
    view_pointer seen{};
    view_pointer latest{};  // of those that were acquired: who polls finds the same again and again
    view_pointer loaded{};  // by relaxed loads from releases: seen once an acquire fence follows
    view_pointer fenced{};  // by the last release fence: later strong stores release it
    scope fenced_scope = scope::thread;
    sight values{}, loaded_values{}, fenced_values{};  // the same of values
};

/// A store that others may acquire from.
struct release {
    view_pointer seen{};
    scope reach = scope::thread;
    std::uint32_t block = 0;
    int device = 0;
    sight values{};
};
/// What the present value of a location carries: the release that wrote it, and those that
/// read-modify-writes passed on.
using releases_of = std::vector<release>;

/// Whether the scope of an operation of this block includes a thread of that one.
[[nodiscard]] bool includes(scope reach, std::uint32_t block, int device, std::uint32_t other_block, int other_device);

/// What everybody sees who acquires from `me` now; what `me` does later isn't in it.
[[nodiscard]] view_pointer publish(actor& me);

/// Strong accesses, after they were done.
void after_load(actor& me, const releases_of& of_value, order ordering, scope reach);
void after_store(actor& me, releases_of& of_value, order ordering, scope reach, bool read_modify_write);
/// The two halves of it, for stores that others see later: what it releases, if anything, and what
/// its location carries then.
[[nodiscard]] std::optional<release> released_by(actor& me, order ordering, scope reach);
void carry(releases_of& of_value, const std::optional<release>& stored, bool read_modify_write);
void after_fence(actor& me, order ordering, scope reach);

/// All of these meet: each sees from now on what any of them saw and did.
void meet(const std::vector<actor*>& all);
/// The same for a whole block, whose floor rises.
void meet_block(const std::vector<actor*>& all, block_clock& block);

}  // namespace ptx
