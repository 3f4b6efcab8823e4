// SPDX-License-Identifier: Apache-2.0
// The source of tenants' memory on a device, in place of the device's own allocations: chunks that
// are mapped to addresses, or a stream-ordered pool of the device. Memory that a source keeps is
// charged to no tenant, and goes back when the device lacks memory.
//
//   detail::arena_source<host::virtual_memory> chunks{memory, capacity, account};
//   void* p = chunks.try_allocate(2 << 20, 256, &why);
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Thread-safe. Called for segments of a pool, or by tenants that do without one.
class memory_source {
public:
    memory_source() = default;
    memory_source(const memory_source&) = delete;
    memory_source& operator=(const memory_source&) = delete;
    virtual ~memory_source() = default;

    /// Null, with the reason in `why`.
    [[nodiscard]] virtual void* try_allocate(std::size_t size, std::size_t alignment, failure& why) noexcept = 0;
    /// No work uses the block any more. A block given back to a lost device is gone: no error.
    virtual errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept = 0;
    /// The bytes of the device that a block takes; bytes::max() if no such block is possible.
    [[nodiscard]] virtual bytes charged(std::size_t size, std::size_t alignment) const noexcept = 0;
    /// Gives back the memory that the source keeps. Returns true if there was any.
    virtual bool trim() noexcept = 0;
};

/// Chunks, each block at addresses of its own. A freed block leaves its chunks to the next block,
/// whatever its size: chunks don't fragment, and the driver needn't make new ones. `V` must outlive
/// it.
template <virtual_memory V>
class arena_source final : public memory_source {
public:
    explicit arena_source(V& memory) noexcept : memory_(&memory) {}
    ~arena_source() override { (void)arena_source::trim(); }

    void* try_allocate(std::size_t size, std::size_t alignment, failure& why) noexcept override try {
        const bytes all = charged(size, alignment);
        why = impossible_block(size, alignment, unit());
        if (all == bytes::max()) return nullptr;
        const auto whole = static_cast<std::size_t>(all.count());
        std::vector<chunk> taken = take(whole / unit(), why);
        if (taken.empty()) return nullptr;
        auto range = memory_->reserve(whole);
        if (!range) {
            why = range.why();
            keep(std::move(taken));
            return nullptr;
        }
        auto* const begin = static_cast<std::byte*>(range->data());
        mapping& block = enter(begin, *std::move(range));  // nothing is mapped yet: it may throw
        for (std::size_t i = 0; i < taken.size(); ++i) {
            const errc failed = memory_->map(begin + i * unit(), taken[i]);
            if (failed == errc::none) continue;
            why = {.code = failed, .asked = size, .because = reason::size};
            block.chunks = std::move(taken);
            if (i == 0 || memory_->unmap(begin, i * unit()) == errc::none) leave(begin);
            return nullptr;  // a mapping that can't be undone stays
        }
        block.chunks = std::move(taken);
        return begin;
    } catch (...) {  // of the host's memory
        why = no_host_memory;
        return nullptr;
    }

    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept override {
        std::size_t whole = 0;
        {
            const std::lock_guard lock(mutex_);
            const auto at = out_.find(p);
            if (at == out_.end() || at->second.leaves) return errc::unknown_block;
            whole = at->second.chunks.size() * unit();
            if (charged(size, alignment) != bytes{whole}) return errc::wrong_size;
            at->second.leaves = true;
        }
        const errc why = memory_->unmap(p, whole);
        if (why != errc::none && why != errc::device_lost) {
            stay(p);
            return why;
        }
        leave(p);  // a lost device has nothing left to unmap
        return errc::none;
    }

    bytes charged(std::size_t size, std::size_t alignment) const noexcept override {
        if (!std::has_single_bit(alignment) || alignment > unit() || size > std::numeric_limits<std::size_t>::max() / 4)
            return bytes::max();
        return bytes{(std::max<std::size_t>(size, 1) + unit() - 1) / unit() * unit()};
    }

    bool trim() noexcept override {
        const std::lock_guard one_at_a_time(trims_);  // a second caller finds the memory free
        std::vector<chunk> gone;
        {
            const std::lock_guard lock(mutex_);
            gone.swap(kept_);
        }
        return !gone.empty();
    }

private:
    using chunk = typename V::chunk;
    struct mapping {
        typename V::range range;
        std::vector<chunk> chunks{};
        bool leaves = false;  // a thread is freeing it
    };

    [[nodiscard]] std::size_t unit() const noexcept { return static_cast<std::size_t>(memory_->granularity().count()); }

    // All chunks; or none, and the reason in `why`.
    [[nodiscard]] std::vector<chunk> take(std::size_t n, failure& why) {
        std::vector<chunk> taken;
        taken.reserve(n);
        {
            const std::lock_guard lock(mutex_);
            for (; taken.size() < n && !kept_.empty(); kept_.pop_back()) taken.push_back(std::move(kept_.back()));
        }
        while (taken.size() < n) {  // no lock is held during the driver's calls
            auto made = memory_->create();
            if (!made) {
                why = made.why();
                keep(std::move(taken));
                return {};
            }
            taken.push_back(*std::move(made));
        }
        return taken;
    }
    // Keeps chunks for the next block. If the host has no memory to remember the chunks, they go
    // back to the device.
    void keep(std::vector<chunk> chunks) noexcept {
        const std::lock_guard lock(mutex_);
        try {
            kept_.insert(kept_.end(), std::move_iterator(chunks.begin()), std::move_iterator(chunks.end()));
        } catch (...) {
        }
    }
    // The mapping's place in memory never changes, however many are entered later.
    mapping& enter(void* p, typename V::range&& range) {
        const std::lock_guard lock(mutex_);
        return out_.emplace(p, mapping{std::move(range)}).first->second;
    }
    void leave(void* p) noexcept {
        typename decltype(out_)::node_type gone;  // its addresses go back without a lock
        {
            const std::lock_guard lock(mutex_);
            gone = out_.extract(p);
        }
        keep(std::move(gone.mapped().chunks));
    }
    void stay(void* p) noexcept {
        const std::lock_guard lock(mutex_);
        out_.find(p)->second.leaves = false;
    }

    V* memory_;
    std::mutex trims_, mutex_;  // in this order
    std::unordered_map<void*, mapping> out_;
    std::vector<chunk> kept_;
};

/// A memory pool of the device, which allocates in the order of a stream.
///   try_allocate(stream, size, alignment, why)   null, and the reason
///   deallocate(stream, p)   frees once the stream reaches the call
///   charged(size, alignment), usage().reserved (of the device), trim()
// clang-format off
template <class P, class Stream>
concept stream_ordered_pool = timeline<Stream> && requires(P& p, const P& c, Stream& s, std::size_t size, void* block, failure* why) {
    { p.try_allocate(s, size, size, why) } noexcept -> std::same_as<void*>;
    { p.deallocate(s, block) } noexcept -> std::same_as<errc>;
    { c.charged(size, size) } noexcept -> std::same_as<bytes>;
    { c.usage().reserved } -> std::convertible_to<bytes>;
    p.trim();
};
// clang-format on

/// Blocks of such a pool, on a stream of its own. A block may be used on any stream. `Pool` must
/// outlive it. Pool and stream are safe from any thread, so no thread waits for a lock while
/// another one is in the driver.
template <class Pool, timeline Stream>
requires stream_ordered_pool<Pool, Stream>
class stream_ordered_source final : public memory_source {
public:
    stream_ordered_source(Pool& pool, Stream stream) : pool_(&pool), stream_(std::move(stream)) {}

    void* try_allocate(std::size_t size, std::size_t alignment, failure& why) noexcept override {
        void* p = nullptr;
        try {
            p = pool_->try_allocate(stream_, size, alignment, &why);
            if (p == nullptr) return nullptr;
            const auto had = stream_.record();
            (void)had.wait(never);  // nothing else is on the stream but calls of other threads
            if (had.status() == errc::none) return p;
            why = {.code = had.status(), .asked = size, .because = reason::size};
        } catch (const error& e) {
            why = e.figures();
        } catch (...) {
            why = {.code = errc::backend_failed, .asked = size, .because = reason::size};
        }
        if (p != nullptr) (void)pool_->deallocate(stream_, p);
        return nullptr;
    }
    errc deallocate(void* p, std::size_t, std::size_t) noexcept override {
        const errc why = pool_->deallocate(stream_, p);
        return why == errc::device_lost ? errc::none : why;
    }
    bytes charged(std::size_t size, std::size_t alignment) const noexcept override {
        return std::as_const(*pool_).charged(size, alignment);
    }
    bool trim() noexcept override {
        const std::lock_guard lock(trims_);  // otherwise two calls would mix up their figures
        try {
            (void)stream_.record().wait(never);
            const bytes before = pool_->usage().reserved;
            pool_->trim();
            return pool_->usage().reserved < before;
        } catch (...) {
            return false;
        }
    }

private:
    Pool* pool_;
    Stream stream_;
    std::mutex trims_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
