// SPDX-License-Identifier: Apache-2.0
// A ring of the latest records of a trace, which any thread may write, in memory that is allocated
// once. Writing a record takes no lock, doesn't allocate and never waits. A part of
// timeline_trace.hpp.
//
//   detail::trace_ring ring;    ring.reserve(65536);    ring.push({...});
//   ring.for_each([](const detail::trace_record& r) { ... });                  // oldest first
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

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
    }

    /// Writes a record over the record that is a whole ring older. If two threads are a whole ring
    /// apart in the same slot, one of their records is dropped and counted as lost: the older one
    /// if it comes last, and the younger one if it comes while the older one is being written.
    void push(const trace_record& r) noexcept {
        if (size_ != 0) put(claim(), r);
    }
    /// The two steps of push(). A test lets other threads write in between. The ring has room.
    [[nodiscard]] std::uint64_t claim() noexcept {
        // Relaxed: the number orders nothing; the slot itself publishes the record.
        return next_.fetch_add(1, std::memory_order_relaxed);
    }
    void put(std::uint64_t number, const trace_record& r) noexcept {
        slot& s = slots_[number % size_];
        if (!s.take(number, number < size_ ? none : number - size_)) return;
        s.fill({static_cast<std::uint64_t>(r.kind), (std::uint64_t{r.device} << 32U) | r.tenant,
                static_cast<std::uint64_t>(r.begin), static_cast<std::uint64_t>(r.end)});
        s.give(number);
    }

    /// Visits the existing records, the oldest first. Records that are made in the meantime may be
    /// missed. Writers don't wait for the visit, and lose no record to it. Throws std::bad_alloc.
    template <std::invocable<const trace_record&> F>
    void for_each(F f) const {
        std::vector<copied> found;
        found.reserve(size_);
        for (std::size_t i = 0; i < size_; ++i)
            if (copied c; slots_[i].copy(c)) found.push_back(c);
        // Sorted, because a slot has an older record than its neighbours if its last record was
        // dropped.
        std::ranges::sort(found, {}, &copied::turn);
        for (const auto& [turn, content] : found)
            f({static_cast<trace_kind>(content[0]), static_cast<std::uint32_t>(content[1] >> 32U),
               static_cast<std::uint32_t>(content[1]), static_cast<std::int64_t>(content[2]),
               static_cast<std::int64_t>(content[3])});
    }

    [[nodiscard]] std::size_t capacity() const noexcept { return size_; }
    /// Records that were overwritten or dropped since reserve(). Of the records of a slot, all but
    /// one are lost, so the number of records says how many. Once no push() is under way, for_each
    /// visits all other records.
    [[nodiscard]] std::uint64_t lost() const noexcept {
        // Relaxed: a count, by which no thread finds anything.
        const auto made = next_.load(std::memory_order_relaxed);
        return made > size_ ? made - size_ : 0;
    }

private:
    static constexpr std::uint64_t none = ~std::uint64_t{0};
    using words = std::array<std::uint64_t, 4>;
    struct copied {
        std::uint64_t turn = 0;
        words content{};
    };

    // The latest record that a thread has written here. A writer marks the slot while it writes, so
    // that no second writer begins, and so that a reader that copies meanwhile notices.
    class slot {
    public:
        // Begins to write. Refuses if another thread is writing, or has written a later record.
        // `before` is the number of the record that is a whole ring older, or none.
        [[nodiscard]] bool take(std::uint64_t number, std::uint64_t before) noexcept {
            // Acquire: pairs with give(), so that these words replace those of the writer before.
            // Relaxed for a failure: this thread then only compares numbers.
            std::uint64_t seen = turn_of(before);
            const auto mark = [&] {
                return turn_.compare_exchange_strong(seen, turn_of(number) | writing, std::memory_order_acquire,
                                                     std::memory_order_relaxed);
            };
            // The first guess is nearly always right, and costs less than a load before it.
            if (mark()) return true;
            return (seen & writing) == 0 && seen < turn_of(number) && mark();
        }
        void fill(const words& from) noexcept {
            // Release: a reader that sees one of these words also sees the mark of take().
            for (std::size_t i = 0; i < from.size(); ++i) content_[i].store(from[i], std::memory_order_release);
        }
        // Release: a reader or writer that sees the number also sees the words.
        void give(std::uint64_t number) noexcept { turn_.store(turn_of(number), std::memory_order_release); }

        // Copies the record. Fails if there is none, or if a writer writes meanwhile.
        [[nodiscard]] bool copy(copied& to) const noexcept {
            // Acquire: pairs with give(), so that the words are at least as late as the number.
            to.turn = turn_.load(std::memory_order_acquire);
            if (to.turn == 0 || (to.turn & writing) != 0) return false;
            // Acquire: if a word is of a later writer, the load below sees that writer's mark or
            // its number, which differ from `turn`.
            for (std::size_t i = 0; i < to.content.size(); ++i)
                to.content[i] = content_[i].load(std::memory_order_acquire);
            // Relaxed: the loads above come first, and nothing is read after this one.
            return turn_.load(std::memory_order_relaxed) == to.turn;
        }

    private:
        static constexpr std::uint64_t writing = 1;
        // 0, of `none`, is a slot without a record. No number comes twice, so an equal turn means
        // equal words.
        [[nodiscard]] static constexpr std::uint64_t turn_of(std::uint64_t number) noexcept { return (number + 1) * 2; }
        std::atomic<std::uint64_t> turn_{0};
        std::array<std::atomic<std::uint64_t>, 4> content_{};
    };

    std::unique_ptr<slot[]> slots_;
    std::size_t size_ = 0;
    std::atomic<std::uint64_t> next_{0};
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
