// SPDX-License-Identifier: Apache-2.0
// The types that compute_limiter, and limiter_core, which decides for it, take and return: options,
// admitted submissions, what each is charged, a client's account, and events, which report faults
// and waits longer than promised.
//
//   const gpushare::limiter_options options{.depth = 4, .anticipation = 100us};      // of a compute_limiter
//   while (auto e = limiter.take_event()) log(to_string(e->what), e->client, e->took, e->bound);
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Options of a limiter, the same for all its clients.
struct limiter_options {
    /// How many submissions of one level and the levels above may be in flight. More submissions
    /// hide the latency of enqueuing; fewer submissions shorten a newcomer's wait.
    std::uint32_t depth = 3;
    /// Predicted cost of a client's first submission, of which nothing is known yet.
    ns first_guess = ns{100'000};
    /// How many submissions of one client may wait.
    std::uint32_t queue_limit = 65536;
    /// More than `depth` submissions may be in flight while all of them together take no longer
    /// than this, or a quarter of this with clients on a level above; with several clients, while
    /// they are predicted to take no longer than a quarter of that. Each submission counts as in
    /// limiter_core::bound_of: with the largest of its declared, seen and already taken times.
    ns horizon = ns{1'000'000};
    /// How long work of lower levels is held back between two submissions of a request.
    ns anticipation = ns{200'000};
    /// How many failures in a row quarantine a client; 0: never.
    std::uint32_t quarantine_after = 32;
    /// A submission that is first on its stream for longer than this fails with errc::stuck and no longer counts as in
    /// flight; 0: never.
    ns stuck_after{};
};

namespace detail {
/// With room for one, at least.
[[nodiscard]] constexpr limiter_options usable(limiter_options o) noexcept {
    o.depth = std::max(o.depth, 1U);
    o.queue_limit = std::max(o.queue_limit, 1U);
    return o;
}
}  // namespace detail

/// The facts about a waiting submission: policies decide by them, and admission checks by them
/// whether there is room.
struct submission_facts {
    queue_head head{};  ///< for the policy
    ns bound{};         ///< on its wait, as published when it came; 0: as it is when it is admitted
    instant late_at =
        never;         ///< it waits until what is in flight has ended, if it might begin later than this behind that
    sm_width width{};  ///< the part of the SMs that it can fill, if it was declared
    std::uint64_t timeline = 0;  ///< its stream's timeline_of(); 0: not known, and all such of a client are one
    bool of_request = false;     ///< more of its client may follow soon: lower levels are held back meanwhile
};

/// A submission that was admitted, with what was predicted of it.
struct admission {
    client_id client{};          ///< whose
    priority level{};            ///< the client's level then
    ns predicted{};              ///< device time (duration times width) that was charged in advance
    ns length{};                 ///< how long it takes, as predicted
    sm_width width{};            ///< the part of the SMs that it can fill; not known of a kind's first ones
    std::uint64_t timeline = 0;  ///< its stream, as far as it is known: work of one runs one after the other
    ns longest{};                ///< the longest that its kind was declared or seen to take; 0: unknown
    ns usual_longest{};     ///< the same, but for one that is longer now and then; for whether it is lent what is kept
    ns at_least{};          ///< what it takes with the device to itself; 0: unknown
    ns yields_within{};     ///< it lets levels above have its SMs at least this often; 0: it doesn't
    ns bound{};             ///< on its wait for work of lower levels; 0: unknown
    ns served_before{};     ///< what work of its level and above had taken when it was admitted
    std::uint64_t key = 0;  ///< its kind
    std::uint32_t level_index = 0;  ///< the level, as the core counts them
    std::uint32_t policy = 0;       ///< which of the policies so far admitted it
    std::uint64_t lent = 0;         ///< what that policy said of it when it served it
    bool known = false;             ///< submissions of its kind were measured before
    bool declared = false;          ///< the width was given with it
    bool may_share = false;         ///< is short enough to be timed together with others
    bool of_request = false;        ///< more of its request may follow soon
    bool unproven = false;          ///< the longest is only as its submitter declared its cost: nothing of it was seen
};

/// The charge of a submission, and how reliable that figure is.
struct charge {
    /// Where the time comes from.
    enum class source : std::uint8_t {
        own,     ///< measured by itself
        alone,   ///< measured by itself, with nothing else on the device
        shared,  ///< its part of a batch's measured time
        doubt,   ///< no more than a prediction
    };
    /// `billed`: as much as `took`.
    static constexpr ns as_taken = ns::min();

    ns took{};  ///< device time: duration times width
    /// The amount billed to its client, where it differs from the time taken (a price, for
    /// example). Shares, predictions and bounds go by `took`.
    ns billed = as_taken;
    ns in_flight{};             ///< from its admission to its end on the device, as far as known; 0: unknown
    ns noticed{};               ///< so long after its end that was seen, at most; 0: unknown
    ns enqueuing{};             ///< its callable took so long; 0: unknown
    bool failed = false;        ///< whether it ended with an error
    source from = source::own;  ///< where `took` comes from
    std::uint32_t times = 1;    ///< how many like submissions took this together
    sm_width width{};           ///< the part of the SMs that it was seen to fill, where the device tells
    bool opaque = false;        ///< or it may have filled any part of them, where it is told what is launched
    bool may_shrink = false;    ///< work beside it, still in flight, may turn out to have shared this time

    /// The bill of its client.
    [[nodiscard]] constexpr ns amount() const noexcept { return billed == as_taken ? took : billed; }
};

/// How often things took how long: counts in fixed buckets. A value, which allocates nothing.
class duration_histogram {
public:
    /// The upper bound of each bucket, inclusive. One more bucket counts what took longer than the
    /// last bound.
    static constexpr std::array<ns, 16> limits{
        ns{10'000},      ns{25'000},        ns{100'000},       ns{250'000},       ns{500'000},    ns{1'000'000},
        ns{2'500'000},   ns{5'000'000},     ns{10'000'000},    ns{25'000'000},    ns{50'000'000}, ns{100'000'000},
        ns{250'000'000}, ns{1'000'000'000}, ns{2'500'000'000}, ns{10'000'000'000}};

    /// So many that took this long each.
    void add(ns took, std::uint32_t times = 1) noexcept {
        std::size_t i = 0;
        while (i < limits.size() && took > limits[i]) ++i;
        counts_[i] += times;
        while (times-- > 0) sum_ = saturating_add(sum_, took);
    }
    /// Adds the counts of another histogram.
    duration_histogram& operator+=(const duration_histogram& other) noexcept {
        for (std::size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
        sum_ = saturating_add(sum_, other.sum_);
        return *this;
    }
    /// How many are in each bucket alone.
    [[nodiscard]] std::span<const std::uint64_t, limits.size() + 1> counts() const noexcept { return counts_; }
    /// How many there were.
    [[nodiscard]] std::uint64_t count() const noexcept {
        std::uint64_t all = 0;
        for (const auto n : counts_) all += n;
        return all;
    }
    /// How long all of them took.
    [[nodiscard]] ns sum() const noexcept { return sum_; }

private:
    std::array<std::uint64_t, limits.size() + 1> counts_{};
    ns sum_{};
};

/// Why submissions never ran.
enum class unrun : std::uint8_t {
    queue_full,   ///< as many waited as may
    no_room,      ///< try_acquire(), and it would have had to wait
    late,         ///< its deadline came before its turn
    stopped,      ///< by a stop token or cancel(), or with the coroutine that waited for it
    closed,       ///< its client closed, or the limiter went
    asleep,       ///< its client sleeps, and what comes is refused
    quarantined,  ///< its client failed too often in a row
    device_lost,  ///< the device was
    other,        ///< it couldn't be enqueued
};

/// As a metric's label has it.
[[nodiscard]] constexpr std::string_view to_string(unrun why) noexcept {
    constexpr std::array<std::string_view, 9> names{"queue_full", "no_room",     "late",        "stopped", "closed",
                                                    "asleep",     "quarantined", "device_lost", "other"};
    return names[static_cast<std::size_t>(why)];
}

/// How many never ran, by reason. A value.
class unrun_counts {
public:
    static constexpr std::size_t reasons = static_cast<std::size_t>(unrun::other) + 1;  ///< That there are.

    /// One more, which ended with this code.
    void add(errc why) noexcept { ++counts_[static_cast<std::size_t>(reason_of(why))]; }
    void add(unrun why) noexcept { ++counts_[static_cast<std::size_t>(why)]; }  ///< The same.
    /// Adds the counts of another instance.
    unrun_counts& operator+=(const unrun_counts& other) noexcept {
        for (std::size_t i = 0; i < reasons; ++i) counts_[i] += other.counts_[i];
        return *this;
    }
    /// For this reason.
    [[nodiscard]] std::uint64_t operator[](unrun why) const noexcept { return counts_[static_cast<std::size_t>(why)]; }
    /// For any.
    [[nodiscard]] std::uint64_t total() const noexcept {
        std::uint64_t all = 0;
        for (const auto n : counts_) all += n;
        return all;
    }

private:
    [[nodiscard]] static constexpr unrun reason_of(errc why) noexcept {
        switch (why) {
            case errc::queue_full: return unrun::queue_full;
            case errc::deadline_exceeded: return unrun::late;
            case errc::stopped: return unrun::stopped;
            case errc::closed: return unrun::closed;
            case errc::asleep: return unrun::asleep;
            case errc::quarantined: return unrun::quarantined;
            case errc::device_lost: return unrun::device_lost;
            default: return unrun::other;
        }
    }

    std::array<std::uint64_t, reasons> counts_{};
};

/// A client's account. device_time is charged time: see compute_limiter for how it is measured.
struct client_usage {
    /// Charged and settled so far; never falls. If the device doesn't report how much each client
    /// used, the time of work that ran beside work still in flight is added once the latter has
    /// ended.
    ns device_time{};
    ns ran{};                       ///< time that its work took, whatever is billed; shared time counts whole
    ns longest{};                   ///< the longest submission seen
    std::uint64_t completed = 0;    ///< submissions that ran, failed ones included
    std::uint64_t failed = 0;       ///< of these
    std::uint32_t waiting = 0;      ///< submissions that wait
    std::uint32_t in_flight = 0;    ///< submissions that were admitted and haven't completed
    std::uint64_t dropped = 0;      ///< submissions that were too late and never ran; see submit_options::drop_if_late
    unrun_counts refused{};         ///< submissions that were turned away when they came
    unrun_counts cancelled{};       ///< submissions that waited and never ran, those dropped included
    duration_histogram queueing{};  ///< how long each waited that was let in
    duration_histogram running{};   ///< how long each lasted on the device, as far as its points tell
};

/// The forecast for a submission that arrives now, if no other client submits: for a 429, or for
/// admission control. For calls that arrive at random, with several widths, streams and tenants of
/// one level, finish() is on average 0.88 to 1.2 times the measured time, and 1.4 times for short
/// calls beside longer ones. A single forecast is off by up to half of that
/// (tests/compute/limiter_estimate_test.cpp, in modelled time). While other clients keep submitting, a
/// client beyond its share waits longer.
struct submission_estimate {
    /// Predicted time until it begins: 0 where part of the device is free. Otherwise the time to
    /// the next end, as if all work in flight had just begun, plus the work that goes before it. If
    /// its client already uses as many streams as it ever used at once, at least the time until one
    /// of these is free.
    ns wait{};
    ns lasts{};    ///< so long it then takes, as predicted
    ns longest{};  ///< the longest that its kind lately took: of 512 at least, so one in 512 takes longer; 0: unknown
    /// The 99th percentile: at most one in a hundred of the `observed` latest submissions of its
    /// kind took longer. The first, which may be cold, isn't counted. With fewer than a hundred,
    /// the longest. 0: unknown.
    ns p99{};
    ns bound{};  ///< the longest that it waits for lower levels once it is admitted; see limiter_core::bound_of
    /// The same bound if no work in flight takes longer than its client's p99, which at most one in
    /// a hundred submissions of each client does. A client with fewer than a hundred counts with
    /// the longest that it declared or showed. 0: unknown, for example if a client that counts
    /// declared and showed nothing.
    ns bound_p99{};
    std::uint32_t observed = 0;  ///< so many were timed by themselves: up to 1023
    bool known = false;          ///< whether enough of its kind were seen to say so
    /// Until it is over.
    [[nodiscard]] constexpr ns finish() const noexcept { return saturating_add(wait, lasts); }
};

/// An event: a fault, or work that broke a bound.
struct limiter_event {
    /// The kind of event.
    enum class kind : std::uint8_t {
        overran,  ///< a submission took longer than its kind was counted for: others may wait beyond the bound
        waited_beyond_bound,  ///< a submission waited for lower levels longer than the bound published on its arrival
        quarantined,          ///< too many failures in a row: nothing of the client is admitted until it is pardoned
        stuck,                ///< work of the client doesn't end; it is quarantined as well
        device_lost,          ///< the device became unusable while the client had work in flight
        undriven,  ///< a submission of the client waited, and no thread drove the limiter for a second or more
    };

    kind what{};            ///< what it was
    client_id client{};     ///< whose submission
    tenant_name name{};     ///< the client's, if it has one
    ns took{};              ///< of overran: the submission; of waited_beyond_bound: its wait; of undriven: how long
    ns bound{};             ///< of these: what it should have been at most
    std::uint64_t key = 0;  ///< of the first two: the kind of submission, if it has one
    std::uint32_t failures = 0;  ///< of quarantined: how many in a row
};

/// In words.
[[nodiscard]] constexpr std::string_view to_string(limiter_event::kind k) noexcept {
    switch (k) {
        case limiter_event::kind::overran: return "overran";
        case limiter_event::kind::waited_beyond_bound: return "waited beyond bound";
        case limiter_event::kind::quarantined: return "quarantined";
        case limiter_event::kind::stuck: return "stuck";
        case limiter_event::kind::device_lost: return "device lost";
        case limiter_event::kind::undriven: return "no thread drove";
    }
    return "unknown event";
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
