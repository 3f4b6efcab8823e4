// SPDX-License-Identifier: Apache-2.0
// What goes in and out of a limiter's core: its options, the submissions that it admits, what each is charged, and a
// client's account.
//
//   gpushare::limiter_core core{{.depth = 4, .anticipation = 100us}};
//   core.complete(admission, {.took = measured});
#pragma once

#include <algorithm>
#include <cstdint>

#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// One configuration for all clients.
struct limiter_options {
    /// Submissions in flight of one level and those above: more hides the latency of enqueuing, fewer shorten a newcomer's
    /// wait.
    std::uint32_t depth = 3;
    /// Cost of a client's first submission, before anything is known about it.
    ns first_guess = ns{100'000};
    /// Submissions of one client that may wait.
    std::uint32_t queue_limit = 65536;
    /// More than `depth` may be in flight while all of it takes no longer than this, a quarter of it with clients on a level
    /// above; of several clients, while it is predicted to take no longer than a quarter of that.
    ns horizon = ns{1'000'000};
    /// How long work of lower levels is held back between two submissions of a request.
    ns anticipation = ns{200'000};
    /// So many failures in a row quarantine a client; 0: never.
    std::uint32_t quarantine_after = 32;
    /// Clients of one level don't run beside each other: one at a time has the device, all kernels of a graph or an engine's
    /// call included. Then shares and metering are exact where points alone can't tell whose kernel ran when; kernels that
    /// don't fill the device share it no longer. No client's work may wait for what another submits later.
    bool take_turns = false;
    /// A submission that is first on its stream for longer than this fails as errc::stuck, and its room is free; 0: never.
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

/// A submission that was admitted, as it was predicted then.
struct admission {
    client_id client{};             ///< whose
    priority level{};               ///< the client's level then
    ns predicted{};                 ///< device time that was charged in advance
    ns longest{};                   ///< what it may take: the longest that its kind was declared or seen to; 0: unknown
    ns at_least{};                  ///< what it takes even with the device to itself; 0: unknown
    ns bound{};                     ///< on its wait for work of lower levels; 0: unknown
    ns served_before{};             ///< what work of its level and above had taken when it was admitted
    std::uint64_t key = 0;          ///< its kind
    std::uint32_t level_index = 0;  ///< the level, as the core counts them
    std::uint32_t policy = 0;       ///< which of the policies so far admitted it
    bool known = false;             ///< the prediction rests on some of its kind
    bool may_share = false;         ///< is short enough to be timed together with others
    bool of_request = false;        ///< more of its request may follow soon
};

/// What a submission is charged, and how well that is known.
struct charge {
    /// Where the time comes from.
    enum class source : std::uint8_t {
        own,     ///< measured by itself
        alone,   ///< and nothing else was on the device meanwhile
        shared,  ///< its part of what it took together with others
        doubt,   ///< no more than a prediction
    };
    ns took{};                  ///< device time
    ns in_flight{};             ///< from its admission to its end on the device, as far as known; 0: unknown
    bool failed = false;        ///< whether it ended with an error
    source from = source::own;  ///< where `took` comes from
    std::uint32_t times = 1;    ///< so many submissions that are alike, which took this together
};

/// A client's account. device_time is charged time: see compute_limiter for how it is measured.
struct client_usage {
    ns device_time{};             ///< charged so far
    ns longest{};                 ///< the longest submission seen
    std::uint64_t completed = 0;  ///< submissions that ran, failed ones included
    std::uint64_t failed = 0;     ///< of these
    std::uint32_t waiting = 0;    ///< submissions that wait
    std::uint32_t in_flight = 0;  ///< submissions that were admitted and haven't completed
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
