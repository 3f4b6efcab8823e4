// SPDX-License-Identifier: Apache-2.0
#include "partition/reserve.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/partition/reservation.hpp>
#include <gpushare/units.hpp>

namespace bench {

namespace {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::quota;
using gpushare::quota_charge;

struct device {
    quota memory{80_GiB};
    quota tenant{memory, 1_GiB, 79_GiB};  // reservations through this quota borrow
    std::atomic<bool> lost{false};
};

/// A charge on a device that may be lost at any moment.
struct fragile_charge : quota_charge {
    fragile_charge(quota& from, bytes n, std::atomic<bool>& gone) noexcept : quota_charge(from, n), lost(&gone) {}
    gpushare::failure prepare() noexcept {
        const auto why = quota_charge::prepare();
        if (why.code != errc::none || !lost->load(std::memory_order_relaxed)) return why;
        abandon();
        return {errc::device_lost};
    }
    std::atomic<bool>* lost;
};
static_assert(gpushare::undoable_change<fragile_charge>);

/// The planted fault: every hundredth undo keeps the bytes.
struct forgetful_charge : fragile_charge {
    using fragile_charge::fragile_charge;
    bool undo() noexcept {
        thread_local std::uint32_t undone = 0;
        return ++undone % 100 == 0 || fragile_charge::undo();
    }
};
static_assert(gpushare::undoable_change<forgetful_charge>);

/// Nanoseconds to reserve equal parts of four devices and to release them.
double reserve_ns() {
    std::array<quota, 4> devices{quota{80_GiB}, quota{80_GiB}, quota{80_GiB}, quota{80_GiB}};
    return ns_per_call(200'000, [&] {
        std::array parts{quota_charge{devices[0], 12_GiB}, quota_charge{devices[1], 12_GiB},
                         quota_charge{devices[2], 12_GiB}, quota_charge{devices[3], 12_GiB}};
        if (gpushare::try_commit_together(parts).code != errc::none)
            throw std::runtime_error("an uncontended reservation was refused");
        for (auto& p : parts) p.undo();
    });
}

struct tally {
    std::atomic<std::uint64_t> made{0};
    // Reservations that weren't returned, or were returned incorrectly.
    std::atomic<std::uint64_t> failures{0};
};

/// Four threads attempt `attempts` reservations on 4 to 8 devices; most attempts succeed. Some
/// sizes can't fit, and some devices are lost for a while.
template <class Charge>
void contend(std::uint64_t attempts, tally& out) {
    constexpr unsigned threads = 4;
    constexpr std::size_t most = 8;
    const auto node = std::make_unique<std::array<device, most>>();
    {
        std::latch start(threads);
        std::vector<std::jthread> crew;
        for (unsigned rank = 0; rank < threads; ++rank)
            crew.emplace_back([&, rank] {
                std::mt19937_64 engine(rank + 1);
                const auto below = [&](std::uint64_t n) { return engine() % n; };
                std::array<gpushare::reservation<Charge>, 4> held;
                start.arrive_and_wait();
                for (std::uint64_t i = 0; i < attempts / threads; ++i) {
                    if (below(64) == 0) (*node)[below(most)].lost.store(below(32) == 0);
                    auto& slot = held[below(held.size())];
                    if (!slot.release()) out.failures.fetch_add(1, std::memory_order_relaxed);
                    std::vector<Charge> parts;
                    const auto first = below(most);
                    const auto size = bytes{1 + below(below(8) == 0 ? (160_GiB).count() : (6_GiB).count())};
                    for (auto count = 4 + below(most - 3); count > 0; --count) {
                        auto& d = (*node)[(first + count) % most];
                        parts.emplace_back(below(3) == 0 ? d.tenant : d.memory, size, d.lost);
                    }
                    if (auto r = gpushare::reservation<Charge>::try_make(std::move(parts))) {
                        slot = *std::move(r);
                        out.made.fetch_add(1, std::memory_order_relaxed);
                    }
                }
                for (auto& slot : held)
                    if (!slot.release()) out.failures.fetch_add(1, std::memory_order_relaxed);
            });
    }
    for (auto& d : *node) {
        if (d.tenant.usage().current != 0_B || d.memory.usage().current != 1_GiB)
            out.failures.fetch_add(1, std::memory_order_relaxed);
        if (d.memory.usage().peak > 80_GiB) out.failures.fetch_add(1, std::memory_order_relaxed);
    }
}

}  // namespace

void bench_reservations(report& r) {
    r.figure("partition.reserve_ns", repeated(9, reserve_ns), "ns");
    constexpr std::uint64_t attempts = 1'000'000;
    tally all, faulty;
    contend<fragile_charge>(attempts, all);
    contend<forgetful_charge>(attempts / 100, faulty);
    r.figure("partition.reservations_made_pct", {100.0 * static_cast<double>(all.made) / attempts}, "%");
    r.figure("partition.rollback_failures", {static_cast<double>(all.failures)}, "count",
             {at_most(0), static_cast<double>(faulty.failures), "a charge that is not always given back"});
}

}  // namespace bench
