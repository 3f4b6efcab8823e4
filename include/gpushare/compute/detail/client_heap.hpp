// SPDX-License-Identifier: Apache-2.0
// The waiting clients in the order in which a policy serves them: the highest level first, and
// within it the smallest key. A part of the policies.
//
//   detail::client_heap waiting;      waiting.reserve(10'000);  // the only call that allocates
//   waiting.put(index, priority{1}, key);    if (!waiting.empty()) serve(waiting.first());    waiting.drop(index);
//
// The heap has four children per node: it is half as deep as a binary heap, and the four children
// are stored side by side with their keys. The heap knows each client's position, so any client is
// moved or removed in O(log waiting).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include <gpushare/config.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A value; not thread-safe. Indices are below the reserved number. Equal keys are ordered by
/// index.
class client_heap {
public:
    /// Makes room for clients with indices below `clients`. Throws std::bad_alloc; then nothing has
    /// changed.
    void reserve(std::size_t clients) {
        if (clients <= places_.size()) return;
        heap_.resize(clients);
        places_.resize(clients, nowhere);
    }

    [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] bool contains(std::uint32_t index) const noexcept { return places_[index] != nowhere; }
    /// The index of the first client; the heap must not be empty.
    [[nodiscard]] std::uint32_t first() const noexcept { return heap_.front().index; }
    [[nodiscard]] std::int64_t first_key() const noexcept { return heap_.front().key; }

    /// Adds the client, or moves it to the place of its new level and key.
    void put(std::uint32_t index, priority level, std::int64_t key) noexcept {
        auto at = places_[index];
        if (at == nowhere) at = size_++;
        // The usual case of a gate that isn't contended.
        if (size_ == 1) return set(0, {key, level.level, index});
        settle(at, {key, level.level, index});
    }

    /// Removes the client; does nothing if it isn't in the heap.
    void drop(std::uint32_t index) noexcept {
        const auto at = places_[index];
        if (at == nowhere) return;
        places_[index] = nowhere;
        if (at != --size_) settle(at, heap_[size_]);
    }

private:
    static constexpr std::uint32_t nowhere = std::numeric_limits<std::uint32_t>::max();
    // Passed by value in two registers: if it were written to memory in parts and read back as a
    // whole, the read would stall.
    struct entry {
        std::int64_t key = 0;
        std::int32_t level = 0;
        std::uint32_t index = 0;
    };

    [[nodiscard]] static bool before(const entry& a, const entry& b) noexcept {
        if (a.level != b.level) return a.level > b.level;
        return a.key != b.key ? a.key < b.key : a.index < b.index;
    }

    void set(std::size_t at, entry e) noexcept {
        heap_[at] = e;
        places_[e.index] = static_cast<std::uint32_t>(at);
    }

    // Moves the hole at `at` to the place of `e`, and fills it with `e`.
    void settle(std::size_t at, entry e) noexcept {
        while (at > 0 && before(e, heap_[(at - 1) / 4])) {
            set(at, heap_[(at - 1) / 4]);
            at = (at - 1) / 4;
        }
        for (;;) {
            const auto child = 4 * at + 1;
            if (child >= size_) break;
            auto first = child;
            const auto end = child + 4 < size_ ? child + 4 : size_;
            for (auto other = child + 1; other < end; ++other)
                if (before(heap_[other], heap_[first])) first = other;
            if (!before(heap_[first], e)) break;
            set(at, heap_[first]);
            at = first;
        }
        set(at, e);
    }

    plain_list<entry> heap_;  // only the first `size_` entries are in use
    plain_list<std::uint32_t> places_;
    std::uint32_t size_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
