// SPDX-License-Identifier: Apache-2.0
// Scale to zero and back: how deep a model sleeps while nobody asks for it, and how long it takes
// to wake. A plain state machine: time comes in as an argument, and it says what to do;
// sleeping_tenant.hpp does it.
//
//   gpushare::sleep_levels chat{{.drop_caches_after = 10s, .spill_after = 1min, .release_after = 10min, .wake_within = 2s}};
//   chat.request_began(now);  ...  chat.request_ended(now);
//   if (auto to = chat.next(now)) { chat.began(*to, now); ...; chat.ended(true, later); }         // again at chat.next_at()
//   chat.predicted_wake();                                                    // if a request came now
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How deep a model sleeps. Each has what the ones before it have.
enum class sleep_level : std::uint8_t {
    awake,             ///< all is there
    caches_dropped,    ///< pools, KV pages that nobody needs and other caches are given back
    weights_spilled,   ///< weights are on the host
    weights_released,  ///< weights are nowhere: they are loaded anew
};
/// How many there are.
inline constexpr std::size_t sleep_levels_count = 4;

/// In English.
[[nodiscard]] constexpr std::string_view to_string(sleep_level l) noexcept {
    switch (l) {
        case sleep_level::awake: return "awake";
        case sleep_level::caches_dropped: return "caches dropped";
        case sleep_level::weights_spilled: return "weights spilled";
        case sleep_level::weights_released: return "weights released";
    }
    return "unknown level";
}

/// After how long without a request it goes how deep; 0: not that deep by itself.
struct sleep_rule {
    ns drop_caches_after{};  ///< to caches_dropped
    ns spill_after{};        ///< to weights_spilled
    ns release_after{};      ///< to weights_released
    /// Not so deep that waking is predicted to take longer. 0: however long.
    ns wake_within{};
    ns retry_after = std::chrono::seconds(1);  ///< a change that failed is tried again then
    /// A wake that took longer than wake_within keeps it from sleeping so deep for that long. Then
    /// it may have been one bad day.
    ns distrust_for = std::chrono::hours(1);
};

/// The state of one model. A value; not thread-safe.
class sleep_levels {
public:
    /// Awake, without requests since `now`.
    explicit sleep_levels(const sleep_rule& rule = {}, instant now = {}) noexcept
        : rule_(rule), idle_since_(now), seen_(now) {}

    /// A request is there, or waits until it can be served.
    void request_began(instant now) noexcept {
        seen_ = std::max(seen_, now);
        ++requests_;
    }
    /// One of them is over.
    void request_ended(instant now) noexcept {
        seen_ = std::max(seen_, now);
        if (requests_ != 0 && --requests_ == 0) idle_since_ = now;
    }
    /// Requests that have begun and aren't over.
    [[nodiscard]] std::uint64_t requests() const noexcept { return requests_; }

    /// The next step: the level to go to. Nothing if it is where it should be, a change is under
    /// way, or the last one failed just now; a request retries at once.
    [[nodiscard]] std::optional<sleep_level> next(instant now) const noexcept {
        if (changing_) return {};
        const sleep_level wanted = wanted_at(now);
        if (wanted == level_ || (requests_ == 0 && now < not_before_)) return {};
        return wanted;
    }
    /// When next() may answer something else, if nothing happens until then. `never`: not by time.
    [[nodiscard]] instant next_at(instant now) const noexcept {
        if (changing_ || requests_ != 0) return never;
        if (now < not_before_) return not_before_;
        instant first = never;
        for (const auto l : deeper)
            if (l > level_)
                if (const instant at = from_when(l); at > now) first = std::min(first, at);
        return first;
    }

    /// The change to `to` begins; requests wait meanwhile.
    void began(sleep_level to, instant now) noexcept {
        changing_ = to;
        changed_at_ = now;
    }
    /// It is over. One that failed leaves the model where it was.
    void ended(bool succeeded, instant now) noexcept {
        seen_ = std::max(seen_, now);
        if (!changing_) return;
        const sleep_level to = *changing_;
        changing_.reset();
        if (!succeeded) {
            not_before_ = saturating_add(now, rule_.retry_after);
            return;
        }
        not_before_ = instant::min();
        if (to == sleep_level::awake) measured(level_, now - changed_at_);
        level_ = to;
    }
    /// As if waking from `from` had been measured when something was told last: from an earlier run, or a first guess.
    void measured(sleep_level from, ns took) noexcept {
        auto& all = wakes_[static_cast<std::size_t>(from)];
        all.when[all.count % all.last.size()] = seen_;
        all.last[all.count++ % all.last.size()] = took;
    }

    /// Where it is; while it changes, where it was.
    [[nodiscard]] sleep_level level() const noexcept { return level_; }
    /// Where it is going, if it is.
    [[nodiscard]] std::optional<sleep_level> changing() const noexcept { return changing_; }
    /// How long a request that comes now waits until it is awake: the longest of the last eight
    /// times from this level. 0 if none was measured.
    [[nodiscard]] ns predicted_wake() const noexcept { return predicted_wake(level_); }
    /// The same from any level.
    [[nodiscard]] ns predicted_wake(sleep_level from) const noexcept {
        if (from == sleep_level::awake) return {};
        const auto& all = wakes_[static_cast<std::size_t>(from)];
        return *std::max_element(all.last.begin(), all.last.end());
    }
    /// How long it took the last time; 0 if it never did.
    [[nodiscard]] ns last_wake(sleep_level from) const noexcept {
        const auto& all = wakes_[static_cast<std::size_t>(from)];
        return all.count == 0 ? ns{} : all.last[(all.count - 1) % all.last.size()];
    }
    /// From now on.
    void set_rule(const sleep_rule& rule) noexcept { rule_ = rule; }

private:
    static constexpr std::array deeper{sleep_level::caches_dropped, sleep_level::weights_spilled,
                                       sleep_level::weights_released};
    struct wake_times {
        std::array<ns, 8> last{};
        std::array<instant, 8> when{};
        std::uint64_t count = 0;
    };

    [[nodiscard]] ns after(sleep_level l) const noexcept {
        return l == sleep_level::caches_dropped    ? rule_.drop_caches_after
               : l == sleep_level::weights_spilled ? rule_.spill_after
                                                   : rule_.release_after;
    }
    // When it has been idle for long enough, and waking may be as fast as it must be. `never`: not by itself.
    [[nodiscard]] instant from_when(sleep_level l) const noexcept {
        if (after(l) <= ns{}) return never;
        instant at = saturating_add(idle_since_, after(l));
        const auto& all = wakes_[static_cast<std::size_t>(l)];
        for (std::size_t i = 0; i < all.last.size(); ++i)
            if (rule_.wake_within != ns{} && all.last[i] > rule_.wake_within)
                at = std::max(at, saturating_add(all.when[i], rule_.distrust_for));
        return at;
    }
    // The deepest that it has been idle for long enough. It never sleeps less deep but by waking.
    [[nodiscard]] sleep_level wanted_at(instant now) const noexcept {
        if (requests_ != 0) return sleep_level::awake;
        sleep_level wanted = level_;
        for (const auto l : deeper)
            if (l > wanted && now >= from_when(l)) wanted = l;
        return wanted;
    }

    sleep_rule rule_;
    sleep_level level_ = sleep_level::awake;
    std::optional<sleep_level> changing_{};
    instant idle_since_, changed_at_{}, not_before_ = instant::min();
    instant seen_;  // the latest time that was told
    std::uint64_t requests_ = 0;
    std::array<wake_times, sleep_levels_count> wakes_{};
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
