// SPDX-License-Identifier: Apache-2.0
// Well-known allocator workloads, written anew from their descriptions. `make` gives each thread
// its source. Results are nanoseconds per call of allocate or deallocate and thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "mixed.hpp"
#include "sources.hpp"

namespace bench {

/// Runs `work(rank, source)` on `threads` threads that start together. `work` returns the number of
/// its calls.
template <class Make, class Work>
double per_call(unsigned threads, Make make, Work work) {
    std::barrier start(static_cast<std::ptrdiff_t>(threads)), end(static_cast<std::ptrdiff_t>(threads));
    const auto run = [&](unsigned rank) {
        auto source = make();
        start.arrive_and_wait();
        const auto begin = std::chrono::steady_clock::now();
        const std::size_t calls = work(rank, source);
        const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
        end.arrive_and_wait();  // all sources live until every thread has finished
        return time.count() / static_cast<double>(calls);
    };
    return mean_of_threads(threads, run);
}

/// rmm's random_allocations: `count` allocations with uniform sizes between 1 byte and `largest`.
/// Before each allocation, random blocks are freed with a probability of 27 %, and also while the
/// next block would exceed 64 GiB.
template <class Make>
double random_allocations(Make make, std::size_t count, std::size_t largest) {
    return per_call(1, make, [&](unsigned, auto& source) {
        std::mt19937_64 random(7);
        constexpr std::size_t most = std::size_t{64} << 30;
        std::vector<sized_block> live;
        std::size_t out = 0, calls = 0;
        const auto free_one = [&] {
            auto& b = live[random() % live.size()];
            source.deallocate(b.pointer, b.size, alignment);
            out -= b.size;
            b = live.back();
            live.pop_back();
            ++calls;
        };
        for (std::size_t made = 0; made < count;) {
            const auto size = 1 + random() % largest;
            if (!live.empty() && (random() % 100 >= 73 || out + size > most)) {
                free_one();
                continue;
            }
            live.push_back({source.allocate(size, alignment), size});
            out += size;
            ++made, ++calls;
        }
        while (!live.empty()) free_one();
        return calls;
    });
}

/// larson: every thread replaces random blocks among 1,000 blocks of 256 B to 8 KiB, and passes the
/// blocks to the next thread at the end of a round.
template <class Make>
double larson(unsigned threads, Make make) {
    constexpr std::size_t blocks = 1'000, rounds = 10, per_round = 10'000;
    std::vector<std::vector<sized_block>> hands(threads, std::vector<sized_block>(blocks));
    std::barrier round(static_cast<std::ptrdiff_t>(threads));
    return per_call(threads, make, [&](unsigned rank, auto& source) {
        std::mt19937_64 random(rank);
        for (std::size_t n = 0; n < rounds; ++n) {
            auto& mine = hands[(rank + n) % threads];
            for (std::size_t i = 0; i < per_round; ++i) {
                auto& b = mine[random() % blocks];
                if (b.pointer != nullptr) source.deallocate(b.pointer, b.size, alignment);
                b.size = 256 + random() % 7'937;
                b.pointer = source.allocate(b.size, alignment);
            }
            round.arrive_and_wait();
        }
        for (const auto& b : hands[rank])
            if (b.pointer != nullptr) source.deallocate(b.pointer, b.size, alignment);
        return 2 * rounds * per_round;
    });
}

/// xmalloc: in each pair of threads, one thread allocates and the other frees. `threads` is even.
template <class Make>
double xmalloc(unsigned threads, Make make) {
    constexpr std::size_t blocks = 100'000;
    std::vector<std::unique_ptr<mailbox>> boxes;
    for (unsigned i = 0; i < threads / 2; ++i) boxes.push_back(std::make_unique<mailbox>());
    return per_call(threads, make, [&](unsigned rank, auto& source) {
        mailbox& box = *boxes[rank / 2];
        std::mt19937_64 random(rank);
        if (rank % 2 == 0) {
            for (std::size_t i = 0; i < blocks; ++i) {
                const auto size = 256 + random() % 3'841;
                for (const sized_block b{source.allocate(size, alignment), size}; !box.send(b);)
                    std::this_thread::yield();
            }
            box.post();
        } else {
            for (std::size_t freed = 0; freed < blocks;) {
                const auto before = freed;
                box.receive([&](sized_block b) { source.deallocate(b.pointer, b.size, alignment), ++freed; });
                if (freed == before) std::this_thread::yield();
            }
        }
        return blocks;
    });
}

/// mstress: allocates blocks in bursts, mostly of small sizes: each doubling is half as likely.
/// Threads keep some blocks, exchange some through shared slots, and free the rest at the end of
/// each burst.
template <class Make>
double mstress(unsigned threads, Make make) {
    constexpr std::size_t bursts = 50, burst = 1'000, slots = 1'000;
    std::vector<std::atomic<sized_block*>> transfer(slots);
    const double ns = per_call(threads, make, [&](unsigned rank, auto& source) {
        std::mt19937_64 random(rank);
        std::size_t calls = 0;
        std::vector<sized_block*> mine, kept;
        const auto free = [&](sized_block* b) {
            source.deallocate(b->pointer, b->size, alignment);
            delete b;
            ++calls;
        };
        for (std::size_t n = 0; n < bursts; ++n) {
            for (std::size_t i = 0; i < burst; ++i) {
                const auto size = (std::size_t{256} << std::min<int>(std::countr_zero(random()), 12)) - random() % 128;
                mine.push_back(new sized_block{source.allocate(size, alignment), size});
                ++calls;
                if (random() % 4 == 0) std::swap(mine[random() % mine.size()], mine.back());
                if (random() % 8 == 0) {
                    // acq_rel: the thread that takes a block sees the writes of the thread that
                    // left the block.
                    auto* const other = transfer[random() % slots].exchange(mine.back(), std::memory_order_acq_rel);
                    mine.pop_back();
                    if (other != nullptr) mine.push_back(other);
                }
                if (random() % 8 == 0 && !mine.empty()) kept.push_back(mine.back()), mine.pop_back();
            }
            while (!mine.empty()) free(mine.back()), mine.pop_back();
            while (kept.size() > burst) free(kept.back()), kept.pop_back();
        }
        for (auto* b : kept) free(b);
        return calls;
    });
    auto last = make();
    for (auto& slot : transfer)
        if (auto* const b = slot.load()) {
            last.deallocate(b->pointer, b->size, alignment);
            delete b;
        }
    return ns;
}

struct serving_costs {
    double busy_percent = 0;  // of a core, inside the calls
    double p99_ns = 0;        // of an allocation
};

/// A serving mix: 200,000 allocations per second for half a second, on schedule. Two thirds are
/// scratch of 256 B to 1 MiB that lives for 16 allocations; one third are cache pages of 2 MiB that
/// live for 512 allocations.
template <class Make>
serving_costs serving(Make make) {
    using clock = std::chrono::steady_clock;
    constexpr std::size_t count = 100'000;
    constexpr std::chrono::nanoseconds apart{5'000};
    auto source = make();
    std::mt19937_64 random(3);
    std::uniform_real_distribution<double> log2_size(8, 20);
    std::vector<std::size_t> sizes(count);
    for (auto& s : sizes)
        s = random() % 3 == 0 ? std::size_t{2} << 20 : static_cast<std::size_t>(std::exp2(log2_size(random)));
    std::vector<sized_block> scratch(16), pages(512);
    std::size_t next_scratch = 0, next_page = 0;
    std::vector<double> each(count);
    std::chrono::nanoseconds busy{0};
    const auto begin = clock::now();
    for (std::size_t i = 0; i < count; ++i) {
        const bool page = sizes[i] == std::size_t{2} << 20;
        auto& slot = page ? pages[next_page++ % pages.size()] : scratch[next_scratch++ % scratch.size()];
        while (clock::now() < begin + i * apart) {
        }
        const auto from = clock::now();
        if (slot.pointer != nullptr) source.deallocate(slot.pointer, slot.size, alignment);
        const auto freed = clock::now();
        slot = {source.allocate(sizes[i], alignment), sizes[i]};
        const auto to = clock::now();
        each[i] = std::chrono::duration<double, std::nano>(to - freed).count();
        busy += to - from;
    }
    const auto took = clock::now() - begin;
    for (auto* slots : {&scratch, &pages})
        for (const auto& b : *slots)
            if (b.pointer != nullptr) source.deallocate(b.pointer, b.size, alignment);
    std::ranges::nth_element(each, each.begin() + count / 100 * 99);
    return {100 * std::chrono::duration<double>(busy) / std::chrono::duration<double>(took), each[count / 100 * 99]};
}

}  // namespace bench
