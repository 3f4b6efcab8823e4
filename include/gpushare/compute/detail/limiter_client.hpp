// SPDX-License-Identifier: Apache-2.0
// What a compute limiter knows of one client: what it asked for, what waits first of it, and its account. A part of
// limiter_core.hpp.
//
//   client.head = client.complete(nullptr, now, id, kinds, first_guess);    // what comes next, as predicted
//   if (client.ended(failed, 32)) ...                                                 // so many in a row are too many
#pragma once

#include <algorithm>
#include <cstdint>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/cost_model.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// What waits behind the first of a client, where nobody says more of it.
struct nothing_known {
    instant now{};
    [[nodiscard]] queue_head operator()(client_id) const noexcept { return {.arrival = now}; }
};

struct limiter_client {
    client_settings settings{};
    std::uint32_t generation = 0, level = 0;  // the level's index in the budget
    bool present = false, quarantined = false;
    bool closing = false;    // takes no more
    bool enqueuing = false;  // its callable is being run
    std::uint32_t failures_in_row = 0, admitted = 0;
    cost_estimate costs{};  // of all its submissions
    queue_head head{};      // while something waits
    client_usage usage{};

    /// The longest that it declared or lately showed; 0: unknown.
    [[nodiscard]] ns longest() const noexcept { return std::max(settings.longest, costs.longest.get()); }

    /// What comes at `now`, as `from` tells or with nothing known of it; filled in what its submitter didn't say.
    [[nodiscard]] queue_head complete(const queue_head* from, instant now, client_id c, const cost_model& kinds,
                                      ns first_guess) const noexcept {
        queue_head h{.arrival = now};
        if (from != nullptr) h = *from;
        if (h.cost <= ns{0}) h.cost = predict(h.key, c, kinds, first_guess);
        h.remaining = std::max(h.remaining, h.cost);
        if (settings.slo > ns{0}) h.deadline = std::min(h.deadline, saturating_add(h.arrival, settings.slo));
        return h;
    }

    /// What a measured one took, or several together. `kind`: of its kind, if that is known.
    void learn(const charge& o, cost_estimate* kind) noexcept {
        if (o.from == charge::source::shared) {
            costs.learn_mean(o.took, o.times);
            if (kind != nullptr) kind->learn_mean(o.took, o.times);
            return;
        }
        costs.learn(o.took, o.from == charge::source::alone);
        if (kind != nullptr) kind->learn(o.took, o.from == charge::source::alone);
        usage.longest = std::max(usage.longest, o.took);
    }

    /// One more that ended. Whether it is quarantined from now on, after so many failures in a row.
    [[nodiscard]] bool ended(bool failed, std::uint32_t quarantine_after) noexcept {
        if (!failed) {
            failures_in_row = 0;
            return false;
        }
        ++usage.failed;
        if (++failures_in_row != quarantine_after) return false;
        return quarantined = true;
    }

    void pardon() noexcept {
        quarantined = false;
        failures_in_row = 0;
    }

    /// Whether its next one may share points: the last of each sixty-four is timed by itself.
    [[nodiscard]] bool next_may_share() const noexcept { return admitted % cycle != cycle - 1; }

private:
    // Batches don't tell how long the longest is, nor whether there were gaps.
    static constexpr std::uint32_t cycle = 64;

    [[nodiscard]] ns predict(std::uint64_t key, client_id c, const cost_model& kinds, ns first_guess) const noexcept {
        if (key != 0)
            if (const auto& kind = kinds.find(c, key); kind.seen != 0) return kind.typical;
        if (costs.seen != 0) return costs.typical;
        return settings.longest > ns{0} ? settings.longest : first_guess;
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
