// SPDX-License-Identifier: Apache-2.0
// A kernel that runs until the test lets it end, to hold SMs without measuring time. Must outlive
// its node.
//
//   gate g;    stream.launch({.blocks = 2}, g.kernel());    g.wait_inside(2);    ...    g.open();
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

class gate {
public:
    [[nodiscard]] auto kernel() {
        return [this](auto& ctx) {
            inside_.fetch_add(1);
            for (std::uint32_t turn = 0; !open_.load() && !ctx.device_lost(); ++turn) ctx.backoff(turn);
        };
    }
    /// Until so many blocks have started, in all.
    void wait_inside(int blocks) const {
        while (inside_.load() < blocks) std::this_thread::yield();
    }
    [[nodiscard]] int inside() const { return inside_.load(); }
    void open() { open_.store(true); }

private:
    std::atomic<bool> open_{false};
    std::atomic<int> inside_{0};
};
