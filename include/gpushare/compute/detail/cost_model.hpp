// SPDX-License-Identifier: Apache-2.0
// Predicts the device time of a submission from the times of earlier submissions of its kind. The
// kind is a 64-bit key that the client gives, such as the id of a kernel or graph together with a
// class of sizes. Without a key, all of a client's submissions are one kind.
//
//   cost_model costs;
//   ns guess = costs.find(chat, key).typical;        // before it runs; 0: never seen
//   costs.learn(chat, key, measured);                          // once the truth is known
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The longest of the latest 512 to 1023 measurements, and the value that at most one in a hundred
/// of them exceeds. Older measurements are forgotten. A measurement that may be cold (memory not
/// yet touched, code not yet compiled) counts as the longest for the next 16 only, and never for
/// p99. A value.
class recent_longest {
public:
    /// Learns one more measurement. `cold`: the first of a kind.
    void learn(ns took, bool cold = false) noexcept {
        if (cold) {
            cold_ = std::max(cold_, took);
            cold_for_ = while_cold;
            return;
        }
        if (cold_for_ > 0 && --cold_for_ == 0) cold_ = {};
        now_.learn(took);
        longest_ = std::max(longest_, took);
        if (now_.seen < window) return;
        before_ = std::exchange(now_, {});
        longest_ = before_.longest[0];
    }
    /// The longest; 0 before the first.
    [[nodiscard]] ns get() const noexcept { return std::max(longest_, cold_); }
    /// The value that at most one in a hundred exceeds; with fewer than a hundred, the longest. 0
    /// before the first that isn't cold.
    [[nodiscard]] ns p99() const noexcept {
        auto *now = now_.longest.data(), *before = before_.longest.data();
        for (auto n = std::min<std::uint32_t>(seen() / 100, few - 1); n > 0; --n) ++(*now > *before ? now : before);
        return std::max(*now, *before);
    }
    /// How many measurements count.
    [[nodiscard]] std::uint32_t seen() const noexcept { return now_.seen + before_.seen; }

    /// At least this many measurements are remembered.
    static constexpr std::uint32_t window = 512;
    /// After this many others the first of a kind is forgotten.
    static constexpr std::uint32_t while_cold = 16;

private:
    // Of 512 measurements, five exceed the sixth longest. Of more measurements the tenth longest
    // would be right, so the value is slightly high then.
    static constexpr std::uint32_t few = window / 100 + 1;
    struct measurements {
        std::array<ns, few> longest{};  // in falling order
        std::uint32_t seen = 0;

        void learn(ns took) noexcept {
            ++seen;
            if (took <= longest.back()) return;
            std::size_t at = few - 1;
            for (; at > 0 && longest[at - 1] < took; --at) longest[at] = longest[at - 1];
            longest[at] = took;
        }
    };

    measurements now_, before_;
    ns longest_{};  // derived from the members above, since each admission asks for it
    ns cold_{};
    std::uint32_t cold_for_ = 0;
};

/// The measured device time of one kind of submissions. A value; not thread-safe.
struct cost_estimate {
    ns typical{};              ///< the smoothed mean of the device times; 0: none was seen
    recent_longest longest{};  ///< the longest duration
    ns shortest_alone{};       ///< the shortest duration with the device to itself; 0: unknown
    sm_width width{};          ///< the largest part of the SMs that they filled lately
    /// How many were seen, up to 8: the mean is smoothed over that many.
    std::uint32_t seen = 0;
    std::uint32_t seen_alone = 0;  ///< how many had the device to themselves, up to 64

    /// Learns one more measurement: its device time and its duration. `alone`: the device had no
    /// other work; `cold`: the first of a kind.
    void learn(ns took, ns lasted, bool alone, bool cold = false) noexcept {
        learn_mean(took);
        longest.learn(lasted, cold);
        if (!alone || lasted <= ns{0}) return;
        shortest_alone = seen_alone > 0 ? std::min(shortest_alone, lasted) : lasted;
        seen_alone += seen_alone < enough_of_a_mixture ? 1 : 0;
    }
    /// Learns the part of the SMs that one more submission filled. A wider part counts immediately,
    /// a narrower one gradually. In a `mixture` of kinds the width falls eight times as slowly,
    /// because a few narrow submissions in a row say little about the next.
    void learn_width(sm_width seen_now, bool mixture = false) noexcept {
        const double most = width.known() ? width.part() : 0, now = seen_now.part();
        width = sm_width(now >= most ? now : most - (most - now) / (mixture ? 64 : 8));
    }
    /// The least time that one more takes; 0: unknown. If all submissions are of one kind, one
    /// measurement is enough. In a `mixture` of kinds the next one may be shorter than all before,
    /// so 64 measurements are needed.
    [[nodiscard]] ns at_least(bool mixture) const noexcept {
        return seen_alone >= (mixture ? enough_of_a_mixture : 1) ? shortest_alone : ns{0};
    }
    /// Learns that `times` more took this long together. Changes only the mean.
    void learn_mean(ns took, std::uint32_t times) noexcept {
        if (times > 1) took /= static_cast<ns::rep>(times);
        while (times-- > 0) learn_mean(took);
    }
    /// Learns that one more took this long. Changes only the mean.
    void learn_mean(ns took) noexcept {
        // The mean of all up to the eighth, then of the latest eight or so: mixed kernels predict
        // their mean.
        if (seen == 1 && took < typical / 4) typical = took;  // the first was cold
        if (seen < 8)
            typical += (took - typical) / static_cast<ns::rep>(++seen);
        else
            typical += (took - typical) / 8;
    }

    /// This many are enough to tell the least time of the next one.
    static constexpr std::uint32_t enough_of_a_mixture = 64;
};

/// Remembers the last used kinds, up to `capacity`, in sets of four by a hash. In a set, a client's
/// new kinds don't replace those of clients that have no more kinds there. Every call is constant
/// time, and nothing is allocated after the constructor, which throws std::bad_alloc. A value; not
/// thread-safe.
class cost_model {
public:
    static constexpr std::size_t capacity = 256;  ///< How many kinds are remembered.

    /// The estimate for this kind of a client. `seen` is 0 for key 0 and for a kind that is new or
    /// forgotten. Valid until the next call of a non-const function.
    [[nodiscard]] const cost_estimate& find(client_id c, std::uint64_t key) const noexcept {
        if (key != 0)
            for (const auto& e : sets_[set_of(c, key)])
                if (e.key == key && e.client == c) return e.estimate;
        return unknown_;
    }

    /// Bounds and predictions for the next submission.
    struct outlook {
        ns at_least{};  ///< 0: unknown
        /// The longest that the kind lately took; 0: count with the longest of its client.
        ns longest{};
        bool known = false;  ///< whether enough were seen for a prediction
        sm_width width{};    ///< the part of the SMs that it can fill
    };
    /// The outlook for the next submission of this kind of a client; `all` is the estimate over all
    /// of the client's submissions.
    [[nodiscard]] outlook next(client_id c, std::uint64_t key, const cost_estimate& all) const noexcept {
        if (key == 0)  // any work of the client, whatever its kind
            return {.at_least = all.at_least(true), .known = all.seen >= seen_enough, .width = all.width};
        const auto& kind = find(c, key);
        if (kind.seen < seen_enough) return {.width = kind.width};
        // A kind with few measurements may take as long as any work of its client.
        const bool tells = kind.seen >= 8;
        return {.at_least = kind.at_least(false),
                .longest = tells ? kind.longest.get() : ns{0},
                .known = true,
                .width = kind.width};
    }

    /// The place for the measurements of this kind, which may replace the kind that was used
    /// longest ago. Valid until the next call. Null for key 0.
    [[nodiscard]] cost_estimate* find_or_add(client_id c, std::uint64_t key) noexcept {
        if (key == 0) return nullptr;
        auto& set = sets_[set_of(c, key)];
        const auto is_it = [&](const entry& e) { return e.key == key && e.client == c; };
        if (is_it(set[0])) return &set[0].estimate;
        std::size_t at = 1;
        while (at < ways && !is_it(set[at])) ++at;
        if (at == ways) at = place_for(set, c);
        const entry latest = is_it(set[at]) ? set[at] : entry{.key = key, .client = c};
        for (; at > 0; --at) set[at] = set[at - 1];
        set[0] = latest;
        return &set[0].estimate;
    }

    /// Learns that one submission of this kind took this long. `alone`: with the device to itself.
    void learn(client_id c, std::uint64_t key, ns took, bool alone = false) noexcept {
        if (auto* const e = find_or_add(c, key)) e->learn(took, took, alone, e->seen == 0);
    }

private:
    static constexpr std::uint32_t seen_enough = 3;  // predictions rely on a kind from this many on
    static constexpr std::size_t ways = 4;
    struct entry {
        std::uint64_t key = 0;  // 0: free
        client_id client{};
        cost_estimate estimate{};
    };

    // The place that a new kind of `c` takes: a free one, the one that `c` used longest ago, or one
    // of the client with the most kinds here. So a client that invents kinds displaces others'
    // kinds only if they have more than their part.
    [[nodiscard]] static std::size_t place_for(const std::array<entry, ways>& set, client_id c) noexcept {
        const auto count = [&](client_id of) {
            return std::count_if(set.begin(), set.end(), [=](const entry& e) { return e.key != 0 && e.client == of; });
        };
        std::size_t best = ways - 1;
        for (std::size_t i = ways; i-- > 0;) {
            if (set[i].key == 0) return i;
            if (count(set[i].client) > count(set[best].client)) best = i;
        }
        if (count(c) == 0 || count(c) < count(set[best].client)) return best;
        std::size_t own = ways - 1;
        while (!(set[own].client == c)) --own;
        return own;
    }
    // Fibonacci hashing (Knuth, TAOCP 3, 6.4): keys may be pointers, or count up.
    [[nodiscard]] static std::size_t set_of(client_id c, std::uint64_t key) noexcept {
        const auto mixed = (key ^ (std::uint64_t{c.index} << 32) ^ c.generation) * golden_ratio;
        return static_cast<std::size_t>(mixed >> 32) % (capacity / ways);
    }

    cost_estimate unknown_{};
    plain_list<std::array<entry, ways>> sets_ = plain_list<std::array<entry, ways>>(capacity / ways);
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
