// SPDX-License-Identifier: Apache-2.0
// The memory that kernels may touch, and for each four bytes of it who read and wrote them last.
//
//   memory m;
//   m.add(begin, size, contents::unknown);
//   area* a = m.find(address, bytes);                   // null: not inside one piece of memory
//   a->touch(offset, bytes, ...)  // what conflicts with it, if something does
//
// Races are found as FastTrack finds them (Flanagan and Freund, PLDI 2009): an access conflicts
// with the last write, and a write with the reads since, unless these happened before it. Two
// strong accesses whose scopes include each other don't conflict (8.7).
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
    std::uint32_t where = 0;  // an instruction, by a number that its owner gives it
    scope reach = scope::thread;
};

/// An access now.
struct access {
    const actor& by;
    bool writes = false;
    scope reach = scope::thread;  // of a strong one
    std::uint32_t where = 0;
};

struct conflict {
    event with{};
    bool wrote = false;
};

/// Says for events of blocks that ended when that was: 0 while they run.
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

/// The host may be at the same address: strong accesses are atomic there, too.
[[nodiscard]] word load_atomically(const std::byte* from, std::size_t bytes);

enum class contents : std::uint8_t { unknown, written };

/// Whose memory it is, where it isn't a device's.
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

    /// Whether all of it was ever written.
    [[nodiscard]] bool known(std::size_t offset, std::size_t bytes) const;
    /// Notes the access down.
    std::optional<conflict> touch(std::size_t offset, std::size_t bytes, const access& a, const ended_blocks& ended);
    /// The same for much at once: of a copy.
    std::optional<conflict> touch_all(std::size_t offset, std::size_t bytes, const access& a,
                                      const ended_blocks& ended);
    /// What a strong access finds at its address; made if there is none.
    [[nodiscard]] releases_of& releases_at(std::size_t offset);
    [[nodiscard]] const releases_of* find_releases(std::size_t offset) const;
    /// The host looks here while kernels run, and writes: see memory::polled_by_host.
    void polled_by_host(std::size_t offset, std::size_t bytes) { polled_ = {offset, offset + bytes}; }
    [[nodiscard]] bool is_polled(std::size_t offset, std::size_t bytes) const {
        return offset < polled_.end && polled_.begin < offset + bytes;
    }
    /// Where strong accesses have been, what was there before; null: nobody knows.
    [[nodiscard]] past_values* find_past(std::size_t offset) {
        const auto at = past_.find(offset);
        return at == past_.end() ? nullptr : &at->second;
    }
    [[nodiscard]] past_values& past_at(std::size_t offset) { return past_[offset]; }
    void forget_past(std::size_t offset, std::size_t bytes) {
        if (!past_.empty()) past_.erase(past_.lower_bound(offset), past_.lower_bound(offset + bytes));
    }
    /// What the host has changed where it looks since the last `look`: an offset and the eight
    /// bytes that were there.
    [[nodiscard]] std::vector<std::pair<std::size_t, word>> changed_by_host() const;
    void look();

private:
    struct extent {
        std::size_t begin = 0, end = 0;
    };
    static constexpr std::size_t page = 4096, unit = 4, units = page / unit;
    static constexpr std::size_t many = 8;  // readers at once that are remembered; the oldest is forgotten

    /// Who touched it last. While no two have read it at once there is one reader, and no more to
    /// look at.
    struct cell {
        event wrote{}, read{};
        std::uint32_t more_readers = 0;  // an index + 1
    };
    /// Four bytes, as one until somebody touches only some of them.
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
    std::vector<std::unique_ptr<granules>> pages_;  // null: all of it is as `fill_` and `copied_` say
    std::vector<contents> fill_;
    std::map<std::size_t, cell> copied_;  // by page: who touched it as a whole, if somebody did
    std::vector<std::array<cell, unit>> splits_;
    std::vector<std::vector<event>> readers_;
    std::vector<releases_of> releases_;
    std::map<std::size_t, past_values> past_;
    std::vector<word> looked_at_{};  // where the host polls
};

class memory {
public:
    void add(std::uintptr_t begin, std::size_t size, contents c, int owner = 0);
    void remove(std::uintptr_t begin);
    /// The host accesses this part of an area by strong accesses of system scope at any time: what
    /// isn't as strong races with it.
    void polled_by_host(std::uintptr_t begin, std::size_t size);
    /// The area that has all of it.
    [[nodiscard]] area* find(std::uintptr_t begin, std::size_t size);
    template <class F>
    void for_each_polled(const F& f) {
        for (const auto& [begin, a] : areas_)
            if (a->is_polled(0, a->size())) f(*a);
    }

private:
    std::map<std::uintptr_t, std::unique_ptr<area>> areas_;
    std::array<area*, 4> recent_{};  // of these, the last that were found
    std::size_t next_ = 0;
};

}  // namespace ptx
