// SPDX-License-Identifier: Apache-2.0
// Predicts the time of launches by their kind: a function with its grid and block, a graph, a copy
// of a size. It learns from batches: a pair of events tells what several launches took together.
//
//   launch_times times;
//   const auto e = times.find(key, 20us);                       // 20 us until something is known
//   times.learn({&e, 1}, 1, measured, true);
//
// A table of a fixed size, made once: nothing is allocated later, and a launch that nobody has seen
// for long loses its place. Not thread-safe: its user locks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

class launch_times {
public:
    using entry = std::uint32_t;  // of the table; another launch's once its own was forgotten

    /// `size` is a power of 2. Throws std::bad_alloc.
    explicit launch_times(std::size_t size = 4096) : table_(size) {}

    /// The entry of `key`; a new entry predicts `guess`.
    [[nodiscard]] entry find(std::uint64_t key, ns guess) noexcept {
        const std::size_t mask = table_.size() - 1;
        std::size_t oldest = mix(key) & mask;
        for (std::size_t n = 0; n < probes; ++n) {
            const std::size_t at = (mix(key) + n) & mask;
            slot& s = table_[at];
            if (s.key == key && s.used != 0) {
                s.used = ++clock_;
                return static_cast<entry>(at);
            }
            if (s.used < table_[oldest].used) oldest = at;
        }
        table_[oldest] = {.key = key, .used = ++clock_, .takes = std::max(guess, ns{1})};
        return static_cast<entry>(oldest);
    }
    [[nodiscard]] ns predicted(entry e) const noexcept { return table_[e].takes; }
    /// Whether it was measured, alone or among others.
    [[nodiscard]] bool known(entry e) const noexcept { return table_[e].measured; }

    /// These, of a batch of `launches`, took `measured` together with the others: `exact`, or at
    /// most that, since the device may have waited for the host meanwhile.
    void learn(std::span<const entry> batch, std::size_t launches, ns measured, bool exact) noexcept {
        if (batch.empty() || measured <= ns{0}) return;
        double expected = 0;  // by now, which others may have changed since they were launched
        for (const entry e : batch) expected += static_cast<double>(table_[e].takes.count());
        expected *= static_cast<double>(std::max(launches, batch.size())) / static_cast<double>(batch.size());
        const double factor = static_cast<double>(measured.count()) / expected;
        if (factor > 1 && !exact) return;
        const bool alone = std::ranges::all_of(batch, [&](entry e) { return e == batch.front(); });
        ++clock_;
        for (const entry e : batch) {
            slot& s = table_[e];
            if (s.corrected == clock_ || (!s.measured && !exact)) continue;  // once a batch, and no bound for a time
            s.corrected = clock_;
            correct(s, alone ? factor : std::clamp(factor, 0.25, 4.0), exact);
        }
    }

private:
    static constexpr std::size_t probes = 8;

    struct slot {
        std::uint64_t key = 0, used = 0, corrected = 0;  // `used` 0: nothing is there
        ns takes{};
        bool measured = false;
    };

    // The first time at once, later by a part of what is missing: the same launch takes more or less with its data.
    static void correct(slot& s, double factor, bool exact) noexcept {
        const double by = s.measured ? 1 + (std::min(factor, 4.0) - 1) * (exact ? 0.25 : 0.125) : factor;
        s.takes = std::max(ns{1}, ns{std::llround(static_cast<double>(s.takes.count()) * by)});
        s.measured = true;
    }
    // The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
    [[nodiscard]] static constexpr std::size_t mix(std::uint64_t x) noexcept {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
        return static_cast<std::size_t>(x ^ (x >> 31));
    }

    std::vector<slot> table_;
    std::uint64_t clock_ = 1;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
