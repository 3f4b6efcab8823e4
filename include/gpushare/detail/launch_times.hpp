// SPDX-License-Identifier: Apache-2.0
// Predicts the time of launches by their kind: a function with its grid and block, a graph, or a
// copy of some size. It learns from batches: a pair of events measures how long several launches
// took together.
//
//   launch_times times;
//   launch_history behind;                                      // of a stream
//   const auto e = times.find(key, behind, 20us);               // 20 us until something is known
//   behind.add(key);
//   times.learn({&e, 1}, 1, measured, true);
//
// The same function with the same grid and block may take ten times as long with other arguments,
// which the gate can't see. The stream's earlier launches say most about the arguments, because
// programs repeat themselves. So each launch has an entry for each history of launches before it,
// and one entry for all histories, which is the guess for a new history.
//
// The table has a fixed size and never allocates later. A launch that hasn't come for a long time
// loses its place. Not thread-safe: the user must lock.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The last launches of a stream. A value.
class launch_history {
public:
    void add(std::uint64_t key) noexcept {
        std::shift_left(last_.begin(), last_.end(), 1);
        last_.back() = key;
    }
    /// A key for `key` behind these launches: another history gives another key.
    [[nodiscard]] std::uint64_t with(std::uint64_t key) const noexcept {
        // the sum, so that an empty history counts as well
        for (const std::uint64_t before : last_) key = mix(key) ^ (before + golden_ratio);
        return mix(key);
    }
    // The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
    [[nodiscard]] static constexpr std::uint64_t mix(std::uint64_t x) noexcept {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
        return x ^ (x >> 31);
    }

private:
    std::array<std::uint64_t, 3> last_{};
};

class launch_times {
public:
    using entry = std::uint32_t;  // of the table; another launch's once its own was forgotten

    /// `size` is a power of 2. Throws std::bad_alloc.
    explicit launch_times(std::size_t size = 4096) : table_(size) {}

    /// The entry of `key`, whatever was launched before; a new entry predicts `guess`.
    [[nodiscard]] entry find(std::uint64_t key, ns guess) noexcept {
        const entry e = place(key);
        slot& s = table_[e];
        if (!is(s, key)) s = {.key = key, .launch = key, .of_all = e, .takes = std::max(guess, ns{1})};
        s.used = ++clock_;
        return e;
    }
    /// The entry of `key` behind those launches; a new entry predicts the time of `key` behind
    /// other launches.
    [[nodiscard]] entry find(std::uint64_t key, const launch_history& behind, ns guess) noexcept {
        const std::uint64_t here = behind.with(key);
        entry e = place(here);
        if (is(table_[e], here)) {
            table_[e].used = ++clock_;
            if (slot& all = table_[table_[e].of_all]; is(all, key)) all.used = clock_;
            return e;
        }
        const entry of_all = find(key, guess);
        e = place(here);
        if (e == of_all) return e;
        const slot& all = table_[of_all];
        table_[e] = {
            .key = here, .used = clock_, .launch = key, .of_all = of_all, .takes = all.takes, .known = all.known};
        return e;
    }
    [[nodiscard]] ns predicted(entry e) const noexcept { return table_[e].takes; }
    /// Whether the launch was measured, behind any history, alone or among others.
    [[nodiscard]] bool known(entry e) const noexcept { return table_[e].known; }
    /// Whether the entry is worth a batch of its own: true once for each history.
    [[nodiscard]] bool first_time(entry e) noexcept { return !std::exchange(table_[e].tried, true); }

    /// Learns the time of these entries of a batch with `launches` launches, which took `measured`
    /// together. `exact`: they took just that long; otherwise at most that long, since the device
    /// may have waited for the host meanwhile.
    void learn(std::span<const entry> batch, std::size_t launches, ns measured, bool exact) noexcept {
        if (batch.empty() || measured <= ns{0}) return;
        double expected = 0;  // as predicted now, which may be more or less than at the launch
        for (const entry e : batch) expected += static_cast<double>(table_[e].takes.count());
        expected *= static_cast<double>(std::max(launches, batch.size())) / static_cast<double>(batch.size());
        const double factor = static_cast<double>(measured.count()) / expected;
        const bool alone = std::ranges::all_of(batch, [&](entry e) { return e == batch.front(); });
        ++clock_;
        for (const entry e : batch) {
            slot& s = table_[e];
            // once a batch, and no bound for a time
            if (s.corrected == clock_ || (!s.known && !exact)) continue;
            s.corrected = clock_;
            if (!exact && keeps(s, factor)) continue;
            correct(s, alone ? factor : std::clamp(factor, 0.25, 4.0), exact, alone && exact);
            tell_all(s);
        }
    }

private:
    static constexpr std::size_t probes = 8;

    struct slot {
        std::uint64_t key = 0, used = 0, corrected = 0;  // `used` 0: nothing is there
        std::uint64_t launch = 0;                        // its key without a history
        entry of_all = 0;                                // the entry of `launch`, unless forgotten
        ns takes{};
        double slack = 0;                      // see keeps()
        bool known = false, measured = false;  // known: behind any history; measured: alone
        bool tried = false;
    };
    [[nodiscard]] static bool is(const slot& s, std::uint64_t key) noexcept { return s.key == key && s.used != 0; }

    // The entry of `key`, or else the entry that makes way for it.
    [[nodiscard]] entry place(std::uint64_t key) const noexcept {
        const std::size_t mask = table_.size() - 1, first = launch_history::mix(key);
        std::size_t oldest = first & mask;
        for (std::size_t n = 0; n < probes; ++n) {
            const std::size_t at = (first + n) & mask;
            if (is(table_[at], key)) return static_cast<entry>(at);
            if (table_[at].used < table_[oldest].used) oldest = at;
        }
        return static_cast<entry>(oldest);
    }

    // Whether an upper bound leaves the prediction as it is. A launch takes a little more or less
    // each time, so some bounds are broken although the prediction is right. A prediction that
    // followed each of them would end at the shortest time. So bounds count together: the amounts
    // by which they were broken, less the amounts by which they were just kept (a cumulative sum,
    // Page, Biometrika 1954). A bound that is far above the prediction says nothing.
    static bool keeps(slot& s, double factor) noexcept {
        constexpr double near = 0.25;
        if (factor <= 1 + near) s.slack = std::min(s.slack + factor - 1, near);
        const bool kept = s.slack >= 0 && factor >= 1 - near;
        s.slack = std::max(s.slack, 0.0);
        return kept || factor >= 1;
    }
    // The first measurement counts in full, a later one in part, since the same launch takes more
    // or less time with other data.
    static void correct(slot& s, double factor, bool exact, bool alone) noexcept {
        const bool first = !s.known || (alone && !s.measured);
        const double by = !first ? 1 + (std::min(factor, 4.0) - 1) * (exact ? 0.25 : 0.125) : factor;
        s.takes = std::max(ns{1}, ns{std::llround(static_cast<double>(s.takes.count()) * by)});
        s.known = true;
        s.measured |= alone;
    }
    // Corrects the prediction that doesn't depend on the history.
    void tell_all(const slot& s) noexcept {
        slot& all = table_[s.of_all];
        if (&all == &s || !is(all, s.launch)) return;
        all.takes = all.known ? all.takes + (s.takes - all.takes) / 8 : s.takes;
        all.known = true;
    }

    std::vector<slot> table_;
    std::uint64_t clock_ = 1;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
