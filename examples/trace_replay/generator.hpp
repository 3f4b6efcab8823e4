// SPDX-License-Identifier: Apache-2.0
// Makes up a trace with the schema and the statistics of the published one, for a replay without
// the file.
//
//   const trace_replay::trace t = trace_replay::generate(/*seed*/ 1, /*requests*/ 2000);
#pragma once

#include <cstddef>
#include <cstdint>

#include "trace_replay/trace.hpp"

namespace trace_replay {

/// The same seed gives the same requests everywhere: the random engine is the one that the standard
/// spells out, and what is made of its numbers needs no more than + - * /.
///
/// Measured in lora_request_trace.csv (26,392 requests that succeeded) and matched:
///   groups    the busiest sends 4.5 % of all requests, the top 10 15 %, 50 29 %, 200 46 %, 1000 73
///             %; about 4,200 groups in 26,392 requests, of which 30 % ask once
///   models    the commonest takes 31 %, then 15, 9.5, 8, 7, 4 %; the top 10 87 % of 79; a group
///             mostly asks for one
///   steps     30 in 91 %, 40 in 5 %, then 28, 50, 35 ...
///   LoRAs     0 in 83.5 %, 1 in 15.4 %, 2 in 0.9 %, up to 6; they come with certain models
///   seconds   quantiles 13 17 23 33 53 106 160 at 0.1 0.25 0.5 0.75 0.9 0.99 0.999, mean 28.9: a
///             median per model, a factor per group and one per request, more with LoRAs and with
///             more steps
///   arrivals  sessions of 4.2 requests on average (median 2, one in a hundred above 30), gaps
///             within a session of 67 s at the median and 242 s at 0.9; nearly all between 16:00
///             and 05:00; Thursday 5 times Saturday
///   load      0.38 of one device on average
/// Left out: the growth over the three weeks (every week is alike, so the busiest hour asks for
/// about 2.7 devices and not for 3.4) and rows that can't be used.
[[nodiscard]] trace generate(std::uint64_t seed, std::size_t requests);

/// The number of requests that the demo generates without a file: those of a few days.
inline constexpr std::size_t demo_requests = 20000;

}  // namespace trace_replay
