// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <gpushare/detail/launch_times.hpp>

#include "support/catch.hpp"

namespace launch_times_test {
using namespace gpushare;
using namespace std::chrono_literals;
using gpushare::detail::launch_history;
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

TEST_CASE("upper bounds that are broken now and then leave the mean, and bounds that stay below it are followed",
          "[launch_times]") {
    launch_times times;
    const auto e = times.find(1, 20us);
    times.learn({&e, 1}, 1, 100us, true);
    for (int i = 0; i < 400; ++i) times.learn({&e, 1}, 1, i % 2 == 0 ? ns{92us} : ns{108us}, false);
    CHECK(in_seconds(times.predicted(e)) == Approx(100e-6).epsilon(0.02));
    for (int i = 0; i < 400; ++i) times.learn({&e, 1}, 1, i % 2 == 0 ? ns{92us} : ns{1ms}, false);
    CHECK(in_seconds(times.predicted(e)) == Approx(92e-6).epsilon(0.01));
}

TEST_CASE("a function that takes longer for other arguments is told apart by what was launched before",
          "[launch_times]") {
    launch_times times;
    launch_history behind;
    // A model: function 1 takes 10, 40 and 160 us in turn, behind different ones. Batches begin
    // anywhere in it.
    const std::array<std::pair<std::uint64_t, ns>, 9> model{
        {{2, 5us}, {1, 10us}, {1, 20us}, {3, 7us}, {1, 40us}, {4, 12us}, {2, 5us}, {3, 7us}, {1, 160us}}};
    const auto launch = [&](std::size_t i) {
        const auto e = times.find(model[i % model.size()].first, behind, 20us);
        behind.add(model[i % model.size()].first);
        return e;
    };
    std::size_t next = 0;
    for (; next < 2 * model.size(); ++next)  // each once alone, as the gate does
        if (const auto e = launch(next); times.first_time(e))
            times.learn({&e, 1}, 1, model[next % model.size()].second, true);
    for (int round = 0; round < 200; ++round, next += 4) {
        std::array<launch_times::entry, 4> batch{};
        ns takes{0};
        for (std::size_t n = 0; n < batch.size(); ++n) {
            batch[n] = launch(next + n);
            takes += model[(next + n) % model.size()].second;
        }
        times.learn(batch, batch.size(), takes, true);
    }
    for (std::size_t n = 0; n < model.size(); ++n, ++next) {
        CAPTURE(next % model.size());
        CHECK(times.predicted(launch(next)) == model[next % model.size()].second);
    }
}

TEST_CASE("behind a new history, a launch is predicted as behind others", "[launch_times]") {
    launch_times times;
    launch_history behind;
    const auto measured = times.find(1, behind, 20us);
    CHECK(times.predicted(measured) == 20us);
    times.learn({&measured, 1}, 1, 300us, true);
    behind.add(7);
    const auto other = times.find(1, behind, 20us);
    CHECK(other != measured);
    CHECK(times.predicted(other) == 300us);
    CHECK(times.known(other));
    CHECK(times.first_time(other));
    CHECK_FALSE(times.first_time(other));
    times.learn({&other, 1}, 1, 100us, true);
    CHECK(times.predicted(other) == 100us);
    CHECK(times.predicted(measured) == 300us);
    CHECK(times.predicted(times.find(1, 20us)) == 275us);  // behind whatever: an eighth of the way
}

TEST_CASE("a launch that was forgotten hears nothing of what replaced it", "[launch_times]") {
    launch_times times(8);
    launch_history behind;
    behind.add(9);
    const auto e = times.find(1, behind, 20us);
    for (std::uint64_t key = 100; key < 107; ++key) {  // all but the youngest entry are others' now
        (void)times.predicted(times.find(key, 20us));
        (void)times.find(1, behind, 20us);
    }
    for (std::uint64_t key = 200; key < 207; ++key) (void)times.find(key, 20us);
    times.learn({&e, 1}, 1, 300us, true);
    for (std::uint64_t key = 200; key < 207; ++key) CHECK(times.predicted(times.find(key, 20us)) == 20us);
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
