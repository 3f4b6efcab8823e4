// SPDX-License-Identifier: Apache-2.0
// The contract of every gang order.
//
//   conformance::check_gang_order(node.gangs());     // of at least four devices
#pragma once

#include <array>
#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include "support/catch.hpp"

namespace conformance {

template <gpushare::gang_order G>
void check_gang_order(G& gangs) {
    using gpushare::device_id;
    const std::vector ab{device_id{0}, device_id{1}}, ba{device_id{1}, device_id{0}}, cd{device_id{2}, device_id{3}},
        twice{device_id{1}, device_id{1}, device_id{0}};

    SECTION("two gangs with a common device come one after the other, in whichever order they name their devices") {
        std::array<int, 2> device{};  // not atomic: the guard protects it
        std::vector<std::jthread> threads;
        for (const auto* gang : {&ab, &ba, &twice}) {
            threads.emplace_back([&, gang] {
                for (int i = 0; i < 2000; ++i) {
                    auto guard = gangs.enter(*gang);
                    auto moved = std::move(guard);
                    ++device[0];
                    ++device[1];
                }
            });
        }
        threads.clear();
        CHECK(device == std::array{6000, 6000});
    }
    SECTION("gangs without a common device don't wait for each other") {
        auto guard = gangs.enter(ab);
        std::thread{[&] { auto other = gangs.enter(cd); }}.join();
        CHECK(true);
    }
    SECTION("an empty gang waits for nobody") {
        auto guard = gangs.enter(ab);
        auto none = gangs.enter({});
        CHECK(true);
    }
    SECTION("while a guard lives, others wait") {
        std::atomic<bool> left{false}, wrong{false};
        std::thread other;
        {
            auto guard = gangs.enter(ab);
            other = std::thread{[&] {
                auto mine = gangs.enter(ba);
                if (!left) wrong = true;
            }};
            std::this_thread::yield();
            left = true;
        }
        other.join();
        CHECK_FALSE(wrong);
    }
}

}  // namespace conformance
