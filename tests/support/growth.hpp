// SPDX-License-Identifier: Apache-2.0
// Measures how the cost of frees and releases grows with the number of pending frees and waiting
// requests. For tests, which count, and for the benchmark.
//
//   support::asked_per_free(10'000)          // reached() calls for a block that comes back
//   support::waiting_line line(4'000);       line.limit.release(4_KiB);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

namespace support {

/// A point that counts the calls of reached().
struct counted_point {
    const bool* done = nullptr;
    static inline std::uint64_t asked = 0;

    [[nodiscard]] bool reached() const noexcept {
        ++asked;
        return done == nullptr || *done;
    }
    bool wait(gpushare::instant) const { return reached(); }
    static bool wait_any(std::span<const counted_point> points, gpushare::instant) {
        return std::ranges::any_of(points, &counted_point::reached);
    }
    [[nodiscard]] static gpushare::errc status() noexcept { return gpushare::errc::none; }
    [[maybe_unused]] friend gpushare::ns elapsed(const counted_point&, const counted_point&) noexcept { return {}; }
};
static_assert(gpushare::timeline_point<counted_point>);

struct no_memory {
    static void* allocate(std::size_t, std::size_t) { return nullptr; }
    static void deallocate(void*, std::size_t, std::size_t) noexcept {}
};

/// The planted fault: a list that queries all of its points for each block that comes back.
class asks_all {
public:
    explicit asks_all(no_memory& /*unused*/) {}
    void add(counted_point p, void* /*block*/, std::size_t /*size*/, std::size_t /*alignment*/) {
        pending_.push_back(p);
    }
    std::size_t collect() {
        std::size_t freed = 0;
        for (std::vector<counted_point> kept; !pending_.empty(); ++freed, pending_ = std::exchange(kept, {})) {
            bool one = false;
            for (const auto& p : pending_) {
                if (p.reached() && !std::exchange(one, true)) continue;
                kept.push_back(p);
            }
            if (!one) return freed;
        }
        return freed;
    }

private:
    std::vector<counted_point> pending_;
};

/// The number of queries for each block that comes back, if half of the pending frees are reached.
template <class List = gpushare::deferred_frees<counted_point, no_memory>>
double asked_per_free(std::size_t pending) {
    no_memory memory;
    bool slow = false, fast = false;
    List frees{memory};
    for (std::size_t i = 0; i < pending; ++i) frees.add({i % 2 == 0 ? &slow : &fast}, &memory, 1, 1);
    fast = true;
    counted_point::asked = 0;
    const auto freed = frees.collect();
    const auto asked = counted_point::asked;
    slow = true;
    (void)frees.collect();
    return static_cast<double>(asked) / static_cast<double>(freed);
}

/// A fully charged quota, and requests that wait for half of its bytes: all of them at that quota,
/// or distributed over several quotas below it.
struct waiting_line {
    explicit waiting_line(int waiters, int quotas = 0) : others(static_cast<std::size_t>(quotas)) {
        const gpushare::bytes all = device.usage().limit();
        if (limit.try_charge(all) != gpushare::errc::none) return;
        for (auto& q : others) q.emplace(device, gpushare::bytes{}, all);
        for (int i = 0; i < waiters; ++i)
            queue.emplace_back(quotas == 0 ? limit : *others[static_cast<std::size_t>(i % quotas)], all / 2);
    }
    /// The number of requests refused so far: one for each request that was tried.
    [[nodiscard]] std::uint64_t refusals() const {
        auto sum = limit.usage().refusals;
        for (const auto& q : others) sum += q->usage().refusals;
        return sum;
    }

    gpushare::quota device{gpushare::bytes{1 << 30}};
    gpushare::quota limit{device, {}, gpushare::bytes{1 << 30}};
    std::vector<std::optional<gpushare::quota>> others;
    std::deque<gpushare::quota_claim> queue;
};

}  // namespace support
