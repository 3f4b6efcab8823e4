// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// A polling thread yields while that is quick, and sleeps on a busy machine.
#include <chrono>

#include <gpushare/detail/let_others_run.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"

namespace let_others_run_test {
using namespace gpushare;
using namespace std::chrono_literals;
using gpushare::detail::polling_pace;

constexpr instant at(ns t) { return instant{t}; }

TEST_CASE("threads whose yields are quick go on to yield", "[polling]") {
    polling_pace pace;
    for (ns t{0}; t < 1s; t += 100us) {
        CHECK_FALSE(pace.sleeps(at(t)));
        pace.yielded(at(t), at(t + 99us));
    }
}

TEST_CASE("threads that others have kept from their cores sleep for longer and longer", "[polling]") {
    polling_pace pace;
    ns t{0}, slept{0};
    int yields = 0;
    for (; t < 60s; t += 100us) {
        if (pace.sleeps(at(t))) {
            slept += 100us;
            continue;
        }
        ++yields;
        pace.yielded(at(t), at(t + 30ms));
        t += 30ms;
    }
    CHECK(slept > 57s);
    CHECK(yields <= 64);
    while (pace.sleeps(at(t))) t += 1ms;
    pace.yielded(at(t), at(t + 1us));  // the machine is idle again
    CHECK_FALSE(pace.sleeps(at(t + 1us)));
    pace.yielded(at(t), at(t + 3ms));  // a single hiccup
    CHECK(pace.sleeps(at(t + 4ms)));
    CHECK_FALSE(pace.sleeps(at(t + 24ms)));
}

}  // namespace let_others_run_test
