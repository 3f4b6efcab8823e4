// SPDX-License-Identifier: Apache-2.0
// Where free chunks are scrubbed: a few addresses of their own, so that a chunk is mapped for a tenant only once it
// holds nothing of another one. The fills run on a stream; nobody waits for them here.
//
//   gpushare::scrub_window window{memory, stream, 16};
//   window.begin(7, chunk);    window.seal();
//   window.finish([](std::uint32_t id, errc why) { ... });       // those whose point was reached
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/scrub.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Refers to the memory and the stream, which must outlive it. Not thread-safe. Nothing may be under way when it is
/// destroyed.
template <virtual_memory Memory, scrubber Stream>
class scrub_window {
public:
    using point = typename Stream::point;

    /// `slots` chunks are scrubbed at a time; the addresses are reserved when they are first needed.
    scrub_window(Memory& memory, Stream& stream, std::size_t slots)
        : memory_(&memory), stream_(&stream), chunk_size_(static_cast<std::size_t>(memory.granularity().count())) {
        jobs_.resize(slots);
    }

    /// Enqueues scrubbing chunk `id`. no_room: all slots are in use; what the memory answers; submission_failed: the
    /// stream took no more. Then nothing happened. seal() when the last one of a batch was begun.
    errc begin(std::uint32_t id, const typename Memory::chunk& chunk) noexcept {
        if (full()) return errc::no_room;
        if (const errc why = reserve(); why != errc::none) return why;
        std::size_t slot = 0;
        while (jobs_[slot].stage != stage::vacant) ++slot;
        void* const at = address(slot);
        if (const errc why = memory_->map(at, chunk); why != errc::none) return why;
        job& j = jobs_[slot];
        j = {.stage = stage::filling, .id = id, .done = {}};
        ++active_;
        try {
            stream_->fill(at, std::byte{0}, chunk_size_);
            return errc::none;
        } catch (...) {
            // Nothing was enqueued, but the slot is free only if the memory lets go of the chunk.
            if (memory_->unmap(at, chunk_size_) == errc::none) {
                vacate(j);
                return errc::submission_failed;
            }
            j.failed = true;
            return errc::none;
        }
    }

    /// Marks the end of what was begun. If the stream can't, finish() tries again.
    void seal() noexcept {
        if (!unsealed()) return;
        try {
            const point done = stream_->record();
            for (job& j : jobs_)
                if (j.stage == stage::filling) {
                    j.done = done;
                    j.stage = stage::sealed;
                }
        } catch (...) {
        }
    }

    /// Calls `told(id, why)` for every chunk whose scrubbing has ended, after it left the window. errc::none: it holds
    /// zeros. Returns how many.
    template <std::invocable<std::uint32_t, errc> F>
    std::size_t finish(F told) {
        if (active_ == 0) return 0;
        seal();
        std::size_t finished = 0;
        for (std::size_t slot = 0; slot < jobs_.size(); ++slot) {
            job& j = jobs_[slot];
            if (j.stage != stage::sealed || !j.done.reached()) continue;
            const errc why = j.failed ? errc::submission_failed : j.done.status();
            j.stuck = memory_->unmap(address(slot), chunk_size_) != errc::none;
            if (j.stuck) continue;  // it stays here, until the memory lets go of it
            const auto id = j.id;
            vacate(j);
            ++finished;
            told(id, why);
        }
        return finished;
    }

    [[nodiscard]] bool holds(std::uint32_t id) const noexcept {
        for (const job& j : jobs_)
            if (j.stage != stage::vacant && j.id == id) return true;
        return false;
    }
    [[nodiscard]] std::size_t active() const noexcept { return active_; }
    [[nodiscard]] bool full() const noexcept { return active_ == jobs_.size(); }

    /// Adds the points that finish() waits for; reached ones among them, if they are by now.
    void add_points(std::vector<point>& to) const {
        for (const job& j : jobs_)
            if (j.stage == stage::sealed && !j.stuck) to.push_back(j.done);
    }

private:
    enum class stage : std::uint8_t { vacant, filling, sealed };
    struct job {
        scrub_window::stage stage = stage::vacant;
        std::uint32_t id = 0;
        point done{};
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
            if (j.stage == stage::filling) return true;
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

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
