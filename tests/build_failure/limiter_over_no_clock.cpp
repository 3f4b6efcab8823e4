// SPDX-License-Identifier: Apache-2.0
// must fail: required for the satisfaction of 'clock<Clock>' \[with Clock = std::chrono[A-Za-z0-9_:]*steady_clock\]
// A clock is an object that gives instants of the library.
#include <chrono>

#include <gpushare/compute/compute_limiter.hpp>

struct stream {
    using point = gpushare::immediate_point;
    point record() { return {}; }
};

gpushare::compute_limiter<stream, std::chrono::steady_clock> limiter;
