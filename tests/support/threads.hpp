// SPDX-License-Identifier: Apache-2.0
// Threads of a test that start together and end with the scope. Catch's assertions aren't
// thread-safe: count in the threads, and check the counts after they have ended.
//
//   support::together(4, [&](unsigned rank) { ... });                 // returns when all have
//   support::background noise(2, [&](unsigned rank) { ... });  // again and again until destroyed
#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <stop_token>
#include <thread>
#include <vector>

namespace support {

/// Spins for a number of turns, so that threads meet at different places of their work.
inline void spin(std::uint64_t turns) {
    for (std::atomic<std::uint64_t> i{0}; i < turns; ++i) {
    }
}

/// Calls `body(rank)` in `count` threads at once.
template <std::invocable<unsigned> Body>
void together(unsigned count, const Body& body) {
    std::latch start(count);
    std::vector<std::jthread> threads;
    for (unsigned rank = 0; rank < count; ++rank)
        threads.emplace_back([&, rank] {
            start.arrive_and_wait();
            body(rank);
        });
}

/// Calls `body(rank)` in `count` threads over and over. The constructor returns once each thread
/// has made a round.
class background {
public:
    template <std::invocable<unsigned> Body>
    background(unsigned count, Body body) {
        std::latch running(static_cast<std::ptrdiff_t>(count));
        for (unsigned rank = 0; rank < count; ++rank)
            threads_.emplace_back([this, rank, body, &running](const std::stop_token& stop) {
                body(rank);
                running.count_down();
                while (!stop.stop_requested()) {
                    body(rank);
                    rounds_.fetch_add(1, std::memory_order_relaxed);
                }
            });
        running.wait();
    }
    background(const background&) = delete;
    background& operator=(const background&) = delete;

    /// The number of rounds so far, over all threads.
    [[nodiscard]] std::size_t rounds() const noexcept { return rounds_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::size_t> rounds_{0};
    std::vector<std::jthread> threads_;  // last: the threads end before the members that they use
};

}  // namespace support
