// SPDX-License-Identifier: Apache-2.0
// The physical chunks of a device: the supply makes chunks on demand, scrubs those that change
// tenants, and hands chunks out. arena_chunks.hpp puts a lock, quotas and address ranges around it.
//
//   gpushare::detail::chunk_supply supply{memory, stream, {.capacity = 512}};
//   if (supply.provide(chat, 3).code == errc::none) ... supply.take(chat) ... three times
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/chunk_registry.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

// Where free chunks are scrubbed: a few addresses of their own, so that a chunk is mapped for a
// tenant only once it holds no data of another one. The fills run on a stream, and no thread waits
// for them here.
//
//   window.begin(7, chunk);    window.seal();
//   window.finish([](std::uint32_t id, errc why) { ... });       // those whose point was reached

/// Refers to the memory and the stream, which must outlive it. Not thread-safe. No scrub may be
/// under way when it is destroyed.
template <virtual_memory Memory, scrubber Stream>
class scrub_window {
public:
    using point = typename Stream::point;

    /// `slots` chunks are scrubbed at a time; the addresses are reserved when they are first
    /// needed.
    scrub_window(Memory& memory, Stream& stream, std::size_t slots)
        : memory_(&memory), stream_(&stream), chunk_size_(static_cast<std::size_t>(memory.granularity().count())) {
        jobs_.resize(slots);
    }

    /// Enqueues scrubbing chunk `id`. Errors: no_room if all slots are in use; the memory's errors;
    /// submission_failed if the stream took no more. After an error nothing has happened. Call
    /// seal() after the last chunk of a batch.
    errc begin(std::uint32_t id, const typename Memory::chunk& chunk) noexcept {
        if (full()) return errc::no_room;
        if (const errc why = reserve(); why != errc::none) return why;
        std::size_t slot = 0;
        while (jobs_[slot].stage != job_stage::vacant) ++slot;
        void* const at = address(slot);
        if (const errc why = memory_->map(at, chunk); why != errc::none) return why;
        job& j = jobs_[slot];
        j = {.stage = job_stage::filling, .id = id, .done = {}};
        ++active_;
        try {
            // another kernel's failure fails no fill
            const typename own_work_of<Stream>::type mine(*stream_);
            j.filled = mine.how_it_went();
            stream_->fill(at, std::byte{0}, chunk_size_);
            return errc::none;
        } catch (...) {
            // Nothing was enqueued, but the slot is free only if the memory unmaps the chunk.
            if (memory_->unmap(at, chunk_size_) == errc::none) {
                vacate(j);
                return errc::submission_failed;
            }
            j.failed = true;
            return errc::none;
        }
    }

    /// Marks the end of the fills that were begun. If the stream can't, finish() tries again.
    void seal() noexcept {
        if (!unsealed()) return;
        try {
            const point done = stream_->record();
            for (job& j : jobs_)
                if (j.stage == job_stage::filling) {
                    j.done = done;
                    j.stage = job_stage::sealed;
                }
        } catch (...) {
        }
    }

    /// Calls `told(id, why)` for every chunk whose scrubbing has ended, after the chunk left the
    /// window. errc::none: it holds zeros. Returns the number of chunks.
    template <std::invocable<std::uint32_t, errc> F>
    std::size_t finish(F told) {
        if (active_ == 0) return 0;
        seal();
        std::size_t finished = 0;
        for (std::size_t slot = 0; slot < jobs_.size(); ++slot) {
            job& j = jobs_[slot];
            if (j.stage != job_stage::sealed || !j.done.reached()) continue;
            const errc why = j.failed ? errc::submission_failed : status_of(j.filled, j.done);
            j.stuck = memory_->unmap(address(slot), chunk_size_) != errc::none;
            if (j.stuck) continue;  // the slot stays in use until the memory unmaps the chunk
            const auto id = j.id;
            vacate(j);
            ++finished;
            told(id, why);
        }
        return finished;
    }

    [[nodiscard]] bool holds(std::uint32_t id) const noexcept {
        for (const job& j : jobs_)
            if (j.stage != job_stage::vacant && j.id == id) return true;
        return false;
    }
    [[nodiscard]] std::size_t active() const noexcept { return active_; }
    [[nodiscard]] bool full() const noexcept { return active_ == jobs_.size(); }

    /// Adds the points that finish() waits for. Some of them may be reached by now.
    void add_points(std::vector<point>& to) const {
        for (const job& j : jobs_)
            if (j.stage == job_stage::sealed && !j.stuck) to.push_back(j.done);
    }

private:
    enum class job_stage : std::uint8_t { vacant, filling, sealed };
    struct job {
        job_stage stage = job_stage::vacant;
        std::uint32_t id = 0;
        point done{};
        [[no_unique_address]] typename own_work_of<Stream>::outcome filled{};
        bool failed = false, stuck = false;
    };

    errc reserve() noexcept {
        if (range_) return errc::none;
        auto reserved = memory_->reserve(jobs_.size() * chunk_size_);
        if (!reserved) return reserved.code();
        range_ = *std::move(reserved);
        return errc::none;
    }
    [[nodiscard]] void* address(std::size_t slot) const noexcept {
        return static_cast<std::byte*>(range_->data()) + slot * chunk_size_;
    }
    [[nodiscard]] bool unsealed() const noexcept {
        for (const job& j : jobs_)
            if (j.stage == job_stage::filling) return true;
        return false;
    }
    void vacate(job& j) noexcept {
        j = {};
        --active_;
    }

    Memory* memory_;
    Stream* stream_;
    std::size_t chunk_size_;
    std::optional<typename Memory::range> range_;
    std::vector<job> jobs_;  // one per slot
    std::size_t active_ = 0;
};

/// Refers to the memory and the stream, which must outlive it. Not thread-safe. All chunks must be
/// back, and no scrubbing under way, when it is destroyed.
template <virtual_memory Memory, scrubber Stream>
class chunk_supply {
public:
    using index = chunk_registry::index;
    using point = typename Stream::point;

    /// Throws memory_error (out_of_memory) without `initial` chunks, operation_error
    /// (invalid_specification).
    chunk_supply(Memory& memory, Stream& stream, const chunk_pool_options& options)
        : memory_(&memory),
          options_(checked(options)),
          registry_(options.scrub),
          window_(memory, stream, options.window) {
        while (registry_.total() < options.initial) {
            errc why = begin_create();
            if (why == errc::none) why = end_create(memory_->create());
            if (why != errc::none)
                raise({.code = why,
                       .asked = (chunk_size() * options.initial).count(),
                       .left = (chunk_size() * registry_.total()).count(),
                       .limit = (chunk_size() * options.capacity).count(),
                       .because = reason::size_left},
                      {}, "making a chunk pool");
        }
    }

    /// Whether a chunk has to be made before `tenant` can take `n` chunks. The memory's call comes
    /// between begin_create() and end_create(), and the supply may be used meanwhile.
    [[nodiscard]] bool lacks(tenant_tag tenant, std::size_t n) const noexcept {
        // A chunk that is clean from the start can be used immediately; a chunk that isn't is no
        // better than the free ones.
        return (Memory::fresh_is_zero ? registry_.ready(tenant) : registry_.available()) < n;
    }
    /// out_of_memory, and nothing is begun, if there are as many chunks as allowed.
    [[nodiscard]] errc begin_create() noexcept {
        if (registry_.total() + making_ >= options_.capacity) return errc::out_of_memory;
        ++making_;
        return errc::none;
    }
    /// Takes the memory's answer. If this throws std::bad_alloc, the chunk is the device's again.
    errc end_create(result<typename Memory::chunk> made) {
        --making_;
        if (!made) return made.code();
        if (registry_.total() >= chunks_.size()) chunks_.emplace_back();
        chunks_[registry_.add(Memory::fresh_is_zero)] = *std::move(made);
        return errc::none;
    }

    /// Makes sure that `tenant` can take `n` chunks, if enough have been made; otherwise `made`
    /// says why not. errc::none: call take() before another caller does. deadline_exceeded: enough
    /// are free, but some are being scrubbed; try again when a point of add_points() is reached.
    /// out_of_memory: too few are free, and `left` says how many bytes.
    [[nodiscard]] failure provide(tenant_tag tenant, std::size_t n, errc made) noexcept {
        const failure figures{.asked = (chunk_size() * n).count(),
                              .left = (chunk_size() * registry_.available()).count(),
                              .limit = (chunk_size() * options_.capacity).count(),
                              .because = reason::size_left};
        const auto because = [&](errc why) {
            failure f = figures;
            f.code = why;
            return f;
        };
        if (registry_.available() < n) return because(made == errc::device_lost ? made : errc::out_of_memory);
        while (registry_.ready(tenant) + registry_.scrubbing() < n && !window_.full())
            if (const errc why = scrub(registry_.begin_scrub(tenant)); why != errc::none) return because(why);
        window_.seal();
        return registry_.ready(tenant) >= n ? failure{} : because(errc::deadline_exceeded);
    }

    /// Takes a chunk; only after provide().
    index take(tenant_tag tenant) noexcept { return registry_.take(tenant); }
    /// The chunk's place doesn't change until the chunk is dropped.
    [[nodiscard]] const typename Memory::chunk& physical(index i) const noexcept { return *chunks_[i]; }
    /// Gives back a chunk that is mapped nowhere any more, except perhaps in the scrub window.
    void give(index i) noexcept {
        if (window_.holds(i))
            registry_.give_scrubbing(i);
        else
            registry_.give(i);
    }
    void pass(index i, tenant_tag to) noexcept { registry_.pass(i, to); }

    /// Begins to scrub free chunks, at most `most` of them, as far as the window has room. Returns
    /// how many.
    std::size_t scrub_ahead(std::size_t most) noexcept {
        std::size_t begun = 0;
        while (begun < most && registry_.dirty() != 0 && !window_.full() &&
               scrub(registry_.begin_scrub()) == errc::none)
            ++begun;
        window_.seal();
        return begun;
    }
    /// Begins to scrub a taken chunk; see scrub_window::begin.
    errc scrub_taken(index i) noexcept { return window_.begin(i, physical(i)); }
    void seal() noexcept { window_.seal(); }
    [[nodiscard]] bool scrubs(index i) const noexcept { return window_.holds(i); }

    /// Collects the chunks whose scrubbing has ended. Returns true if there was one.
    bool collect() noexcept {
        const auto failed = failed_;
        const bool any = window_.finish([this](index i, errc why) {
            if (why != errc::none) {
                ++failed_;
                why_failed_ = why;
            }
            if (!registry_.is_out(i)) registry_.end_scrub(i, why == errc::none);
        }) != 0;
        // A failed scrub isn't retried before the next call, because the device may be lost.
        if (registry_.policy() == scrub_policy::on_free && failed_ == failed) scrub_ahead(options_.window);
        return any;
    }
    /// How often scrubbing has failed so far, and why the last time.
    [[nodiscard]] std::uint64_t failed() const noexcept { return failed_; }
    [[nodiscard]] errc why_failed() const noexcept { return why_failed_; }
    void add_points(std::vector<point>& to) const { window_.add_points(to); }
    [[nodiscard]] bool scrubbing() const noexcept { return window_.active() != 0; }

    /// A free chunk that the caller gives back to the device; none if at most `keep` are free.
    [[nodiscard]] std::optional<typename Memory::chunk> drop(std::size_t keep) noexcept {
        std::optional<typename Memory::chunk> dropped;
        if (registry_.clean() + registry_.dirty() > keep) chunks_[registry_.drop()].swap(dropped);
        return dropped;
    }

    [[nodiscard]] bytes chunk_size() const noexcept { return memory_->granularity(); }
    [[nodiscard]] std::size_t capacity() const noexcept { return options_.capacity; }
    [[nodiscard]] chunk_registry& registry() noexcept { return registry_; }
    [[nodiscard]] const chunk_registry& registry() const noexcept { return registry_; }

private:
    static const chunk_pool_options& checked(const chunk_pool_options& o) {
        if (o.initial > o.capacity || o.capacity >= chunk_registry::none || o.window == 0)
            raise({.code = errc::invalid_specification,
                   .asked = o.initial,
                   .limit = o.capacity,
                   .because = reason::count_limit},
                  {}, "the first chunks of a chunk pool");
        return o;
    }

    // A chunk that registry_ has begun to scrub.
    errc scrub(index i) noexcept {
        const errc why = window_.begin(i, physical(i));
        if (why != errc::none) registry_.end_scrub(i, false);
        return why;
    }

    Memory* memory_;
    chunk_pool_options options_;
    chunk_registry registry_;
    std::deque<std::optional<typename Memory::chunk>> chunks_;
    std::size_t making_ = 0;  // between begin_create() and end_create()
    scrub_window<Memory, Stream> window_;
    std::uint64_t failed_ = 0;
    errc why_failed_ = errc::none;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
