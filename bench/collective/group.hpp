// SPDX-License-Identifier: Apache-2.0
// Runs ranks as threads, and times calls that all ranks make together.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>

#include "collective/sweep.hpp"

namespace bench {

/// Calls body(member) on a thread for each rank.
template <class Body>
void on_ranks(const gpushare::communicator& group, const Body& body) {
    std::vector<std::jthread> threads;
    for (std::uint32_t r = 0; r < group.size(); ++r) threads.emplace_back([&, r] { body(group.rank(r)); });
}

/// Microseconds per call of `f(member)` on all ranks at once: the median over `n` batches of
/// `batch` calls.
template <class F>
double timed(const gpushare::communicator& group, std::size_t n, const F& f, std::size_t batch = 1) {
    std::vector<double> took;
    on_ranks(group, [&](const gpushare::member& me) {
        for (std::size_t i = 0; i < n + 1; ++i) {
            gpushare::barrier(me);
            const auto begin = std::chrono::steady_clock::now();
            for (std::size_t k = 0; k < batch; ++k) f(me);
            gpushare::barrier(me);
            const std::chrono::duration<double, std::micro> d = std::chrono::steady_clock::now() - begin;
            if (me.rank() == 0 && i > 0) took.push_back(d.count() / static_cast<double>(batch));
        }
    });
    std::ranges::sort(took);
    return took[took.size() / 2];
}

/// `n` floats that start on a cache line.
struct aligned_floats {
    explicit aligned_floats(std::size_t n) : memory(n + 16) {
        data = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64 / sizeof(float);
        for (std::size_t i = 0; i < n; ++i) data[i] = static_cast<float>(i % 13);
    }
    std::vector<float> memory;
    float* data;
};

}  // namespace bench
