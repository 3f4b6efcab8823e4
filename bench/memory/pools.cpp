// SPDX-License-Identifier: Apache-2.0
// Runs the pool_mixed workload and compares our pool with a mutex, and with the peers on the same
// sequence.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

#include "mixed.hpp"
#include "parts.hpp"
#include "sources.hpp"
#include "survivors.hpp"

namespace bench {

namespace {

constexpr std::size_t repeats = 11;

using pool_type = gpushare::pool_resource<address_space>;

/// Locks and unlocks a mutex twice, like an allocation and a free in a pool with one lock. All
/// threads run at once.
double mutex_pair(unsigned threads) {
    std::mutex mutex;
    std::size_t count = 0;
    std::atomic<unsigned> ready{0};
    const auto work = [&](unsigned) {
        for (ready.fetch_add(1); ready.load() < threads;) std::this_thread::yield();
        return ns_per_call(200'000, [&] {
            for (int i = 0; i < 2; ++i) {
                const std::lock_guard lock(mutex);
                keep(++count);
            }
        });
    };
    return mean_of_threads(threads, work);
}

/// Uses a fresh pool for each measurement, and checks that the pool gets all memory back.
template <class Make>
double pool_mixed(unsigned threads, Make make, gpushare::pool_usage* usage = nullptr) {
    address_space upstream;
    pool_type pool(upstream);
    const double ns = mixed(threads, [&] { return make(pool); });
    if (usage != nullptr) *usage = pool.usage();
    if (pool.trim({}) != gpushare::bytes{}) throw std::runtime_error("pool_mixed: the pool has lost a block");
    return ns;
}

/// Mixes 256 long-lived blocks of 1 to 32 MiB, such as weights and KV caches, with 64 short-lived
/// blocks of 256 B to 1 MiB. A long-lived block is replaced after every 100 replacements of
/// short-lived blocks. All sizes are log-uniform. Returns the peak of held bytes per live byte,
/// once all blocks exist.
double fragmentation_of_long_lived(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto size = [&](double least, double most) {
        return static_cast<std::size_t>(std::exp2(std::uniform_real_distribution<double>(least, most)(random)));
    };
    address_space upstream;
    pool_type pool(upstream);
    auto cache = pool.make_cache();
    std::vector<sized_block> longs(256), shorts(64);
    const auto replace = [&](sized_block& b, std::size_t n) {
        if (b.pointer != nullptr) cache.deallocate(b.pointer, b.size, alignment);
        b = {cache.allocate(n, alignment), n};
    };
    double most = 0;
    for (std::size_t i = 0; i < 100'000; ++i) {
        replace(shorts[random() % shorts.size()], size(8, 20));
        if (i % 100 == 0 || i < 10 * longs.size())
            replace(longs[i < longs.size() ? i : random() % longs.size()], size(20, 25));
        if (i >= 10 * longs.size() && i % 100 == 0) most = std::max(most, pool.usage().held_over_live());
    }
    for (auto* all : {&longs, &shorts})
        for (const auto& b : *all)
            if (b.pointer != nullptr) cache.deallocate(b.pointer, b.size, alignment);
    if (pool.trim({}) != gpushare::bytes{}) throw std::runtime_error("fragmentation: the pool has lost a block");
    return most;
}

const auto cached = [](pool_type& pool) { return pool.make_cache(); };
const auto plain = [](pool_type& pool) { return shared<pool_type>{&pool}; };

}  // namespace

void pools(report& r) {
    const auto found = peers();
    std::printf("# peers:");
    for (const auto& p : found) std::printf(" %s", p.name.c_str());
    std::printf("\n");
    for (const unsigned threads : {1U, 2U}) {
        const std::string name = threads == 1 ? "memory.pool_mixed" : "memory.pool_mixed_2t";
        const auto floor = [&] { return mutex_pair(threads); };
        const auto ours = [&] { return pool_mixed(threads, cached); };
        r.figure(threads == 1 ? "memory.mutex_pair_ns" : "memory.mutex_pair_2t_ns", repeated(repeats, floor), "ns");
        r.figure(name + "_ns", repeated(repeats, ours), "ns");
        r.figure(name + "_vs_mutex_pair", ratios(repeats, ours, floor), "x");
        r.figure(name + "_without_cache_vs_mutex_pair",
                 ratios(
                     repeats, [&] { return pool_mixed(threads, plain); }, floor),
                 "x");
        for (const auto& p : found) {
            const auto theirs = [&] { return mixed(threads, [&] { return p.make(); }); };
            r.figure(name + "_" + p.name + "_ns", repeated(repeats, theirs), "ns");
            r.figure(name + "_vs_" + p.name, ratios(repeats, ours, theirs), "x");
        }
        std::vector<double> held, over_live;
        for (std::size_t i = 0; i < repeats; ++i) {
            gpushare::pool_usage usage;
            (void)pool_mixed(threads, cached, &usage);
            held.push_back(static_cast<double>(usage.peak_reserved.count()) / (1 << 20));
            over_live.push_back(held.back() / (threads * mean_live_mib));
        }
        r.figure(name + "_held_mib", held, "MiB");
        r.figure(name + "_held_over_live", over_live, "x", statistic::most);
    }
    std::vector<double> fragmentation;
    for (std::uint64_t seed = 1; seed <= repeats; ++seed) fragmentation.push_back(fragmentation_of_long_lived(seed));
    for (const auto stack : {gpushare::memory_stack::direct, gpushare::memory_stack::pool,
                             gpushare::memory_stack::arena, gpushare::memory_stack::stream_ordered})
        fragmentation.push_back(survivors(stack).held_over_live);
    r.figure("memory.pool_fragmentation_max", fragmentation, "x", statistic::most);
}

}  // namespace bench
