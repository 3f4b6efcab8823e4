// SPDX-License-Identifier: Apache-2.0
// Which events each thread has seen: the causality order of the PTX memory model (ISA 9.0, chapter
// 8), represented by vector clocks.
//
// A thread's clock counts its releases. An event is a pair of a thread and its clock at that time.
// An event happened before another thread's present action if that thread's view covers the event.
// These things extend views:
//   - program order: a thread covers itself
//   - barriers: all threads of the block cover everything that any of them covered
//   - release and acquire: a thread that acquires from a location covers what the releasing thread
//     covered, if the scope of each operation includes the other operation's thread ("morally
//     strong", 8.7.3); read-modify-writes in between pass the release on (8.9.2)
//   - fences, which make a release of later stores and an acquire of earlier loads
//   - the end of a grid, before all work that starts after it
// Shuffles order nothing.
//
// Grids have thousands of threads, so views can't have a clock for each thread. The threads of a
// block mostly meet at barriers. So a view has one number for a block, its `floor`, which covers
// all its threads up to that clock, and further entries only for threads that have released since.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "program.hpp"
#include "sight.hpp"

namespace ptx {

/// A thread among all that ever ran: the number of its block, and its number in the block.
using agent = std::uint32_t;
inline constexpr unsigned threads_bits = 10;
[[nodiscard]] constexpr std::uint32_t block_of(agent a) { return a >> threads_bits; }
[[nodiscard]] constexpr std::uint32_t thread_of(agent a) { return a & ((1U << threads_bits) - 1); }

struct view {
    struct block {
        std::uint32_t number = 0, floor = 0;
        std::vector<std::pair<agent, std::uint32_t>> threads{};  // threads above the floor, sorted
    };
    std::uint64_t finished = 0;   // covers the blocks that ended up to this moment
    std::vector<block> blocks{};  // sorted by number
    sight values{};               // the values that finished grids have seen

    void include(const view& other);
    [[nodiscard]] block& of(std::uint32_t number);
    [[nodiscard]] bool covers(agent a, std::uint32_t clock) const;
};
/// Threads that see the same share a view. Views never change.
using view_pointer = std::shared_ptr<const view>;

/// The smallest view that covers both.
[[nodiscard]] view_pointer join(const view_pointer& a, const view_pointer& b);

/// The clock that a block's threads share.
struct block_clock {
    std::uint32_t number = 0, floor = 0;
    int device = 0;
};

/// The state of a thread that concerns order.
struct actor {
    agent id = 0;
    std::uint32_t clock = 1;
    const block_clock* block = nullptr;
    view_pointer seen{};
    view_pointer latest{};  // the view acquired last: a thread that polls finds the same one repeatedly
    view_pointer loaded{};  // from relaxed loads of releases: seen once an acquire fence follows
    view_pointer fenced{};  // the view at the last release fence: later strong stores release it
    scope fenced_scope = scope::thread;
    sight values{}, loaded_values{}, fenced_values{};  // the same for values
};

/// A store from which other threads may acquire.
struct release {
    view_pointer seen{};
    scope reach = scope::thread;
    std::uint32_t block = 0;
    int device = 0;
    sight values{};
};
/// The releases that a location's present value carries: the release that wrote the value, and
/// earlier releases that read-modify-writes passed on.
using releases_of = std::vector<release>;

/// Whether the scope of an operation in `block` includes a thread of `other_block`.
[[nodiscard]] bool includes(scope reach, std::uint32_t block, int device, std::uint32_t other_block, int other_device);

/// The view of a thread that acquires from `me` now. It doesn't cover later actions of `me`.
[[nodiscard]] view_pointer publish(actor& me);

/// Call these after a strong access.
void after_load(actor& me, const releases_of& of_value, order ordering, scope reach);
void after_store(actor& me, releases_of& of_value, order ordering, scope reach, bool read_modify_write);
/// The two halves of the function above, for stores that others see later. The first returns the
/// release, if there is one; the second updates the releases that the location carries.
[[nodiscard]] std::optional<release> released_by(actor& me, order ordering, scope reach);
void carry(releases_of& of_value, const std::optional<release>& stored, bool read_modify_write);
void after_fence(actor& me, order ordering, scope reach);

/// All of these threads meet: from now on each sees everything that any of them saw and did.
void meet(const std::vector<actor*>& all);
/// The same for a whole block, whose floor rises.
void meet_block(const std::vector<actor*>& all, block_clock& block);

}  // namespace ptx
