// SPDX-License-Identifier: Apache-2.0
// A pool over any upstream: takes memory in segments and hands it out in blocks of any size, in constant time and
// without touching it. Over a quota_resource the quota counts what the pool holds.
//
//   gpushare::pool_resource pool{mine};                       // mine: a quota_resource
//   void* p = pool.allocate(1 << 20, 256);                    // any thread
//   auto cache = pool.make_cache();                           // one worker: faster
//   auto ordered = pool.make_cache(stream);                   // one worker's stream: frees in stream order
//   pool.deallocate(p, 1 << 20, 256);    pool.trim(0_B);
//   void* q = pool.allocate_until(1 << 20, 256, until);       // waits: include pool_wait.hpp
//
// Before a request is refused, all workers' caches are emptied, what streams have reached is collected, segments in
// which nothing is go back to the upstream, and the upstream is asked again for exactly what is needed. It grows by
// segments, never by a factor, and only if neither what is free nor what streams have reached suffices, nor what caches
// keep beyond pool_options::kept.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string_view>
#include <type_traits>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/detail/pool_store.hpp>
#include <gpushare/memory/pool_cache.hpp>
#include <gpushare/memory/pool_usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Options of a pool_resource.
struct pool_options {
    bytes segment = 32_MiB;  ///< what the upstream is asked for at once; bigger requests are asked for as they are
    bytes kept = 128_MiB;    ///< the pool grows rather than empty caches that keep less each: what speed may cost
};

/// Refers to `Upstream`, which must outlive it and must not allocate from the pool; it is called under no lock. All
/// members are safe from any thread. `Point` is what the streams of its caches record. What it knows of its blocks is kept on the host:
/// about 200 bytes a block, free ones included.
template <memory_resource Upstream, timeline_point Point = immediate_point>
class pool_resource {
public:
    using point = Point;                      ///< of the streams of its caches
    using cache = pool_cache<pool_resource>;  ///< see make_cache()

    /// Takes nothing yet. Throws std::bad_alloc.
    explicit pool_resource(Upstream& upstream, const pool_options& options = {})
        : upstream_(upstream), options_(options) {
        closes_.emplace(upstream_.closing(), [this](instant deadline) { return close(deadline); });
    }
    pool_resource(const pool_resource&) = delete;
    pool_resource& operator=(const pool_resource&) = delete;
    /// Waits for what was freed on streams (drain() first bounds that), then gives everything back, blocks that are
    /// still out included. Its caches must be gone.
    ~pool_resource() {
        closes_.reset();
        if (detached_.load(std::memory_order_relaxed)) return;  // by the close that has just been waited for
        try {
            store_.drain(never);
        } catch (
            ...) {  // nobody can tell when the work is done: the upstream's frees are in order behind it, or nothing is
        }
        for (auto s = store_.remove_any(); s.begin != nullptr; s = store_.remove_any())
            upstream_.deallocate(s.begin, s.size, s.alignment);
    }

    /// `size` bytes at a multiple of `alignment`, a power of two; a unique address for 0 bytes. Contents undefined.
    /// Throws memory_error: out_of_memory (also while others wait), over_quota and the like from the upstream,
    /// size_overflow, bad_alignment. What the upstream throws passes through.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment = alignof(std::max_align_t)) {
        return obtain_or_throw(size, alignment);
    }
    /// Null where `allocate` would throw; `why`, if given, gets the reason with its figures.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment = alignof(std::max_align_t),
                                     failure* why = nullptr) noexcept {
        refusal r;
        void* const p = obtain(size, alignment, r, nullptr);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }
    /// As allocate, but waits for memory as long as `until` has it, first come first served: a patience, see
    /// pool_wait.hpp. deadline_exceeded or stopped then, with the figures of the last refusal. A request that the
    /// upstream's limit rules out, and what isn't for want of memory, is refused at once.
    template <class Patience>
    [[nodiscard]] void* allocate_until(std::size_t size, std::size_t alignment, const Patience& until) {
        return obtain_until_or_throw(size, alignment, until);
    }
    /// Null where allocate_until would throw.
    template <class Patience>
    [[nodiscard]] void* try_allocate_until(std::size_t size, std::size_t alignment, const Patience& until,
                                           failure* why = nullptr) noexcept {
        refusal r;
        void* const p = obtain_until(size, alignment, until, r, nullptr);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }
    /// As try_allocate, but only what the pool holds and nobody caches: calls neither the upstream nor a stream. For
    /// code that must not, such as one that is being captured.
    [[nodiscard]] void* try_allocate_held(std::size_t size, std::size_t alignment) noexcept {
        if (detail::pool_tag::check(size, alignment) != errc::none || waiting() != 0) return nullptr;
        const auto whole = detail::whole_granules(size);
        return out(store_.take({whole, whole, alignment, size}), size, alignment);
    }

    /// Free for everybody at once: all work that uses the block is done. unknown_block or wrong_size, changing nothing,
    /// if the block isn't out or was allocated otherwise. Null is ignored.
    errc deallocate(void* p, std::size_t size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return p == nullptr ? errc::none : store_.free(p, size, alignment);
    }
    /// As deallocate, but for a block that work before `used` may still use: free once that is reached.
    errc deallocate_after(const Point& used, void* p, std::size_t size,
                          std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return p == nullptr ? errc::none : store_.free_after(used, p, size, alignment);
    }

    /// A cache for one worker. Throws std::bad_alloc.
    [[nodiscard]] cache make_cache() { return cache(*this); }
    /// A cache for one stream: what is freed there can be had there again at once, and elsewhere when the stream has
    /// got there. `stream` must outlive it, and record() must be safe from any thread. Throws std::bad_alloc.
    template <timeline Stream>
    requires std::is_same_v<typename Stream::point, Point>
    [[nodiscard]] cache make_cache(Stream& stream) {
        return cache(*this, &stream, [](void* s) { return static_cast<Stream*>(s)->record(); });
    }

    /// Empties all caches and gives back segments in which nothing is, until at most `target` is held. Returns what is.
    bytes trim(bytes target) noexcept {
        store_.reclaim();
        return_empty(target.count());
        return usage().reserved;
    }
    /// Waits until `deadline` for what was freed on streams. False if some of it is left.
    bool drain(instant deadline) { return store_.drain(deadline); }

    /// From now on everything is refused with errc::closed; what is free goes back to the upstream, what streams use first.
    /// False if they haven't got there at the deadline: call it again. What is out then stays the upstream's, which is
    /// closing: the pool doesn't touch it any more. Called when the upstream closes; private pools close before.
    bool close(instant deadline) {
        const bool above = closing_.close(deadline);
        store_.close();
        if (!store_.drain(deadline) || !above) return false;
        return_empty(0);
        store_.abandon();
        detached_.store(true, std::memory_order_relaxed);
        return true;
    }
    /// For what keeps memory of the pool.
    [[nodiscard]] close_token closing() const noexcept { return closing_.token(); }

    /// A reading; see pool_usage.
    [[nodiscard]] pool_usage usage() const noexcept { return store_.usage(); }
    /// The largest block, at a multiple of 256 bytes, that is free here or, where it can tell, with the upstream. There may
    /// be a larger one when caches and segments are emptied.
    [[nodiscard]] bytes largest_free() const noexcept {
        const bytes above = upstream_.largest_free();
        return std::max(usage().largest_free,
                        above == bytes::max() ? bytes{} : above - above % bytes{detail::pool_granule});
    }
    /// Threads that wait.
    [[nodiscard]] std::size_t waiting() const noexcept { return store_.waiting(); }
    /// What it was made over.
    [[nodiscard]] Upstream& upstream() const noexcept { return upstream_.resource(); }
    /// Whoever the upstream says that the memory is charged to.
    [[nodiscard]] std::string_view owner() const noexcept { return upstream_.owner(); }
    /// Why such a block can never be had, whatever is freed; errc::none if it could be.
    [[nodiscard]] failure refuses(std::size_t size, std::size_t alignment) const noexcept {
        if (const errc why = detail::pool_tag::check(size, alignment); why != errc::none)
            return {.code = why, .asked = size};
        const auto least = detail::whole_granules(size);
        return impossible({least, least, alignment, size});
    }

    /// What a request takes of the pool, bytes::max() if none can. A cache may take an eighth more.
    [[nodiscard]] static constexpr bytes charged(std::size_t size, std::size_t alignment) noexcept {
        return detail::pool_tag::check(size, alignment) == errc::none ? bytes{detail::whole_granules(size)}
                                                                      : bytes::max();
    }
    /// The tenant's view of the memory, where the upstream has one.
    [[nodiscard]] bytes capacity() const noexcept requires memory<Upstream> { return upstream_.resource().capacity(); }
    /// The same.
    [[nodiscard]] bytes taken_by_others() const noexcept requires memory<Upstream> {
        return upstream_.resource().taken_by_others();
    }

private:
    friend cache;
    using worker = detail::pool_worker<Point>;

    using refusal = upstream_refusal;  // `final`: nothing that may be freed could change it

    void* obtain_or_throw(std::size_t size, std::size_t alignment, worker* own = nullptr) {
        refusal r;
        void* const p = obtain(size, alignment, r, own);
        if (p == nullptr) refuse(r);
        return p;
    }
    template <class Patience>
    void* obtain_until_or_throw(std::size_t size, std::size_t alignment, const Patience& until, worker* own = nullptr) {
        refusal r;
        void* const p = obtain_until(size, alignment, until, r, own);
        if (p == nullptr) refuse(r);
        return p;
    }
    // In the name of whoever the upstream says that the memory is charged to.
    [[noreturn]] void refuse(const refusal& r) const {
        if (r.thrown) std::rethrow_exception(r.thrown);
        if (r.why.code == errc::closed) throw memory_error(r.why, {}, "allocate from a pool");
        const auto tenant = upstream_.owner();
        const auto held = usage();
        detail::message m;
        if (!tenant.empty()) m.add("tenant '", tenant.substr(0, detail::longest_name), "': ");
        m.add("allocate from a pool: asked ", bytes{r.why.asked});
        if (r.why.limit != 0) m.add(", ", bytes{r.why.left}, " of ", bytes{r.why.limit}, " left");
        m.add(" (", to_string(r.why.code), "); the pool holds ", held.reserved, ", of which ", held.free(),
              " are free, ", held.largest_free, " in one block");
        throw memory_error(r.why, tenant, m);
    }

    // What a worker gets is rounded to its bins, unless that is what it would be refused for. While somebody
    // waits, only who came first gets anything.
    [[nodiscard]] void* obtain(std::size_t size, std::size_t alignment, refusal& r, worker* own,
                               bool waits = false) noexcept {
        if (const errc why = detail::pool_tag::check(size, alignment); why != errc::none) {
            r.why = {.code = why, .asked = size};
            r.final = true;
            return nullptr;
        }
        const auto least = detail::whole_granules(size);
        const detail::pool_request request{own == nullptr ? least : cache::rounded(least), least, alignment, size};
        if (waiting() != 0 && !waits) [[unlikely]] {
            r.why = explain(request);
            return nullptr;
        }
        detail::pool_block* b = own == nullptr ? nullptr : store_.take_from_depot(request, *own);
        if (b == nullptr) b = store_.take(request);
        if (b == nullptr) b = obtain_slowly(request, r, own);
        return out(b, size, alignment);
    }
    template <class Patience>
    [[nodiscard]] void* obtain_until(std::size_t size, std::size_t alignment, const Patience& until, refusal& r,
                                     worker* own) noexcept {
        if (void* const p = obtain(size, alignment, r, own); p != nullptr || r.final) return p;
        for (detail::pool_waiter<Point> waiter(store_);;) {
            const errc over = waiter.wait(until);
            if (over != errc::none) {
                r.thrown = nullptr;
                r.why.code = over;
                r.why.asked = size;
                return nullptr;
            }
            if (void* const p = obtain(size, alignment, r, own, true); p != nullptr || r.final) return p;
        }
    }
    [[nodiscard]] static void* out(detail::pool_block* b, std::size_t size, std::size_t alignment) noexcept {
        if (b == nullptr) return nullptr;
        b->bin = detail::bin_layout::of(b->size / detail::pool_granule);
        // Relaxed: whoever frees the block has had the pointer handed over from here.
        b->tag.store(detail::pool_tag::live(b->begin, size, alignment), std::memory_order_relaxed);
        return b->begin;
    }

    [[gnu::noinline]] detail::pool_block* obtain_slowly(const detail::pool_request& request, refusal& r,
                                                        worker* own) noexcept {
        // What could never be granted must not cost the others their caches and segments.
        if (r.why = impossible(request); r.why.code != errc::none) {
            r.final = true;
            return nullptr;
        }
        const auto segment = detail::whole_granules(options_.segment.count());
        const auto grow_by_segment = [&] {
            return segment > request.size ? grow(segment, request.size, request, r) : nullptr;
        };
        for (;;) {
            auto seen = store_.changes();
            if (detail::pool_block* const b = store_.collect_and_take(request, own)) return b;
            const bool early = store_.caches_keep_less(options_.kept);
            if (early)
                if (detail::pool_block* const b = grow_by_segment()) return b;
            if (detail::pool_block* const b = store_.reclaim_and_take(request, own)) return b;
            if (!early)
                if (detail::pool_block* const b = grow_by_segment()) return b;
            seen += return_empty(0);
            if (detail::pool_block* const b = grow(request.least, request.least, request, r)) return b;
            // Each further round means that another thread has got memory from the upstream or given it some.
            if (const auto [b, again] = store_.settle_and_take(request, own, seen); b != nullptr || !again) {
                if (b == nullptr && r.why.code == errc::none) r.why = explain(request);
                return b;
            }
        }
    }
    // Neither the upstream nor what is held could ever give it.
    [[nodiscard]] failure impossible(const detail::pool_request& request) const noexcept {
        if (store_.closed()) return {.code = errc::closed, .asked = request.asked};
        if (store_.could_hold(request)) return {};
        return upstream_.refuses(request.least, std::max(request.alignment, detail::pool_granule));
    }
    [[nodiscard]] failure explain(const detail::pool_request& request) const noexcept {
        if (store_.closed()) return {.code = errc::closed, .asked = request.asked};
        const auto u = usage();
        return {errc::out_of_memory, request.least, u.free().count(), u.reserved.count()};
    }

    // `range` bytes from the upstream, or as many as it takes for these, and of them a block.
    [[nodiscard]] detail::pool_block* grow(std::uint64_t range, std::uint64_t size, const detail::pool_request& request,
                                           refusal& r) noexcept {
        const auto alignment = std::max(request.alignment, detail::pool_granule);
        if (const bytes takes = upstream_.charged(range, alignment); takes != bytes::max())
            range = std::max(range, takes.count() & ~std::uint64_t{detail::pool_granule - 1});
        store_.begin_move();
        detail::pool_block* b = nullptr;
        if (void* const p = from_upstream(range, alignment, r)) {
            try {
                b = store_.add({static_cast<std::byte*>(p), range, alignment}, size, request);
            } catch (...) {  // the host has no memory for the bookkeeping
            }
            if (b == nullptr) upstream_.deallocate(p, range, alignment);
        }
        store_.end_move(b != nullptr);
        return b;
    }
    [[nodiscard]] void* from_upstream(std::size_t size, std::size_t alignment, refusal& r) noexcept {
        r = {};
        void* const p = upstream_.ask(size, alignment, r);
        // What is over a whole quota won't fit whatever is freed.
        if (r.why.code == errc::size_overflow || (r.why.code == errc::over_quota && r.why.asked > r.why.limit))
            r.final = true;
        return p;
    }
    // Gives back segments in which nothing is while more than `target` bytes are held. Returns how many.
    std::uint64_t return_empty(std::uint64_t target) noexcept {
        std::uint64_t returned = 0;
        for (auto s = store_.remove_empty(target); s.begin != nullptr; s = store_.remove_empty(target), ++returned) {
            upstream_.deallocate(s.begin, s.size, s.alignment);
            store_.end_move(true);
        }
        return returned;
    }

    upstream_ref<Upstream> upstream_;
    pool_options options_;
    detail::pool_store<Point> store_;
    close_source closing_;
    std::optional<close_callback> closes_;
    std::atomic<bool> detached_{false};  // the upstream is not to be touched any more
};

static_assert(upstream<pool_resource<detail::plain_resource>>);
static_assert(upstream<pool_resource<detail::plain_resource>::cache>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
