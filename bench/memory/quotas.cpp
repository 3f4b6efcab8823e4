// SPDX-License-Identifier: Apache-2.0
// What quotas cost, and that they are exact under attack.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/units.hpp>

#include "parts.hpp"
#include "sources.hpp"

namespace bench {

namespace {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::quota;

constexpr std::size_t repeats = 21;
constexpr std::size_t calls = 200'000;

/// The least a correct quota can do: one compare-and-swap to reserve, one subtraction to release.
double floor_pair() {
    std::atomic<std::uint64_t> used{0};
    return ns_per_call(calls, [&] {
        auto now = used.load(std::memory_order_relaxed);
        while (now + 4096 <= (1ULL << 30) && !used.compare_exchange_weak(now, now + 4096)) {
        }
        keep(now);
        used.fetch_sub(4096);
    });
}

/// A line of quotas; the leaf is charged. With guarantees, each level holds what the one below may need; with burst,
/// all is lent by the root.
class line {
public:
    line(unsigned levels, bool burst) {
        all_.push_back(std::make_unique<quota>(1_GiB));
        while (all_.size() < levels)
            all_.push_back(std::make_unique<quota>(*all_.back(), burst ? 0_B : 512_MiB, burst ? 512_MiB : 0_B));
    }
    line(const line&) = delete;
    line& operator=(const line&) = delete;
    ~line() {
        while (!all_.empty()) all_.pop_back();  // children before parents
    }
    quota& leaf() { return *all_.back(); }

private:
    std::vector<std::unique_ptr<quota>> all_;
};

double pair(unsigned levels, bool burst) {
    line tree(levels, burst);
    quota& q = tree.leaf();
    return ns_per_call(calls, [&] {
        keep(q.try_charge(4_KiB));
        keep(q.release(4_KiB));
    });
}

void costs(report& r) {
    r.figure("memory.quota_pair_ns", repeated(repeats, [] { return pair(1, false); }), "ns");
    r.figure("memory.quota_pair_vs_cas",
             ratios(
                 repeats, [] { return pair(1, false); }, floor_pair),
             "x");
    // What a further level adds, in floors: the worst of two and three levels, with guarantees and with burst only.
    const auto added = [](unsigned levels, bool burst) {
        return ratios(
            repeats, [&] { return (pair(levels, burst) - pair(1, false)) / (levels - 1); }, floor_pair);
    };
    std::vector<double> worst;
    for (const bool burst : {false, true})
        for (const unsigned levels : {2U, 3U}) {
            auto here = added(levels, burst);
            r.figure("memory.quota_level_" + std::to_string(levels) + (burst ? "_burst" : "_guaranteed") + "_vs_cas",
                     here, "x");
            const auto median = [](std::vector<double> v) { return std::ranges::sort(v), v[v.size() / 2]; };
            if (worst.empty() || median(here) > median(worst)) worst = std::move(here);
        }
    r.figure("memory.quota_pair_vs_cas_per_level", worst, "x");
    // Two children that take turns with the same lent bytes: each loan has to be fetched from the other one.
    r.figure("memory.quota_pair_contested_burst_ns",
             repeated(repeats,
                      [] {
                          quota device{1_GiB}, a{device, 0_B, 1_GiB}, b{device, 0_B, 1_GiB};
                          return ns_per_call(calls / 10,
                                             [&] {
                                                 for (quota* q : {&a, &b}) {
                                                     keep(q->try_charge(1_GiB));
                                                     keep(q->release(1_GiB));
                                                 }
                                             }) /
                                 2;
                      }),
             "ns");

    const auto refusal = [](auto refuse) {
        return [=] {
            quota q{1_GiB};
            null_upstream upstream;
            gpushare::quota_resource mine(q, upstream);
            return ns_per_call(calls / 10, [&] { refuse(mine); });
        };
    };
    r.figure("memory.refusal_ns",
             repeated(repeats, refusal([](auto& mine) { keep(mine.try_allocate(2UL << 30, alignment)); })), "ns");
    r.figure("memory.refusal_with_figures_ns", repeated(repeats, refusal([](auto& mine) {
                                                            gpushare::failure why;
                                                            keep(mine.try_allocate(2UL << 30, alignment, &why));
                                                            keep(why);
                                                        })),
             "ns");
    r.figure("memory.refusal_thrown_ns", repeated(repeats, refusal([](auto& mine) {
                                                      try {
                                                          keep(mine.allocate(2UL << 30, alignment));
                                                      } catch (const std::bad_alloc& e) {
                                                          keep(&e);
                                                      }
                                                  })),
             "ns");
}

/// What threads hold, counted from outside: raised behind a grant and lowered before a release, so whatever is over the
/// limit here was over it in truth.
class shadow {
public:
    explicit shadow(bytes limit) : limit_(limit.count()) {}
    void add(std::uint64_t n) noexcept {
        const auto held = held_.fetch_add(n) + n;
        auto most = most_.load();
        while (held > most && !most_.compare_exchange_weak(most, held)) {
        }
    }
    void remove(std::uint64_t n) noexcept { held_.fetch_sub(n); }
    [[nodiscard]] std::uint64_t over() const noexcept { return most_.load() > limit_ ? most_.load() - limit_ : 0; }

private:
    const std::uint64_t limit_;
    std::atomic<std::uint64_t> held_{0}, most_{0};
};

struct outcome {
    std::uint64_t operations = 0, false_refusals = 0, bytes_over = 0, drift = 0;
};

/// Two workers that keep within half of what their quota always has for them, so that each of their requests fits, and
/// two attackers that ask for what can never be had. A worker with `scarce` bytes asks for more than that and may be
/// refused: only the limit counts then.
outcome attack(std::vector<quota*> path, std::vector<quota*> ways, bytes limit, std::uint64_t operations, bool scarce) {
    shadow seen(limit);
    std::atomic<std::uint64_t> refused{0}, lost{0}, done{0};
    const auto of_each = operations / 4;
    const auto worker = [&](unsigned rank) {
        std::mt19937_64 random(rank);
        quota& q = *ways[rank % ways.size()];
        std::array<std::uint64_t, 8> held{};
        const auto most = limit.count() / (scarce ? 4 : 4 * held.size());
        for (std::uint64_t i = 0; i < of_each; ++i) {
            auto& b = held[random() % held.size()];
            if (b != 0) {
                seen.remove(b);
                lost += q.release(bytes{b}) ? 0 : 1;
                b = 0;
            } else if (const auto n = 1 + random() % most; q.try_charge(bytes{n}) == errc::none) {
                b = n;
                seen.add(n);
            } else {
                refused += scarce ? 0 : 1;
            }
        }
        for (const auto b : held)
            if (b != 0) {
                seen.remove(b);
                lost += q.release(bytes{b}) ? 0 : 1;
            }
        done.fetch_add(of_each);
    };
    const auto attacker = [&](unsigned rank) {
        quota& q = *ways[rank % ways.size()];
        for (std::uint64_t i = 0; i < of_each; ++i)
            if (q.try_charge(limit) == errc::none) {  // what is set aside below makes it impossible
                seen.add(limit.count());
                seen.remove(limit.count());
                lost += q.release(limit) ? 0 : 1;
            }
        done.fetch_add(of_each);
    };
    if (ways[0]->try_charge(1_B) != errc::none) ++lost;
    seen.add(1);
    {
        std::vector<std::jthread> threads;
        for (unsigned rank = 0; rank < 2; ++rank)
            threads.emplace_back(worker, rank), threads.emplace_back(attacker, rank);
    }
    seen.remove(1);
    if (!ways[0]->release(1_B)) ++lost;
    outcome o{
        .operations = done.load(), .false_refusals = refused.load(), .bytes_over = seen.over(), .drift = lost.load()};
    for (const quota* q : path) {
        const auto u = q->usage();
        o.drift += (u.current + u.borrowed).count();
        o.bytes_over += u.peak > limit ? (u.peak - limit).count() : 0;
    }
    return o;
}

void exactness(report& r) {
    constexpr std::uint64_t operations = 2'500'000;  // of each of four attacks
    outcome all;
    const auto add = [&](const outcome& o) {
        all.operations += o.operations;
        all.false_refusals += o.false_refusals;
        all.bytes_over += o.bytes_over;
        all.drift += o.drift;
    };
    for (const bool scarce : {false, true}) {
        quota one{1_GiB};
        add(attack({&one}, {&one}, 1_GiB, operations, scarce));
        quota root{1_GiB}, left{root, 0_B, 1_GiB}, right{root, 0_B, 1_GiB};
        add(attack({&root, &left, &right}, {&left, &right}, 1_GiB, operations, scarce));
    }
    std::printf("# %llu operations by 4 threads: one and two levels, what fits beside what can't, and what is scarce\n",
                static_cast<unsigned long long>(all.operations));
    r.figure("memory.false_refusals", {static_cast<double>(all.false_refusals)}, "count");
    r.figure("memory.bytes_over_quota", {static_cast<double>(all.bytes_over)}, "B");
    r.figure("memory.drift_bytes", {static_cast<double>(all.drift)}, "B");
}

}  // namespace

void quotas(report& r) {
    costs(r);
    exactness(r);
}

}  // namespace bench
