// SPDX-License-Identifier: Apache-2.0
// A pool over any upstream: takes memory in segments and allocates blocks of any size from them, in
// constant time and without touching the memory. Over a quota_resource, the quota counts the memory
// that the pool holds.
//
//   // or pool_resource pool{mine}, without streams
//   gpushare::pool_resource<resource, gpushare::host::point> pool{mine};
//   void* p = pool.allocate(1_MiB, 256);                      // any thread
//   auto cache = pool.make_cache();                           // one worker: faster
//   pool.deallocate(p, 1_MiB, 256);    pool.trim(0_B);
//
// Large blocks have segments of their own, which small blocks don't use. So a small block that
// stays never keeps a large segment.
//
// Before the pool refuses a request, it empties all workers' caches, collects the frees that
// streams have reached, gives empty segments back to the upstream, and asks the upstream for
// exactly what is needed. It grows by one segment at a time, and only when free blocks and frees
// that streams have reached don't suffice. If the caches keep more than pool_options::kept on
// average, it empties them before it grows.
//
// A worker's cache allocates and frees without the pool's lock as long as blocks that were freed
// there fit the requests. Made for a stream, it frees in stream order:
//
//   auto ordered = pool.make_cache(stream);
//   void* q = ordered.allocate(4_KiB, 256);
//   launch(stream, q);
//   ordered.deallocate(q, 4_KiB, 256);  // immediately; the next allocation may be the same block
//   // q again: in stream order, without an event of CUDA's
//   void* again = ordered.allocate(4_KiB, 256);
//
// Threads can wait for memory, first come first served, until a deadline or a stop request:
//
//   const gpushare::patience until{node.get_clock(), node.get_clock().now() + 50ms, stop};
//   // throws memory_error: deadline_exceeded, stopped, ...
//   void* large = pool.allocate(512_MiB, 256, until);
//   gpushare::failure why;    void* small = cache.try_allocate(4_KiB, 256, until, &why);
//
// While a thread waits, caches keep nothing, every free wakes the first of the queue, and a later
// request that doesn't wait is refused. So small requests don't starve a big one. The first also
// waits for the streams on which blocks were freed, and asks the upstream again every two
// milliseconds, because an upstream doesn't tell when it has memory again. Each time counts as a
// refusal there, and calls the hooks of a quota below (quota_wait.hpp). The pool's waiters have no
// place in the quota's own queue. The pool makes no thread for any of this.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/detail/pool_store.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A thread that waits for a pool's memory.
template <timeline_point Point>
struct pool_waiter {
    explicit pool_waiter(detail::pool_store<Point>& of) noexcept : store(of) { store.join(place); }
    pool_waiter(const pool_waiter&) = delete;
    pool_waiter& operator=(const pool_waiter&) = delete;
    ~pool_waiter() { store.leave(place); }

    /// errc::none: it is this thread's turn, and a try makes sense. deadline_exceeded; stopped.
    template <clock Clock>
    [[nodiscard]] errc wait(const patience<Clock>& until) noexcept {
        const std::stop_callback on_stop(until.stop, [&] {
            const auto lock = store.locked();
            place.woken.notify_one();
        });
        auto lock = store.locked();
        const auto look_again = std::min(until.deadline, saturating_add(until.time.now(), detail::look_slice));
        for (;;) {
            if (until.stop.stop_requested()) return errc::stopped;
            const auto now = until.time.now();
            if (now >= until.deadline) return errc::deadline_exceeded;
            if (std::exchange(place.told, false)) return errc::none;
            const bool first = store.waiters_.first(place);
            if (first && now >= look_again) return errc::none;
            if (first && !store.pending_.empty()) {
                if (wait_for_stream(lock, look_again)) return errc::none;
                continue;
            }
            const auto most = saturating_add(now, detail::longest_sleep);
            place.woken.wait_for(lock, std::min(first ? look_again : until.deadline, most) - now);
        }
    }

private:
    // Waits for the oldest free. Returns false if its point isn't reached by then.
    bool wait_for_stream(std::unique_lock<std::mutex>& lock, instant by) noexcept {
        bool reached = false;
        try {
            const Point next = store.pending_.first();
            lock.unlock();
            reached = next.wait(by);
        } catch (...) {  // the wait failed: the point is looked at again, but not all the time
            if (lock) lock.unlock();
            std::this_thread::sleep_for(detail::look_slice);
        }
        lock.lock();
        return reached;
    }

    detail::pool_store<Point>& store;
    detail::pool_wait_entry place;
};

}  // namespace detail

/// A worker's cache of a pool, for one worker: calls that overlap wait for each other, and a cache
/// on a stream must not have overlapping calls. Before the pool refuses another user, it takes back
/// the blocks that caches keep, even while their workers sleep. It also does so before it grows, if
/// the caches keep more than pool_options::kept on average. A block may be freed through a cache
/// other than the one it was allocated from, or through the pool. The pool must outlive the cache.
///
/// On a stream, a free records no point. When another user needs the blocks kept here, one point is
/// recorded for all of them, and they are free elsewhere once the stream has reached that point.
/// flush() records the point immediately.
template <class Pool>
class pool_cache {
public:
    using point = typename Pool::point;  ///< of its stream

    pool_cache(pool_cache&&) noexcept = default;
    /// Blocks that this cache kept go back to the pool when `other` ends.
    pool_cache& operator=(pool_cache&& other) noexcept {
        std::swap(pool_, other.pool_);
        std::swap(worker_, other.worker_);
        std::swap(beyond_, other.beyond_);
        return *this;
    }
    ~pool_cache() {
        if (worker_ != nullptr) pool_->store_.leave(*worker_);
    }

    /// See pool_resource::allocate.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t)) {
        void* const p = try_allocate_kept(size, alignment);
        return p != nullptr ? p : pool_->obtain_or_throw(size, alignment, worker_.get());
    }
    /// See pool_resource::try_allocate.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t),
                                     failure* why = nullptr, std::string_view label = {}) noexcept {
        void* const p = try_allocate_kept(size, alignment, label);
        return p != nullptr ? p : try_allocate_anew(size, alignment, why, label);
    }
    /// See pool_resource::allocate with a patience.
    template <clock Clock>
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment, const patience<Clock>& until) {
        void* const p = try_allocate_kept(size, alignment);
        return p != nullptr ? p : pool_->obtain_or_throw(size, alignment, worker_.get(), until);
    }
    /// See pool_resource::try_allocate with a patience. `by` goes to an upstream whose
    /// try_allocate() takes it.
    template <clock Clock>
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr, std::string_view label = {},
                                     detail::asker by = {}) noexcept {
        if (void* const p = try_allocate_kept(size, alignment, label)) return p;
        typename Pool::refusal r{.by = by};
        void* const p = pool_->obtain(size, alignment, until, r, worker_.get(), label);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }
    /// See pool_resource::deallocate. On a stream the block is free here immediately, and elsewhere
    /// in stream order.
    errc deallocate(void* p, byte_count size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        if (p == nullptr) return errc::none;
        const auto freed = worker_->bins.put(pool_->store_.index(), p, size, alignment);
        if (freed.homeless != nullptr) [[unlikely]]
            return pool_->store_.give_from(*worker_, freed.bin, *freed.homeless, size);
        return freed.why;
    }

    /// See pool_resource::deallocate_after. This cache's stream isn't involved.
    errc deallocate_after(const point& used, void* p, byte_count size,
                          std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return pool_->deallocate_after(used, p, size, alignment);
    }

    /// The pool's answers; see pool_resource.
    [[nodiscard]] static constexpr bytes charged(byte_count size, std::size_t alignment) noexcept {
        return Pool::charged(size, alignment);
    }
    /// See pool_resource::refuses.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept {
        return pool_->refuses(size, alignment);
    }
    /// See pool_resource.
    [[nodiscard]] bytes largest_free() const noexcept { return pool_->largest_free(); }
    /// See pool_resource.
    [[nodiscard]] std::string_view owner() const noexcept { return pool_->owner(); }
    /// The pool's.
    [[nodiscard]] close_token closing() const noexcept { return pool_->closing(); }
    /// As the pool's; see quota::in_hook.
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept { return pool_->in_hook(thread); }

    /// Gives all blocks that are kept here back to the pool. On a stream, records one point for all
    /// of them now.
    void flush() noexcept { pool_->store_.flush(*worker_); }

    /// While a pause exists, no point is recorded on the stream, because it is being captured.
    /// Blocks freed here stay here meanwhile.
    class [[nodiscard]] pause {
    public:
        /// Waits until no thread is recording a point.
        explicit pause(pool_cache& cache) noexcept : cache_(cache) { cache.pool_->store_.pause(*cache.worker_); }
        pause(const pause&) = delete;
        pause& operator=(const pause&) = delete;
        ~pause() { cache_.pool_->store_.resume(*cache_.worker_); }

    private:
        pool_cache& cache_;
    };

    /// As try_allocate, but takes only blocks that are kept here.
    [[nodiscard]] void* try_allocate_kept(std::size_t size, std::size_t alignment,
                                          std::string_view label = {}) noexcept {
        if (size >= beyond_ || !detail::pool_tag::power_of_two(alignment)) [[unlikely]]
            return try_allocate_chosen(size, alignment, label);
        detail::pool_block* const b =
            worker_->bins.take(detail::whole_granules(size) / detail::pool_granule, alignment, size);
        return b == nullptr ? nullptr : b->hand_out(size, alignment, label);
    }
    /// As try_allocate, for a caller that has just looked at the blocks kept here. `by` goes to an
    /// upstream whose try_allocate() takes it.
    [[nodiscard]] void* try_allocate_anew(std::size_t size, std::size_t alignment, failure* why = nullptr,
                                          std::string_view label = {}, detail::asker by = {}) noexcept {
        typename Pool::refusal r{.by = by};
        void* const p = pool_->obtain(size, alignment, r, worker_.get(), label);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }

private:
    friend Pool;
    using classes = detail::pool_bins::classes;

    explicit pool_cache(Pool& pool, void* stream = nullptr, point (*record)(void*) = nullptr)
        : pool_(&pool),
          worker_(std::make_unique<detail::pool_worker<point>>(stream, record)),
          beyond_(surely_small(pool.large())) {
        pool.store_.join(*worker_);
    }

    // Looks at the blocks themselves. A request that is nearly large gets no block with a segment
    // of its own. In an exact pool, a block with a segment of its own serves only a request for as
    // much.
    [[nodiscard]] void* try_allocate_chosen(std::size_t size, std::size_t alignment, std::string_view label) noexcept {
        if (size > detail::pool_bins::largest * detail::pool_granule || !detail::pool_tag::power_of_two(alignment))
            return nullptr;
        const auto least = detail::whole_granules(size);
        const auto granules = least / detail::pool_granule;
        auto& bins = worker_->bins;
        detail::pool_block* const b = !pool_->is_large(least) ? bins.take_shared(granules, alignment, size)
                                      : pool_->is_exact()
                                          ? bins.take_exact(least, pool_->range_for(least, alignment), alignment, size)
                                          : bins.take(granules, alignment, size);
        return b == nullptr ? nullptr : b->hand_out(size, alignment, label);
    }

    // The first size whose bins may keep a large block, of at least `large` bytes, or that has no
    // bin.
    [[nodiscard]] static constexpr std::size_t surely_small(std::uint64_t large) noexcept {
        constexpr auto window = detail::pool_bins::window;
        auto last = detail::pool_bins::largest;
        if (const auto granules = detail::whole_granules(large) / detail::pool_granule; granules <= last) {
            const auto bin = classes::of(granules);
            if (bin <= window) return 0;
            last = classes::smallest(bin - window);
        }
        return static_cast<std::size_t>(last * detail::pool_granule) + 1;
    }

    /// The granules that a request of `size` bytes takes: the size of its bin, if there is one,
    /// else `size` in whole granules.
    [[nodiscard]] static constexpr std::uint64_t rounded(std::uint64_t size) noexcept {
        const auto granules = size / detail::pool_granule;
        return granules > detail::pool_bins::largest
                   ? size
                   : classes::smallest(classes::covering(granules)) * detail::pool_granule;
    }

    Pool* pool_;
    std::unique_ptr<detail::pool_worker<point>> worker_;
    std::size_t beyond_;  // from this size on, kept blocks must be looked at one by one
};

/// Options of a pool_resource.
struct pool_options {
    static constexpr bytes usual_segment = 32_MiB;  ///< over an upstream that has plenty
    /// Bytes taken from the upstream at a time, for small blocks. 0: usual_segment, but at most a
    /// sixteenth of the bytes that the upstream has left, unless `part` says otherwise. So the
    /// first block doesn't take all of a small quota.
    bytes segment{};
    /// caches that keep less than this on average aren't emptied while the pool can grow
    bytes kept = 32_MiB;
    /// a segment is at most 1/part of what the upstream has left; 0: as above
    std::uint32_t part = 0;
    /// A block of at least this size is never in a segment of small blocks. 0: a quarter of
    /// `segment`. If `segment` is 0, too: a quarter of the segment that an unused upstream gives,
    /// if the upstream tells its capacity, and at least 16 KiB.
    bytes large{};
    /// A large block has a segment of its own, as large as the block has to be. An idle segment is
    /// used again only for a block that needs nearly as much, and is given back otherwise. So all
    /// memory outside blocks can be had, except a 64th of the whole. Without this option, large
    /// blocks share an idle segment, and are up to an eighth larger than they have to be.
    bool exact = false;
};

/// A pool over an upstream. Refers to `Upstream`, which must outlive the pool and must not allocate
/// from it; the pool calls the upstream under no lock. All members are safe from any thread.
/// `Point` is the type of point that the streams of its caches record. The bookkeeping takes about
/// 200 bytes of host memory for each block, free blocks included.
template <memory_resource Upstream, timeline_point Point = immediate_point>
class pool_resource {
public:
    using point = Point;                      ///< the point that its caches' streams record
    using cache = pool_cache<pool_resource>;  ///< see make_cache()

    /// Takes nothing yet. Throws std::bad_alloc.
    explicit pool_resource(Upstream& upstream, const pool_options& options = {})
        : upstream_(upstream), options_(fitted(options, upstream)) {
        closes_.emplace(upstream_.closing(), [this](instant deadline) { return close(deadline); });
    }
    pool_resource(const pool_resource&) = delete;
    pool_resource& operator=(const pool_resource&) = delete;
    /// Waits until streams have reached all frees, then gives everything back, allocated blocks
    /// included. Call drain() first to bound the wait. Its caches must be gone.
    ~pool_resource() {
        closes_.reset();
        // set by the close for which reset() has just waited
        if (detached_.load(std::memory_order_relaxed)) return;
        try {
            store_.drain(never);
        } catch (...) {
            // the end of the work is unknown: the upstream frees in order behind it, or nothing
            // runs
        }
        for (auto s = store_.remove_any(); s.begin != nullptr; s = store_.remove_any())
            upstream_.deallocate(s.begin, s.size, s.alignment);
    }

    /// `size` bytes at a multiple of `alignment`, a power of two; a unique address for 0 bytes.
    /// Contents undefined. Throws memory_error: out_of_memory (also while others wait), over_quota
    /// and the like from the upstream, size_overflow, bad_alignment. Exceptions of the upstream
    /// pass through.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t)) {
        return obtain_or_throw(size, alignment, nullptr);
    }
    /// Returns null where `allocate` would throw; `why`, if given, receives the reason with its
    /// figures. `label` is for take_back(), and must outlive the block.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t),
                                     failure* why = nullptr, std::string_view label = {}) noexcept {
        refusal r;
        void* const p = obtain(size, alignment, r, nullptr, label);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }
    /// As allocate, but waits for memory, first come first served, until the deadline or stop
    /// request of `until`, a patience. Then it throws deadline_exceeded or stopped, with the
    /// figures of the last refusal. Throws immediately in two cases: the request exceeds the
    /// upstream's limit, or the bytes that others' guarantees leave of that limit; or lack of
    /// memory isn't the reason for the refusal.
    template <clock Clock>
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment, const patience<Clock>& until) {
        return obtain_or_throw(size, alignment, nullptr, until);
    }
    /// The same, null instead of an exception; `why`, if given, receives the reason.
    template <clock Clock>
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr, std::string_view label = {}) noexcept {
        refusal r;
        void* const p = obtain(size, alignment, until, r, nullptr, label);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }
    /// As try_allocate, but takes only from the memory that the pool holds outside caches, and
    /// calls neither the upstream nor a stream. For code that must not call them, for example while
    /// a stream is being captured. So it cuts a large segment even in an exact pool, rather than
    /// hand out all of it.
    [[nodiscard]] void* try_allocate_held(byte_count size, std::size_t alignment) noexcept {
        if (detail::pool_tag::check(size, alignment) != errc::none || waiting() != 0) return nullptr;
        const auto whole = detail::whole_granules(size);
        const bool own = is_large(whole);
        detail::pool_request request{whole, whole, alignment, size, own, whole + whole / 8, own};
        auto* b = store_.take(request);
        // from shared segments
        if (b == nullptr && std::exchange(request.own, false)) b = store_.take(request);
        // or a large block that can't be cut out of its segment
        if (b == nullptr && own) {
            request.own = own;
            request.most = detail::pool_tag::size_limit;
            b = store_.take(request);
        }
        return b == nullptr ? nullptr : out(*b, size, alignment, {});
    }

    /// As try_allocate, but requests no memory from the upstream. It takes memory that the pool
    /// holds, caches included, as long as all blocks together then have at most `most` bytes. For a
    /// pool that holds more than it may, after its quota shrank.
    [[nodiscard]] void* try_allocate_within(bytes most, std::size_t size, std::size_t alignment,
                                            std::string_view label = {}) noexcept {
        if (detail::pool_tag::check(size, alignment) != errc::none || waiting() != 0) return nullptr;
        const auto least = detail::whole_granules(size);
        auto* const b = store_.take_within(request_for(size, least, alignment, false), most.count());
        return b == nullptr ? nullptr : out(*b, size, alignment, label);
    }

    /// The same, but waits, first come first served, for a block that is freed here, or whose
    /// stream reaches its free. Calls `most` for the limit before each try. Once `most` returns no
    /// limit, returns null, and `why` is none.
    template <class Most, clock Clock>
    [[nodiscard]] void* try_allocate_within(Most most, std::size_t size, std::size_t alignment,
                                            const patience<Clock>& until, failure& why,
                                            std::string_view label = {}) noexcept {
        why = {};
        if (detail::pool_tag::check(size, alignment) != errc::none) {
            why = detail::pool_tag::why(size, alignment);
            return nullptr;
        }
        const auto request = request_for(size, detail::whole_granules(size), alignment, false);
        for (detail::pool_waiter<Point> waiter(store_);;) {
            why.code = waiter.wait(until);
            const std::optional<bytes> limit = why.code == errc::none ? most() : std::nullopt;
            if (!limit) return nullptr;
            if (auto* const b = store_.take_within(request, limit->count())) return out(*b, size, alignment, label);
        }
    }

    /// Frees the block for all threads at once: all work that uses the block must be done.
    /// unknown_block or wrong_size, and nothing changes, if the block isn't allocated or has
    /// another size or alignment. Null is ignored.
    errc deallocate(void* p, byte_count size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return p == nullptr ? errc::none : store_.free(p, size, alignment);
    }
    /// As deallocate, but work before `used` may still use the block: the block is free once that
    /// point is reached. submission_failed, and nothing changes, if the host has no memory to
    /// remember the point and the wait for the point throws.
    errc deallocate_after(const Point& used, void* p, byte_count size,
                          std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return p == nullptr ? errc::none : store_.free_after(used, p, size, alignment);
    }

    /// The allocated block at `p`, as it was asked for, without its label. Takes the pool's lock.
    [[nodiscard]] std::optional<block> find(const void* p) const noexcept {
        return store_.find(const_cast<void*>(p));  // NOLINT: an address
    }

    /// A cache for one worker. Throws std::bad_alloc.
    [[nodiscard]] cache make_cache() { return cache(*this); }
    /// A cache for one stream: a block freed there can be allocated there again immediately, and
    /// elsewhere once the stream has reached the free. `stream` must outlive the cache, and
    /// record() must be safe from any thread. Throws std::bad_alloc.
    template <timeline Stream>
    requires std::is_same_v<typename Stream::point, Point>
    [[nodiscard]] cache make_cache(Stream& stream) {
        return cache(*this, &stream, [](void* s) { return static_cast<Stream*>(s)->record(); });
    }

    /// Empties all caches and gives back empty segments until the pool holds at most `target`.
    /// Returns the bytes that it holds then.
    bytes trim(bytes target) noexcept {
        store_.reclaim();
        return_empty(target.count());
        return usage().reserved;
    }
    /// Collects the frees that streams have reached, empties all caches, and gives back empty
    /// segments until `wanted` bytes are back or there are no more. Returns the number of bytes
    /// given back.
    bytes give_back(bytes wanted) noexcept {
        store_.reclaim();
        return return_empty((bytes{store_.held()} - wanted).count()).size;
    }
    /// Takes back blocks whose streams have reached the free.
    void collect() noexcept { store_.collect(); }
    /// Waits until a stream reaches a free, or until `deadline`. Returns false immediately if no
    /// free is pending.
    bool wait_any(instant deadline) { return store_.wait_any(deadline); }
    /// Waits until streams have reached all frees. Returns false if some are left at `deadline`. A
    /// call from within a stream's record() waits for itself, so give it a deadline.
    bool drain(instant deadline) { return store_.drain(deadline); }

    /// From now on every call is refused with errc::closed. Waits for blocks that were freed on
    /// streams, and gives free memory back to the upstream. False if a stream hasn't reached a free
    /// by the deadline, if the upstream doesn't take free memory back now, or if a thread is still
    /// in the upstream, perhaps in a hook: call it again. Blocks that are still allocated are left
    /// to the upstream; the pool doesn't touch them any more. Called when the upstream closes.
    /// Private pools over it close first.
    bool close(instant deadline) {
        const bool above = closing_.close(deadline);
        if (!store_.close(deadline) || !store_.drain(deadline) || !above) return false;
        if (return_empty(0).refused) return false;
        store_.abandon();
        detached_.store(true, std::memory_order_relaxed);
        return true;
    }
    /// From now on every allocation is refused with errc::closed. Allocated blocks can still be
    /// freed.
    void stop() noexcept { store_.stop(); }
    /// After stop(): takes back all allocated blocks, and enters them into `found`. Nothing may use
    /// these blocks any more. False: a call overlaps, and another take_back() sees its block.
    /// Throws std::bad_alloc, and then nothing was taken back.
    [[nodiscard]] bool take_back(std::vector<leak>& found) { return store_.take_back(found); }
    /// For resources that keep memory of the pool: tells them when it closes.
    [[nodiscard]] close_token closing() const noexcept { return closing_.token(); }

    /// A reading; see pool_usage.
    [[nodiscard]] pool_usage usage() const noexcept { return store_.usage(); }
    /// Bytes of empty segments: trim() gives them back without emptying a cache.
    [[nodiscard]] bytes empty() const noexcept { return bytes{store_.empty_bytes()}; }
    /// Bytes freed on streams that haven't reached the free.
    [[nodiscard]] bytes pending() const noexcept { return bytes{store_.pending()}; }
    /// The largest free block at a multiple of 256 bytes, here or, where it can tell, in the
    /// upstream. Emptying caches and segments may make a larger one.
    [[nodiscard]] bytes largest_free() const noexcept {
        const bytes above = upstream_.largest_free();
        return std::max(usage().largest_free,
                        above == bytes::max() ? bytes{} : above - above % bytes{detail::pool_granule});
    }
    /// How many threads wait for memory.
    [[nodiscard]] std::size_t waiting() const noexcept { return store_.waiting(); }
    /// The upstream.
    [[nodiscard]] Upstream& upstream() const noexcept { return upstream_.resource(); }
    /// As the upstream's; see quota::in_hook.
    [[nodiscard]] bool in_hook(std::thread::id t) const noexcept { return upstream_.in_hook(t); }
    /// The upstream's owner: the tenant that is charged for the memory.
    [[nodiscard]] std::string_view owner() const noexcept { return upstream_.owner(); }
    /// Why such a request can never be granted, whatever is freed; errc::none if it could be.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept {
        if (detail::pool_tag::check(size, alignment) != errc::none) return detail::pool_tag::why(size, alignment);
        const auto least = detail::whole_granules(size);
        return impossible({least, least, alignment, size});
    }

    /// Bytes of the pool that a request takes; bytes::max() if it can't be granted. A cache may
    /// take an eighth more.
    [[nodiscard]] static constexpr bytes charged(byte_count size, std::size_t alignment) noexcept {
        return detail::pool_tag::check(size, alignment) == errc::none ? bytes{detail::whole_granules(size)}
                                                                      : bytes::max();
    }
    /// The tenant's view of the memory, where the upstream has one.
    [[nodiscard]] bytes capacity() const noexcept requires memory<Upstream> { return upstream_.resource().capacity(); }
    /// As the upstream's.
    [[nodiscard]] bytes taken_by_others() const noexcept requires memory<Upstream> {
        return upstream_.resource().taken_by_others();
    }

private:
    friend cache;
    using worker = detail::pool_worker<Point>;

    using refusal = upstream_refusal;  // `final`: no free could change it

    // `until`: a patience, or none.
    template <class... Until>
    void* obtain_or_throw(std::size_t size, std::size_t alignment, worker* own, const Until&... until) {
        refusal r;
        void* const p = obtain(size, alignment, until..., r, own);
        if (p == nullptr) refuse(r);
        return p;
    }
    // Names the owner that the upstream charges.
    [[noreturn]] void refuse(const refusal& r) const {
        if (r.thrown) std::rethrow_exception(r.thrown);
        if (r.why.code == errc::closed) throw memory_error(r.why, {}, "allocate from a pool");
        const auto tenant = upstream_.owner();
        const auto held = usage();
        detail::message m;
        m.of(tenant).add("allocate from a pool: ", r.why, "; the pool holds ", held.reserved, ", of which ",
                         held.free(), " are free, ", held.largest_free, " in one block");
        throw memory_error(r.why, tenant, m);
    }

    // A worker's blocks are rounded to its bins, unless the rounding would be the reason for a
    // refusal. While requests wait, only the first of them gets a block.
    [[nodiscard]] void* obtain(std::size_t size, std::size_t alignment, refusal& r, worker* own,
                               std::string_view label = {}, bool waits = false) noexcept {
        if (detail::pool_tag::check(size, alignment) != errc::none) {
            r.why = detail::pool_tag::why(size, alignment);
            r.final = true;
            return nullptr;
        }
        const auto least = detail::whole_granules(size);
        const auto request = request_for(size, least, alignment, own != nullptr);
        if (waiting() != 0 && !waits) [[unlikely]] {
            r.why = impossible(request);  // such a request doesn't wait in the queue, either
            r.final = r.why.code != errc::none;
            if (!r.final) r.why = explain(request);
            return nullptr;
        }
        detail::pool_block* b = own == nullptr ? nullptr : store_.take_from_depot(request, *own);
        if (b == nullptr) b = store_.take(request);
        if (b == nullptr)
            b = obtain_slowly(request, r, own);
        else if (request.own && !options_.exact)
            limit_idle();
        return b == nullptr ? nullptr : out(*b, size, alignment, label);
    }
    template <clock Clock>
    [[nodiscard]] void* obtain(std::size_t size, std::size_t alignment, const patience<Clock>& until, refusal& r,
                               worker* own, std::string_view label = {}) noexcept {
        if (void* const p = obtain(size, alignment, r, own, label); p != nullptr || r.final) return p;
        for (detail::pool_waiter<Point> waiter(store_);;) {
            const errc over = waiter.wait(until);
            if (over != errc::none) {
                r.thrown = nullptr;
                r.why = {over, size, r.why.left, r.why.limit, r.why.limit == 0 ? reason::size : reason::size_left};
                return nullptr;
            }
            if (void* const p = obtain(size, alignment, r, own, label, true); p != nullptr || r.final) return p;
        }
    }
    [[nodiscard]] static void* out(detail::pool_block& b, std::size_t size, std::size_t alignment,
                                   std::string_view label) noexcept {
        b.bin = static_cast<std::uint8_t>(detail::bin_layout::of(b.size / detail::pool_granule));
        return b.hand_out(size, alignment, label);
    }

    // The options, with the defaults that suit this upstream.
    [[nodiscard]] static pool_options fitted(pool_options o, const Upstream& upstream) noexcept {
        bytes least_large{detail::pool_granule + 1};
        bytes whole = o.segment;
        if (o.segment == bytes{}) {
            whole = o.segment = pool_options::usual_segment;
            if (o.part == 0) o.part = 16;
            if constexpr (memory<Upstream>) whole = std::min(whole, upstream.capacity() / o.part);
            least_large = 16_KiB;
        }
        if (o.large == bytes{}) o.large = std::max(whole / 4, least_large);
        o.large = std::max(o.large, bytes{detail::pool_granule + 1});
        return o;
    }
    [[nodiscard]] std::uint64_t large() const noexcept { return options_.large.count(); }
    [[nodiscard]] bool is_large(std::uint64_t whole) const noexcept { return whole >= large(); }
    [[nodiscard]] bool is_exact() const noexcept { return options_.exact; }
    // The size of the range that the upstream charges for a segment of `least` bytes, in whole
    // granules. If the upstream also charges room for the alignment, the size is `least`: a request
    // for all charged bytes would be charged for such room again.
    [[nodiscard]] std::uint64_t range_for(std::uint64_t least, std::size_t alignment) const noexcept {
        const auto at = std::max(alignment, detail::pool_granule);
        const bytes takes = upstream_.charged(least, at);
        const auto whole = takes.count() & ~std::uint64_t{detail::pool_granule - 1};
        return takes == bytes::max() || upstream_.charged(whole, at) > takes ? least : std::max(least, whole);
    }
    [[nodiscard]] detail::pool_request request_for(std::size_t size, std::uint64_t least, std::size_t alignment,
                                                   bool in_bins) const noexcept {
        const bool own = is_large(least), exact = own && options_.exact;
        const auto rounded = in_bins && !exact ? cache::rounded(least) : least;
        const auto most = own ? std::max(rounded, range_for(least, alignment)) : 2 * rounded;
        return {rounded, least, alignment, size, own, most, own && !options_.exact};
    }
    // While there is plenty left, the pool reuses a block that is a little too large instead of
    // calling the driver. All such blocks together waste at most a small part of the memory that
    // the pool holds or can still get.
    [[nodiscard]] detail::pool_request relaxed(detail::pool_request request) const noexcept {
        if (!request.own) return request;
        const auto left = upstream_.largest_free().count(), held = store_.held();
        const bool unlimited = left > bytes::max().count() / 2;
        if (left < held) return request;
        const auto most = (bytes{left} + bytes{held}).count() / detail::pool_waste;
        const auto wasted = unlimited ? 0 : store_.rounding();
        request.most += std::min(request.most / 8, most - std::min(most, wasted));
        return request;
    }

    [[gnu::noinline]] detail::pool_block* obtain_slowly(const detail::pool_request& wanted, refusal& r,
                                                        worker* own) noexcept {
        // A request that could never be granted must not cost the others their caches and segments.
        if (r.why = impossible(wanted); r.why.code != errc::none) {
            r.final = true;
            return nullptr;
        }
        const detail::pool_request request = relaxed(wanted);
        const auto grow_by_segment = [&]() -> detail::pool_block* {
            if (request.own) limit_idle();
            const auto segment = request.own ? request.size : segment_size(request.size);
            return segment > request.size || request.own ? grow(segment, request.size, request, r) : nullptr;
        };
        for (;;) {
            auto seen = store_.changes();
            if (detail::pool_block* const b = store_.collect_and_take(request, own)) return b;
            const bool early = store_.caches_keep_less(options_.kept);
            if (early && request.own)  // the caches' blocks can't merge into such a block
                if (detail::pool_block* const b = store_.take_one_kept(request)) return b;
            if (early)
                if (detail::pool_block* const b = grow_by_segment()) return b;
            if (detail::pool_block* const b = store_.reclaim_and_take(request, own)) return b;
            if (!early)
                if (detail::pool_block* const b = grow_by_segment()) return b;
            // Gives back nothing, the missing bytes, then all. Asks again only if some went back.
            bool asked = request.own && request.size == request.least;
            const auto held = store_.held();
            for (const auto target : {held, held - std::min(held, request.least), std::uint64_t{0}}) {
                const auto back = return_empty(target).count;
                seen += back;
                if (back == 0 && asked) continue;
                asked = true;
                if (detail::pool_block* const b = grow(request.least, request.least, request, r)) return b;
            }
            // Each further round means that another thread took or gave memory upstream.
            if (const auto [b, again] = store_.settle_and_take(request, own, seen, upstream_); b != nullptr || !again) {
                if (b == nullptr) r.why = explain(request, r.why);
                return b;
            }
        }
    }
    // If a segment is a part of the bytes left, it holds whole blocks only: the rest of a segment
    // could be missing in the end.
    [[nodiscard]] std::uint64_t segment_size(std::uint64_t block) const noexcept {
        const bytes part = options_.part != 0 ? upstream_.largest_free() / options_.part : bytes::max();
        if (part < options_.segment) return part.count() - part.count() % block;
        return detail::whole_granules(options_.segment.count());
    }
    // Why neither the upstream nor the memory held could ever satisfy the request.
    [[nodiscard]] failure impossible(const detail::pool_request& request) const noexcept {
        if (store_.stopped()) return {.code = errc::closed, .asked = request.asked};
        const failure why = upstream_.refuses(request.least, std::max(request.alignment, detail::pool_granule));
        return why.code == errc::none || store_.could_hold(request) ? failure{} : why;
    }
    // `upstream`: its last answer, if it was asked.
    [[nodiscard]] failure explain(const detail::pool_request& request, const failure& upstream = {}) const noexcept {
        if (request.alignment > detail::pool_granule && is_memory_refusal(upstream.code))
            if (const failure why = upstream_.refuses(request.least, request.alignment); why == errc::bad_alignment)
                return why;  // the upstream's figures include room for the alignment
        if (upstream.code != errc::none) return upstream;
        if (store_.stopped()) return {.code = errc::closed, .asked = request.asked};
        const auto u = usage();
        return {errc::out_of_memory, request.least, u.free().count(), u.reserved.count()};
    }

    // Takes `range` bytes from the upstream, or as many bytes as this range needs, and cuts a block
    // out of them.
    [[nodiscard]] detail::pool_block* grow(std::uint64_t range, std::uint64_t size, const detail::pool_request& request,
                                           refusal& r) noexcept {
        const auto alignment = std::max(request.alignment, detail::pool_granule);
        range = range_for(range, alignment);
        detail::pool_move move(upstream_);
        store_.begin_move(move);
        detail::pool_block* b = nullptr;
        r = {.by = r.by};
        void* const p = upstream_.ask(range, alignment, r);
        // A request over a whole quota, or over the part of it that others' guarantees leave, won't
        // fit, whatever is freed.
        if (r.why.code == errc::size_overflow || r.why.code == errc::bad_alignment ||
            r.why.because == reason::guaranteed_to_others ||
            (r.why.code == errc::over_quota && r.why.asked > r.why.limit))
            r.final = true;
        const bool aligned = (reinterpret_cast<std::uintptr_t>(p) & (alignment - 1)) == 0;
        if (!aligned) refuse_misaligned(p, alignment, r);
        if (p != nullptr && aligned) {
            try {
                b = store_.add({static_cast<std::byte*>(p), range, alignment}, size, request);
            } catch (...) {  // the host has no memory for the bookkeeping
            }
        }
        if (p != nullptr && b == nullptr) upstream_.deallocate(p, range, alignment);
        store_.end_move(move, b != nullptr);
        return b;
    }
    // If an upstream ignores alignments, no block can be cut at the address where it has to begin.
    static void refuse_misaligned(const void* p, std::size_t alignment, refusal& r) noexcept {
        const auto begin = reinterpret_cast<std::uintptr_t>(p);
        r.why = {.code = errc::bad_alignment,
                 .asked = alignment,
                 .limit = std::uint64_t{begin & (~begin + 1)},
                 .because = reason::alignment_too_large};
        r.final = true;
    }
    // Gives empty segments back if there are more than may be needed soon, so that the memory that
    // a pool holds stays in proportion to the live bytes. An exact pool keeps more of them, up to
    // half of the other bytes, until a request lacks them.
    void limit_idle() noexcept {
        if (const auto excess = store_.idle_beyond((2 * options_.kept).count(), options_.exact ? 2 : 8); excess != 0)
            (void)return_empty(store_.held() - std::min(store_.held(), excess));
    }
    struct returned {
        std::uint64_t count = 0;
        bytes size{};
        bool refused = false;  // the upstream takes no segment back now: a later call tries again
    };
    // Gives back empty segments while more than `target` bytes are held.
    returned return_empty(std::uint64_t target) noexcept {
        returned all;
        detail::pool_move move(upstream_);
        for (auto s = store_.remove_empty(move, target); s.begin != nullptr; s = store_.remove_empty(move, target)) {
            if (detail::stays_out(upstream_.deallocate(s.begin, s.size, s.alignment))) {
                store_.put_back(move, s);
                all.refused = true;
                break;
            }
            store_.end_move(move, true);
            ++all.count;
            all.size += bytes{s.size};
        }
        return all;
    }

    upstream_ref<Upstream> upstream_;
    pool_options options_;
    detail::pool_store<Point> store_;
    close_source closing_;
    std::optional<close_callback> closes_;
    std::atomic<bool> detached_{false};  // the pool must not touch the upstream any more
};

static_assert(upstream<pool_resource<detail::plain_resource>>);
static_assert(upstream<pool_resource<detail::plain_resource>::cache>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
