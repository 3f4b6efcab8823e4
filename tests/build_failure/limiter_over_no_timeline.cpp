// SPDX-License-Identifier: Apache-2.0
// must fail: required for the satisfaction of 'timeline<Stream>' \[with Stream = no_stream\]
// A stream records points.
#include <gpushare/compute/compute_limiter.hpp>

struct no_stream {};
struct stopped_clock {
    gpushare::instant now() const noexcept { return {}; }
};

gpushare::compute_limiter<no_stream, stopped_clock> limiter;
