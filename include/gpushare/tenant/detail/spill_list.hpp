// SPDX-License-Identifier: Apache-2.0
// A tenant's blocks on one device that may be spilled to the host, and the hook that spills them:
// least recently used first, and never one in use.
//
//   detail::spill_list<stream, memory> list{tenant_memory, pinned, 8_GiB, make_stream, now};
//   auto& e = list.add(1_GiB);     if (list.hold(e, deadline) == errc::none) { use(e.block.data()); list.let_go(e); }
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory_resource>
#include <mutex>
#include <thread>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/spillable_block.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Thread-safe. `Memory` is a tenant_memory. No lock is held while memory is requested or copied:
/// the thread that does so has marked the block as moving, and other threads wait for the block or
/// pass it by.
template <copier Stream, class Memory>
class spill_list {
    using host_memory = quota_resource<std::pmr::memory_resource>;

public:
    struct entry {
        entry(Stream& by, Memory& on, host_memory& aside, bytes size, void* at, std::mutex& turn)
            : block(by, on, aside, size, alignment, at, &turn) {}

        spillable_block<Stream, Memory, host_memory> block;
        std::uint32_t users = 0;
        bool moving = false;      // a thread moves the block
        std::thread::id mover{};  // the thread that moves the block
        instant until = never;    // the deadline of the move
        std::uint64_t used = 0;   // the time of the last use, counted in uses
    };

    /// At most `most` bytes are on the host. All arguments by reference must outlive the list.
    spill_list(Memory& on, std::pmr::memory_resource& aside, bytes most, Stream by, std::function<instant()> now)
        : memory_(&on),
          aside_limit_(most),
          aside_(aside_limit_, aside, on.owner()),
          stream_(std::move(by)),
          now_(std::move(now)),
          spills_(on.limit(), order, [this](const reclaim_request& r) { return spill(r); }) {}
    spill_list(const spill_list&) = delete;
    spill_list& operator=(const spill_list&) = delete;

    /// `until`: a patience, or none. Throws what the memory's allocate throws.
    template <class... Until>
    [[nodiscard]] entry& add(bytes size, const Until&... until) {
        return enter(size, memory_->allocate(count(size), alignment, until...));
    }
    void remove(entry& e) noexcept {
        std::list<entry> one;
        std::unique_lock lock(mutex_);
        rests_.wait(lock, [&] { return !e.moving; });
        const auto at = std::ranges::find_if(all_, [&](const entry& other) { return &other == &e; });
        one.splice(one.end(), all_, at);
        lock.unlock();
    }

    /// The block is on the device until let_go(). Otherwise returns why it isn't.
    [[nodiscard]] errc hold(entry& e, instant deadline) {
        std::unique_lock lock(mutex_);
        if (!await_rest(lock, e, deadline)) return errc::deadline_exceeded;
        e.used = ++uses_;
        if (e.users == 0 && !e.block.settled()) {
            move(e, deadline);
            lock.unlock();
            errc why = bring_back(e, deadline);
            if (why == errc::none) why = e.block.wait(deadline);
            lock.lock();
            rest(e);
            if (why != errc::none) return why;
        }
        ++e.users;
        return errc::none;
    }
    /// Moves the block to the host now. in_flight: a thread holds it. Otherwise as
    /// spillable_block::spill.
    [[nodiscard]] errc send(entry& e, instant deadline) {
        std::unique_lock lock(mutex_);
        if (!await_rest(lock, e, deadline)) return errc::deadline_exceeded;
        if (e.users > 0) return errc::in_flight;
        move(e, deadline);
        lock.unlock();
        const errc why = e.block.spill(deadline);
        lock.lock();
        rest(e);
        lock.unlock();
        if (why == errc::none) memory_->trim();  // the tenant's pool has the memory by now
        return why;
    }
    void let_go(entry& e) noexcept {
        const std::lock_guard lock(mutex_);
        --e.users;
    }
    /// False while the block is being moved.
    [[nodiscard]] bool resident(const entry& e) const noexcept {
        const std::lock_guard lock(mutex_);
        return !e.moving && e.block.data() != nullptr;
    }
    /// From now on keeps at most `most` bytes on the host. Blocks that are there stay.
    void keep_aside(bytes most) noexcept { (void)aside_limit_.resize(most, {}); }

private:
    static constexpr std::size_t alignment = 256;
    static constexpr int order = 10;                           // after hooks that need no copy
    static constexpr ns for_a_copy = std::chrono::seconds(1);  // for requests that wouldn't wait

    [[nodiscard]] static std::size_t count(bytes size) noexcept { return static_cast<std::size_t>(size.count()); }
    // Adds a block of the memory to the list. The caller has requested it under no mutex, since the
    // request may call the hook.
    [[nodiscard]] entry& enter(bytes size, void* at) {
        std::list<entry> one;
        try {
            one.emplace_back(stream_, *memory_, aside_, size, at, turn_);
        } catch (...) {
            memory_->deallocate(at, count(size), alignment);
            throw;
        }
        const std::lock_guard lock(mutex_);
        spill_block_ = [](entry& e, instant by) { return e.block.spill(by); };
        one.front().used = ++uses_;
        all_.splice(all_.end(), one);
        return all_.back();
    }

    // Returns false if the block is still being moved at the deadline.
    [[nodiscard]] bool await_rest(std::unique_lock<std::mutex>& lock, const entry& e, instant deadline) {
        while (e.moving) {
            const instant now = now_();
            if (now >= deadline) return false;
            rests_.wait_for(lock, std::min(deadline - now, longest_sleep));
        }
        return true;
    }

    // Waits for room as the tenant's memory does, but not beyond the deadline.
    errc bring_back(entry& e, instant deadline) {
        if (memory_->waits() == ns{}) return e.block.restore();
        const instant by = std::min(deadline, saturating_add(now_(), memory_->waits()));
        return e.block.restore(patience{clock_of(now_), by});
    }
    // The deadline of this thread's use(), if the request that called the hook comes from there.
    [[nodiscard]] instant own_deadline() const noexcept {
        for (const auto& e : all_)
            if (e.moving && e.mover == std::this_thread::get_id()) return e.until;
        return never;
    }

    bytes spill(const reclaim_request& r) {
        bytes freed;
        std::unique_lock lock(mutex_);
        const instant by =
            std::min(own_deadline(), r.until != instant::min() ? r.until : saturating_add(now_(), for_a_copy));
        while (freed < r.missing) {
            entry* const e = idle_longest();
            if (e == nullptr) break;
            move(*e, by);
            const auto spill_block = spill_block_;  // under the mutex: add() may come meanwhile
            lock.unlock();
            const errc why = spill_block(*e, by);
            if (why == errc::none) freed += e->block.size();
            lock.lock();
            rest(*e);
            if (why != errc::none) break;
        }
        lock.unlock();
        if (freed != bytes{}) memory_->trim();  // the tenant's pool has the blocks by now
        return freed;
    }
    [[nodiscard]] entry* idle_longest() noexcept {
        entry* oldest = nullptr;
        for (auto& e : all_)
            if (e.users == 0 && !e.moving && e.block.on_device() && (oldest == nullptr || e.used < oldest->used))
                oldest = &e;
        return oldest;
    }
    static void move(entry& e, instant until) noexcept {
        e.moving = true;
        e.mover = std::this_thread::get_id();
        e.until = until;
    }
    void rest(entry& e) noexcept {
        e.moving = false;
        rests_.notify_all();
    }

    Memory* memory_;
    quota aside_limit_;
    host_memory aside_;
    Stream stream_;
    std::function<instant()> now_;
    std::mutex turn_;  // at the stream
    mutable std::mutex mutex_;
    std::condition_variable rests_;
    std::list<entry> all_;
    std::uint64_t uses_ = 0;
    // Spills a block. Set with the first block, so that programs without such blocks don't compile
    // the function.
    errc (*spill_block_)(entry&, instant) = nullptr;
    quota_hook spills_;  // last: no thread is in the hook any more when the rest is destroyed
};

/// Empty, for streams that can't copy.
template <class Stream, class Memory>
struct spills_of {
    struct type {};
};
template <copier Stream, class Memory>
struct spills_of<Stream, Memory> {
    using type = spill_list<Stream, Memory>;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
