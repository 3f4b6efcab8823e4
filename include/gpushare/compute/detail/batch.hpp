// SPDX-License-Identifier: Apache-2.0
// Submissions that share one point at their end: short ones of one client on one stream, one after the other. A part of
// flights.hpp, under the mutex of its limiter.
//
// A batch is open while more may come, and ends with a recorded point: when it is predicted to take as long as the
// limiter's quantum, when somebody wants to know, or when other work follows on its stream. What ends later than the
// device is predicted to be busy, or was joined later, may have had gaps: its span is doubtful.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>

#include <gpushare/compute/detail/flight_slots.hpp>
#include <gpushare/compute/grant.hpp>
#include <gpushare/compute/span_meter.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// What to record the end of a batch with: nothing where streams don't share their timelines.
template <timeline Stream>
struct timeline_handle {
    struct type {
        [[nodiscard]] explicit operator bool() const noexcept { return false; }
    };
};
template <shared_timeline Stream>
struct timeline_handle<Stream> {
    using type = typename Stream::handle;
};

/// Names the timeline of `s`: by itself where it has a name, or else by where the stream object is.
template <timeline Stream>
[[nodiscard]] std::uint64_t timeline_of(const Stream& s) noexcept {
    if constexpr (shared_timeline<Stream>)
        return s.timeline();
    else
        return reinterpret_cast<std::uintptr_t>(&s);
}

template <timeline Stream>
struct batch {
    static constexpr bool shares = shared_timeline<Stream>;
    static constexpr std::uint32_t most_members = 63;
    using handle_type = typename timeline_handle<Stream>::type;
    using point = typename Stream::point;
    using interval = typename span_meter<point>::interval;

    enum class state : std::uint8_t { free, open, ending, ended };

    state at = state::free;
    bool known = false;          // how long it takes, as far as predictions go
    bool doubtful = false;       // its span may have gaps
    bool contended = false;      // something was in flight on another stream meanwhile
    bool beside_others = false;  // from the begin on, and of another client
    bool trouble = false;        // a member failed to be enqueued
    bool end_wanted = false;     // nobody else joins
    bool overtaken = false;      // another began behind it before it could end: its span holds that, too
    bool ends_soon = false;      // nor now: the latest to enter records the end
    bool written_off = false;    // it doesn't end: its members have been told
    bool begun = false;          // `begin` is known
    client_id client{};
    priority level{};
    std::uint64_t timeline = 0;
    const Stream* followed_on = nullptr;  // this one waits for the end, on behalf of `follower`
    client_id follower{};
    handle_type handle{};  // while open
    std::uint64_t order = 0;
    std::uint32_t num_members = 0, entering = 0;      // enqueued, being enqueued
    flight<Stream>*first = nullptr, *last = nullptr;  // members
    ns predicted{};                                   // of all of them
    instant busy_until{};                             // as predicted of its own work
    ns more{};                                        // and so much later it ends, as others' runs beside it
    instant head_since = never;                       // first on its stream, for write_off()
    point begin{}, end{};
    bool placed = false, found = false;  // `when` is known from its begin on; to its end
    interval when{};

    void begin_with(const grant& g, const Stream& s, std::uint64_t nth) noexcept {
        at = state::open;
        known = shares && g.known;
        client = g.client;
        level = g.level;
        timeline = timeline_of(s);
        followed_on = nullptr;
        order = nth;
        entering = 1;
        predicted = g.predicted;
    }

    /// False where the stream can't be marked once it is gone.
    [[nodiscard]] bool stay_open(const Stream& s) noexcept {
        if constexpr (shares) handle = s.share();
        return static_cast<bool>(handle);
    }

    [[nodiscard]] bool is_on(const Stream& s) const noexcept { return timeline == timeline_of(s); }

    [[nodiscard]] bool takes(const grant& g, ns quantum) const noexcept {
        return at == state::open && static_cast<bool>(handle) && client == g.client && level == g.level &&
               !end_wanted && !ends_soon && !trouble && num_members + entering < most_members &&
               predicted + g.predicted <= quantum;
    }

    void enter(const grant& g, instant now) noexcept {
        ++entering;
        doubtful |= now > busy_until;
        predicted += g.predicted;
        busy_until = saturating_add(std::max(now, busy_until), g.predicted);
    }

    /// So many more like `g` at least may enter before the one that fills it.
    [[nodiscard]] std::uint32_t room_for(const grant& g, ns quantum) const noexcept {
        if (!takes(g, quantum)) return 0;
        const auto in_time = static_cast<std::uint64_t>((quantum - predicted) / std::max(g.predicted, ns{1}));
        const auto n =
            static_cast<std::uint32_t>(std::min<std::uint64_t>(most_members - num_members - entering, in_time));
        return n > 0 ? n - 1 : 0;
    }

    /// No room for another one like the latest.
    [[nodiscard]] bool is_full(const grant& latest, ns quantum) const noexcept {
        return num_members + entering >= most_members || predicted + latest.predicted > quantum;
    }

    /// When it may be done, as far as is known.
    [[nodiscard]] instant due() const noexcept { return known ? saturating_add(busy_until, more) : instant::min(); }
    [[nodiscard]] bool is_due(instant now) const noexcept { return now >= due(); }

    /// Whether the device hasn't reached its end, once that is recorded. Asking costs as much as another point where points
    /// are dear: there, as far as is known.
    [[nodiscard]] bool is_to_come(instant now) const noexcept {
        if constexpr (shares)
            return !known || now < busy_until;
        else
            return !end.reached();
    }

    void clear() noexcept {
        at = state::free;
        known = doubtful = contended = beside_others = trouble = end_wanted = overtaken = ends_soon = false;
        written_off = begun = false;
        handle = {};
        num_members = entering = 0;
        first = last = nullptr;
        head_since = never;
        begin = {};
        end = {};
        placed = found = false;
    }

    [[nodiscard]] bool can_end() const noexcept {
        return at == state::open && static_cast<bool>(handle) && entering == 0 && num_members > 0;
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
