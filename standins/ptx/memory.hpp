// SPDX-License-Identifier: Apache-2.0
// The memory that kernels may touch, with the last reads and the last write of each four bytes.
//
//   memory m;
//   m.add(begin, size, contents::unknown);
//   area* a = m.find(address, bytes);                   // null: not inside one piece of memory
//   a->touch(offset, bytes, ...)  // the conflicting access, if there is one
//
// Races are found by the method of FastTrack (Flanagan and Freund, PLDI 2009). An access conflicts
// with the last write, and a write also with the reads since, unless these happened before the
// access. Two strong accesses whose scopes include each other don't conflict (8.7).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "happens_before.hpp"
#include "past_values.hpp"

namespace ptx {

/// An access in the past.
struct event {
    agent who = 0;  // 0: none yet
    std::uint32_t clock = 0;
    std::uint32_t where = 0;  // the number of an instruction, given by its owner
    scope reach = scope::thread;
};

/// An access now.
struct access {
    const actor& by;
    bool writes = false;
    scope reach = scope::thread;  // of a strong access
    std::uint32_t where = 0;
};

struct conflict {
    event with{};
    bool wrote = false;
};

/// The time at which each block of an event ended; 0 while the block runs.
class ended_blocks {
public:
    void end(std::uint32_t block, std::uint64_t when, int device) { set(block, {when, device}); }
    void begin(std::uint32_t block, int device) { set(block, {0, device}); }
    [[nodiscard]] std::uint64_t when(std::uint32_t block) const { return all_[block].ended; }
    [[nodiscard]] int device(std::uint32_t block) const { return all_[block].device; }

private:
    struct fate {
        std::uint64_t ended = 0;
        int device = 0;
    };
    void set(std::uint32_t block, fate f) {
        if (all_.size() <= block) all_.resize(block + std::size_t{1});
        all_[block] = f;
    }
    std::vector<fate> all_;
};

/// The host may access the same address, so strong accesses must be atomic on the host, too.
[[nodiscard]] word load_atomically(const std::byte* from, std::size_t bytes);

enum class contents : std::uint8_t { unknown, written };

/// The owner of memory that belongs to no device.
inline constexpr int of_host = -1;

/// One piece of memory.
class area {
public:
    area(std::uintptr_t begin, std::size_t size, contents c, int owner = 0)
        : begin_(begin), size_(size), owner_(owner), pages_((size + page - 1) / page) {
        fill_.assign(pages_.size(), c);
    }

    [[nodiscard]] std::uintptr_t begin() const { return begin_; }
    [[nodiscard]] std::size_t size() const { return size_; }
    /// A device, or of_host.
    [[nodiscard]] int owner() const { return owner_; }

    /// Whether all of these bytes have been written.
    [[nodiscard]] bool known(std::size_t offset, std::size_t bytes) const;
    /// Records the access, and returns the access with which it conflicts, if there is one.
    std::optional<conflict> touch(std::size_t offset, std::size_t bytes, const access& a, const ended_blocks& ended);
    /// The same for the many bytes of a copy.
    std::optional<conflict> touch_all(std::size_t offset, std::size_t bytes, const access& a,
                                      const ended_blocks& ended);
    /// The releases that a strong access finds at its address; made if there are none.
    [[nodiscard]] releases_of& releases_at(std::size_t offset);
    [[nodiscard]] const releases_of* find_releases(std::size_t offset) const;
    /// The host polls and writes here while kernels run; see memory::polled_by_host.
    void polled_by_host(std::size_t offset, std::size_t bytes) { polled_ = {offset, offset + bytes}; }
    [[nodiscard]] bool is_polled(std::size_t offset, std::size_t bytes) const {
        return offset < polled_.end && polled_.begin < offset + bytes;
    }
    /// The earlier values at a place of strong accesses; null if there is no record.
    [[nodiscard]] past_values* find_past(std::size_t offset) {
        const auto at = past_.find(offset);
        return at == past_.end() ? nullptr : &at->second;
    }
    [[nodiscard]] past_values& past_at(std::size_t offset) { return past_[offset]; }
    void forget_past(std::size_t offset, std::size_t bytes) {
        if (!past_.empty()) past_.erase(past_.lower_bound(offset), past_.lower_bound(offset + bytes));
    }
    /// The changes that the host has made, since the last `look`, in memory that it polls: an
    /// offset and the previous eight bytes.
    [[nodiscard]] std::vector<std::pair<std::size_t, word>> changed_by_host() const;
    void look();

private:
    struct extent {
        std::size_t begin = 0, end = 0;
    };
    static constexpr std::size_t page = 4096, unit = 4, units = page / unit;
    static constexpr std::size_t many = 8;  // the most concurrent readers that are recorded; the oldest is dropped

    /// The last accesses. If no two threads have read concurrently, there is one reader and no
    /// further list.
    struct cell {
        event wrote{}, read{};
        std::uint32_t more_readers = 0;  // an index + 1
    };
    /// Four bytes, recorded as one cell until an access touches only some of them.
    struct granule {
        cell whole{};
        std::uint32_t split = 0, released = 0;  // indices + 1
        std::uint8_t known = 0;                 // a bit for each byte
    };
    using granules = std::array<granule, units>;

    [[nodiscard]] granule& at(std::size_t offset);
    [[nodiscard]] std::optional<conflict> touch(cell& c, const access& a, const ended_blocks& ended);

    std::uintptr_t begin_;
    std::size_t size_;
    int owner_;
    extent polled_{};
    std::vector<std::unique_ptr<granules>> pages_;  // null: `fill_` and `copied_` describe the whole page
    std::vector<contents> fill_;
    std::map<std::size_t, cell> copied_;  // by page: the last accesses to the page as a whole
    std::vector<std::array<cell, unit>> splits_;
    std::vector<std::vector<event>> readers_;
    std::vector<releases_of> releases_;
    std::map<std::size_t, past_values> past_;
    std::vector<word> looked_at_{};  // the values that the host last saw where it polls
};

class memory {
public:
    void add(std::uintptr_t begin, std::size_t size, contents c, int owner = 0);
    void remove(std::uintptr_t begin);
    /// From now on the host may access this part of an area at any time, by strong operations of
    /// system scope. Weaker accesses of a kernel race with the host.
    void polled_by_host(std::uintptr_t begin, std::size_t size);
    /// The area that contains the whole range.
    [[nodiscard]] area* find(std::uintptr_t begin, std::size_t size);
    template <class F>
    void for_each_polled(const F& f) {
        for (const auto& [begin, a] : areas_)
            if (a->is_polled(0, a->size())) f(*a);
    }

private:
    std::map<std::uintptr_t, std::unique_ptr<area>> areas_;
    std::array<area*, 4> recent_{};  // the areas found last
    std::size_t next_ = 0;
};

}  // namespace ptx
