// SPDX-License-Identifier: Apache-2.0
// The contract of every clock.
//
//   conformance::check_clock(host::steady_clock{}, true);
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include <gpushare/concepts.hpp>
#include "support/catch.hpp"

namespace conformance {

/// `across_threads`: instants of different threads can be compared.
template <gpushare::clock C>
void check_clock(const C& clock, bool across_threads) {
    auto last = clock.now();
    bool forward = true;
    for (int i = 0; i < 1000; ++i) {
        const auto now = clock.now();
        forward &= now >= last;
        last = now;
    }
    CHECK(forward);
    CHECK(clock.now() < gpushare::never);
    if (!across_threads) return;

    // What another thread has seen is not ahead of what we see afterwards.
    std::atomic<gpushare::ns::rep> seen{clock.now().time_since_epoch().count()};
    std::atomic<bool> back{false};
    std::vector<std::jthread> threads;
    for (int t = 0; t < 2; ++t) {
        threads.emplace_back([&] {
            for (int i = 0; i < 2000; ++i) {
                const auto before = seen.load();
                const auto now = clock.now().time_since_epoch().count();
                if (now < before) back = true;
                seen = now;
            }
        });
    }
    threads.clear();
    CHECK_FALSE(back);
}

}  // namespace conformance
