// SPDX-License-Identifier: Apache-2.0
// Generates a trace with the schema and the statistics of the published trace, for a replay without
// the file.
//
//   const trace_replay::trace t = trace_replay::generate(/*seed*/ 1, /*requests*/ 2000);
#pragma once

#include <cstddef>
#include <cstdint>

#include "trace_replay/trace.hpp"

namespace trace_replay {

/// The same seed gives the same requests on every machine: the standard specifies the random engine
/// exactly, and the distributions use only + - * /.
///
/// The following was measured in lora_request_trace.csv (26,392 requests that succeeded), and is
/// matched:
///  - Groups: the busiest group sends 4.5 % of all requests, the top 10 send 15 %, the top 50 29 %,
///    the top 200 46 %, and the top 1000 73 %. There are about 4,200 groups in 26,392 requests, and
///    30 % of them ask once.
///  - Models: the most common model takes 31 %, the next ones 15, 9.5, 8, 7 and 4 %; the top 10 of
///    79 models take 87 %. Most of a group's requests are for one model.
///  - Steps: 30 in 91 % of the requests, 40 in 5 %, then 28, 50, 35 ...
///  - LoRAs: 0 in 83.5 %, 1 in 15.4 %, 2 in 0.9 %, up to 6. They come with certain models.
///  - Seconds: quantiles of 13, 17, 23, 33, 53, 106 and 160 at 0.1, 0.25, 0.5, 0.75, 0.9, 0.99 and
///    0.999, and a mean of 28.9. They consist of a median for each model, and a factor for each
///    group and for each request. LoRAs and further steps add to them.
///  - Arrivals: sessions of 4.2 requests on average (median 2, one in a hundred above 30). Gaps
///    within a session are 67 s at the median and 242 s at 0.9. Nearly all requests come between
///    16:00 and 05:00, and Thursday has five times as many as Saturday.
///  - Load: 0.38 of one device on average.
/// Two things are left out: the growth over the three weeks (every week is alike, so the busiest
/// hour asks for about 2.7 devices instead of 3.4), and rows that can't be used.
[[nodiscard]] trace generate(std::uint64_t seed, std::size_t requests);

/// The number of requests that the demo generates without a file, which cover a few days.
inline constexpr std::size_t demo_requests = 20000;

}  // namespace trace_replay
