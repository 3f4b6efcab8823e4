// SPDX-License-Identifier: Apache-2.0
// Maps chunks into the address ranges of arenas and takes them out again: the implementation of
// chunk_pool and virtual_arena. A mutex of each arena guards what is mapped where
// (arena_space.hpp). One mutex for all guards the books of the chunks (chunk_supply.hpp); it is
// never held while the driver makes, maps, unmaps or gives back an arena's chunks.
//
//   auto space = chunks.open(tenant, quota, 512);     chunks.commit(space, 0, 16, deadline);
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/arena_space.hpp>
#include <gpushare/memory/detail/chunk_supply.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Hooks on the roots of quotas. When a requester within its quota lacks memory there, free chunks
/// that are charged to no quota go back to the device, and chunks that arenas gave up go back to
/// the quotas once their points are reached.
class reclaim_hooks {
public:
    /// Makes sure that requests in the tree of `q` ask `chunks` for memory. Throws std::bad_alloc.
    template <class Chunks>
    void watch(const quota& q, Chunks& chunks) {
        const std::lock_guard lock(mutex_);
        for (const auto& h : hooks_)
            if (h->in_tree_of(q)) return;
        std::erase_if(hooks_, [](const auto& h) { return h->orphaned(); });
        hooks_.push_back(std::make_unique<quota_hook>(
            quota_hook::at_root, q, std::numeric_limits<int>::min(),
            [&chunks](const reclaim_request& r) {
                return r.below ? chunks.reclaim(r.missing) : chunks.chunk_size() * (chunks.collect() ? 1 : 0);
            },
            [&chunks](instant deadline) { return chunks.wait_any(deadline); }));
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<quota_hook>> hooks_;
};

/// Thread-safe. No lock is held while a thread waits for a stream. `stream` scrubs; its points are
/// those of the streams that use the arenas. Memory and stream must outlive the pool, and the pool
/// the arenas; a quota must live until all its charges are back.
///
/// Two kinds of locks, in this order: an arena's, whose holder alone maps and unmaps there, and
/// then the lock of the books. Only a hand-over from one arena to another holds two arenas' locks.
/// Driver calls that run without the lock of the books are in a list. Before any request is
/// refused, calls begun earlier have ended, and so has every call that brings memory back. The few
/// chunks that are being scrubbed (chunk_pool_options::window) are mapped and unmapped under the
/// lock of the books.
///
/// One call unmaps neighbours, and a commit maps all its chunks without the lock of the books.
/// Missing chunks are made one by one (cuMemCreate makes one), and the lock is taken and released
/// between two of these calls. A batch would make all of them before it is known how many chunks
/// others free meanwhile. The surplus would go back to the driver with as many calls again, which
/// is more work, and a neighbour would be refused this memory meanwhile. A batch would gain little:
/// our own code for a new chunk, locks, books and quota included, takes 50 ns alone and 113 ns
/// alongside a neighbour that commits as well (over a memory that does nothing; Intel Xeon, two
/// cores), while making and mapping a chunk of the host's memory takes 13 us and more.
template <virtual_memory Memory, scrubber Stream>
class arena_chunks {
public:
    using point = typename Stream::point;

    /// Throws memory_error (out_of_memory) without `options.initial` chunks, operation_error
    /// (invalid_specification) for options that contradict each other.
    arena_chunks(Memory& memory, Stream& stream, const chunk_pool_options& options)
        : memory_(&memory), supply_(memory, stream, options) {}
    arena_chunks(const arena_chunks&) = delete;
    arena_chunks& operator=(const arena_chunks&) = delete;
    /// Waits for the pending departures, however long: giving memory back under a running kernel
    /// would be worse. Call drain() first to bound the wait.
    ~arena_chunks() {
        try {
            drain(never);
        } catch (...) {  // no memory for the wait; leaving chunks stay with the process
        }
    }

    [[nodiscard]] bytes chunk_size() const noexcept { return supply_.chunk_size(); }

    [[nodiscard]] chunk_pool_usage usage() const noexcept {
        const std::lock_guard lock(mutex_);
        const auto& chunks = supply_.registry();
        return {supply_.capacity(), chunks.total(), chunks.out(),      leaving_,
                chunks.clean(),     chunks.dirty(), chunks.scrubbing()};
    }
    /// One tenant's usage.
    [[nodiscard]] chunk_usage usage(tenant_tag tenant) const noexcept {
        const std::lock_guard lock(mutex_);
        return supply_.registry().usage(tenant);
    }

    /// Takes back given-up memory whose points are reached, and scrubbed chunks. True if there was
    /// any. Never blocks on a stream.
    bool collect() noexcept {
        departures gone;  // points are destroyed without the lock
        std::unique_lock lock(mutex_);
        return collect(gone, lock);
    }

    /// Waits until a departure or a scrub is reached, or until the deadline; takes nothing back.
    /// False, immediately, if there is none.
    bool wait_any(instant deadline) const {
        std::vector<point> open;
        {
            const std::lock_guard lock(mutex_);
            add_points(open);
            supply_.add_points(open);
        }
        if (open.empty()) return false;
        (void)point::wait_any(open, deadline);
        return true;
    }

    /// Waits for all departures and scrubs. False if some are left at the deadline, or can't be
    /// unmapped (a lost device).
    bool drain(instant deadline) {
        for (std::vector<point> open;; open.clear()) {
            {
                departures gone;
                std::unique_lock lock(mutex_);
                collect(gone, lock);
                settle(lock);
                // another thread may have begun to take the last ones back meanwhile
                if (departures_.empty()) settle(lock);
                if (departures_.empty() && !supply_.scrubbing()) return true;
                add_points(open);
                supply_.add_points(open);
            }
            if (open.empty()) return false;
            for (const point& p : open)
                if (!p.wait(deadline)) return false;
        }
    }

    /// Begins to scrub up to `most` free chunks before a tenant requests them, as many as the
    /// window has room for. Returns how many. Call it when the device is idle, and collect() later.
    std::size_t scrub_ahead(std::size_t most) noexcept {
        const std::lock_guard lock(mutex_);
        return supply_.scrub_ahead(most);
    }

    /// Gives free chunks back to the device until `keep` are left free. Returns how many.
    std::size_t trim(std::size_t keep) noexcept {
        std::unique_lock lock(mutex_);
        return trim(keep, std::numeric_limits<std::size_t>::max(), lock);
    }

    using index = chunk_registry::index;
    using stage = slot_stage;
    using space = arena_space<Memory, point>;
    using departures = typename space::departures;
    using runs = std::span<const slot_run>;  // apart from each other, at least one

    // ---- for virtual_arena; positions and counts are in slots, and within the range

    [[nodiscard]] std::size_t mapped(const space& s) const noexcept {
        const std::lock_guard lock(mutex_);
        return s.mapped;
    }
    [[nodiscard]] std::size_t leaving(const space& s) const noexcept {
        const std::lock_guard lock(mutex_);
        return s.leaving;
    }

    std::shared_ptr<space> open(tenant_tag tenant, quota& limit, std::size_t slots) {
        const auto size = static_cast<std::size_t>(chunk_size().count());
        auto made = std::make_shared<space>(memory_->reserve(slots * size).value({}, "reserving addresses"), slots,
                                            size, tenant, limit);
        reclaims_.watch(limit, *this);
        {
            const std::lock_guard lock(mutex_);
            supply_.registry().open(tenant);
        }
        // Last, and it doesn't throw: a close by another thread may call it immediately.
        made->closes.emplace(limit.closing(), [this, weak = std::weak_ptr<space>(made)](instant deadline) {
            return close_for(weak.lock(), deadline);
        });
        return made;
    }

    /// Closes an arena when its quota closes: none of its memory stays charged there. Returns false
    /// if a stream still uses some chunk at the deadline.
    bool close_for(const std::shared_ptr<space>& s, instant deadline) {
        if (s == nullptr) return true;
        (void)close(s, {});
        const auto is_back = [&] { return s->mapped == 0 && s->leaving == 0 && s->pledged == 0; };
        const auto leaves = [&](const auto& d) { return d.from == s; };
        for (std::vector<point> open;; open.clear()) {
            {
                departures gone;
                std::unique_lock lock(mutex_);
                collect(gone, lock);
                if (is_back()) return true;
                if (!settle(lock, deadline)) return false;
                // another thread may have begun to take the last ones back meanwhile
                if (std::ranges::none_of(departures_, leaves) && !settle(lock, deadline)) return false;
                if (is_back()) return true;
                for (const auto& d : departures_)
                    if (leaves(d)) d.add_points(open);
                // a hand-over gives it back soon, or once it has scrubbed
                if (open.empty() && s->pledged != 0) {
                    supply_.add_points(open);
                    if (open.empty()) {
                        if (std::chrono::steady_clock::now() >= deadline) return false;
                        ended_.wait_for(lock, short_look_slice);
                        continue;
                    }
                }
            }
            if (open.empty()) return false;
            for (const point& p : open)
                if (!p.wait(deadline)) return false;
        }
    }

    /// Takes back departures whose points are reached, and then gives the device as many free
    /// chunks as `missing` bytes need. Returns their bytes.
    bytes reclaim(bytes missing) noexcept {
        departures gone;
        std::unique_lock lock(mutex_);
        collect(gone, lock);
        const auto wanted = (missing.count() + chunk_size().count() - 1) / chunk_size().count();
        return chunk_size() * trim(0, static_cast<std::size_t>(wanted), lock);
    }

    /// All chunks leave once the points are reached. Commits are refused from now on. errc::closed
    /// if the arena was closed already.
    errc close(const std::shared_ptr<space>& s, std::vector<point> points) noexcept {
        departures gone;
        std::unique_lock own(s->mutex);
        std::unique_lock lock(mutex_);
        if (!std::exchange(s->open, false)) return errc::closed;
        s->farewell.front().points = std::move(points);
        depart(s, s->farewell, stage::mapped);
        supply_.registry().close(s->tenant);
        own.unlock();
        collect(gone, lock);
        return errc::none;
    }

    /// Maps the chunks that aren't mapped yet. See virtual_arena::try_commit.
    failure commit(const std::shared_ptr<space>& s, runs where, instant deadline) {
        request r;
        return commit(s, where, deadline, r);
    }
    /// See virtual_arena::try_commit with a patience.
    template <clock Clock>
    failure commit(const std::shared_ptr<space>& s, runs where, const patience<Clock>& until) {
        for (;;) {
            request r;
            failure why = commit(s, where, instant{}, r);
            // only scrubs are missing: wait for them
            if (why.code == errc::deadline_exceeded) why = commit(s, where, until.deadline, r);
            if (why.code == errc::none || r.lacks != lack::quota) return why;
            why = try_charge(*s->limit, r.missing, until);
            if (why.code != errc::none) return why;
            struct charge {  // given back unless it is used
                quota& limit;
                bytes& size;
                ~charge() {
                    if (size != bytes{}) (void)limit.release(size);
                }
            } const paid{*s->limit, r.paid = r.missing};
            why = commit(s, where, until.deadline, r);
            if (why.code == errc::none || r.lacks != lack::quota)
                return why;  // or more is missing now than before: queue again
        }
    }

    /// Unmaps once the points are reached; all or nothing.
    failure decommit(space& s, std::size_t first, std::size_t count, std::span<const point> points, instant deadline) {
        if (const errc why = await_departure(s, first, count, points, deadline); why != errc::none) return {why};
        const std::lock_guard own(s.mutex);
        if (!s.all(first, count, stage::mapped)) return {errc::unknown_block};
        if (const errc why = unmap(s, first, count); why != errc::none) return {why};
        const std::lock_guard lock(mutex_);
        returns_ += supply_.collect() ? 1 : 0;
        return {};
    }

    /// The same, but unmaps later, without waiting.
    failure decommit_after(const std::shared_ptr<space>& s, std::size_t first, std::size_t count,
                           std::span<const point> points) {
        departures gone, made;
        made.push_back({.first = first, .count = count, .points = {points.begin(), points.end()}});
        std::unique_lock own(s->mutex);
        if (!s->all(first, count, stage::mapped)) return {errc::unknown_block};
        std::unique_lock lock(mutex_);
        depart(s, made, stage::mapped);
        own.unlock();
        collect(gone, lock);
        return {};
    }

    /// Moves the chunks themselves, without a copy. See virtual_arena::try_hand_over.
    failure hand_over(space& from, std::size_t first, const std::shared_ptr<space>& to, std::size_t to_first,
                      std::size_t count, std::span<const point> points, instant deadline) {
        if (const errc why = await_departure(from, first, count, points, deadline); why != errc::none) return {why};
        departures gone, undo;
        undo.push_back({.first = to_first, .count = count});
        std::vector<index> moving(count);
        if (const failure why = take_over(from, first, *to, to_first, moving); why.code != errc::none) return why;

        errc why = errc::none;
        std::unique_lock lock(mutex_);
        if (supply_.registry().policy() != scrub_policy::off && from.tenant != to->tenant)
            why = scrub(moving, lock, deadline, gone);
        lock.unlock();
        std::unique_lock own(to->mutex);
        // neither lock was held meanwhile
        if (why == errc::none) why = vacant(*to, to_first, count);
        std::size_t done = 0;
        for (; why == errc::none && done < count; done += why == errc::none ? 1 : 0)
            why = map(*to, to_first + done, moving[done]);
        lock.lock();
        --to->pledged;
        ended_.notify_all();
        for (std::size_t i = 0; i < done; ++i) supply_.pass(moving[i], to->tenant);
        if (why == errc::none) {
            leaving_ -= to->settle(to_first, count);
            return {};
        }
        for (std::size_t i = done; i < count; ++i) supply_.give(moving[i]);
        to->limit->release(chunk_size() * (count - done));
        depart(to, undo, stage::arriving);
        own.unlock();
        collect(gone, lock);
        return {why};
    }

    /// Unmaps chunks in `from`, and charges their bytes to the quota of `to` from now on (pledged).
    /// All or nothing.
    failure take_over(space& from, std::size_t first, space& to, std::size_t to_first, std::vector<index>& moving) {
        const std::size_t count = moving.size();
        std::unique_lock own(from.mutex, std::defer_lock), own_to(to.mutex, std::defer_lock);
        if (&from == &to)
            own.lock();
        else
            std::lock(own, own_to);
        if (!from.all(first, count, stage::mapped)) return {errc::unknown_block};
        if (const errc why = vacant(to, to_first, count); why != errc::none) return {why};
        if (const errc why = memory_->unmap(from.address(first), count * from.chunk_bytes); why != errc::none)
            return {why};
        std::unique_lock lock(mutex_);
        for (std::size_t i = 0; i < count; ++i) moving[i] = from.vacate(first + i);
        const bytes size = chunk_size() * count;
        const auto paid = try_transfer(*from.limit, *to.limit, size);
        if (paid.why == errc::none) {
            ++to.pledged;
            return {};
        }
        const failure why = to.limit->explain(paid.why, size);
        if (!paid.kept) {
            for (const index i : moving) supply_.give(i);
            return why;
        }
        lock.unlock();
        put_back(from, first, moving);
        return why;
    }

    /// Maps chunks again that were just unmapped there, contents included. Chunks that can't be
    /// mapped any more return to the supply.
    void put_back(space& s, std::size_t first, const std::vector<index>& chunks) noexcept {
        for (std::size_t i = 0; i < chunks.size(); ++i) {
            if (map(s, first + i, chunks[i]) == errc::none) continue;
            const std::lock_guard lock(mutex_);
            supply_.give(chunks[i]);
            s.limit->release(chunk_size());
        }
        const std::lock_guard lock(mutex_);
        for (std::size_t i = first; i < first + chunks.size(); ++i)
            if (s.slots[i].stage == stage::arriving) s.settle(i, 1);
    }

    /// Why nothing can be mapped there: closed, or invalid_specification (something is mapped
    /// already).
    static errc vacant(const space& s, std::size_t first, std::size_t count) noexcept {
        if (!s.open) return errc::closed;
        return s.all(first, count, stage::empty) ? errc::none : errc::invalid_specification;
    }

private:
    // The reason for a commit's refusal.
    enum class lack : std::uint8_t { other, quota, memory };
    struct request {
        lack lacks = lack::other;
        bytes missing{};         // to be charged, as of the last attempt
        bytes paid{};            // charged already, and not used
        std::uint64_t seen = 0;  // how often memory had come back at the last refusal
    };

    // Asks the hooks for the bytes that the quota or the memory lacks, and waits for chunks that
    // are being scrubbed or leaving.
    failure commit(const std::shared_ptr<space>& s, runs where, instant deadline, request& r) {
        departures gone, undo;
        for (const auto& run : where) undo.push_back({.first = run.first, .count = run.count});
        std::vector<point> awaited;
        std::unique_lock lock(mutex_);
        const auto failed = supply_.failed(), entered = calls_begun_;
        lock.unlock();
        hook_cursor asked{.until = deadline};
        for (bool expired = false;;) {
            const failure why = attempt(s, where, undo, r);
            if (why.code == errc::none || why.code == errc::closed) return why;
            lock.lock();
            (void)collect(gone, lock);
            if (undo.empty()) return why;  // undone: trying again wouldn't help
            // A commit that waits only for a scrub isn't refused yet, so it needn't wait for other
            // threads' calls.
            if (expired || why.code != errc::deadline_exceeded) settle(lock, entered);
            const bool again = returns_ != r.seen;  // whichever thread brought it back
            if (supply_.failed() != failed) return {.code = supply_.why_failed()};
            lock.unlock();
            if (again) continue;
            if (r.lacks != lack::other && s->limit->ask_next(asked, r.missing, r.lacks == lack::memory)) continue;
            if (expired || never_fits(*s, why, r)) return why;
            awaited.clear();
            lock.lock();
            // If only scrubbing is missing, waits for the scrubbing; otherwise leaving chunks may
            // help.
            if (why.code == errc::deadline_exceeded)
                supply_.add_points(awaited);
            else
                add_points(awaited, r.lacks == lack::quota ? s->limit : nullptr);
            const bool came_back = returns_ != r.seen;  // since the lock was given up above
            lock.unlock();
            if (came_back) continue;
            if (awaited.empty()) return why.code == errc::deadline_exceeded ? failure{errc::submission_failed} : why;
            expired = !point::wait_any(awaited, deadline);
        }
    }

    // Whether no leaving chunk could help.
    [[nodiscard]] static bool never_fits(const space& s, const failure& why, const request& r) noexcept {
        return r.lacks == lack::quota ? s.limit->refuses(r.missing).code != errc::none
                                      : why.code == errc::out_of_memory && why.asked > why.limit && why.limit != 0;
    }

    // One try at commit: everything that is missing, or nothing.
    failure attempt(const std::shared_ptr<space>& s, runs where, departures& undo, request& r) {
        r.lacks = lack::other;
        const std::lock_guard own(s->mutex);
        if (!s->open) return {errc::closed};
        std::size_t missing = 0;
        for (const auto& run : where) missing += s->count_of(run.first, run.count, stage::empty);
        const bytes size = r.missing = chunk_size() * missing;
        std::unique_lock lock(mutex_);
        if (missing != 0)
            if (const failure why = obtain(*s, missing, r, lock); why.code != errc::none) {
                r.seen = returns_;
                return why;
            }
        for (const auto& run : where)
            for (std::size_t i = run.first; i < run.end(); ++i)
                if (s->slots[i].stage == stage::empty) s->arrive(i, supply_.take(s->tenant));
        // How far the commit has got.
        auto run = where.begin();
        std::size_t i = run->first;
        const auto each_arriving = [&](auto f) {
            for (;; i = run->first) {
                for (; i < run->end(); ++i)
                    if (s->slots[i].stage == stage::arriving)
                        if (const errc why = f(i); why != errc::none) return why;
                if (++run == where.end()) return errc::none;
            }
        };
        const errc why = without(lock, false, [&] {
            return each_arriving([&](std::size_t slot) { return map(*s, slot, s->slots[slot].chunk); });
        });
        if (why == errc::none) {
            for (const auto& all : where) leaving_ -= s->settle(all.first, all.count);
            return {};
        }
        std::size_t unmapped = 0;
        (void)each_arriving([&](std::size_t slot) {
            supply_.give(std::exchange(s->slots[slot], {}).chunk);
            ++unmapped;
            return errc::none;
        });
        s->limit->release(chunk_size() * unmapped);
        ++returns_;
        depart(s, undo, stage::arriving);
        return {.code = why, .asked = size.count(), .because = reason::size};
    }

    // ---- under the mutex of the books

    // Takes chunks and charges their bytes, or does neither.
    failure obtain(space& s, std::size_t missing, request& r, std::unique_lock<std::mutex>& lock) {
        const bytes size = r.missing;
        const auto charge = [&] {
            const bytes rest = size - r.paid;
            const errc why = rest == bytes{} ? errc::none : s.limit->try_charge(rest);
            if (why != errc::none) r.lacks = lack::quota;
            return why == errc::none ? failure{} : s.limit->explain(why, size);
        };
        // The quota is checked before chunks are made or scrubbed, and charged once the chunks are
        // there, so that no other request is refused because of an attempt that fails.
        if (s.limit->free() < size - r.paid) {
            if (const failure why = charge(); why.code != errc::none) return why;
            s.limit->release(size - r.paid);
        }
        errc made = errc::none;
        while (made == errc::none && supply_.lacks(s.tenant, missing)) {
            made = supply_.begin_create();
            if (made == errc::none) made = supply_.end_create(without(lock, false, [&] { return memory_->create(); }));
        }
        if (const failure why = supply_.provide(s.tenant, missing, made); why.code != errc::none) {
            // Chunks are missing, not addresses for scrubbing them, and the request doesn't exceed
            // the most there may be.
            if (why.code == errc::out_of_memory && why.left < why.asked && why.asked <= why.limit)
                r.lacks = lack::memory;
            return why;
        }
        if (const failure why = charge(); why.code != errc::none) return why;
        r.paid -= std::min(r.paid, size);
        return {};
    }

    // A call of the memory that is under way without the lock.
    struct driver_call {
        driver_call* next = nullptr;
        std::uint64_t number = 0;
        bool brings = false;  // gives back memory that no longer belongs to any tenant
    };
    // Returns the result of `calls`, which run without the lock.
    template <std::invocable F>
    auto without(std::unique_lock<std::mutex>& lock, bool brings, F calls) noexcept {
        driver_call here{.number = ++calls_begun_, .brings = brings};
        under_way_.push(here);
        lock.unlock();
        auto answer = calls();
        lock.lock();
        under_way_.remove(here);
        ended_.notify_all();
        return answer;
    }
    // Whether a request must await one of the first `last` calls before its refusal: a call that
    // brings memory back, or a call that began before the request (`entered`).
    [[nodiscard]] bool awaits(std::uint64_t entered, std::uint64_t last) const noexcept {
        for (const auto* c = under_way_.front(); c != nullptr; c = c->next)
            if (c->number <= last && (c->brings || c->number <= entered)) return true;
        return false;
    }
    // Waits for the calls that are under way now.
    void settle(std::unique_lock<std::mutex>& lock, std::uint64_t entered = 0) const noexcept {
        ended_.wait(lock, [&, last = calls_begun_] { return !awaits(entered, last); });
    }
    // Waits for those of them that bring memory back; false if some are under way at the deadline.
    [[nodiscard]] bool settle(std::unique_lock<std::mutex>& lock, instant deadline) const noexcept {
        for (const auto last = calls_begun_; awaits(0, last);)
            if (!wait_until(ended_, lock, deadline)) return false;
        return true;
    }

    std::size_t trim(std::size_t keep, std::size_t most, std::unique_lock<std::mutex>& lock) noexcept {
        std::size_t gone = 0;
        for (; gone < most; ++gone) {
            auto chunk = supply_.drop(keep);
            if (!chunk) break;
            (void)without(lock, true, [&] {
                chunk.reset();
                return true;
            });
            ++returns_;
        }
        return gone;
    }

    /// The slots of `last` that are in stage `which` leave with `last`.
    void depart(const std::shared_ptr<space>& s, departures& last, stage which) noexcept {
        for (auto& d : last) {
            d.from = s;
            d.ticket = ++tickets_;
            leaving_ += s->depart(d, which);
        }
        departures_.splice(departures_.end(), last);
    }

    /// Completes departures and scrubs that are over. Objects to destroy without the lock go to
    /// `gone`. The caller holds no arena's lock.
    bool collect(departures& gone, std::unique_lock<std::mutex>& lock) noexcept {
        bool any = supply_.collect();
        returns_ += any ? 1 : 0;
        departures reached;
        for (auto i = departures_.begin(); i != departures_.end();) {
            const auto d = i++;
            if (d->reached()) reached.splice(reached.end(), departures_, d);
        }
        if (reached.empty()) return any;
        departures stuck;
        any |= without(lock, true, [&] {
            bool finished = false;
            while (!reached.empty()) {
                auto& d = reached.front();
                d.stuck = !finish(d);
                finished |= !d.stuck;
                auto& to = d.stuck ? stuck : gone;
                to.splice(to.end(), reached, reached.begin());
            }
            return finished;
        });
        departures_.splice(departures_.begin(), stuck);
        return any;
    }

    // ---- not under the mutex of the books

    /// Unmaps the chunks that still leave with this departure; other chunks may have been committed
    /// again. Returns false if the memory doesn't release some chunks: then these are tried again.
    bool finish(const departure<Memory, point>& d) noexcept {
        space& s = *d.from;
        const std::lock_guard own(s.mutex);
        bool all = true;
        s.each_run(d, [&](std::size_t first, std::size_t count) {
            if (unmap(s, first, count, true) != errc::none) all = false;
        });
        return all;
    }

    // The arena's lock guards the three functions below.

    /// Gives neighbouring chunks back to the supply and their bytes to the quota, or does nothing.
    errc unmap(space& s, std::size_t first, std::size_t count, bool leaves = false) noexcept {
        if (const errc why = memory_->unmap(s.address(first), count * s.chunk_bytes); why != errc::none) return why;
        const std::lock_guard lock(mutex_);
        for (std::size_t i = first; i < first + count; ++i) supply_.give(s.vacate(i));
        if (leaves) leaving_ -= count;
        s.limit->release(chunk_size() * count);
        ++returns_;
        return errc::none;
    }
    errc map(space& s, std::size_t i, index chunk) noexcept {
        const errc why = memory_->map(s.address(i), physical(chunk));
        if (why == errc::none) s.arrive(i, chunk);
        return why;
    }
    [[nodiscard]] const typename Memory::chunk& physical(index chunk) const noexcept {
        const std::lock_guard lock(mutex_);
        return supply_.physical(chunk);  // it stays where it is
    }

    // ---- under the mutex of the books

    /// Scrubs chunks that are mapped nowhere; unlocks while it waits.
    errc scrub(const std::vector<index>& chunks, std::unique_lock<std::mutex>& lock, instant deadline,
               departures& gone) noexcept try {
        std::vector<point> awaited;
        const auto failed = supply_.failed();
        for (std::size_t begun = 0;;) {
            errc why = errc::none;
            while (begun < chunks.size() && why == errc::none) {
                why = supply_.scrub_taken(chunks[begun]);
                if (why == errc::none) ++begun;
            }
            supply_.seal();
            // no_room: the rest with the next batch
            if (why != errc::none && why != errc::no_room) return why;
            const bool any = collect(gone, lock);
            if (supply_.failed() != failed) return supply_.why_failed();
            if (begun == chunks.size() && std::ranges::none_of(chunks, [&](index i) { return supply_.scrubs(i); }))
                return errc::none;
            if (any) continue;
            awaited.clear();
            supply_.add_points(awaited);
            if (awaited.empty()) return errc::submission_failed;
            lock.unlock();
            const bool reached = point::wait_any(awaited, deadline);
            lock.lock();
            if (!reached) return errc::deadline_exceeded;
        }
    } catch (...) {  // the host has no memory to wait with
        if (!lock.owns_lock()) lock.lock();
        return errc::out_of_memory;
    }

    // With `lacking`, adds only the points of departures that give bytes back to that quota's tree.
    // A quota has to live only while chunks that are charged to it leave.
    void add_points(std::vector<point>& to, const quota* lacking = nullptr) const {
        for (const auto& d : departures_)
            if (lacking == nullptr || (d.from->leaving != 0 && quota_change::of_one_tree(*d.from->limit, *lacking)))
                d.add_points(to);
    }

    // ---- not under the mutex

    /// unknown_block immediately, or deadline_exceeded.
    static errc await_departure(const space& s, std::size_t first, std::size_t count, std::span<const point> points,
                                instant deadline) {
        {
            const std::lock_guard own(s.mutex);
            if (!s.all(first, count, stage::mapped)) return errc::unknown_block;
        }
        const bool reached = std::ranges::all_of(points, [&](const point& p) { return p.wait(deadline); });
        return reached ? errc::none : errc::deadline_exceeded;
    }

    Memory* memory_;
    mutable std::mutex mutex_;               // of the books; locked after an arena's
    mutable std::condition_variable ended_;  // a call that was under way has ended
    fifo<driver_call> under_way_;            // in the order in which they began
    std::uint64_t calls_begun_ = 0;
    std::uint64_t returns_ = 0;  // how often chunks, or bytes of a quota, have come back
    chunk_supply<Memory, Stream> supply_;
    departures departures_;  // oldest first
    std::uint64_t tickets_ = 0;
    std::size_t leaving_ = 0;
    reclaim_hooks reclaims_;  // last: all other members still exist while a hook is called
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
