// SPDX-License-Identifier: Apache-2.0
// What goes in and out of a limiter's core: its configuration, the submissions that it lets in, what became of them, and
// a client's account.
//
//   gpushare::limiter_core core{{.depth = 4, .anticipation = 100us}};
//   core.complete(grant, {.took = measured});
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
    std::uint32_t depth = 3;            // submissions in flight of one level and those above: more hides the latency of
                                        // enqueuing, fewer shorten a newcomer's wait
    ns first_guess = ns{100'000};       // cost of a client's first submission, before anything is known about it
    std::uint32_t queue_limit = 65536;  // submissions of one client that may wait
    ns horizon = ns{1'000'000};  // more than `depth` may be in flight while all of it takes no longer, a quarter of it
                                 // with clients on a level above; of several clients, while it is predicted to take
                                 // no longer than a quarter of that
    ns anticipation = ns{200'000};  // how long work of lower levels is held back between two submissions of a request
    std::uint32_t quarantine_after = 32;  // failures in a row; 0: never
    bool take_turns = false;  // clients of one level don't run beside each other: whose turn it is has the device, all
                              // kernels of a graph or an engine's call included. Then shares and metering are exact
                              // where points alone can't tell whose kernel ran when; kernels that don't fill the device
                              // share it no longer. No client's work may wait for what another submits later.
    ns stuck_after{};         // at the head of its stream: then its ticket fails, and its room is free; 0: never
};

namespace detail {
/// With room for one, at least.
[[nodiscard]] constexpr limiter_options usable(limiter_options o) noexcept {
    o.depth = std::max(o.depth, 1U);
    o.queue_limit = std::max(o.queue_limit, 1U);
    return o;
}
}  // namespace detail

/// A submission that was let in.
struct grant {
    client_id client{};
    priority level{};
    ns predicted{};
    ns longest{};                   // what it may take: the longest that its kind was declared or seen to; 0: unknown
    ns at_least{};                  // what it takes even with the device to itself; 0: unknown
    ns bound{};                     // on its wait for work of lower levels; 0: unknown
    ns served_before{};             // what work of its level and above had taken when it was let in
    std::uint64_t key = 0;          // its kind
    std::uint32_t level_index = 0;  // in the core's book
    std::uint32_t policy = 0;       // which of the policies so far let it in
    bool known = false;             // the prediction rests on some of its kind
    bool may_share = false;         // is short enough to be timed together with others
    bool of_request = false;
};

/// What became of a submission.
struct outcome {
    enum class source : std::uint8_t {
        own,     // measured by itself
        alone,   // and nothing else was on the device meanwhile
        shared,  // its part of what it took together with others
        doubt,   // no more than a prediction
    };
    ns took{};
    ns in_flight{};  // from being let in to its end on the device, as far as known; 0: unknown
    bool failed = false;
    source from = source::own;
    std::uint32_t times = 1;  // submissions alike that went well, which took this together
};

/// A client's account. device_time is charged time: see compute_limiter for how it is measured.
struct client_usage {
    ns device_time{};
    ns longest{};                 // the longest submission seen
    std::uint64_t completed = 0;  // submissions that ran, failed ones included
    std::uint64_t failed = 0;
    std::uint32_t waiting = 0, in_flight = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
