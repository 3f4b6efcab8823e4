// SPDX-License-Identifier: Apache-2.0
// Runs well-known allocator workloads on our pool, and on the peers that support them.
#include "workloads.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/units.hpp>

#include "parts.hpp"

namespace bench {

namespace {

using namespace gpushare::literals;

constexpr std::size_t repeats = 5;

/// A tenant's memory: a pool over a quota over an address space, fresh for every measurement.
struct tenant {
    address_space space;
    gpushare::quota limit{120_GiB};
    gpushare::quota_resource<address_space> mine{limit, space};
    gpushare::pool_resource<gpushare::quota_resource<address_space>> pool{mine};
};

template <class Measure>
auto with_pool(Measure measure) {
    return [=] {
        tenant t;
        const double ns = measure([&] { return t.pool.make_cache(); });
        if (t.pool.trim({}) != gpushare::bytes{}) throw std::runtime_error("a workload's pool has lost a block");
        return ns;
    };
}

/// Runs a workload on our pool and on all peers.
template <class Measure>
void against_peers(report& r, const std::string& name, const std::vector<peer>& others, Measure measure) {
    r.figure(name + "_ns", repeated(repeats, with_pool(measure)), "ns");
    for (const auto& p : others)
        r.figure(name + "_" + p.name + "_ns", repeated(repeats, [&] { return measure([&] { return p.make(); }); }),
                 "ns");
}

/// Measures pairs of calls over an upstream that does nothing.
void null_pairs(report& r) {
    for (const unsigned threads : {1U, 2U}) {
        const std::string suffix = threads == 1 ? "_ns" : "_2t_ns";
        const auto pairs = [threads](auto make, std::size_t size) {
            return per_call(threads, make, [&](unsigned, auto& source) {
                constexpr std::size_t count = 100'000;
                for (std::size_t i = 0; i < count; ++i) {
                    void* const p = source.allocate(size, alignment);
                    keep(p);
                    source.deallocate(p, size, alignment);
                }
                return count;
            });
        };
        r.figure("memory.null_pair_quota" + suffix,
                 repeated(repeats,
                          [&] {
                              gpushare::quota q{1_GiB};
                              null_upstream upstream;
                              gpushare::quota_resource mine(q, upstream);
                              return pairs([&] { return shared<decltype(mine)>{&mine}; }, 4096);
                          }),
                 "ns");
        r.figure("memory.null_pair_pool_1mib" + suffix,
                 repeated(repeats, with_pool([&](auto make) { return pairs(make, 1 << 20); })), "ns");
    }
}

/// A stream that counts its points. The points are reached when the round ends.
class round_stream {
public:
    class point {
    public:
        point() = default;
        point(const std::atomic<std::uint64_t>* done, std::uint64_t at) : done_(done), at_(at) {}
        [[nodiscard]] bool reached() const noexcept {
            return done_ == nullptr || done_->load(std::memory_order_acquire) >= at_;
        }
        bool wait(gpushare::instant) const { return reached(); }
        static bool wait_any(std::span<const point> points, gpushare::instant) { return points.front().reached(); }
        [[nodiscard]] gpushare::errc status() const noexcept { return gpushare::errc::none; }
        friend gpushare::ns elapsed(const point&, const point&) noexcept { return {}; }

    private:
        const std::atomic<std::uint64_t>* done_ = nullptr;
        std::uint64_t at_ = 0;
    };

    point record() { return {&done_, ++recorded_}; }
    void finish() { done_.store(recorded_, std::memory_order_release); }
    [[nodiscard]] std::uint64_t recorded() const { return recorded_; }

private:
    std::uint64_t recorded_ = 0;
    std::atomic<std::uint64_t> done_{0};
};
static_assert(gpushare::timeline<round_stream>);

/// rmm's multi_stream_allocations: in each round, each of 4 kernels allocates 1 MiB on the next
/// stream and frees the block there. "Cold" starts with an empty pool, "warm" with a pool that has
/// run a round.
void multi_stream(report& r) {
    for (const std::size_t streams : {1UL, 2UL, 4UL})
        for (const bool warm : {false, true}) {
            constexpr std::size_t rounds = 200, kernels = 4;
            std::uint64_t recorded = 0;
            const auto measure = [&] {
                std::chrono::duration<double, std::nano> took{};
                recorded = 0;
                for (std::size_t round = 0; round < rounds; ++round) {
                    address_space space;
                    gpushare::pool_resource<address_space, round_stream::point> pool(space);
                    std::deque<round_stream> all(streams);
                    std::vector<decltype(pool)::cache> caches;
                    for (auto& s : all) caches.push_back(pool.make_cache(s));
                    for (int pass = warm ? 0 : 1; pass < 2; ++pass) {
                        const auto begin = std::chrono::steady_clock::now();
                        for (std::size_t k = 0; k < kernels; ++k) {
                            auto& cache = caches[k % streams];
                            void* const p = cache.allocate(1 << 20, alignment);
                            keep(p);
                            cache.deallocate(p, 1 << 20, alignment);
                        }
                        if (pass == 1) took += std::chrono::steady_clock::now() - begin;
                    }
                    for (auto& s : all) recorded += s.recorded(), s.finish();
                    caches.clear();
                    for (auto& s : all) s.finish();
                }
                return took.count() / (rounds * kernels);
            };
            const std::string name = "memory.multi_stream_" + std::to_string(streams) + (warm ? "_warm" : "_cold");
            r.figure(name + "_ns", repeated(repeats, measure), "ns");
            r.figure(name + "_points", {static_cast<double>(recorded)}, "count");
        }
}

}  // namespace

void workloads(report& r) {
    const auto others = peers();
    null_pairs(r);
    for (const std::size_t count : {std::size_t{1'000}, std::size_t{10'000}, std::size_t{100'000}})
        for (const std::size_t mib : {std::size_t{1}, std::size_t{64}, std::size_t{4096}})
            r.figure(
                "memory.random_allocations_" + std::to_string(count) + "_" + std::to_string(mib) + "mib_ns",
                repeated(repeats, with_pool([&](auto make) { return random_allocations(make, count, mib << 20); })),
                "ns");
    multi_stream(r);
    against_peers(r, "memory.larson_2t", others, [](auto make) { return larson(2, make); });
    against_peers(r, "memory.xmalloc_2t", others, [](auto make) { return xmalloc(2, make); });
    against_peers(r, "memory.mstress_2t", others, [](auto make) { return mstress(2, make); });
    std::vector<double> busy, p99;
    for (std::size_t i = 0; i < repeats; ++i) {
        tenant t;
        const auto costs = serving([&] { return t.pool.make_cache(); });
        busy.push_back(costs.busy_percent);
        p99.push_back(costs.p99_ns);
    }
    r.figure("memory.serving_200k_busy", busy, "%");
    r.figure("memory.serving_200k_p99_ns", p99, "ns");
}

}  // namespace bench
