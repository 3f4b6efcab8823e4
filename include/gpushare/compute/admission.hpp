// SPDX-License-Identifier: Apache-2.0
// The types that compute_limiter and its decision core, limiter_core, take and return: options,
// admitted submissions, their charges, a client's account, and events. Events report faults and
// waits longer than promised.
//
//   // of a compute_limiter
//   const gpushare::limiter_options options{.depth = 4, .anticipation = 100us};
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
    /// than the horizon, or than a quarter of the horizon if a higher level has clients. If several
    /// clients have work, the predicted time of all submissions must also be at most a quarter of
    /// that limit. Each submission counts as in limiter_core::bound_of: with the largest of its
    /// declared, seen and already taken times.
    ns horizon = ns{1'000'000};
    /// How long work of lower levels is held back between two submissions of a request.
    ns anticipation = ns{200'000};
    /// How many failures in a row quarantine a client; 0: never.
    std::uint32_t quarantine_after = 32;
    /// A submission that is first on its stream for longer than this fails with errc::stuck and no
    /// longer counts as in flight; 0: never.
    ns stuck_after{};
};

namespace detail {
/// The same options, with room for at least one submission.
[[nodiscard]] constexpr limiter_options usable(limiter_options o) noexcept {
    o.depth = std::max(o.depth, 1U);
    o.queue_limit = std::max(o.queue_limit, 1U);
    return o;
}
}  // namespace detail

/// The facts about a waiting submission: policies decide by them, and admission checks by them
/// whether there is room.
struct submission_facts {
    /// The facts for the policy.
    queue_head head{};
    /// The bound on its wait that was published on its arrival; 0: the bound at its admission
    /// counts.
    ns bound{};
    /// If the submission might begin later than this behind the work in flight, it waits until that
    /// work has ended.
    instant late_at = never;
    /// The part of the SMs that the submission can fill, if declared.
    sm_width width{};
    /// The number of its stream, as timeline_of() gives it; 0: unknown, and all such submissions of
    /// a client count as one stream.
    std::uint64_t timeline = 0;
    /// More submissions of its client may follow soon: lower levels are held back meanwhile.
    bool of_request = false;
};

/// An admitted submission, with the predictions about it.
struct admission {
    client_id client{};  ///< the client that submitted it
    priority level{};    ///< the client's level at the time of admission
    ns predicted{};      ///< device time (duration times width) that was charged in advance
    ns length{};         ///< the predicted duration
    /// The part of the SMs that the submission can fill; unknown for the first submissions of a
    /// kind.
    sm_width width{};
    /// Its stream, if known: the work of one stream runs one after the other.
    std::uint64_t timeline = 0;
    ns longest{};   ///< the longest that its kind was declared or seen to take; 0: unknown
    ns at_least{};  ///< the least time that it takes with the device to itself; 0: unknown
    /// The work lets higher levels have its SMs at least this often; 0: the work doesn't yield.
    ns yields_within{};
    ns bound{};  ///< the bound on its wait for work of lower levels; 0: unknown
    /// The total time of completed work of its level and above at the time of admission.
    ns served_before{};
    std::uint64_t key = 0;          ///< its kind
    std::uint32_t level_index = 0;  ///< the index of the level in the core
    /// The number of the policy that admitted it: each set_policy() counts one.
    std::uint32_t policy = 0;
    std::uint64_t lent = 0;   ///< the value that the policy's `serve` returned
    bool known = false;       ///< submissions of its kind were measured before
    bool declared = false;    ///< the caller declared the width
    bool may_share = false;   ///< short enough to be timed together with others
    bool of_request = false;  ///< more submissions of its request may follow soon
    /// `longest` is only the cost that the submitter declared: no time of its kind was seen.
    bool unproven = false;
};

/// The charge of a submission, and how reliable that figure is.
struct charge {
    /// Where the time comes from.
    enum class source : std::uint8_t {
        own,     ///< measured by itself
        alone,   ///< measured by itself, with nothing else on the device
        shared,  ///< the submission's part of a batch's measured time
        doubt,   ///< an estimate: the measured span isn't reliable
    };
    /// `billed`: as much as `took`.
    static constexpr ns as_taken = ns::min();

    ns took{};  ///< device time: duration times width
    /// The amount billed to its client, where it differs from the time taken (a price, for
    /// example). Shares, predictions and bounds go by `took`.
    ns billed = as_taken;
    /// The time from its admission to its end on the device, as far as known; 0: unknown.
    ns in_flight{};
    /// The limiter noticed the end at most this long after it; 0: unknown.
    ns noticed{};
    ns enqueuing{};             ///< how long its callable took; 0: unknown
    bool failed = false;        ///< whether it ended with an error
    source from = source::own;  ///< where `took` comes from
    std::uint32_t times = 1;    ///< how many equal submissions took this time together
    /// The part of the SMs that the submission filled, if the device reports that.
    sm_width width{};
    /// The stream records the sizes of launches, but not of this work: it may have filled any part
    /// of the SMs.
    bool opaque = false;
    /// Work alongside it, still in flight, may turn out to have shared this time.
    bool may_shrink = false;
    /// Its request, if it was of one, has ended: no more submissions of the request follow.
    bool request_over = false;

    /// The bill of its client.
    [[nodiscard]] constexpr ns amount() const noexcept { return billed == as_taken ? took : billed; }
};

/// A histogram of durations, with fixed buckets. A value, which allocates nothing.
class duration_histogram {
public:
    /// The upper bound of each bucket, inclusive. One more bucket counts durations beyond the last
    /// bound.
    static constexpr std::array<ns, 16> limits{
        ns{10'000},      ns{25'000},        ns{100'000},       ns{250'000},       ns{500'000},    ns{1'000'000},
        ns{2'500'000},   ns{5'000'000},     ns{10'000'000},    ns{25'000'000},    ns{50'000'000}, ns{100'000'000},
        ns{250'000'000}, ns{1'000'000'000}, ns{2'500'000'000}, ns{10'000'000'000}};

    /// Counts `times` durations of `took` each.
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
    /// The count of each bucket; the counts aren't cumulative.
    [[nodiscard]] std::span<const std::uint64_t, limits.size() + 1> counts() const noexcept { return counts_; }
    /// The number of durations counted.
    [[nodiscard]] std::uint64_t count() const noexcept {
        std::uint64_t all = 0;
        for (const auto n : counts_) all += n;
        return all;
    }
    /// The sum of all durations.
    [[nodiscard]] ns sum() const noexcept { return sum_; }

private:
    std::array<std::uint64_t, limits.size() + 1> counts_{};
    ns sum_{};
};

/// The reason why a submission never ran.
enum class unrun : std::uint8_t {
    queue_full,  ///< the client's queue was full
    no_room,     ///< try_acquire() found no room immediately
    late,        ///< its deadline came before its turn
    /// A stop token or cancel() ended it, or the coroutine that awaited it was destroyed.
    stopped,
    closed,       ///< its client was closed, or the limiter was destroyed
    asleep,       ///< its client sleeps and refuses submissions
    quarantined,  ///< its client failed too often in a row
    device_lost,  ///< the device was lost
    other,        ///< any other error, for example in enqueuing
};

/// The reason as the label of a metric.
[[nodiscard]] constexpr std::string_view to_string(unrun why) noexcept {
    constexpr std::array<std::string_view, 9> names{"queue_full", "no_room",     "late",        "stopped", "closed",
                                                    "asleep",     "quarantined", "device_lost", "other"};
    return names[static_cast<std::size_t>(why)];
}

/// The number of submissions that never ran, by reason. A value.
class unrun_counts {
public:
    /// The number of reasons.
    static constexpr std::size_t reasons = static_cast<std::size_t>(unrun::other) + 1;

    /// Counts one more submission, which ended with this code.
    void add(errc why) noexcept { ++counts_[static_cast<std::size_t>(reason_of(why))]; }
    void add(unrun why) noexcept { ++counts_[static_cast<std::size_t>(why)]; }  ///< The same.
    /// Adds the counts of another instance.
    unrun_counts& operator+=(const unrun_counts& other) noexcept {
        for (std::size_t i = 0; i < reasons; ++i) counts_[i] += other.counts_[i];
        return *this;
    }
    /// The count for this reason.
    [[nodiscard]] std::uint64_t operator[](unrun why) const noexcept { return counts_[static_cast<std::size_t>(why)]; }
    /// The sum over all reasons.
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
    /// used, the time of work that ran alongside work still in flight is added once the latter has
    /// ended.
    ns device_time{};
    /// The time that its work took, whatever is billed; time shared with others counts in full.
    ns ran{};
    ns longest{};                 ///< the longest submission seen
    std::uint64_t completed = 0;  ///< submissions that ran, failed ones included
    std::uint64_t failed = 0;     ///< how many of the completed submissions failed
    std::uint32_t waiting = 0;    ///< submissions that wait
    std::uint32_t in_flight = 0;  ///< submissions that were admitted and haven't completed
    /// Submissions that were too late and never ran; see submit_options::drop_if_late.
    std::uint64_t dropped = 0;
    unrun_counts refused{};  ///< submissions that were turned away when they came
    /// Submissions that waited and never ran, those dropped included.
    unrun_counts cancelled{};
    duration_histogram queueing{};  ///< the waits of admitted submissions
    duration_histogram running{};   ///< the durations on the device, as far as points tell
};

/// The forecast for a submission that arrives now, if no other client submits: for a 429, or for
/// admission control. For calls that arrive at random, with several widths, streams and tenants of
/// one level, finish() is on average 0.88 to 1.2 times the measured time, and 1.4 times for short
/// calls alongside longer ones. A single forecast is off by up to half of that
/// (tests/compute/limiter_estimate_test.cpp, in modelled time). While other clients keep
/// submitting, a client beyond its share waits longer.
struct submission_estimate {
    /// Predicted time until it begins: 0 where part of the device is free. Otherwise the time to
    /// the next end, as if all work in flight had just begun, plus the work that goes before it. If
    /// its client already uses as many streams as it ever used at once, at least the time until one
    /// of these is free.
    ns wait{};
    ns lasts{};  ///< the predicted duration from then on
    /// The longest of at least the latest 512 submissions of its kind; about one in 512 takes
    /// longer; 0: unknown.
    ns longest{};
    /// The 99th percentile: at most one in a hundred of the `observed` latest submissions of its
    /// kind took longer. The first, which may be cold, isn't counted. With fewer than a hundred,
    /// the longest. 0: unknown.
    ns p99{};
    /// The longest time that it waits for lower levels once it is admitted; see
    /// limiter_core::bound_of.
    ns bound{};
    /// The same bound if no work in flight takes longer than its client's p99, which at most one in
    /// a hundred submissions of each client does. A client with fewer than a hundred counts with
    /// the longest that it declared or showed. 0: unknown, for example if a client that counts
    /// declared and showed nothing.
    ns bound_p99{};
    std::uint32_t observed = 0;  ///< how many submissions were timed by themselves, up to 1023
    /// Whether enough submissions of its kind were seen for a forecast.
    bool known = false;
    /// The predicted time until its end.
    [[nodiscard]] constexpr ns finish() const noexcept { return saturating_add(wait, lasts); }
};

/// An event: a fault, or work that broke a bound.
struct limiter_event {
    /// The kind of event.
    enum class kind : std::uint8_t {
        /// A submission took longer than bounds count for its kind: others may wait beyond their
        /// bound.
        overran,
        /// A submission waited for lower levels longer than the bound published on its arrival.
        waited_beyond_bound,
        /// Too many failures in a row: nothing of the client is admitted until it is pardoned.
        quarantined,
        stuck,        ///< work of the client doesn't end; it is quarantined as well
        device_lost,  ///< the device became unusable while the client had work in flight
        /// A submission of the client waited, and no thread drove the limiter for a second or more.
        undriven,
    };

    kind what{};         ///< the kind of this event
    client_id client{};  ///< the client of the submission
    tenant_name name{};  ///< the client's name, if it has one
    /// For overran the submission's time, for waited_beyond_bound its wait, for undriven the time
    /// without a driving thread.
    ns took{};
    ns bound{};  ///< for these three: the time that `took` should not have exceeded
    /// For overran and waited_beyond_bound: the kind of the submission, if it has one.
    std::uint64_t key = 0;
    std::uint32_t failures = 0;  ///< for quarantined: the number of failures in a row
};

/// The event in words.
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
