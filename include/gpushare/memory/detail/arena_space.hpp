// SPDX-License-Identifier: Apache-2.0
// The addresses of one arena, slot by slot. Each slot is empty, mapped, or leaving once a stream
// has reached a point. A plain state machine: arena_chunks.hpp carries out its decisions, under its
// locks.
//
//   space.depart(last, slot_stage::mapped);  // last: a departure. Its mapped slots are leaving now
//   space.each_run(last, [](std::size_t first, std::size_t count) { ... });
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/chain.hpp>
#include <gpushare/memory/detail/chunk_registry.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// `arriving`: about to be mapped, only while one thread holds the arena's mutex.
enum class slot_stage : std::uint8_t { empty, arriving, mapped, leaving };

struct arena_slot {
    std::uint64_t ticket = 0;  // of the departure with which the slot leaves
    std::uint32_t chunk = chunk_registry::none;
    slot_stage stage = slot_stage::empty;
};

/// Slots side by side.
struct slot_run {
    std::size_t first = 0, count = 0;

    [[nodiscard]] std::size_t end() const noexcept { return first + count; }
};

template <virtual_memory Memory, timeline_point Point>
struct arena_space;

/// Slots that leave once the points are reached, unless they were committed again meanwhile.
template <virtual_memory Memory, timeline_point Point>
struct departure {
    std::shared_ptr<arena_space<Memory, Point>> from{};
    std::uint64_t ticket = 0;
    std::size_t first = 0, count = 0;
    std::vector<Point> points{};
    bool stuck = false;  // all points are reached, but the memory didn't release the chunks

    [[nodiscard]] bool reached() const noexcept { return std::ranges::all_of(points, &Point::reached); }
    /// Adds the points that the departure waits for: those that aren't reached, or one reached
    /// point if there are no others.
    void add_points(std::vector<Point>& to) const {
        if (stuck) return;
        const auto before = to.size();
        std::ranges::copy_if(points, std::back_inserter(to), [](const Point& p) { return !p.reached(); });
        if (to.size() == before) to.emplace_back();
    }
};

/// Lives as long as the arena or anything mapped in it. Positions and counts are in slots, and
/// within the range.
template <virtual_memory Memory, timeline_point Point>
struct arena_space {
    using departures = std::list<departure<Memory, Point>>;

    arena_space(typename Memory::range r, std::size_t n, std::size_t size, tenant_tag t, quota& q)
        : addresses(std::move(r)), chunk_bytes(size), tenant(t), limit(&q), slots(n), farewell(1) {
        farewell.front().count = n;
    }

    [[nodiscard]] void* address(std::size_t i) const noexcept {
        return static_cast<std::byte*>(addresses.data()) + i * chunk_bytes;
    }
    [[nodiscard]] auto part(std::size_t first, std::size_t count) noexcept {
        return std::span(slots).subspan(first, count);
    }
    [[nodiscard]] bool all(std::size_t first, std::size_t count, slot_stage s) const noexcept {
        return count_of(first, count, s) == count;
    }
    [[nodiscard]] std::size_t count_of(std::size_t first, std::size_t count, slot_stage s) const noexcept {
        const auto some = std::span(slots).subspan(first, count);
        return static_cast<std::size_t>(std::ranges::count(some, s, &arena_slot::stage));
    }

    void arrive(std::size_t i, std::uint32_t chunk) noexcept {
        slots[i] = {.chunk = chunk, .stage = slot_stage::arriving};
    }
    /// Arriving slots become mapped, and so do slots that were about to leave. Returns the number
    /// of the latter.
    std::size_t settle(std::size_t first, std::size_t count) noexcept {
        const auto stayed = count_of(first, count, slot_stage::leaving);
        for (arena_slot& x : part(first, count)) {
            if (x.stage != slot_stage::mapped) ++mapped;
            x.stage = slot_stage::mapped;
        }
        leaving -= stayed;
        return stayed;
    }
    /// The slots of `d` in stage `which` are about to leave. Returns their number.
    std::size_t depart(const departure<Memory, Point>& d, slot_stage which) noexcept {
        std::size_t n = 0;
        for (arena_slot& x : part(d.first, d.count)) {
            if (x.stage != which) continue;
            x.stage = slot_stage::leaving;
            x.ticket = d.ticket;
            ++n;
        }
        leaving += n;
        if (which == slot_stage::mapped) mapped -= n;
        return n;
    }
    /// Calls `f(first, count)` for each run of neighbouring slots that leave with `d`.
    template <std::invocable<std::size_t, std::size_t> F>
    void each_run(const departure<Memory, Point>& d, F f) const {
        const auto leaves = [&](std::size_t i) {
            return slots[i].stage == slot_stage::leaving && slots[i].ticket == d.ticket;
        };
        for (std::size_t i = d.first; i < d.first + d.count; ++i) {
            const std::size_t first = i;
            while (i < d.first + d.count && leaves(i)) ++i;
            if (i != first) f(first, i - first);
        }
    }
    /// Makes the slot empty, and returns its chunk, which is mapped nowhere any more.
    std::uint32_t vacate(std::size_t i) noexcept {
        --(slots[i].stage == slot_stage::leaving ? leaving : mapped);
        return std::exchange(slots[i], {}).chunk;
    }

    const typename Memory::range addresses;
    const std::size_t chunk_bytes;
    const tenant_tag tenant;
    quota* const limit;
    mutable std::mutex mutex;              // of the thread that maps and unmaps here
    std::vector<arena_slot> slots;         // under it
    bool open = true;                      // until it is closed; under it
    std::optional<close_callback> closes;  // when the quota does
    // all slots: made beforehand, so that closing an arena needs no memory
    departures farewell;
    // Under the mutex of the books. `mapped` and `leaving`, slots, change under both.
    std::size_t mapped = 0, leaving = 0;
    std::size_t pledged = 0;  // calls that have charged the quota, and hold no lock
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
