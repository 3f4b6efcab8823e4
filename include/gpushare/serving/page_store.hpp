// SPDX-License-Identifier: Apache-2.0
// Pages for the KV caches of one model, whose memory comes and goes with the load. Addresses never
// change, and memory that isn't in a page serves other tenants. The tenant's quota sets the cache's
// guarantee and burst.
//
//   gpushare::page_store cache{pool, chat.memory().limit(), gpushare::tenant_tag{chat.tag()},
//                              {.lanes = 36, .token = 512_B, .tokens = 64, .pages = 4096}, "chat"};
//   std::array<std::uint32_t, 8> pages;
//   cache.allocate(pages);                                     // all or none
//   attend(cache.data(), cache.page_stride(), cache.lane_stride(), pages);
//   cache.free(pages, stream.record());                        // once that work is over
//
// A page has the tokens of all lanes (keys and values of each layer) side by side, so that a cache
// grows by one page, and not by a chunk for each lane. With a chunk of 2 MiB for each of these 36
// lanes, the cache would grow by 72 MiB, 4,096 tokens at a time. Lane l of page p begins at data()
// + p * page_stride() + l * lane_stride(). (For an engine that needs each lane in one piece, use
// virtual_arena::commit of several ranges.)
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/serving/detail/page_book.hpp>
#include <gpushare/serving/detail/page_growers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The layout of pages, and limits on their number.
struct page_options {
    std::uint32_t lanes = 1;    ///< parts of a page: keys and values of each layer
    bytes token{};              ///< the size of one token in one lane
    std::uint32_t tokens = 64;  ///< the tokens of a page
    /// The most pages. Addresses are reserved for this many pages, rounded up to whole slabs. Page
    /// numbers may reach the rounded number, so size tables of pages by pages_per_slab().
    std::uint32_t pages = 0;
    std::uint32_t floor = 0;  ///< pages whose memory stays here once allocated, used or not
    /// Called when a request lacks memory and all memory here is in pages. Frees at most `pages`
    /// pages that the engine can do without (of cached prefixes, or of idle sequences), now or by
    /// the request's deadline. The callable is a hook: see quota_wait.hpp.
    std::function<void(const reclaim_request&, std::uint32_t pages)> evict{};
};

/// A reading of a page_store.
struct page_usage {
    std::uint32_t out = 0;      ///< allocated pages
    std::uint32_t pending = 0;  ///< freed pages whose stream hasn't reached the free
    std::uint32_t free = 0;     ///< pages with memory, for the next allocation
    bytes committed{};          ///< memory that is charged to the quota
    bytes given_back{};         ///< memory given back so far, to other tenants or by trim()
};

/// The pages of one model on one device. Any thread may use the store, which can't be copied or
/// moved. Pool and quota must outlive it. When the quota closes, the store closes, too: it refuses
/// requests with errc::closed, and gives its memory back once no work uses the memory.
template <virtual_memory Memory, scrubber Stream>
class page_store {
    using arena_type = virtual_arena<Memory, Stream>;

public:
    using pool_type = chunk_pool<Memory, Stream>;  ///< the source of the store's memory
    using point = typename pool_type::point;       ///< a point on a stream that uses pages

    /// Makes a store without memory. `owner` names the tenant in messages and must outlive the
    /// store. Throws operation_error (invalid_specification for a page size or a page count of 0),
    /// and the exceptions of virtual_arena.
    page_store(pool_type& pool, quota& limit, tenant_tag tenant, page_options o, std::string_view owner = {})
        : limit_(&limit),
          owner_(owner),
          options_(std::move(o)),
          made_with_(options_.pages),
          lane_(options_.token * options_.tokens),
          page_(checked(lane_ * options_.lanes, options_.pages)),
          slab_(page_ > pool.chunk_size() ? up(page_, pool.chunk_size()) : pool.chunk_size()),
          book_(static_cast<std::uint32_t>(slab_ / page_),
                static_cast<std::uint32_t>((options_.pages + slab_ / page_ - 1) / (slab_ / page_))),
          next_(book_.pages()),
          arena_(pool, limit, tenant, slab_ * book_.slabs(), owner),
          reclaims_(
              limit, order, [this](const reclaim_request& r) { return reclaim(r); },
              [this](instant until) { return wait_pending(until); }) {
        closes_.emplace(limit.closing(), [this](instant) {
            close();
            return true;  // the arena takes care of the rest
        });
    }
    page_store(const page_store&) = delete;
    page_store& operator=(const page_store&) = delete;
    /// Gives the memory back once the points of freed pages are reached. No work may use the other
    /// pages any more.
    ~page_store() {
        closes_.reset();
        close();
    }

    /// The first byte of page 0, which never changes.
    [[nodiscard]] void* data() const noexcept { return arena_.data(); }
    /// The distance from one page of a slab to the next. Slabs follow each other at a distance of
    /// slab_stride(). Use address() unless slab_stride() is a multiple of the page stride.
    [[nodiscard]] bytes page_stride() const noexcept { return page_; }
    /// The distance from one lane of a page to the next.
    [[nodiscard]] bytes lane_stride() const noexcept { return lane_; }
    /// The pages of a slab, which is the unit in which memory comes and goes. A slab is one chunk,
    /// or as many chunks as a page needs.
    [[nodiscard]] std::uint32_t pages_per_slab() const noexcept { return book_.per_slab(); }
    /// The distance from one slab to the next.
    [[nodiscard]] bytes slab_stride() const noexcept { return slab_; }
    /// The address of a lane of a page. Page and lane must exist.
    [[nodiscard]] void* address(std::uint32_t page, std::uint32_t lane = 0) const noexcept {
        const auto at = slab_ * (page / book_.per_slab()) + page_ * (page % book_.per_slab()) + lane_ * lane;
        return static_cast<std::byte*>(arena_.data()) + at.count();
    }

    /// Allocates as many pages as `to` has room for, or none. The pages have old contents of this
    /// tenant, or zeros. If memory is missing, the call recalls burst that was lent to other
    /// tenants. Until `deadline` the call waits for three things: the scrubbing of memory, freed
    /// pages whose stream hasn't reached the free, and memory that another thread is about to
    /// bring, if that thread gives up no later. Fails with over_quota (of the quota, or for more
    /// than page_options::pages), out_of_memory, closed, and the errors of
    /// virtual_arena::try_commit.
    failure try_allocate(std::span<std::uint32_t> to, instant deadline = {}) noexcept {
        return obtain(
            to, deadline, false, [&](ranges more, const std::stop_token&) { return arena_.try_commit(more, deadline); },
            [&](const failure& lacks) -> look { return {.why = lacks, .until = deadline}; });
    }
    /// try_allocate(), but throws the failure.
    void allocate(std::span<std::uint32_t> to, instant deadline = {}) {
        check(try_allocate(to, deadline), "allocate pages");
    }
    /// Like try_allocate, but waits in the quota's queue, first come first served, until the
    /// deadline or stop request of `until`, a patience (include memory/quota_wait.hpp).
    template <clock Clock>
    failure try_allocate(std::span<std::uint32_t> to, const patience<Clock>& until) noexcept {
        // Also stops if there are enough pages after all, because another thread freed some.
        const auto commit = [&](ranges more, const std::stop_token& enough) {
            std::stop_source either;
            const auto stop = [&] { (void)either.request_stop(); };
            const std::stop_callback by_caller(until.stop, stop), by_store(enough, stop);
            patience<Clock> mine = until;
            mine.stop = either.get_token();
            const failure why = arena_.try_commit(more, mine);
            return why.code == errc::stopped && !until.stop.stop_requested() ? failure{errc::in_flight} : why;
        };
        return obtain(to, until.deadline, true, commit, [&](const failure&) -> look {
            const instant now = until.time.now();
            if (until.stop.stop_requested()) return {.why = {errc::stopped}};
            if (now >= until.deadline) return {.why = {errc::deadline_exceeded}};
            return {.again = true, .until = std::min(until.deadline, now + detail::short_look_slice)};
        });
    }
    /// The old name of try_allocate() with a patience. 0.3 removes it.
    [[deprecated("use try_allocate with a patience")]] failure try_allocate_until(std::span<std::uint32_t> to,
                                                                                  const auto& until) noexcept {
        return try_allocate(to, until);
    }

    /// Gives pages back. They can be allocated again once `after` is reached. If a page isn't
    /// currently allocated, no page goes back and the result is unknown_block. Doesn't allocate
    /// memory.
    errc free(std::span<const std::uint32_t> pages, const point& after = {}) noexcept {
        if (pages.empty()) return errc::none;
        const std::lock_guard lock(mutex_);
        for (std::size_t i = 0; i < pages.size(); ++i)
            if (!book_.leave(pages[i])) {
                while (i != 0) book_.stay(pages[--i]);
                return errc::unknown_block;
            }
        pending_.push_back({after, none});  // within the room that obtain() has reserved
        for (const auto p : pages) next_[p] = std::exchange(pending_.back().head, p);
        pending_pages_ += static_cast<std::uint32_t>(pages.size());
        (void)collect_reached();
        return errc::none;
    }

    /// Makes freed pages whose streams have reached the free available again, and returns whether
    /// there were any. Allocations do this as well.
    bool collect() noexcept {
        const std::lock_guard lock(mutex_);
        return collect_reached();
    }
    /// Gives back memory that isn't in pages, but keeps `keep` pages and never goes below the
    /// floor. Returns the bytes given back.
    bytes trim(std::uint32_t keep = 0) noexcept {
        std::unique_lock lock(mutex_);
        (void)collect_reached();
        return shrink(std::max(keep, options_.floor), bytes::max(), counted_, lock);
    }

    /// Sets the most pages (no more than the store was made with) and the floor. Allocated pages
    /// stay allocated.
    void set_limits(std::uint32_t floor, std::uint32_t most) noexcept {
        const std::lock_guard lock(mutex_);
        options_.floor = floor;
        options_.pages = std::min(most, made_with_);
    }
    /// A reading of the store.
    [[nodiscard]] page_usage usage() const noexcept {
        const std::lock_guard lock(mutex_);
        return {book_.out(), pending_pages_, book_.free(), arena_.committed() + arena_.leaving(), given_back_};
    }

private:
    static constexpr int order = 5;  // the order of the store's hook: before hooks that must copy
    static constexpr std::uint32_t none = ~0U;
    static constexpr bytes line{256};  // the alignment of pages

    struct batch {
        point after;
        std::uint32_t head;  // the first of the batch's pages, linked by next_
    };

    static bytes up(bytes size, bytes to) noexcept { return (size + to - bytes{1}) / to * to; }
    static bytes checked(bytes page, std::uint32_t pages) {
        if (page == bytes{} || page >= quota::max_limit() || pages == 0 || pages > 1U << 30)
            raise({.code = errc::invalid_specification, .asked = page.count(), .because = reason::pages_of_nothing}, {},
                  "a page store");
        return up(page, line);
    }

    using ranges = std::span<const arena_range>;
    using look = detail::page_look;

    template <class Commit, class Look>
    failure obtain(std::span<std::uint32_t> to, instant deadline, bool queues, Commit commit, Look next_look) noexcept
        try {
        std::unique_lock lock(mutex_);
        for (bool again = false;; again = true) {
            if (limit_->closed()) return {errc::closed};
            (void)collect_reached();
            if (to.size() > options_.pages - std::min(options_.pages, book_.out())) return too_many(to.size());
            // Room for the case that every page is freed in a batch of its own, so that free()
            // needs no host memory.
            if (const auto most = pending_.size() + book_.out() + to.size(); most > pending_.capacity())
                pending_.reserve(std::max(most, 2 * pending_.capacity()));
            if (book_.take(to)) return {};
            failure why = too_many(to.size());
            // Made before slabs are planned, because the construction may throw.
            detail::page_grower here{deadline, to.size(),
                                     queues ? std::stop_source{} : std::stop_source{std::nostopstate}};
            if (const auto slabs = book_.plan(static_cast<std::uint32_t>(to.size()) - book_.free()); !slabs.empty()) {
                // While this call waits, free pages aren't given back. In the first round only this
                // store's own hook keeps them, because this request may call that hook. In the
                // second round no hook takes them, so that two stores don't take pages from each
                // other forever.
                const auto counts_on = book_.free();
                counted_ += counts_on;
                firmly_counted_ += again ? counts_on : 0;
                why = grow(slabs, here, commit, lock);
                counted_ -= counts_on;
                firmly_counted_ -= again ? counts_on : 0;
                if (why.code == errc::none || why.code == errc::in_flight || book_.free() >= to.size()) continue;
                if (queues) return why;
            }
            // All slabs exist, are on their way, or were taken by other calls. Waits for pages that
            // other calls have to spare.
            const look next = next_look(why);
            if (!next.again && queues) return next.why;
            const bool coming = others_bring(deadline);
            if (coming && next.again)
                changed_.wait_for(lock, detail::short_look_slice);
            else if (coming)
                changed_.wait(lock, [&] { return !others_bring(deadline) || book_.free() >= to.size(); });
            if (coming) continue;
            if (pending_pages_ == 0 || next.until == instant{}) return why;
            lock.unlock();
            const bool reached = wait_pending(next.until);
            lock.lock();
            if (reached || next.again) continue;
            (void)collect_reached();  // another thread may have done so in the meantime
            if (book_.free() < to.size()) return why;
        }
    } catch (const error& e) {  // a stream on a lost device
        return e.figures();
    } catch (...) {
        return detail::no_host_memory;
    }
    // Whether other calls will bring memory by then. Threads that give memory back wait for
    // nothing.
    [[nodiscard]] bool others_bring(instant by) const noexcept { return book_.leaving() != 0 || growers_.any(by); }
    // Brings memory for slabs. Holds the lock, except during the memory's calls.
    template <class Commit>
    failure grow(const std::vector<std::uint32_t>& slabs, detail::page_grower& here, Commit& commit,
                 std::unique_lock<std::mutex>& lock) noexcept {
        growers_.add(here);
        const failure why = bring(slabs, commit, here.enough.get_token(), lock);
        growers_.remove(here);
        changed_.notify_all();
        return why;
    }
    template <class Commit>
    failure bring(const std::vector<std::uint32_t>& slabs, Commit& commit, const std::stop_token& enough,
                  std::unique_lock<std::mutex>& lock) noexcept {
        failure why = detail::no_host_memory;
        lock.unlock();
        try {
            std::vector<arena_range> more;
            more.reserve(slabs.size());
            for (const auto s : slabs) more.push_back({slab_ * s, slab_});
            why = commit(ranges(more), enough);
        } catch (...) {  // no host memory for the list
        }
        lock.lock();
        for (const auto s : slabs) why.code == errc::none ? book_.landed(s) : book_.fell_through(s);
        if (why.code == errc::none) growers_.tell(book_.free());
        return why;
    }
    [[nodiscard]] failure too_many(std::size_t asked) const noexcept {
        const auto out = std::min(options_.pages, book_.out());
        return {errc::over_quota, (page_ * asked).count(), (page_ * (options_.pages - out)).count(),
                (page_ * options_.pages).count()};
    }

    // ---- with the lock

    bool collect_reached() noexcept {
        const auto before = pending_.size();
        std::erase_if(pending_, [&](const batch& b) {
            if (!b.after.reached()) return false;
            for (auto p = b.head; p != none; p = next_[p]) {
                book_.put(p);
                --pending_pages_;
            }
            return true;
        });
        if (pending_.size() == before) return false;
        growers_.tell(book_.free());
        changed_.notify_all();
        return true;
    }
    // Unlocks while memory is given back.
    bytes shrink(std::uint32_t keep, bytes most, const std::uint32_t& counted,
                 std::unique_lock<std::mutex>& lock) noexcept {
        const auto slabs = (std::uint64_t{keep} + book_.per_slab() - 1) / book_.per_slab();
        bytes given{};
        while (given < most && book_.free() >= std::uint64_t{counted} + book_.per_slab()) {
            const auto s = book_.begin_leaving(static_cast<std::uint32_t>(slabs));
            if (s == book_.slabs()) break;
            lock.unlock();
            // All points are reached, so no work uses the memory. unknown_block means that the
            // arena is closed.
            const failure why = arena_.try_decommit(slab_ * s, slab_, {}, instant{});
            lock.lock();
            if (why.code != errc::none && why.code != errc::unknown_block) {
                book_.stays(s);
                break;
            }
            book_.left(s);
            given += slab_;
        }
        changed_.notify_all();
        given_back_ += given;
        return given;
    }

    // ---- the hook

    bytes reclaim(const reclaim_request& r) {
        std::unique_lock lock(mutex_);
        (void)collect_reached();
        const auto& counted = r.own ? counted_ : firmly_counted_;
        bytes given = shrink(options_.floor, r.missing, counted, lock);
        if (given >= r.missing || !options_.evict) return given;
        const auto pages = up(r.missing - given, slab_) / slab_ * book_.per_slab();
        const auto above = book_.out() - std::min(options_.floor, book_.out());
        if (above == 0) return given;
        lock.unlock();
        options_.evict(r, static_cast<std::uint32_t>(std::min<std::uint64_t>(pages, above)));
        lock.lock();
        // Repeats until there is enough memory. Once there is enough, the hook doesn't wait for a
        // batch whose stream takes longer.
        for (bool more = r.until != instant::min();;) {
            (void)collect_reached();
            given += shrink(options_.floor, r.missing - given, counted, lock);
            if (given >= r.missing || !more || pending_pages_ == 0) return given;
            lock.unlock();
            more = wait_pending(r.until);
            lock.lock();
        }
    }
    bool wait_pending(instant until) {
        std::vector<point> open;
        {
            const std::lock_guard lock(mutex_);
            for (const auto& b : pending_) open.push_back(b.after);
        }
        return !open.empty() && point::wait_any(open, until);
    }

    // Closes the store after the work that still uses pages.
    void close() noexcept {
        std::unique_lock lock(mutex_);
        try {
            std::vector<point> open;
            for (const auto& b : pending_) open.push_back(b.after);
            lock.unlock();
            (void)arena_.close(open);
        } catch (...) {  // no host memory: the next close, or the destructor, tries again
        }
    }

    void check(const failure& why, std::string_view what) const {
        if (why.code != errc::none) raise(why, owner_, what);
    }

    quota* limit_;
    std::string_view owner_;
    page_options options_;
    const std::uint32_t made_with_;  // the number of pages that the store was made with
    const bytes lane_, page_, slab_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;  // pages became free, or a growth ended
    detail::page_book book_;
    std::vector<std::uint32_t> next_;
    std::vector<batch> pending_;
    std::uint32_t pending_pages_ = 0;
    // free pages that calls without enough pages are going to take
    std::uint32_t counted_ = 0, firmly_counted_ = 0;
    detail::page_growers growers_;
    bytes given_back_{};
    arena_type arena_;
    // destroyed before the members above, so that no thread is in the hook then
    quota_hook reclaims_;
    std::optional<close_callback> closes_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
