// SPDX-License-Identifier: Apache-2.0
// What a compute limiter has let in and the device hasn't finished: which points to watch, what is done, and what it
// cost. A part of compute_limiter.hpp, which holds its mutex around every call.
//
//   detail::flights<stream> flights;
//   auto slot = flights.free_slot();  flights.take(*slot, grant);  flights.land(*slot, s, begin, end, errc::none, &work);
//   while (auto done = flights.take_finished()) charge(done->what, done->cost);
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/span_meter.hpp>
#include <gpushare/compute/ticket.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI::detail {

/// Not thread-safe. Allocates while more are in flight than ever before.
template <timeline Stream>
class flights {
public:
    using point = typename Stream::point;
    struct finished {
        grant what{};
        submission<Stream>* owner = nullptr;  // null: a permit
        errc code = errc::none;
        ns cost{};
    };

    flights() {
        slots_.reserve(1);  // with room for one, running out of memory delays what waits and never strands it
        watched_.reserve(1);
    }

    /// A slot for one more; none when memory runs out, and then others are in flight.
    [[nodiscard]] std::optional<std::size_t> free_slot() noexcept {
        const auto free = std::ranges::find(slots_, false, &slot::taken);
        const auto index = static_cast<std::size_t>(free - slots_.begin());
        try {
            if (free == slots_.end()) slots_.emplace_back();
        } catch (const std::bad_alloc&) {
            return std::nullopt;
        }
        return index;
    }

    void take(std::size_t index, const grant& g) noexcept {
        slots_[index].what = g;
        slots_[index].taken = true;
    }

    /// It was enqueued on `stream` between these points. `code`: what is known to have failed already.
    void land(std::size_t index, const Stream& stream, point begin, point end, errc code,
              submission<Stream>* owner) noexcept {
        auto& s = slots_[index];
        s.stream = &stream;
        s.order = ++landed_;
        s.begin = std::move(begin);
        s.end = std::move(end);
        s.code = code;
        s.owner = owner;
        s.enqueued = true;
    }

    /// Nothing was enqueued after all.
    grant leave(std::size_t index) noexcept { return std::exchange(slots_[index], {}).what; }

    /// What the device has finished, in the order in which it finished; never blocks. Of each stream only the oldest is
    /// asked for, because asking may cost as much as a launch.
    [[nodiscard]] std::optional<finished> take_finished() noexcept {
        slot* first = nullptr;
        for (auto& s : slots_)
            if (s.enqueued && is_oldest(s) && s.end.reached() &&
                (first == nullptr || elapsed(first->end, s.end) < ns{0}))
                first = &s;
        if (first == nullptr) return std::nullopt;
        const auto s = std::exchange(*first, {});
        return finished{.what = s.what,
                        .owner = s.owner,
                        .code = s.code != errc::none ? s.code : s.end.status(),
                        .cost = meter_.charge(s.begin, s.end)};
    }

    /// The end of what was enqueued last on `stream`; none if nothing is in flight there. Once take_finished() has
    /// nothing more, it is still to come, and so is as good a begin of the next as a point of its own.
    [[nodiscard]] std::optional<point> last_end(const Stream& stream) const noexcept {
        const slot* last = nullptr;
        for (const auto& s : slots_)
            if (s.enqueued && s.stream == &stream && (last == nullptr || s.order > last->order)) last = &s;
        return last == nullptr ? std::nullopt : std::optional(last->end);
    }

    /// Whether there is a point to watch.
    [[nodiscard]] bool any_enqueued() const noexcept { return std::ranges::any_of(slots_, &slot::enqueued); }

    /// The ends of what was enqueued, for one watcher at a time: they stay until the next call. Without memory for
    /// all, some of them.
    [[nodiscard]] std::span<const point> watch() noexcept {
        watched_.clear();
        try {
            for (const auto& s : slots_)
                if (s.enqueued) watched_.push_back(s.end);
        } catch (const std::bad_alloc&) {  // the first fitted
        }
        return watched_;
    }

    /// The end of this one's work, if it is enqueued.
    [[nodiscard]] std::optional<point> end_of(const submission<Stream>* owner) const noexcept {
        if (owner == nullptr) return std::nullopt;
        const auto found = std::ranges::find(slots_, owner, &slot::owner);
        return found == slots_.end() ? std::nullopt : std::optional(found->end);
    }

    /// Ends everything without waiting: calls `end_of(submission)` for each that wasn't a permit.
    template <std::invocable<submission<Stream>&> F>
    void abandon(F end_of) {
        for (auto& s : slots_)
            if (auto* const owner = std::exchange(s, {}).owner) end_of(*owner);
    }

private:
    struct slot {
        grant what{};
        point begin{}, end{};
        submission<Stream>* owner = nullptr;
        const Stream* stream = nullptr;
        std::uint64_t order = 0;
        errc code = errc::none;
        bool taken = false, enqueued = false;
    };

    [[nodiscard]] bool is_oldest(const slot& s) const noexcept {
        return std::ranges::none_of(slots_, [&](const slot& other) {
            return other.enqueued && other.stream == s.stream && other.order < s.order;
        });
    }

    std::vector<slot> slots_;
    std::uint64_t landed_ = 0;
    std::vector<point> watched_;
    span_meter<point> meter_;
};

}  // namespace gpushare::inline GPUSHARE_ABI::detail
