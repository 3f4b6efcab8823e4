// SPDX-License-Identifier: Apache-2.0
// A pool without its upstream: the ranges that it holds, the workers' caches, and the blocks that
// were freed on streams which haven't reached the free. Programs use pool_resource, which contains
// it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/memory/detail/pool_bins.hpp>
#include <gpushare/memory/detail/pool_block.hpp>
#include <gpushare/memory/detail/pool_fit.hpp>
#include <gpushare/memory/detail/pool_index.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Blocks that were freed on streams which haven't reached the free: in batches, each behind one
/// point. Not thread-safe. Calls no function of a point but reached().
template <timeline_point Point>
class pool_pending {
public:
    struct batch {
        batch* next = nullptr;
        Point point{};
        pool_chain blocks;
        const void* by = nullptr;  // the worker that may use the blocks before the point is reached
    };
    using batches = detail::fifo<batch>;

    /// Batches whose points were reached. Declare it before taking the lock of the store, so that
    /// points are destroyed after the lock is released.
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

    /// Gives the blocks of all batches whose points are reached to `fit`, and these batches to
    /// `reached`.
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

    /// A block that `by` freed, whether or not the point is reached; null if none fits. Linear.
    [[nodiscard]] pool_block* take(const void* by, const pool_request& r) noexcept {
        for (auto* b = open_.front(); b != nullptr; b = b->next)
            if (b->by == by)
                if (pool_block* const found = b->blocks.take(r)) return found;
        return nullptr;
    }
    /// From now on no worker may use these blocks early.
    void forget(const void* by) noexcept {
        for (auto* b = open_.front(); b != nullptr; b = b->next)
            if (b->by == by) b->by = nullptr;
    }

    [[nodiscard]] std::uint64_t bytes() const noexcept {
        std::uint64_t total = 0;
        for (const auto* b = open_.front(); b != nullptr; b = b->next) total += b->blocks.bytes();
        return total;
    }
    /// Copies as many of the oldest points as there is room for. Returns how many.
    [[nodiscard]] std::size_t oldest(std::span<Point> into) const {
        std::size_t n = 0;
        for (const auto* b = open_.front(); b != nullptr && n < into.size(); b = b->next) into[n++] = b->point;
        return n;
    }
    /// A copy of the oldest point; a reached one if there is none.
    [[nodiscard]] Point first() const { return open_.empty() ? Point{} : open_.front()->point; }
    [[nodiscard]] bool empty() const noexcept { return open_.empty(); }

private:
    detail::pool<batch> made_;
    batches open_;
};

/// One user of caches: its bins, and its stream if it has one.
template <timeline_point Point>
struct pool_worker {
    explicit pool_worker(void* on = nullptr, Point (*point_of)(void* stream) = nullptr)
        : stream(on), record(point_of) {}

    /// Records a point on the stream. Returns false, without a point, if recording threw.
    [[nodiscard]] bool try_record(Point& point) const noexcept {
        try {
            point = record(stream);
            return true;
        } catch (...) {
            return false;
        }
    }

    pool_bins bins;
    void* const stream;
    Point (*const record)(void* stream);

    // Under the lock of the store.
    pool_chain unrecorded;        // has left the bins; a point must be recorded behind it
    unsigned recording = 0;       // threads that record on the stream right now
    unsigned paused = 0;          // how many pauses exist: while there is one, nothing is recorded
    std::uint64_t failed_in = 0;  // the last pass in which recording threw
};

/// A range on its way between the pool and its upstream. It lives on the stack of the thread that
/// moves it, under the lock of the pool.
struct pool_move {
    template <class Upstream>
    explicit pool_move(const Upstream& upstream) noexcept : inside(upstream.in_hook(by)) {}

    pool_move* next = nullptr;
    std::thread::id by = std::this_thread::get_id();
    bool inside;  // begun by a hook, and so it doesn't ask further hooks
};

/// A thread that waits. Under the lock of the pool.
struct pool_wait_entry {
    pool_wait_entry* next = nullptr;
    bool told = false;              // since its last try
    std::condition_variable woken;  // with the lock of the pool
};

/// The waiters for memory of a pool, first come first served; pool_resource.hpp has the wait. Only
/// the first one tries. A thread that frees memory notifies it, and a thread that leaves notifies
/// the next one. Under the lock of the pool, except for size().
class pool_wait_queue {
public:
    [[nodiscard]] bool first(const pool_wait_entry& p) const noexcept { return waiters_.front() == &p; }

    /// Relaxed: a hint for later callers. A caller that doesn't see a waiter counts as having come
    /// before it.
    [[nodiscard]] std::size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

    /// Joins at the end. Returns true if no thread waited before.
    bool join(pool_wait_entry& p) noexcept {
        const bool first = waiters_.empty();
        waiters_.push(p);
        size_.fetch_add(1, std::memory_order_relaxed);
        if (first) tell();
        return first;
    }
    /// Returns true if no thread waits any more.
    bool leave(pool_wait_entry& p) noexcept {
        const bool was_first = first(p);
        waiters_.remove(p);
        size_.fetch_sub(1, std::memory_order_relaxed);
        if (was_first) tell();
        return waiters_.empty();
    }

    /// Wakes the first waiter: memory has come, or may come if the waiter waits for a stream.
    void tell() noexcept {
        if (waiters_.empty()) return;
        waiters_.front()->told = true;
        waiters_.front()->woken.notify_one();
    }

    /// Wakes all waiters: nothing will come.
    void tell_all() noexcept {
        for (auto* p = waiters_.front(); p != nullptr; p = p->next) {
            p->told = true;
            p->woken.notify_one();
        }
    }

private:
    detail::fifo<pool_wait_entry> waiters_;
    std::atomic<std::size_t> size_{0};
};

template <timeline_point Point>
struct pool_waiter;

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
        w.bins.keep(waiters_.size() == 0 && !stopped_);
    }
    /// Empties the worker's bins. Blocks for which its stream can't record a point stay out of use
    /// as long as the store lives.
    void leave(worker& w) noexcept {
        flush(w);
        auto lock = locked();
        changed_.wait(lock, [&] { return w.recording == 0; });
        stranded_.append(w.unrecorded);
        pending_.forget(&w);
        traffic_ += w.bins.traffic();
        erase_equal(workers_, &w);
    }
    /// Empties the worker's bins now.
    void flush(worker& w) noexcept {
        spent done(*this);
        auto lock = locked();
        gather(w);
        record(lock, &w);
        collect(done);
    }
    /// Stops recording points on the worker's stream until resume() was called as often as pause().
    /// Waits for threads that are recording.
    void pause(worker& w) noexcept {
        auto lock = locked();
        ++w.paused;
        changed_.wait(lock, [&] { return w.recording == 0; });
    }
    void resume(worker& w) noexcept {
        const auto lock = locked();
        --w.paused;
        waiters_.tell();
    }

    // --- waiters: see pool_resource.hpp

    /// The number of waiters. While this isn't 0, later requests that don't wait are refused.
    [[nodiscard]] std::size_t waiting() const noexcept { return waiters_.size(); }
    void join(pool_wait_entry& p) noexcept {
        const auto lock = locked();
        if (waiters_.join(p)) keep(false);  // blocks freed from now on are for the waiters
    }
    void leave(pool_wait_entry& p) noexcept {
        const auto lock = locked();
        if (waiters_.leave(p)) keep(!stopped_);
    }

    // --- the end

    /// From now on the store allocates no block: all bins are empty and stay empty. Allocated
    /// blocks can still be freed.
    void stop() noexcept {
        spent done(*this);
        auto lock = locked();
        stop(lock, done);
    }
    /// The same, and frees are refused as well. True once no memory is on its way between pool and
    /// upstream, and all frees on streams are recorded. False if some is on its way at the
    /// deadline: its thread may be in a hook, which may take any time. False immediately if the
    /// caller is that thread.
    [[nodiscard]] bool close(instant deadline) noexcept {
        spent done(*this);
        auto lock = locked();
        closed_ = true;
        stop(lock, done);
        while (!moves_.empty() || recordings_ != 0)
            if (inside_move() || !wait_until(changed_, lock, deadline)) return false;
        return true;
    }
    [[nodiscard]] bool stopped() const noexcept {
        const auto lock = locked();
        return stopped_;
    }

    /// After stop(): takes back all allocated blocks, and enters them into `found`. False: a call
    /// between this store and its caller has a block that it has taken or is about to give back;
    /// another take_back() sees that block. Throws std::bad_alloc, and then nothing was taken back.
    [[nodiscard]] bool take_back(std::vector<leak>& found) {
        const auto lock = locked();
        std::size_t out = 0;
        segments_.for_each_block(fit_, [&](const pool_block& b) { out += b.tag.load(std::memory_order_relaxed) != 0; });
        found.reserve(found.size() + out);
        pool_chain taken;
        std::uint64_t elsewhere = 0;  // bytes that are neither out nor free
        segments_.for_each_block(fit_, [&](pool_block& b) {
            auto tag = b.tag.load(std::memory_order_relaxed);
            // Acquire: for the label. A block may come out meanwhile; `found` has no place for such
            // a block.
            if (tag == 0 || found.size() == found.capacity() ||
                !b.tag.compare_exchange_strong(tag, 0, std::memory_order_acquire)) {
                elsewhere += b.free ? 0 : b.size;
                return;
            }
            const auto [size, alignment] = pool_tag::asked(tag, b.begin);
            found.push_back({{b.begin, bytes{size}, alignment, {b.label, b.label_size}}, {}, {}});
            traffic_.back(size);
            taken.push(b);
        });
        while (!taken.empty()) fit_.give(taken.pop());
        return moves_.empty() && elsewhere == pending_bytes();
    }
    /// Forgets the ranges that still have blocks: their owner gives them back.
    void abandon() noexcept {
        while (remove_any().begin != nullptr) {
        }
    }

    // --- blocks

    /// `size` bytes in a bounded number of steps, or null.
    [[nodiscard]] pool_block* take(const pool_request& r) noexcept {
        const auto lock = locked();
        if (stopped_) [[unlikely]]
            return nullptr;
        return counted(take_soon(r), r);
    }
    /// Takes a block from other workers' surplus, or null; and moves some more into this worker's
    /// bin.
    [[nodiscard]] pool_block* take_from_depot(const pool_request& r, worker& own) noexcept {
        if (r.size > pool_bins::largest * pool_granule || r.own) return nullptr;
        pool_block* const b = depot_.bins.take(r.least / pool_granule, r.alignment, r.asked);
        if (b != nullptr) depot_.bins.share(r.least / pool_granule, own.bins);
        return b;
    }

    /// Takes from free blocks, from blocks that `own` has freed on its stream and may use
    /// immediately, or from blocks whose streams have reached the free. Leaves the caches alone.
    [[nodiscard]] pool_block* collect_and_take(const pool_request& r, worker* own) noexcept {
        spent done(*this);
        const auto lock = locked();
        collect(done);
        return stopped_ ? nullptr : counted(take_any(r, own), r);
    }
    /// Takes a block that a cache keeps, or else empties all caches and takes from the blocks that
    /// merge.
    [[nodiscard]] pool_block* reclaim_and_take(const pool_request& r, worker* own) noexcept {
        spent done(*this);
        auto lock = locked();
        if (stopped_) return nullptr;
        if (pool_block* const b = take_kept(r)) return counted(b, r);
        reclaim(lock, done);
        return stopped_ ? nullptr : counted(take_any(r, own), r);
    }
    /// Takes a block that a cache keeps, and leaves the others there.
    [[nodiscard]] pool_block* take_one_kept(const pool_request& r) noexcept {
        const auto lock = locked();
        return stopped_ ? nullptr : counted(take_kept(r), r);
    }
    /// Takes from all memory held, if at most `most` bytes are allocated then.
    [[nodiscard]] pool_block* take_within(pool_request r, std::uint64_t most) noexcept {
        spent done(*this);
        auto lock = locked();
        reclaim(lock, done);
        const auto taken = out_bytes();
        if (stopped_ || taken > most || most - taken < r.least) return nullptr;
        r.most = std::min(r.most, most - taken);
        return counted(take_any(r, nullptr, true), r);
    }
    /// Whether caches keep less than `each` on average.
    [[nodiscard]] bool caches_keep_less(bytes each) const noexcept {
        const auto lock = locked();
        bytes kept;
        for (const worker* const w : workers_) kept += w->bins.kept();
        return kept < each * (workers_.size() - 1);
    }

    /// The last attempt, once no memory is on its way between pool and upstream. There are two
    /// exceptions. A thread that is itself within a move, because a quota's hook was called from
    /// there, doesn't wait at all, since others may wait for it. And no thread waits for a move
    /// whose own thread is in a hook called from there, as `upstream` says: that thread holds no
    /// memory, and may wait for this thread. `seen` is the value of changes() before the upstream
    /// was asked. Null and false: the request doesn't fit. Null and true: something has changed in
    /// between, so try again.
    template <class Upstream>
    [[nodiscard]] std::pair<pool_block*, bool> settle_and_take(const pool_request& r, worker* own, std::uint64_t seen,
                                                               const Upstream& upstream) noexcept {
        spent done(*this);
        auto lock = locked();
        const auto settled = [&] {
            for (const auto* m = moves_.front(); m != nullptr; m = m->next)
                if (m->inside || !upstream.in_hook(m->by)) return false;
            return recordings_ == 0;
        };
        // polls, since the end of a hook isn't announced
        while (!settled() && !inside_move()) changed_.wait_for(lock, short_look_slice);
        if (stopped_) return {nullptr, false};
        for (worker* const w : workers_) gather(*w);
        collect(done);
        pool_block* const b = counted(take_any(r, own, true), r);
        return {b, b == nullptr && changes_ != seen};
    }

    /// The allocated block at `p`, as it was asked for.
    [[nodiscard]] std::optional<gpushare::block> find(void* p) const noexcept {
        const auto lock = locked();
        const pool_block* const b = fit_.index().find(p);
        const auto tag = b == nullptr ? 0 : b->tag.load(std::memory_order_relaxed);
        if (tag == 0) return std::nullopt;
        const auto [size, alignment] = pool_tag::asked(tag, p);
        return gpushare::block{p, bytes{size}, alignment, {}};
    }
    /// Frees a block. unknown_block or wrong_size, and nothing changes, if no such block is
    /// allocated.
    errc free(void* p, std::size_t size, std::size_t alignment) noexcept {
        const auto lock = locked();
        if (closed_) return errc::closed;
        const auto [why, block, bin] = fit_.index().claim(p, size, alignment);
        if (why != errc::none) return why;
        traffic_.back(size);
        fit_.give(*block);
        waiters_.tell();
        return errc::none;
    }
    /// As free, but once `point` is reached. If the host has no memory to remember the block, waits
    /// for the point. submission_failed, and the block stays allocated, if that wait fails.
    errc free_after(const Point& point, void* p, std::size_t size, std::size_t alignment) noexcept {
        if (!point.reached()) {
            const auto lock = locked();
            if (closed_) return errc::closed;
            if (auto* const b = pending_.make()) {
                const auto [why, block, bin] = fit_.index().claim(p, size, alignment);
                if (why != errc::none) {
                    pending_.drop(*b);
                    return why;
                }
                b->point = point;
                b->blocks.push(*block);
                pending_.add(*b);
                traffic_.back(size);
                waiters_.tell();  // so that a waiter waits for the point
                return errc::none;
            }
        }
        if (!await(point)) return errc::submission_failed;
        return free(p, size, alignment);
    }
    /// Takes a block for which its worker's bin has no room, and makes room there for later blocks.
    /// errc::closed if the pool is closed.
    errc give_from(worker& w, std::uint32_t bin, pool_block& block, std::size_t size) noexcept {
        // a thread that empties all bins must not miss a block between two of them
        const auto lock = locked();
        if (closed_) return errc::closed;
        traffic_.back(size);
        pool_chain out;
        out.push(block);
        if (bin < pool_bins::bins) w.bins.take_half(bin, [&](pool_block& kept) { out.push(kept); });
        if (w.record == nullptr && !block.own) out = depot_.bins.stock(out);
        while (!out.empty()) release(w, out.pop());
        waiters_.tell();
        return errc::none;
    }

    /// Takes back blocks whose streams have reached the free, and leaves the caches alone.
    void collect() noexcept {
        spent done(*this);
        const auto lock = locked();
        collect(done);
    }
    /// Waits until one of the points behind which blocks were freed is reached, or until
    /// `deadline`. False, immediately, if there is none. Throws what waiting for the points throws.
    bool wait_any(instant deadline) {
        std::array<Point, 64> open{};  // 64 at a time: a waiting thread comes back
        std::size_t n = 0;
        {
            const auto lock = locked();
            n = pending_.oldest(open);
        }
        if (n != 0) (void)Point::wait_any(std::span<const Point>(open.data(), n), deadline);
        return n != 0;
    }

    // --- ranges, and their ways from and to the upstream. Between begin_move and end_move, memory
    // is neither here nor there, and no request is refused for lack of this memory.

    [[nodiscard]] std::uint64_t changes() const noexcept {
        const auto lock = locked();
        return changes_;
    }
    void begin_move(pool_move& m) noexcept {
        const auto lock = locked();
        enlist(m);
    }
    void end_move(pool_move& m, bool changed) noexcept {
        const auto lock = locked();
        moves_.remove(m);
        changes_ += changed ? 1 : 0;
        changed_.notify_all();
        if (changed) waiters_.tell();
    }

    /// Adds a range, and takes a block of `size` bytes of it, so that no other thread gets that
    /// memory first. Null, and nothing has changed, if the pool was closed meanwhile. Throws
    /// std::bad_alloc, and then nothing has changed, either.
    [[nodiscard]] pool_block* add(const pool_segment& s, std::uint64_t size, const pool_request& r) {
        const auto lock = locked();
        if (stopped_) return nullptr;
        pool_block& whole = segments_.add(fit_, s, r.own);
        try {
            return counted(r.own ? &fit_.take_whole(whole) : &fit_.carve(whole, size, r.alignment), r);
        } catch (...) {
            (void)segments_.remove(fit_, whole);
            throw;
        }
    }

    /// Takes out an empty range, and begins its move, if more than `target` bytes are held. An
    /// empty segment otherwise.
    [[nodiscard]] pool_segment remove_empty(pool_move& m, std::uint64_t target) noexcept {
        const auto lock = locked();
        const pool_segment s = segments_.remove_empty(fit_, target);
        if (s.begin != nullptr) enlist(m);
        return s;
    }
    /// After remove_empty(): the upstream doesn't take the range back now, so it is the pool's
    /// again. Ends the move.
    void put_back(pool_move& m, const pool_segment& s) noexcept {
        const auto lock = locked();
        try {
            (void)segments_.add(fit_, s, s.own);
        } catch (...) {  // the host has no memory to remember it: it stays allocated
        }
        moves_.remove(m);
        changed_.notify_all();
    }
    /// The bytes of empty ranges.
    [[nodiscard]] std::uint64_t empty_bytes() const noexcept {
        const auto lock = locked();
        return fit_.empty_bytes();
    }
    /// Bytes of blocks beyond the bytes requested.
    [[nodiscard]] std::uint64_t rounding() const noexcept {
        const auto lock = locked();
        const auto traffic = all_traffic();
        const auto out = out_bytes() - std::min(out_bytes(), pending_bytes());
        return out - std::min(out, traffic.requested());
    }
    /// 0 unless the empty bytes are more than `least` and more than a `part`-th of the other bytes.
    /// Then the empty bytes beyond half of the larger limit.
    [[nodiscard]] std::uint64_t idle_beyond(std::uint64_t least, std::uint64_t part) const noexcept {
        const auto lock = locked();
        const auto idle = fit_.empty_bytes(), most = std::max(least, (segments_.held() - idle) / part);
        return idle > most ? idle - most / 2 : 0;
    }
    [[nodiscard]] std::uint64_t held() const noexcept {
        const auto lock = locked();
        return segments_.held();
    }
    /// Whether the store holds a range that is large enough for such a block.
    [[nodiscard]] bool could_hold(const pool_request& r) const noexcept {
        const auto lock = locked();
        return segments_.largest(fit_) >= r.least;
    }
    /// Removes any range, whatever it holds: for the end of the pool. Returns an empty segment if
    /// there are no more.
    [[nodiscard]] pool_segment remove_any() noexcept {
        const auto lock = locked();
        return segments_.remove_any(fit_);
    }

    /// Empties all bins and takes back what streams have reached.
    void reclaim() noexcept {
        spent done(*this);
        auto lock = locked();
        reclaim(lock, done);
    }

    /// Waits until `deadline` for blocks that were freed on streams. Returns false if some are
    /// left.
    bool drain(instant deadline) {
        for (;;) {
            reclaim();
            Point next;
            {
                auto lock = locked();
                if (pending_.empty() && recordings_ == 0)
                    return all_where(workers_, [](const worker* w) { return w->unrecorded.empty(); });
                if (pending_.empty()) {  // but another thread is recording a point just now
                    if (!wait_until(changed_, lock, deadline)) return false;
                    continue;
                }
                next = pending_.first();
            }
            if (!next.wait(deadline)) return false;
        }
    }

    [[nodiscard]] pool_usage usage() const noexcept {
        const auto lock = locked();
        if (closed_ && segments_.count() == 0) return {.peak_reserved = bytes{segments_.peak()}};
        const auto cached = cached_bytes(), pending = pending_bytes();
        const auto traffic = all_traffic();
        return {.reserved = bytes{segments_.held()},
                .used = bytes{segments_.held()} - bytes{fit_.free_bytes() + cached + pending},
                .requested = bytes{traffic.requested()},
                .cached = bytes{cached},
                .pending = bytes{pending},
                .largest_free = bytes{fit_.largest_free()},
                .peak_reserved = bytes{segments_.peak()},
                .segments = segments_.count(),
                .allocated = bytes{traffic.allocated},
                .allocations = traffic.allocations,
                .frees = traffic.frees};
    }
    /// The traffic through the pool.
    [[nodiscard]] pool_traffic traffic() const noexcept {
        const auto lock = locked();
        return all_traffic();
    }
    /// Bytes freed on streams that haven't reached the free.
    [[nodiscard]] std::uint64_t pending() const noexcept {
        const auto lock = locked();
        return pending_bytes();
    }

private:
    // Out of line: inlined, g++ 12 takes its caller's `m` in the list for one that is left there
    // (-Wdangling-pointer).
    [[gnu::noinline]] void enlist(pool_move& m) noexcept { moves_.push(m); }

    friend struct detail::pool_waiter<Point>;
    using spent = typename pool_pending<Point>::template spent<pool_store>;
    friend spent;

    [[nodiscard]] std::unique_lock<std::mutex> locked() const noexcept { return detail::lock_soon(mutex_); }

    // Cutting a block may have renewed the index. Caches read it under the locks of their bins.
    [[nodiscard]] pool_block* counted(pool_block* b, const pool_request& r) noexcept {
        if (fit_.index().has_retired()) {
            for (worker* const w : workers_) w->bins.pass();
            fit_.index().drop_retired();
        }
        if (b != nullptr) traffic_.out(r.asked);
        return b;
    }

    void stop(std::unique_lock<std::mutex>& lock, spent& done) noexcept {
        stopped_ = true;
        keep(false);
        waiters_.tell_all();
        reclaim(lock, done);
    }
    [[nodiscard]] pool_traffic all_traffic() const noexcept {
        auto all = traffic_;
        for (const worker* const w : workers_) all += w->bins.traffic();
        return all;
    }
    // Looks at one worker's bins after the other: a block that goes from one to the next meanwhile
    // may count in both.
    [[nodiscard]] std::uint64_t cached_bytes() const noexcept {
        std::uint64_t cached = 0;
        for (const worker* const w : workers_) w->bins.for_each([&](const pool_block& kept) { cached += kept.size; });
        return cached;
    }
    // The bytes of blocks, including freed blocks whose streams haven't reached the free.
    [[nodiscard]] std::uint64_t out_bytes() const noexcept {
        const auto in_bins = fit_.free_bytes() + cached_bytes();
        return segments_.held() - std::min(segments_.held(), in_bins);
    }
    [[nodiscard]] std::uint64_t pending_bytes() const noexcept {
        auto all = pending_.bytes() + stranded_.bytes() + recorded_now_;
        for (const worker* const w : workers_) all += w->unrecorded.bytes();
        return all;
    }
    // Whether this thread moves a range, and was called from within that move.
    [[nodiscard]] bool inside_move() const noexcept {
        for (const auto* m = moves_.front(); m != nullptr; m = m->next)
            if (m->by == std::this_thread::get_id()) return true;
        return false;
    }

    // In a bounded number of steps, with few exceptions.
    [[nodiscard]] pool_block* take_soon(const pool_request& r) noexcept {
        return r.own ? take_large(r, r.size) : detail::quietly([&] { return fit_.take(r.size, r.alignment); });
    }
    [[nodiscard]] pool_block* take_large(const pool_request& r, std::uint64_t size) noexcept {
        pool_block* const b = fit_.take_own(size, r.most, r.alignment);
        return b != nullptr || !r.cut ? b : detail::quietly([&] { return fit_.cut_own(size, r.alignment); });
    }
    // Before a refusal, a large request may also use what is left of shared segments.
    [[nodiscard]] pool_block* take_any(const pool_request& r, worker* own, bool last = false) noexcept {
        pool_block* b = r.own ? take_large(r, r.least) : nullptr;
        if (b == nullptr && (last || !r.own))
            b = detail::quietly([&] { return fit_.take_any(r.least, r.alignment, last); });
        return b != nullptr ? b : take_own(own, r);
    }
    // A block that a worker freed on its stream is in order before its next work there, reached or
    // not.
    [[nodiscard]] pool_block* take_own(worker* own, const pool_request& r) noexcept {
        if (own == nullptr) return nullptr;
        pool_block* const b = own->unrecorded.take(r);
        return b != nullptr ? b : pending_.take(own, r);
    }

    // Takes one block out of a worker's bin, so that the workers needn't lose all blocks.
    [[nodiscard]] pool_block* take_kept(const pool_request& r) noexcept {
        const auto slack = std::max(r.alignment, pool_granule) - pool_granule;
        for (worker* const w : workers_) {
            if (w->record != nullptr) continue;
            if (r.own) {
                if (pool_block* const kept = w->bins.take_within(r.least, r.most, r.alignment)) return kept;
                continue;
            }
            if (pool_block* const kept = w->bins.take_bigger((r.size + slack) / pool_granule)) {
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
        w.bins.take_all([&](pool_block& kept) {
            release(w, kept);
            waiters_.tell();
        });
    }
    void collect(spent& done) noexcept {
        pending_.collect(fit_, done.batches);
        if (!done.batches.empty()) waiters_.tell();
    }
    void keep(bool more) noexcept {
        for (worker* const w : workers_) w->bins.keep(more);
    }

    void reclaim(std::unique_lock<std::mutex>& lock, spent& done) noexcept {
        for (worker* const w : workers_) gather(*w);
        record(lock, nullptr);
        collect(done);
    }

    // Records one point for all that a stream has freed. While the point is recorded, without the
    // lock, the worker may free more; only blocks taken out before are behind the point. For
    // `only`, or for all workers if that is null.
    void record(std::unique_lock<std::mutex>& lock, worker* only) noexcept {
        const auto pass = ++passes_;
        for (;;) {
            worker* next = nullptr;
            for (worker* const w : workers_)
                if (next == nullptr && !w->unrecorded.empty() && w->paused == 0 && w->failed_in < pass &&
                    (only == nullptr || only == w))
                    next = w;
            if (next == nullptr) return;
            worker& w = *next;
            auto* const b = pending_.make();
            if (b == nullptr) return;
            b->by = &w;
            b->blocks = w.unrecorded.take_all();
            const auto size = b->blocks.bytes();
            recorded_now_ += size;
            ++w.recording;
            ++recordings_;
            lock.unlock();
            const bool recorded = w.try_record(b->point);
            lock.lock();
            recorded_now_ -= size;
            --w.recording;
            --recordings_;
            changed_.notify_all();
            if (recorded) {
                pending_.add(*b);
                waiters_.tell();
            } else {
                w.unrecorded.append(b->blocks);
                w.failed_in = std::max(w.failed_in, pass);
                pending_.drop(*b);
            }
        }
    }
    mutable std::mutex mutex_;         // before the lock of any bins
    std::condition_variable changed_;  // a move has ended, or a worker's `recording` went down
    pool_fit fit_;
    pool_pending<Point> pending_;
    pool_segments segments_;
    pool_wait_queue waiters_;
    plain_list<worker*> workers_;
    worker depot_;                    // the surplus of workers, for other workers
    pool_chain stranded_;             // freed on streams that ended before a point was recorded
    std::uint64_t recorded_now_ = 0;  // bytes in batches that are being recorded
    pool_traffic traffic_;            // without the part that workers count
    fifo<pool_move> moves_;           // between here and the upstream
    unsigned recordings_ = 0;         // batches being recorded
    std::uint64_t changes_ = 0;       // moves that moved something
    std::uint64_t passes_ = 0;
    bool stopped_ = false;  // nothing is handed out
    bool closed_ = false;   // and nothing comes back
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
