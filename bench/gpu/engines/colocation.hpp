// SPDX-License-Identifier: Apache-2.0
// Runs tenants beside each other on one device. Measures how late the answers of the serving tenant
// are, and how much work the busy tenants complete.
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
    plain,    ///< no mechanism: each tenant has a thread and a stream
    native,   ///< the stream of requests has the highest priority
    acquire,  ///< like native, and a limiter gives a permit for each pass and request
    held,     ///< like native, and a launch gate holds threads that want to launch
    gated,    ///< like native, and a launch gate waits in streams
};
[[nodiscard]] constexpr std::string_view to_string(strategy s) noexcept {
    constexpr std::string_view names[] = {"plain", "native", "acquire", "held", "gated"};
    return names[static_cast<std::size_t>(s)];
}

/// A tenant that always has work.
struct busy_part {
    busy_tenant* tenant = nullptr;
    std::uint32_t weight = 1;          ///< the weight that the gate gets
    std::chrono::nanoseconds rest{0};  ///< pause after each pass, without work in flight; 0: three passes in flight
    /// Each pass is a graph, into which a gate in the stream puts waits.
    bool as_graph = false;
};

struct setting {
    serving_tenant* serving = nullptr;  ///< null: there are no requests
    serving_tenant* second = nullptr;   ///< another tenant of the same level, with as many requests
    bool urgent = true;                 ///< the gate has an urgent client even without requests
    gpushare::ns in_flight{200'000};    ///< work of lower clients that the gate allows in flight
    std::vector<busy_part> busy{};
    strategy how = strategy::plain;
    /// Random requests per second for each serving tenant.
    double per_s = 0;
    unsigned burst = 1;                          ///< requests that arrive together
    std::chrono::nanoseconds warm{300'000'000};  ///< time before the run counts
    std::chrono::nanoseconds length{2'000'000'000};
};

/// Sorted times in microseconds of the requests that arrived while the run counted. For a request
/// without an answer, the wait until the end of the run counts.
struct latencies {
    std::vector<double> from_arrival_us;
    /// From the start of the request's turn; answered requests only.
    std::vector<double> call_us;
    std::vector<double> told_us;    ///< the gate's bound on the wait at that time
    std::vector<double> beyond_us;  ///< call time minus bound
};

struct progress {
    double passes_per_s = 0;
    double longest_hold_us = 0;  ///< longest hold of a launch, by the gate
};

struct outcome {
    latencies answers;
    latencies of_second;
    std::vector<progress> busy;
};

/// `seed` determines the arrivals, which are the same under every strategy.
[[nodiscard]] outcome colocate(const setting& s, std::uint64_t seed);

/// The time that a gate charges a tenant that runs alone, divided by the time between two events
/// around the passes.
[[nodiscard]] double charged_over_measured(busy_tenant& t, strategy how, std::size_t passes);

/// Returns true if the driver supports waits in streams. Otherwise, `gated` holds threads.
[[nodiscard]] bool can_wait_in_streams();

/// The median time of a pass on an idle lane until the host sees its end.
[[nodiscard]] double pass_us(serving_tenant& t, std::size_t passes);

}  // namespace gpu_engines
