// SPDX-License-Identifier: Apache-2.0
// Blocks of a pool that were freed on streams which haven't got there: in batches, each behind one point.
//
//   gpushare::pool_pending<stream::point> pending;
//   if (auto* b = pending.make()) { b->point = s.record();   b->blocks.push(block);   pending.add(*b); }
//   pending.collect(fit, reached);     // reached: batches whose points are to be destroyed under no lock, then dropped
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/memory/detail/pool_block.hpp>
#include <gpushare/memory/detail/pool_fit.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Not thread-safe. Calls no function of a point but reached().
template <timeline_point Point>
class pool_pending {
public:
    struct batch {
        batch* next = nullptr;
        Point point{};
        pool_chain blocks;
        const void* by = nullptr;  // whoever may use the blocks before the point is reached
    };
    using batches = detail::fifo<batch>;

    /// Batches whose points were reached. Declared before the lock of the store is taken, so that points are destroyed
    /// behind it.
    template <class Store>
    struct spent {
        explicit spent(Store& s) noexcept : store(s) {}
        spent(const spent&) = delete;
        spent& operator=(const spent&) = delete;
        ~spent() {
            if (batches.empty()) return;
            for (auto* b = batches.front(); b != nullptr; b = b->next) b->point = Point{};
            const auto lock = store.locked();
            while (auto* b = batches.pop()) store.pending_.drop(*b);
        }

        Store& store;
        detail::fifo<batch> batches;
    };

    /// Null if the host has no memory for one.
    [[nodiscard]] batch* make() noexcept {
        try {
            return &made_.acquire();
        } catch (...) {
            return nullptr;
        }
    }
    void drop(batch& b) noexcept {
        b.by = nullptr;
        made_.release(b);
    }

    void add(batch& b) noexcept { open_.push(b); }

    /// Gives the blocks of all batches whose points are reached to `fit`, and these batches to `reached`.
    void collect(pool_fit& fit, batches& reached) noexcept {
        batches open(std::move(open_));
        while (batch* const b = open.pop()) {
            if (!b->point.reached()) {
                open_.push(*b);
                continue;
            }
            while (!b->blocks.empty()) fit.give(b->blocks.pop());
            reached.push(*b);
        }
    }

    /// A block that `by` freed, reached or not; null if none fits. Linear.
    [[nodiscard]] pool_block* take(const void* by, std::uint64_t least, std::size_t alignment) noexcept {
        for (auto* b = open_.front(); b != nullptr; b = b->next)
            if (b->by == by)
                if (pool_block* const found = b->blocks.take(least, alignment)) return found;
        return nullptr;
    }
    /// Nobody may any more.
    void forget(const void* by) noexcept {
        for (auto* b = open_.front(); b != nullptr; b = b->next)
            if (b->by == by) b->by = nullptr;
    }

    [[nodiscard]] std::uint64_t bytes() const noexcept {
        std::uint64_t total = 0;
        for (const auto* b = open_.front(); b != nullptr; b = b->next) total += b->blocks.bytes();
        return total;
    }
    /// A copy of the oldest point; a reached one if there is none.
    [[nodiscard]] Point first() const { return open_.empty() ? Point{} : open_.front()->point; }
    [[nodiscard]] bool empty() const noexcept { return open_.empty(); }

private:
    detail::pool<batch> made_;
    batches open_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
