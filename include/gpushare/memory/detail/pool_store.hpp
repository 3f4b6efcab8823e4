// SPDX-License-Identifier: Apache-2.0
// All of a pool but its upstream: the ranges it holds, the workers that keep blocks of them, and what was freed on
// streams that haven't got there. pool_resource is made of it; use that.
#pragma once

#include <algorithm>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/memory/detail/pool_block.hpp>
#include <gpushare/memory/detail/pool_fit.hpp>
#include <gpushare/memory/detail/pool_index.hpp>
#include <gpushare/memory/detail/pool_line.hpp>
#include <gpushare/memory/detail/pool_parts.hpp>
#include <gpushare/memory/detail/pool_pending.hpp>
#include <gpushare/memory/detail/pool_segments.hpp>
#include <gpushare/memory/detail/pool_shelves.hpp>
#include <gpushare/memory/pool_usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {
template <timeline_point Point>
struct pool_waiter;
}

/// Thread-safe. Points are recorded and destroyed under no lock.
template <timeline_point Point>
class pool_store {
public:
    using worker = pool_worker<Point>;

    pool_store() { workers_.push_back(&depot_); }

    [[nodiscard]] const pool_index& index() const noexcept { return fit_.index(); }

    // --- workers

    /// Throws std::bad_alloc.
    void join(worker& w) {
        const auto lock = locked();
        workers_.push_back(&w);
        w.shelves.keep(line_.size() == 0);
    }
    /// Empties the worker's shelves. What can't be recorded on its stream stays out of use for as long as the store.
    void leave(worker& w) noexcept {
        flush(w);
        auto lock = locked();
        changed_.wait(lock, [&] { return w.recording == 0; });
        stranded_.append(w.unrecorded);
        pending_.forget(&w);
        requested_ += w.shelves.requested();
        std::erase(workers_, &w);
    }
    /// Empties the worker's shelves now.
    void flush(worker& w) noexcept {
        spent done(*this);
        auto lock = locked();
        gather(w);
        record(lock, [&](const worker& other) { return &other == &w; });
        collect(done);
    }
    /// No point is recorded on the worker's stream until as many resumes. Waits for those who record.
    void pause(worker& w) noexcept {
        auto lock = locked();
        ++w.paused;
        changed_.wait(lock, [&] { return w.recording == 0; });
    }
    void resume(worker& w) noexcept {
        const auto lock = locked();
        --w.paused;
        line_.tell();
    }

    // --- those who wait: see pool_waiters.hpp

    /// Whoever comes later and doesn't wait goes without.
    [[nodiscard]] std::size_t waiting() const noexcept { return line_.size(); }
    void join(pool_place& p) noexcept {
        const auto lock = locked();
        if (line_.join(p)) keep(false);  // what is freed from now on is for those who wait
    }
    void leave(pool_place& p) noexcept {
        const auto lock = locked();
        if (line_.leave(p)) keep(true);
    }

    // --- blocks

    /// `size` bytes in a bounded number of steps, or null.
    [[nodiscard]] pool_block* take(const pool_request& r) noexcept {
        const auto lock = locked();
        return counted(detail::quietly([&] { return fit_.take(r.size, r.alignment); }), r);
    }
    /// Of what other workers had too much of, or null; and some more onto the shelf of this one.
    [[nodiscard]] pool_block* take_from_depot(const pool_request& r, worker& own) noexcept {
        if (r.size > pool_shelves::largest * pool_granule) return nullptr;
        pool_block* const b = depot_.shelves.take(r.least / pool_granule, r.alignment, r.asked);
        if (b != nullptr) depot_.shelves.share(r.least / pool_granule, own.shelves);
        return b;
    }

    /// Of what is free, or what `own` has freed on its stream and may use at once, or streams have reached: leaves the
    /// caches alone.
    [[nodiscard]] pool_block* collect_and_take(const pool_request& r, worker* own) noexcept {
        spent done(*this);
        const auto lock = locked();
        collect(done);
        return counted(take_any(r, own), r);
    }
    /// Of one block that a cache keeps, or else of what comes together when all caches are emptied.
    [[nodiscard]] pool_block* reclaim_and_take(const pool_request& r, worker* own) noexcept {
        spent done(*this);
        auto lock = locked();
        if (pool_block* const b = take_kept(r)) return counted(b, r);
        reclaim(lock, done);
        return counted(take_any(r, own), r);
    }
    /// Whether caches keep less than `each` on average.
    [[nodiscard]] bool caches_keep_less(bytes each) const noexcept {
        const auto lock = locked();
        bytes kept;
        for (const worker* const w : workers_) kept += w->shelves.kept();
        return kept < each * (workers_.size() - 1);
    }

    /// The last word, once no memory is on its way between pool and upstream. `seen` is what changes() was before the
    /// upstream was asked. Null and false: it doesn't fit; null and true: something has come in between, try again.
    [[nodiscard]] std::pair<pool_block*, bool> settle_and_take(const pool_request& r, worker* own,
                                                               std::uint64_t seen) noexcept {
        spent done(*this);
        auto lock = locked();
        changed_.wait(lock, [&] { return moving_ == 0; });
        for (worker* const w : workers_) gather(*w);
        collect(done);
        pool_block* const b = counted(take_any(r, own), r);
        return {b, b == nullptr && changes_ != seen};
    }

    /// Frees a block: unknown_block or wrong_size, changing nothing, if it isn't out like that.
    errc free(void* p, std::size_t size, std::size_t alignment) noexcept {
        const auto lock = locked();
        const auto [why, block, shelf] = fit_.index().claim(p, size, alignment);
        if (why != errc::none) return why;
        uncount(size);
        fit_.give(*block);
        line_.tell();
        return errc::none;
    }
    /// As free, but once `point` is reached. Waits for it if the host has no memory to remember it.
    errc free_after(const Point& point, void* p, std::size_t size, std::size_t alignment) noexcept {
        if (!point.reached()) {
            const auto lock = locked();
            if (auto* const b = pending_.make()) {
                const auto [why, block, shelf] = fit_.index().claim(p, size, alignment);
                if (why != errc::none) {
                    pending_.drop(*b);
                    return why;
                }
                b->point = point;
                b->blocks.push(*block);
                pending_.add(*b);
                uncount(size);
                line_.tell();  // to wait for the point
                return errc::none;
            }
        }
        point.wait(never);
        return free(p, size, alignment);
    }
    /// Takes a block for which its worker's shelf has no room. Makes some, for the next ones.
    void give_from(worker& w, std::uint32_t shelf, pool_block& block, std::size_t size) noexcept {
        const auto lock = locked();  // whoever empties all shelves must not miss what is between two of them
        uncount(size);
        pool_chain out;
        out.push(block);
        if (shelf < pool_shelves::shelves) w.shelves.take_half(shelf, [&](pool_block& kept) { out.push(kept); });
        if (w.record == nullptr) out = depot_.shelves.stock(out);
        while (!out.empty()) release(w, out.pop());
        line_.tell();
    }

    // --- ranges, and their ways from and to the upstream. Between begin_move and end_move the memory is neither here
    // --- nor there, and nobody is refused for want of it.

    [[nodiscard]] std::uint64_t changes() const noexcept {
        const auto lock = locked();
        return changes_;
    }
    void begin_move() noexcept {
        const auto lock = locked();
        ++moving_;
    }
    void end_move(bool changed) noexcept {
        const auto lock = locked();
        --moving_;
        changes_ += changed ? 1 : 0;
        changed_.notify_all();
        if (changed) line_.tell();
    }

    /// Takes in a range, and a block of `size` bytes of it, so that nobody else gets there first.
    /// Throws std::bad_alloc, and then nothing has changed.
    [[nodiscard]] pool_block& add(const pool_segment& s, std::uint64_t size, const pool_request& r) {
        const auto lock = locked();
        pool_block& whole = segments_.add(fit_, s);
        try {
            return *counted(&fit_.carve(whole, size, r.alignment), r);
        } catch (...) {
            (void)segments_.remove(fit_, whole);
            throw;
        }
    }

    /// Takes out a range in which nothing is, and begins its move, if more than `target` bytes are held. An empty
    /// segment otherwise.
    [[nodiscard]] pool_segment remove_empty(std::uint64_t target) noexcept {
        const auto lock = locked();
        const pool_segment s = segments_.remove_empty(fit_, target);
        if (s.begin != nullptr) ++moving_;
        return s;
    }
    /// Any range, whatever is in it: for the end of the pool. An empty segment when there are no more.
    [[nodiscard]] pool_segment remove_any() noexcept {
        const auto lock = locked();
        return segments_.remove_any();
    }

    /// Empties all shelves and takes back what streams have reached.
    void reclaim() noexcept {
        spent done(*this);
        auto lock = locked();
        reclaim(lock, done);
    }

    /// Waits until `deadline` for what was freed on streams. False if some of it is left.
    bool drain(instant deadline) {
        for (;;) {
            reclaim();
            Point next;
            {
                const auto lock = locked();
                if (pending_.empty())
                    return std::ranges::all_of(workers_, [](const worker* w) { return w->unrecorded.empty(); });
                next = pending_.first();
            }
            if (!next.wait(deadline)) return false;
        }
    }

    [[nodiscard]] pool_usage usage() const noexcept {
        const auto lock = locked();
        std::uint64_t cached = 0, pending = pending_.bytes() + stranded_.bytes() + recorded_now_;
        auto requested = requested_;
        for (const worker* const w : workers_) {
            w->shelves.for_each([&](const pool_block& kept) { cached += kept.size; });
            requested += w->shelves.requested();
            pending += w->unrecorded.bytes();
        }
        return {.reserved = bytes{segments_.held()},
                .used = bytes{segments_.held() - fit_.free_bytes() - cached - pending},
                .requested = bytes{static_cast<std::uint64_t>(std::max<std::int64_t>(requested, 0))},
                .cached = bytes{cached},
                .pending = bytes{pending},
                .largest_free = bytes{fit_.largest_free()},
                .peak_reserved = bytes{segments_.peak()},
                .segments = segments_.count()};
    }

private:
    friend struct detail::pool_waiter<Point>;
    using spent = typename pool_pending<Point>::template spent<pool_store>;
    friend spent;

    [[nodiscard]] std::unique_lock<std::mutex> locked() const noexcept { return detail::lock_soon(mutex_); }

    // Cutting a block may have renewed the index. Caches read it under the locks of their shelves.
    [[nodiscard]] pool_block* counted(pool_block* b, const pool_request& r) noexcept {
        if (fit_.index().has_retired()) {
            for (worker* const w : workers_) w->shelves.pass();
            fit_.index().drop_retired();
        }
        if (b != nullptr) requested_ += static_cast<std::int64_t>(r.asked);
        return b;
    }
    void uncount(std::size_t asked) noexcept { requested_ -= static_cast<std::int64_t>(asked); }

    [[nodiscard]] pool_block* take_any(const pool_request& r, worker* own) noexcept {
        pool_block* const b = detail::quietly([&] { return fit_.take_any(r.least, r.alignment); });
        return b != nullptr ? b : take_own(own, r);
    }
    // What a worker freed on its stream is in order before whatever it enqueues next, reached or not.
    [[nodiscard]] pool_block* take_own(worker* own, const pool_request& r) noexcept {
        if (own == nullptr) return nullptr;
        pool_block* const b = own->unrecorded.take(r.least, r.alignment);
        return b != nullptr ? b : pending_.take(own, r.least, r.alignment);
    }

    // Out of one block that is on a shelf: what spares the workers the loss of all.
    [[nodiscard]] pool_block* take_kept(const pool_request& r) noexcept {
        const auto slack = std::max(r.alignment, pool_granule) - pool_granule;
        for (worker* const w : workers_) {
            if (w->record != nullptr) continue;
            if (pool_block* const kept = w->shelves.take_bigger((r.size + slack) / pool_granule)) {
                fit_.give(*kept);
                return detail::quietly([&] { return fit_.take(r.size, r.alignment); });
            }
        }
        return nullptr;
    }

    void release(worker& w, pool_block& b) noexcept {
        if (w.record == nullptr)
            fit_.give(b);
        else
            w.unrecorded.push(b);
    }
    void gather(worker& w) noexcept {
        w.shelves.take_all([&](pool_block& kept) {
            release(w, kept);
            line_.tell();
        });
    }
    void collect(spent& done) noexcept {
        pending_.collect(fit_, done.batches);
        if (!done.batches.empty()) line_.tell();
    }
    void keep(bool more) noexcept {
        for (worker* const w : workers_) w->shelves.keep(more);
    }

    void reclaim(std::unique_lock<std::mutex>& lock, spent& done) noexcept {
        for (worker* const w : workers_) gather(*w);
        record(lock, [](const worker&) { return true; });
        collect(done);
    }

    // One point for all that a stream has freed. While it is recorded, without the lock, the worker may free more: only
    // what was taken out before is behind the point.
    template <std::predicate<const worker&> F>
    void record(std::unique_lock<std::mutex>& lock, F wanted) noexcept {
        const auto pass = ++passes_;
        for (;;) {
            const auto at = std::ranges::find_if(workers_, [&](const worker* w) {
                return !w->unrecorded.empty() && w->paused == 0 && w->failed_in < pass && wanted(*w);
            });
            if (at == workers_.end()) return;
            worker& w = **at;
            auto* const b = pending_.make();
            if (b == nullptr) return;
            b->by = &w;
            b->blocks = w.unrecorded.take_all();
            const auto size = b->blocks.bytes();
            recorded_now_ += size;
            ++w.recording;
            ++moving_;
            lock.unlock();
            const bool recorded = w.try_record(b->point);
            lock.lock();
            recorded_now_ -= size;
            --w.recording;
            --moving_;
            changed_.notify_all();
            if (recorded) {
                pending_.add(*b);
                line_.tell();
            } else {
                w.unrecorded.append(b->blocks);
                w.failed_in = std::max(w.failed_in, pass);
                pending_.drop(*b);
            }
        }
    }
    mutable std::mutex mutex_;         // before the lock of any shelves
    std::condition_variable changed_;  // moving_ or a worker's `recording` went down
    pool_fit fit_;
    pool_pending<Point> pending_;
    pool_segments segments_;
    pool_line line_;
    std::vector<worker*> workers_;
    worker depot_;                    // for all: what a worker has too much of, as others may have too little
    pool_chain stranded_;             // freed on streams that could not be recorded before they were gone
    std::uint64_t recorded_now_ = 0;  // bytes in batches that are being recorded
    std::int64_t requested_ = 0;      // but for what workers count
    unsigned moving_ = 0;             // moves between here and the upstream, and batches being recorded
    std::uint64_t changes_ = 0;       // moves that moved something
    std::uint64_t passes_ = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
