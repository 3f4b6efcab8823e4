// SPDX-License-Identifier: Apache-2.0
// Tenants beside each other on one device: how late the answers of one become, and how much the
// others get done.
//
//   const auto r = colocate({.serving = &bert, .busy = {{&resnet}}, .how = strategy::gated, .per_s = 428}, 1);
//   bench::percentile(r.answers.from_arrival_us, 0.99);  r.busy[0].passes_per_s;
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include <gpushare/units.hpp>

#include "tenants.hpp"

namespace gpu_engines {

enum class strategy : std::uint8_t {
    plain,    ///< nothing: a thread and a stream each
    native,   ///< the stream of requests has the highest priority
    acquire,  ///< the same, and a limiter's permit for each pass and request
    held,     ///< the same, and a launch gate holds launching threads
    gated,    ///< the same, and a launch gate waits in streams
};
[[nodiscard]] constexpr std::string_view to_string(strategy s) noexcept {
    constexpr std::string_view names[] = {"plain", "native", "acquire", "held", "gated"};
    return names[static_cast<std::size_t>(s)];
}

/// One that always has work.
struct busy_part {
    busy_tenant* tenant = nullptr;
    std::uint32_t weight = 1;          ///< as the gate is told
    std::chrono::nanoseconds rest{0};  ///< behind each pass, with nothing in flight; none: three passes are in flight
    bool as_graph = false;             ///< a pass is a graph, into which a gate in the stream puts waits
};

struct setting {
    serving_tenant* serving = nullptr;  ///< none: requests never come
    serving_tenant* second = nullptr;   ///< of the same level, with as many requests
    bool urgent = true;                 ///< though a gate knows that they may
    gpushare::ns in_flight{200'000};    ///< of lower clients, as a gate counts with
    std::vector<busy_part> busy{};
    strategy how = strategy::plain;
    double per_s = 0;                            ///< requests of each, at random
    unsigned burst = 1;                          ///< so many arrive at once
    std::chrono::nanoseconds warm{300'000'000};  ///< before it counts
    std::chrono::nanoseconds length{2'000'000'000};
};

/// Sorted, in microseconds, of the requests that arrived while it counted. A request without
/// an answer at the end has waited until then.
struct latencies {
    std::vector<double> from_arrival_us;
    std::vector<double> call_us;    ///< from when the request's turn came; answered ones alone
    std::vector<double> told_us;    ///< how long it would wait at most, as a gate told it then
    std::vector<double> beyond_us;  ///< the call less that
};

struct progress {
    double passes_per_s = 0;
    double longest_hold_us = 0;  ///< of a launch, by the gate
};

struct outcome {
    latencies answers;
    latencies of_second;
    std::vector<progress> busy;
};

/// `seed`: of the arrivals, which are the same under every strategy.
[[nodiscard]] outcome colocate(const setting& s, std::uint64_t seed);

/// The time that a gate counts for a tenant alone, over the time between two events around its
/// passes.
[[nodiscard]] double charged_over_measured(busy_tenant& t, strategy how, std::size_t passes);

/// Whether the driver can: without that, `gated` holds threads.
[[nodiscard]] bool can_wait_in_streams();

/// How long a pass takes on an idle lane until its end is seen: median.
[[nodiscard]] double pass_us(serving_tenant& t, std::size_t passes);

}  // namespace gpu_engines
