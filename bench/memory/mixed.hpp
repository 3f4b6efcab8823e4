// SPDX-License-Identifier: Apache-2.0
// The pool_mixed workload. Every thread keeps 64 blocks of 256 B to 4 MiB with log-uniform sizes
// and repeatedly replaces a random block. With two threads, the other thread frees half of the
// blocks. No thread touches the blocks.
//
//   // a replacement, by one thread
//   const double ns = bench::mixed(2, [&] { return pool.make_cache(); });
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "sources.hpp"

namespace bench {

struct sized_block {
    void* pointer = nullptr;
    std::size_t size = 0;
};

/// A queue from one thread to one other thread. The threads publish indices in batches, so that
/// sending costs little.
class mailbox {
public:
    /// Returns false when the queue is full.
    bool send(sized_block b) noexcept {
        if (sent_ - known_taken_ == ring_.size()) {
            // The receiver has read the slot.
            known_taken_ = taken_.load(std::memory_order_acquire);
            if (sent_ - known_taken_ == ring_.size()) return false;
        }
        ring_[sent_++ % ring_.size()] = b;
        if (sent_ % bunch == 0) post();
        return true;
    }
    // The slots have been written.
    void post() noexcept { posted_.store(sent_, std::memory_order_release); }

    template <std::invocable<sized_block> F>
    void receive(F take) {
        const auto posted = posted_.load(std::memory_order_acquire);
        if (posted == received_) return;
        for (; received_ != posted; ++received_) take(ring_[received_ % ring_.size()]);
        taken_.store(received_, std::memory_order_release);
    }

private:
    static constexpr std::size_t bunch = 8;
    std::array<sized_block, 256> ring_{};
    alignas(64) std::size_t sent_ = 0, known_taken_ = 0;  // written by the sender
    alignas(64) std::size_t received_ = 0;                // written by the receiver
    alignas(64) std::atomic<std::size_t> posted_{0};
    alignas(64) std::atomic<std::size_t> taken_{0};
};

struct replacement {
    std::uint32_t size = 0;
    std::uint8_t slot = 0;
    bool by_other = false;  // the other thread frees the old block
};

/// The mean total size of 64 blocks of log-uniform size between 256 B and 4 MiB: 64 (4 MiB - 256 B)
/// / ln(4 MiB / 256 B).
inline constexpr double mean_live_mib = 64 * (4.0 - 1.0 / 4096) / 9.704060527839234;

/// The sequence is made before the clock runs.
inline constexpr std::size_t replacements = 1 << 14;
inline std::vector<replacement> make_replacements(std::uint64_t seed, bool share) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> log2_size(8, 22);
    std::vector<replacement> all(replacements);
    for (auto& r : all)
        r = {static_cast<std::uint32_t>(std::exp2(log2_size(random))), static_cast<std::uint8_t>(random() % 64),
             share && random() % 2 == 0};
    return all;
}

/// The mean of what work(rank) returns in so many threads, of which the caller is the first.
template <class Work>
double mean_of_threads(unsigned threads, const Work& work) {
    std::vector<double> took(threads);
    {
        std::vector<std::jthread> others;
        for (unsigned rank = 1; rank < threads; ++rank) others.emplace_back([&, rank] { took[rank] = work(rank); });
        took[0] = work(0);
    }
    return std::accumulate(took.begin(), took.end(), 0.0) / threads;
}

/// Nanoseconds per replacement and thread. Every thread calls `make` to get its source.
template <class Make>
requires block_source<std::invoke_result_t<Make&>>
double mixed(unsigned threads, Make make, std::size_t pairs = 200'000) {
    using source = std::invoke_result_t<Make&>;
    std::vector<std::unique_ptr<mailbox>> boxes;
    for (unsigned i = 0; i < threads; ++i) boxes.push_back(std::make_unique<mailbox>());
    std::atomic<unsigned> arrived{0};
    const auto work = [&](unsigned rank) {
        const auto steps = make_replacements(rank + 1, threads > 1);
        source mine = make();
        mailbox& out = *boxes[rank];
        mailbox& in = *boxes[(rank + 1) % threads];
        const auto free = [&](sized_block b) { mine.deallocate(b.pointer, b.size, alignment); };
        // Waits for the other threads. Frees received blocks in the meantime, because a sender may
        // be waiting for room in the mailbox.
        const auto meet = [&](unsigned nth) {
            for (arrived.fetch_add(1); arrived.load() < nth * threads; std::this_thread::yield()) in.receive(free);
            in.receive(free);
        };
        std::array<sized_block, 64> live;
        for (std::size_t i = 0; i < live.size(); ++i)
            live[i] = {mine.allocate(steps[i].size, alignment), steps[i].size};
        const auto run = [&](std::size_t count) {
            for (std::size_t i = 0; i < count; ++i) {
                const auto& r = steps[i % replacements];
                if (r.by_other)
                    while (!out.send(live[r.slot])) in.receive(free), std::this_thread::yield();
                else
                    free(live[r.slot]);
                live[r.slot] = {mine.allocate(r.size, alignment), r.size};
                if (threads > 1 && i % 8 == 0) in.receive(free);
            }
        };
        run(pairs / 4);  // a warm-up
        meet(1);
        const auto begin = std::chrono::steady_clock::now();
        run(pairs);
        const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
        out.post();
        meet(2);
        for (const auto& b : live) free(b);
        return time.count() / static_cast<double>(pairs);
    };
    return mean_of_threads(threads, work);
}

}  // namespace bench
