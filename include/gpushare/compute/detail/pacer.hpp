// SPDX-License-Identifier: Apache-2.0
// A cap on device time, kept as one point in time: when a client, or a group of clients, may next
// have device time.
//
//   detail::pacer p{.per_million = 300'000};            // 30 %
//   if (p.entitled(now)) { p.spend(1ms, now); ... }     // not again for 3.3 ms
//
// A client that is within its cap may still wait, because others' work is on the device and isn't
// interrupted. The time that its cap would have allowed meanwhile is kept for it, so that the
// client reaches its cap alongside calls of any length. Only time in which others had the device
// counts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A value. Over any span of time, the client spends at most the rate times (the span + the time
/// kept), and the last submission begun. The time kept is how long the client waited for others'
/// work before the span without having made up for it: at least `catch_up`, at most `most_kept`.
/// The generic cell rate algorithm (ITU-T I.371), which needs one point in time where a token
/// bucket needs two numbers.
struct pacer {
    /// Up to this much of the time in which the client waited is kept for it, whatever the reason
    /// for the wait.
    static constexpr ns catch_up{5'000'000};
    /// At most this much of a wait for others' work is kept: the time of several long calls.
    static constexpr ns most_kept{100'000'000};

    // The rate, in millionths of the device's time; 0 counts as 1.
    std::int64_t per_million = 1'000'000;
    instant from{};      // from then on the client may have device time
    instant spent_at{};  // when it was last served, or began to want device time
    ns all_had{};        // the device time of all clients until `spent_at`

    [[nodiscard]] bool entitled(instant now) const noexcept { return from <= now; }
    /// The client wants device time again. Time before this isn't kept for it. `all`: the device
    /// time of all clients so far, including its own.
    void begin(instant now, ns all = {}) noexcept {
        from = std::max(from, now);
        spent_at = now;
        all_had = all;
    }
    /// The client is served work that is predicted to cost this much.
    void spend(ns cost, instant now) noexcept {
        from = std::max(from, now - catch_up);
        adjust(cost);
    }
    /// The same, and keeps the time for which the client waited for others. `all`: as in begin().
    void spend(ns cost, instant now, ns all) noexcept {
        // This includes the client's own work, which has moved `from` by at least as much.
        const ns waited = std::min(all - all_had, now - spent_at);
        const ns kept = std::max(spent_at - from, ns{0});  // time kept from earlier waits
        from = std::max(from, now - std::clamp(saturating_add(kept, waited), catch_up, most_kept));
        spent_at = now;
        all_had = all;
        adjust(cost);
    }
    /// Corrects a prediction: `delta` is the measured time less the predicted one.
    void adjust(ns delta) noexcept {
        constexpr instant long_ago{ns::min() / 2};
        const ns whole = lasts(delta);
        from = whole < ns{0} ? std::max(from + whole, long_ago) : saturating_add(from, whole);
    }
    /// Changes the rate. The client pays back time beyond the old rate at the new rate.
    void change(std::int64_t rate, instant now) noexcept {
        const ns before = beyond(now);
        per_million = rate;
        from = std::min(from, now) + lasts(before);
    }
    /// How long the client takes to earn this device time. Cut to an hour, which exceeds any kernel
    /// and doesn't overflow at a rate of a millionth.
    [[nodiscard]] ns lasts(ns device_time) const noexcept {
        constexpr std::int64_t most = 3'600'000'000'000;
        const auto cost = std::clamp<std::int64_t>(device_time.count(), -most, most);
        const auto rate = std::max<std::int64_t>(per_million, 1);
        return ns{cost / rate * 1'000'000 + cost % rate * 1'000'000 / rate};
    }
    /// The device time that the client has had beyond its cap.
    [[nodiscard]] ns beyond(instant now) const noexcept {
        if (from <= now) return ns{0};
        const auto ahead = static_cast<double>((from - now).count()) * static_cast<double>(per_million) / 1e6;
        return ns{static_cast<ns::rep>(std::min(ahead, 3.6e12))};
    }
};

/// A quota of device time for each period. Device time comes back evenly, and at most one period's
/// quota is saved up. A value, with the same algorithm as pacer's, by the quota itself instead of a
/// rate, because a millisecond an hour is no whole number of millionths.
struct refill {
    ns time{};  // the quota; 0: no time comes back
    ns each{};  // the period; 0: there is no quota
    // From then on the client may have device time; a new client has a whole quota.
    instant from = instant::min();

    [[nodiscard]] bool is_set() const noexcept { return each > ns{0}; }
    [[nodiscard]] bool entitled(instant now) const noexcept { return from <= now; }
    void spend(ns charge, instant now) noexcept {
        from = std::max(from, now - each);
        adjust(charge);
    }
    /// Corrects a prediction: `delta` is the measured time less the predicted one.
    void adjust(ns delta) noexcept { from = saturating_add(from, lasts(delta)); }
    /// Changes the quota. Time spent beyond the old quota is paid back at the rate of the new one.
    void change(ns new_time, ns new_each, instant now) noexcept {
        const ns before = beyond(now);
        time = new_time;
        each = new_each;
        from = is_set() ? saturating_add(std::min(from, now), lasts(before)) : instant::min();
    }

private:
    [[nodiscard]] ns lasts(ns charge) const noexcept {
        if (time <= ns{0}) return charge > ns{0} ? ns::max() : ns{0};
        return scaled(charge, each, time);
    }
    [[nodiscard]] ns beyond(instant now) const noexcept {
        return from <= now || !is_set() ? ns{0} : scaled(from - now, time, each);
    }
    // `what` x `by` / `over`, rounded up, and bounded by about 30 years.
    [[nodiscard]] static ns scaled(ns what, ns by, ns over) noexcept {
        const double whole =
            static_cast<double>(what.count()) * static_cast<double>(by.count()) / static_cast<double>(over.count());
        return ns{static_cast<ns::rep>(std::clamp(std::ceil(whole), -1e18, 1e18))};
    }
};

/// When a client's work is due, and when it counts as due where deadlines order clients: no earlier
/// than the client's pace allows, as under a constant bandwidth server (Abeni, Buttazzo, RTSS
/// 1998). Otherwise the late work of a client that floods its queue would always be the most
/// urgent.
struct due_time {
    pacer pace{};
    instant at{};

    [[nodiscard]] instant counts() const noexcept { return std::max(at, pace.from); }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
