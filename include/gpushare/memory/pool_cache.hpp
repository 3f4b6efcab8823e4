// SPDX-License-Identifier: Apache-2.0
// One worker's cache of a pool. It allocates and frees without the pool's lock as long as blocks that were freed here
// fit the requests. A pool makes it; made for a stream, it frees in stream order.
//
//   auto cache = pool.make_cache(stream);
//   void* p = cache.allocate(4_KiB, 256);
//   launch(stream, p);
//   cache.deallocate(p, 4_KiB, 256);           // at once; the next allocation here may be the same block
//   void* q = cache.allocate(4_KiB, 256);      // p again: in stream order, without an event of CUDA's
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/pool_store.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A worker's cache of a pool. Belongs to one worker: calls that overlap wait for each other, and on a stream they must
/// not overlap. Whenever the pool would refuse another user or have to grow, it takes back the
/// blocks that are kept here, also while the worker sleeps. A block may be freed through another
/// cache than it was allocated from, or through the pool. The pool must outlive the cache.
///
/// On a stream, a free records no point. One point is recorded for all blocks kept here when another user needs them,
/// and they are free elsewhere once the stream has reached it; flush() records it at once.
template <class Pool>
class pool_cache {
public:
    using point = typename Pool::point;  ///< of its stream

    pool_cache(pool_cache&&) noexcept = default;
    /// Blocks that this cache kept go back to the pool with `other`.
    pool_cache& operator=(pool_cache&& other) noexcept {
        std::swap(pool_, other.pool_);
        std::swap(worker_, other.worker_);
        std::swap(cut_, other.cut_);
        return *this;
    }
    ~pool_cache() {
        if (worker_ != nullptr) pool_->store_.leave(*worker_);
    }

    /// See pool_resource::allocate.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment = alignof(std::max_align_t)) {
        void* const p = try_allocate_kept(size, alignment);
        return p != nullptr ? p : pool_->obtain_or_throw(size, alignment, worker_.get());
    }
    /// The same, of a size with its unit.
    [[nodiscard]] void* allocate(bytes size, std::size_t alignment = alignof(std::max_align_t)) {
        return allocate(static_cast<std::size_t>(size.count()), alignment);
    }
    /// See pool_resource::try_allocate.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment = alignof(std::max_align_t),
                                     failure* why = nullptr, std::string_view label = {}) noexcept {
        void* const p = try_allocate_kept(size, alignment, label);
        return p != nullptr ? p : try_allocate_anew(size, alignment, why, label);
    }
    /// The same, of a size with its unit.
    [[nodiscard]] void* try_allocate(bytes size, std::size_t alignment = alignof(std::max_align_t),
                                     failure* why = nullptr, std::string_view label = {}) noexcept {
        return try_allocate(static_cast<std::size_t>(size.count()), alignment, why, label);
    }
    /// See pool_resource::allocate_until.
    template <class Patience>
    [[nodiscard]] void* allocate_until(std::size_t size, std::size_t alignment, const Patience& until) {
        void* const p = try_allocate_kept(size, alignment);
        return p != nullptr ? p : pool_->obtain_until_or_throw(size, alignment, until, worker_.get());
    }
    /// The same, of a size with its unit.
    template <class Patience>
    [[nodiscard]] void* allocate_until(bytes size, std::size_t alignment, const Patience& until) {
        return allocate_until(static_cast<std::size_t>(size.count()), alignment, until);
    }
    /// See pool_resource::try_allocate_until.
    template <class Patience>
    [[nodiscard]] void* try_allocate_until(std::size_t size, std::size_t alignment, const Patience& until,
                                           failure* why = nullptr, std::string_view label = {}) noexcept {
        if (void* const p = try_allocate_kept(size, alignment, label)) return p;
        typename Pool::refusal r;
        void* const p = pool_->obtain_until(size, alignment, until, r, worker_.get(), label);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }
    /// The same, of a size with its unit.
    template <class Patience>
    [[nodiscard]] void* try_allocate_until(bytes size, std::size_t alignment, const Patience& until,
                                           failure* why = nullptr, std::string_view label = {}) noexcept {
        return try_allocate_until(static_cast<std::size_t>(size.count()), alignment, until, why, label);
    }
    /// See pool_resource::deallocate. On a stream the block is free here at once, elsewhere in stream order.
    errc deallocate(void* p, std::size_t size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        if (p == nullptr) return errc::none;
        const auto freed = worker_->bins.put(pool_->store_.index(), p, size, alignment);
        if (freed.homeless != nullptr) [[unlikely]]
            return pool_->store_.give_from(*worker_, freed.bin, *freed.homeless, size);
        return freed.why;
    }
    /// The same, of a size with its unit.
    errc deallocate(void* p, bytes size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return deallocate(p, static_cast<std::size_t>(size.count()), alignment);
    }

    /// See pool_resource::deallocate_after: this cache's stream plays no part.
    errc deallocate_after(const point& used, void* p, std::size_t size,
                          std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return pool_->deallocate_after(used, p, size, alignment);
    }
    /// The same, of a size with its unit.
    errc deallocate_after(const point& used, void* p, bytes size,
                          std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return deallocate_after(used, p, static_cast<std::size_t>(size.count()), alignment);
    }

    /// The pool's answers; see pool_resource.
    [[nodiscard]] static constexpr bytes charged(std::size_t size, std::size_t alignment) noexcept {
        return Pool::charged(size, alignment);
    }
    /// The same, of a size with its unit.
    [[nodiscard]] static constexpr bytes charged(bytes size, std::size_t alignment) noexcept {
        return charged(static_cast<std::size_t>(size.count()), alignment);
    }
    /// See pool_resource::refuses.
    [[nodiscard]] failure refuses(std::size_t size, std::size_t alignment) const noexcept {
        return pool_->refuses(size, alignment);
    }
    /// The same, of a size with its unit.
    [[nodiscard]] failure refuses(bytes size, std::size_t alignment) const noexcept {
        return refuses(static_cast<std::size_t>(size.count()), alignment);
    }
    [[nodiscard]] bytes largest_free() const noexcept { return pool_->largest_free(); }  ///< See pool_resource.
    [[nodiscard]] std::string_view owner() const noexcept { return pool_->owner(); }     ///< See pool_resource.
    [[nodiscard]] close_token closing() const noexcept { return pool_->closing(); }      ///< The pool's.
    /// As the pool's; see quota::in_hook.
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept { return pool_->in_hook(thread); }

    /// Gives all blocks that are kept here back to the pool; on a stream, one point is recorded for them now.
    void flush() noexcept { pool_->store_.flush(*worker_); }

    /// While a pause exists, no point is recorded on the stream, because it is being captured. Blocks freed here stay
    /// here meanwhile.
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

    /// As try_allocate, but only what is kept here.
    [[nodiscard]] void* try_allocate_kept(std::size_t size, std::size_t alignment,
                                          std::string_view label = {}) noexcept {
        if (size > cut_ || !detail::pool_tag::power_of_two(alignment)) [[unlikely]]
            return try_allocate_large(size, alignment, label);
        detail::pool_block* const b =
            worker_->bins.take(detail::whole_granules(size) / detail::pool_granule, alignment, size);
        return b == nullptr ? nullptr : b->hand_out(size, alignment, label);
    }
    /// As try_allocate, for who has looked at what is kept here just now.
    [[nodiscard]] void* try_allocate_anew(std::size_t size, std::size_t alignment, failure* why = nullptr,
                                          std::string_view label = {}) noexcept {
        typename Pool::refusal r;
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
          cut_(std::min<std::size_t>(detail::pool_bins::largest * detail::pool_granule, pool.largest_inexact())) {
        pool.store_.join(*worker_);
    }

    // Where a block of its own is as large as it has to be, what is kept serves only who asks for as much.
    [[nodiscard]] void* try_allocate_large(std::size_t size, std::size_t alignment, std::string_view label) noexcept {
        if (size > detail::pool_bins::largest * detail::pool_granule || !detail::pool_tag::power_of_two(alignment))
            return nullptr;
        const auto least = detail::whole_granules(size);
        detail::pool_block* const b =
            worker_->bins.take_exact(least, pool_->range_for(least, alignment), alignment, size);
        return b == nullptr ? nullptr : b->hand_out(size, alignment, label);
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
    std::size_t cut_;  // what is larger has to be exact, or isn't kept
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
