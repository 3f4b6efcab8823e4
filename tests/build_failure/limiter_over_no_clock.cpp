// SPDX-License-Identifier: Apache-2.0
// must fail: required for the satisfaction of 'clock<Clock>' \[with Clock = std::chrono[A-Za-z0-9_:]*system_clock\]
// A clock gives instants of the library, which are those of the steady clock.
#include <chrono>

#include <gpushare/compute/compute_limiter.hpp>

struct stream {
    using point = gpushare::immediate_point;
    point record() { return {}; }
};

gpushare::compute_limiter<stream, std::chrono::system_clock> limiter;
