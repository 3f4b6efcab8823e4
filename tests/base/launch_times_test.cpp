// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <chrono>
#include <cstdint>

#include <gpushare/detail/launch_times.hpp>

#include "support/catch.hpp"

namespace launch_times_test {
using namespace gpushare;
using namespace std::chrono_literals;
using gpushare::detail::launch_times;

TEST_CASE("a launch takes what is guessed until it was measured", "[launch_times]") {
    launch_times times;
    const auto e = times.find(1, 20us);
    CHECK(times.predicted(e) == 20us);
    CHECK_FALSE(times.known(e));
    times.learn({&e, 1}, 1, 300us, true);
    CHECK(times.predicted(e) == 300us);
    CHECK(times.known(e));
    CHECK(times.find(1, 20us) == e);
}

TEST_CASE("predictions are right in the end, by what batches took alone", "[launch_times]") {
    launch_times times;
    const std::array takes{ns{7us}, ns{90us}, ns{250us}};
    for (int round = 0; round < 2000; ++round) {
        // Different mixtures, so that the parts can be told from the wholes.
        const auto a = static_cast<std::uint64_t>(round % 3), b = static_cast<std::uint64_t>(round / 3 % 3);
        const std::array batch{times.find(a, 20us), times.find(b, 20us)};
        times.learn(batch, batch.size(), takes[a] + takes[b], true);
    }
    for (std::uint64_t key = 0; key < takes.size(); ++key) {
        CAPTURE(key);
        CHECK(in_seconds(times.predicted(times.find(key, 20us))) == Approx(in_seconds(takes[key])).epsilon(0.01));
    }
}

TEST_CASE("time in which the device may have waited for the host says little", "[launch_times]") {
    launch_times times;
    const auto e = times.find(1, 20us);
    times.learn({&e, 1}, 1, 10us, true);
    for (int i = 0; i < 4; ++i) times.learn({&e, 1}, 1, 1ms, false);
    CHECK(times.predicted(e) == 10us);
    times.learn({&e, 1}, 1, 2us, false);  // an upper bound all the same
    CHECK(times.predicted(e) == 9us);
    const auto other = times.find(2, 20us);
    times.learn({&other, 1}, 1, 15us, false);
    CHECK_FALSE(times.known(other));  // a bound is no time
}

TEST_CASE("a launch that takes more or less with its data is predicted near its mean", "[launch_times]") {
    launch_times times;
    const auto e = times.find(1, 20us);
    for (int i = 0; i < 400; ++i) times.learn({&e, 1}, 1, i % 2 == 0 ? ns{60us} : ns{140us}, true);
    CHECK(in_seconds(times.predicted(e)) == Approx(100e-6).epsilon(0.15));
}

TEST_CASE("the table forgets the launches that were not seen for longest", "[launch_times]") {
    launch_times times(8);
    const auto kept = times.find(0, 20us);
    times.learn({&kept, 1}, 1, 5us, true);
    for (std::uint64_t key = 1; key < 100; ++key) {
        (void)times.find(key, 20us);
        CHECK(times.predicted(times.find(0, 20us)) == 5us);
    }
    CHECK_FALSE(times.known(times.find(1, 20us)));
}

}  // namespace launch_times_test
