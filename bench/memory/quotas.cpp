// SPDX-License-Identifier: Apache-2.0
// Measures the cost of quotas, and attacks quotas to show that they are exact.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

#include "parts.hpp"
#include "quota_floor.hpp"
#include "sources.hpp"
#include "support/composition/host_backend.hpp"
#include "support/composition/matrix.hpp"
#include "support/growth.hpp"
#include "survivors.hpp"

namespace bench {

namespace {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::quota;

constexpr std::size_t repeats = 21;
constexpr std::size_t calls = 200'000;

double floor_ns() { return quota_floor(calls); }

/// A chain of quotas, of which the leaf is charged. With guarantees, each level holds the bytes
/// that the level below may need. With burst, the root lends everything.
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

/// Nanoseconds per pair when two threads run pairs at once; the mean of both threads.
template <std::invocable<unsigned> F>
double by_two_threads(F pair_of) {
    std::atomic<unsigned> ready{0};
    std::array<double, 2> took{};
    const auto work = [&](unsigned rank) {
        for (ready.fetch_add(1); ready.load() < 2;) std::this_thread::yield();
        took[rank] = ns_per_call(calls / 4, [&] { pair_of(rank); });
    };
    {
        std::jthread other(work, 1U);
        work(0);
    }
    return (took[0] + took[1]) / 2;
}

double contested_floor() {
    std::atomic<std::uint64_t> used{0};
    return by_two_threads([&](unsigned) { floor_pair(used); });
}

/// A root of 1 GiB and, for each of two threads, a chain of `levels` - 1 quotas without a
/// guarantee. Each thread asks for more than half of the root, so that the root refuses the request
/// or fetches what the other thread has returned. With one level, both threads use the root
/// directly.
double contested_pair(unsigned levels) {
    quota root{1_GiB};
    std::array<std::vector<std::unique_ptr<quota>>, 2> lines;
    std::array<quota*, 2> leaf{&root, &root};
    for (unsigned rank = 0; rank < 2; ++rank)
        for (unsigned level = 1; level < levels; ++level)
            leaf[rank] = lines[rank].emplace_back(std::make_unique<quota>(*leaf[rank], 0_B, 1_GiB)).get();
    const double ns = by_two_threads([&](unsigned rank) {
        if (leaf[rank]->try_charge(600_MiB) == errc::none) keep(leaf[rank]->release(600_MiB));
    });
    for (auto& line : lines)
        while (!line.empty()) line.pop_back();  // children before parents
    return ns;
}

void costs(report& r) {
    r.figure("memory.quota_pair_ns", repeated(repeats, [] { return pair(1, false); }), "ns");
    r.figure("memory.quota_pair_vs_cas",
             ratios(
                 repeats, [] { return pair(1, false); }, floor_ns),
             "x");
    // The cost of each further level in units of the floor: the worst of two and three levels, with
    // guarantees and with burst. The leaf keeps the bytes that it has borrowed, so the leaf doesn't
    // ask its parent again.
    const auto added = [](unsigned levels, bool burst) {
        return ratios(
            repeats, [&] { return (pair(levels, burst) - pair(1, false)) / (levels - 1); }, floor_ns);
    };
    std::vector<double> worst;
    for (const bool burst : {false, true})
        for (const unsigned levels : {2U, 3U}) {
            auto here = added(levels, burst);
            r.figure("memory.quota_level_" + std::to_string(levels) + (burst ? "_burst" : "_guaranteed") + "_vs_cas",
                     here, "x");
            if (worst.empty() || value_of(statistic::median, here) > value_of(statistic::median, worst))
                worst = std::move(here);
        }
    r.figure("memory.quota_pair_vs_cas_per_level", worst, "x");
    // Two threads with a leaf each compete for the same bytes of the root, so each loan has to be
    // fetched from the other leaf.
    worst.clear();
    for (const unsigned levels : {2U, 3U}) {
        auto here = ratios(
            repeats, [&] { return (contested_pair(levels) - contested_pair(1)) / (levels - 1); }, contested_floor);
        if (worst.empty() || value_of(statistic::median, here) > value_of(statistic::median, worst))
            worst = std::move(here);
    }
    r.figure("memory.quota_pair_contested_ns", repeated(repeats, [] { return contested_pair(2); }), "ns");
    r.figure("memory.quota_pair_vs_cas_per_level_contested", worst, "x");

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

/// Nanoseconds per release that satisfies no waiter, while `waiters` claims wait on one quota, or
/// spread over `quotas` quotas.
double release_beside(int waiters, int quotas) {
    support::waiting_line line(waiters, quotas);
    return ns_per_call(2'000, [&] { keep(line.limit.release(4_KiB)); });
}

/// The planted fault: a release that looks at every waiter.
double release_that_looks_at_all(int waiters) {
    support::waiting_line line(waiters);
    return ns_per_call(2'000, [&] {
        keep(line.limit.release(4_KiB));
        for (const auto& claim : line.queue) keep(&claim);
    });
}

/// Nanoseconds per release that satisfies the first of `quotas` waiting quotas. The quota then
/// waits again, at the end of the line.
double release_served(std::size_t quotas) {
    quota device{1_GiB};
    quota limit{device, 0_B, 1_GiB};
    std::vector<std::optional<quota>> others(quotas);
    for (auto& q : others) q.emplace(device, 0_B, 1_GiB);
    if (limit.try_charge(1_GiB) != errc::none) throw std::runtime_error("no charge");
    std::deque<std::pair<quota*, gpushare::quota_claim>> waiting;
    const auto join = [&](quota& q) {
        waiting.emplace_back(std::piecewise_construct, std::forward_as_tuple(&q), std::forward_as_tuple(q, 4_KiB));
    };
    for (auto& q : others) join(*q);
    quota* holder = &limit;
    const double ns = ns_per_call(20'000, [&] {
        keep(holder->release(4_KiB));
        auto& [next, claim] = waiting.front();
        holder = next;
        claim.take();
        waiting.pop_front();
        join(*holder);
    });
    while (!waiting.empty()) waiting.pop_back();
    return ns;
}

void growth(report& r) {
    using support::asked_per_free;
    r.figure("memory.collect_growth", {asked_per_free(10'000) / asked_per_free(10)}, "x",
             {at_most(1.5), asked_per_free<support::asks_all>(1'000) / asked_per_free<support::asks_all>(10),
              "a list that asks all of its points for each block"});
    const auto here = [](auto f, auto many, auto few) {
        return ratios(
            repeats, [=] { return f(many); }, [=] { return f(few); });
    };
    const auto one = here([](int n) { return release_beside(n, 0); }, 4'000, 10);
    const auto each = here([](int n) { return release_beside(n, n); }, 4'000, 10);
    r.figure("memory.line_growth_of_one_quota", one, "x");
    r.figure("memory.line_growth_of_quotas", each, "x");
    r.figure("memory.line_growth", value_of(statistic::median, one) > value_of(statistic::median, each) ? one : each,
             "x",
             {at_most(2), release_that_looks_at_all(4'000) / release_that_looks_at_all(10),
              "a release that looks at all who wait"});
    r.figure("memory.line_served_growth", here(release_served, std::size_t{4'000}, std::size_t{10}), "x");
    r.figure("memory.line_served_ns", repeated(repeats, [] { return release_served(4'000); }), "ns");
}

/// Counts held bytes from outside the quota. Threads add after a grant and subtract before a
/// release, so the count is never higher than the bytes really held.
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

/// Two workers each hold less than half of the limit, so each of their requests must succeed: first
/// some bytes, then exactly the rest of their half. Meanwhile, two attackers ask for the whole
/// limit, which is never free. With `scarce`, workers want more than their half and may be refused;
/// then only the limit is checked.
template <class Quota>
outcome attack(std::vector<Quota*> path, std::vector<Quota*> ways, bytes limit, std::uint64_t operations, bool scarce) {
    shadow seen(limit);
    std::atomic<std::uint64_t> refused{0}, lost{0}, done{0};
    std::atomic<unsigned> working{2};
    const auto worker = [&](unsigned rank) {
        std::mt19937_64 random(rank);
        Quota& q = *ways[rank % ways.size()];
        const auto mine = scarce ? limit.count() * 3 / 4 : (limit.count() - 1) / 2;
        const auto charge = [&](std::uint64_t n) {
            if (q.try_charge(bytes{n}) != errc::none) {
                refused += scarce ? 0 : 1;
                return false;
            }
            seen.add(n);
            return true;
        };
        const auto release = [&](std::uint64_t n) {
            seen.remove(n);
            lost += q.release(bytes{n}) ? 0 : 1;
        };
        // Four operations in each iteration, for each of two workers.
        for (std::uint64_t i = 0; i < operations / 8; ++i) {
            const auto some = 1 + random() % (mine - 1);
            const bool first = charge(some), rest = charge(mine - some);
            if (first) release(some);
            if (rest) release(mine - some);
        }
        done.fetch_add(operations / 2);
        working.fetch_sub(1);
    };
    const auto attacker = [&](unsigned rank) {
        Quota& q = *ways[rank % ways.size()];
        std::uint64_t tries = 0;
        for (; working.load(std::memory_order_relaxed) != 0; ++tries)
            // Never succeeds, because a byte is held throughout.
            if (q.try_charge(limit) == errc::none) {
                seen.add(limit.count());
                seen.remove(limit.count());
                lost += q.release(limit) ? 0 : 1;
            }
        done.fetch_add(tries);
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
    for (const Quota* q : path) {
        const auto u = q->usage();
        o.drift += (u.current + u.borrowed).count();
        o.bytes_over += u.peak > limit ? (u.peak - limit).count() : 0;
    }
    return o;
}

/// The planted faults. The quota adds first and checks afterwards, so that a refused request blocks
/// requests that fit. `most` may be too high. With `forgets`, every hundredth release is lost.
class faulty_quota {
public:
    faulty_quota(bytes most, bool forgets) : most_(most.count()), forgets_(forgets) {}
    errc try_charge(bytes n) noexcept {
        if (used_.fetch_add(n.count()) + n.count() <= most_) return errc::none;
        used_.fetch_sub(n.count());
        return errc::over_quota;
    }
    bool release(bytes n) noexcept {
        if (!forgets_ || releases_.fetch_add(1) % 100 != 99) used_.fetch_sub(n.count());
        return true;
    }
    [[nodiscard]] gpushare::quota_usage usage() const noexcept {
        gpushare::quota_usage u{};
        u.current = bytes{used_.load()};
        return u;
    }

private:
    const std::uint64_t most_;
    const bool forgets_;
    std::atomic<std::uint64_t> used_{0}, releases_{0};
};

/// Runs the same attacks on faulty quotas. Each fault must be found.
outcome attacks_on_faulty_quotas() {
    const auto attacked = [](bytes most, bool forgets, bool scarce) {
        faulty_quota q{most, forgets};
        return attack<faulty_quota>({&q}, {&q}, 1_GiB, 100'000, scarce);
    };
    return {.false_refusals = attacked(1_GiB, false, false).false_refusals,
            .bytes_over = attacked(2_GiB, false, true).bytes_over,
            .drift = attacked(1_GiB, true, false).drift};
}

void exactness(report& r) {
    constexpr std::uint64_t operations = 2'500'000;  // for each of four attacks
    outcome all;
    const auto add = [&](const outcome& o) {
        all.operations += o.operations;
        all.false_refusals += o.false_refusals;
        all.bytes_over += o.bytes_over;
        all.drift += o.drift;
    };
    for (const bool scarce : {false, true}) {
        quota one{1_GiB};
        add(attack<quota>({&one}, {&one}, 1_GiB, operations, scarce));
        quota root{1_GiB}, left{root, 0_B, 1_GiB}, right{root, 0_B, 1_GiB};
        add(attack<quota>({&root, &left, &right}, {&left, &right}, 1_GiB, operations, scarce));
    }
    // The composition matrix attacks tenants, and pools, caches, scrubbing, arenas and other layers
    // above and below quotas.
    const auto stacked =
        support::composition::run_matrix<support::composition::host_backend>(400, {}, "exactness under attack");
    all.false_refusals += stacked.false_refusals;
    for (const auto& what : stacked.wrong) std::printf("# %s\n", what.c_str());
    // Attacks tenants with small blocks that stay beside large blocks.
    for (const auto stack : {gpushare::memory_stack::direct, gpushare::memory_stack::pool,
                             gpushare::memory_stack::arena, gpushare::memory_stack::stream_ordered}) {
        const auto tenants = survivors(stack);
        all.operations += tenants.operations;
        all.false_refusals += tenants.false_refusals;
    }
    std::printf("# %zu stacks under attack, of which %zu broke a promise\n", stacked.cells, stacked.failed);
    std::printf("# %llu operations by 4 threads: one and two levels, what fits beside what can't, and what is scarce\n",
                static_cast<unsigned long long>(all.operations));
    const auto faulty = attacks_on_faulty_quotas();
    const auto figure = [&](const char* name, std::uint64_t outcome::*of, const char* unit, const char* fault) {
        r.figure(name, {static_cast<double>(all.*of)}, unit, {at_most(0), static_cast<double>(faulty.*of), fault});
    };
    figure("memory.false_refusals", &outcome::false_refusals, "count", "a quota that adds first and checks after");
    figure("memory.bytes_over_quota", &outcome::bytes_over, "B", "a quota that has twice its bytes");
    figure("memory.drift_bytes", &outcome::drift, "B", "a quota that forgets every hundredth release");
}

}  // namespace

void quotas(report& r) {
    costs(r);
    growth(r);
    exactness(r);
}

}  // namespace bench
