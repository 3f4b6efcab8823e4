// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/host/detail/wakeup.hpp>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include <gpushare/backend/host/clock.hpp>

#include "support/catch.hpp"

using namespace gpushare;
using namespace std::chrono_literals;
using host::detail::wake_list;
using host::detail::wakeup;

TEST_CASE("a sleep ends when it is raised, before or meanwhile, or at its deadline", "[host]") {
    const host::steady_clock clock;
    wakeup w;
    const auto deadline = clock.now() + 2ms;
    CHECK_FALSE(w.wait(deadline));
    CHECK(clock.now() >= deadline);
    CHECK_FALSE(w.wait(instant{}));
    CHECK_FALSE(w.wait(instant::min()));
    wake_list woken;
    woken.add(w);
    CHECK(w.wait(instant::min()));  // at once, woken or not
    woken.wake_all();
    w.lower();
    std::jthread other([&] {
        std::this_thread::sleep_for(1ms);
        woken.add(w);
        woken.wake_all();
    });
    CHECK(w.wait(never));
}

TEST_CASE("a waiter may be gone before it is woken, and another one there", "[host]") {
    for (int round = 0; round < 200; ++round) {
        std::optional<wakeup> w(std::in_place);
        std::atomic<bool> again{false};
        bool first = false, second = true;
        wake_list woken;
        std::jthread sleeper([&] {
            first = w->wait(never);
            w.emplace();  // at the same address
            again = true;
            second = w->wait(host::steady_clock::now() + 500us);  // a late wake-up isn't for this one
        });
        woken.add(*w);
        // Unless it is asleep already it goes on by itself.
        for (int i = 0; i < 100 * (round % 4) && !again; ++i) std::this_thread::yield();
        woken.wake_all();
        sleeper.join();
        CHECK(first);
        CHECK_FALSE(second);
    }
}
