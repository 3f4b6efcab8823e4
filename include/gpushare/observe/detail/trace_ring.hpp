// SPDX-License-Identifier: Apache-2.0
// A ring of the latest records of a trace, which any thread may write, in memory that is allocated
// once. Writing a record takes no lock, doesn't allocate and never waits. A part of
// timeline_trace.hpp.
//
//   detail::trace_ring ring;    ring.reserve(65536);    ring.push({...});
//   ring.for_each([](const detail::trace_record& r) { ... });                  // oldest first
#pragma once

#include <array>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

enum class trace_kind : std::uint8_t { wait, permit, kernel, bound, violation };

struct trace_record {
    trace_kind kind{};
    std::uint32_t device = 0, tenant = 0;
    // Ns on the trace's clock. A bound and a violation have their time in `begin` and their length
    // in `end`.
    std::int64_t begin = 0, end = 0;
};

class trace_ring {
public:
    /// Makes room for `records`, and drops existing records. Must not overlap any other call.
    void reserve(std::size_t records) {
        slots_ = std::make_unique<slot[]>(records);
        size_ = records;
        next_.store(0, std::memory_order_relaxed);
        dropped_.store(0, std::memory_order_relaxed);
    }

    /// Writes a record. The record is dropped, and counted as lost, if its slot is being read, or
    /// is being written by a thread that is a whole ring behind.
    void push(const trace_record& r) noexcept {
        if (size_ == 0) return;
        // Relaxed: the number orders nothing; the slot itself publishes the record.
        const auto number = next_.fetch_add(1, std::memory_order_relaxed);
        slot& s = slots_[number % size_];
        if (!s.take()) {
            dropped_.fetch_add(1, std::memory_order_relaxed);
            return;
        }
        s.words = {number + 1, static_cast<std::uint64_t>(r.kind), (std::uint64_t{r.device} << 32U) | r.tenant,
                   static_cast<std::uint64_t>(r.begin), static_cast<std::uint64_t>(r.end)};
        s.give();
    }

    /// Visits the existing records, the oldest first. Records that are made in the meantime may be
    /// missed.
    template <std::invocable<const trace_record&> F>
    void for_each(F f) {
        const auto end = next_.load(std::memory_order_relaxed);
        for (auto number = end > size_ ? end - size_ : 0; number < end; ++number) {
            slot& s = slots_[number % size_];
            if (!s.take()) continue;
            const auto words = s.words;
            s.give();
            if (words[0] != number + 1) continue;  // dropped or overwritten
            f({static_cast<trace_kind>(words[1]), static_cast<std::uint32_t>(words[2] >> 32U),
               static_cast<std::uint32_t>(words[2]), static_cast<std::int64_t>(words[3]),
               static_cast<std::int64_t>(words[4])});
        }
    }

    [[nodiscard]] std::size_t capacity() const noexcept { return size_; }
    /// Records that were overwritten or dropped since reserve().
    [[nodiscard]] std::uint64_t lost() const noexcept {
        const auto made = next_.load(std::memory_order_relaxed);
        return (made > size_ ? made - size_ : 0) + dropped_.load(std::memory_order_relaxed);
    }

private:
    struct slot {
        std::atomic<bool> taken{false};
        std::array<std::uint64_t, 5> words{};

        // Acquire, so that the owner sees the writes of the owner before; release, so that the next
        // owner sees this owner's writes.
        [[nodiscard]] bool take() noexcept { return !taken.exchange(true, std::memory_order_acquire); }
        void give() noexcept { taken.store(false, std::memory_order_release); }
    };

    std::unique_ptr<slot[]> slots_;
    std::size_t size_ = 0;
    std::atomic<std::uint64_t> next_{0}, dropped_{0};
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
