// SPDX-License-Identifier: Apache-2.0
// must fail: required for the satisfaction of 'stream_source<Device>' \[with Device = no_device\]
// Partitions, or shares of time, are those of something that streams come from.
#include <gpushare/compute/partitioned_limiter.hpp>

struct no_device {};
struct stopped_clock {
    gpushare::instant now() const noexcept { return {}; }
};

gpushare::partitioned_limiter<no_device, stopped_clock>* limiter;
