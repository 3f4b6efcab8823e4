// SPDX-License-Identifier: Apache-2.0
// Earliest deadline first, under strict priority between levels. The deadline is the submission's own, or else its
// arrival plus its client's objective (`slo`). A client that wants more device time than its weight misses its own
// deadlines first, not its neighbours'.
//
//   gpushare::earliest_deadline policy;
//   policy.add(chat, {.weight = 60_pct, .slo = 50ms});  policy.add(batch, {.weight = 40_pct});
//
// Work counts as due no earlier than its client's pace of weight x device time allows, as under a constant bandwidth
// server (Abeni, Buttazzo, RTSS 1998). Otherwise the late work of a client that floods its queue would always be the
// most urgent. Work without a deadline is due one second after its arrival, so that it doesn't starve.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/client_heap.hpp>
#include <gpushare/compute/detail/pacer.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Serves the submission that is due first. Looks at `level`, `weight`, arrivals and deadlines; the
/// limiter has put `slo` into these. Refuses no client: weights may sum to more than the whole, but
/// then no client is protected from the others. A value; not thread-safe. `pick` is O(1), the rest
/// O(log waiting). The members are those of compute_policy.
class earliest_deadline {
public:
    earliest_deadline() = default;  ///< A patience of a second.
    /// `patience`: when work without a deadline is due, from its arrival.
    explicit earliest_deadline(ns patience) : patience_(patience) {}

    /// A client begins.
    failure add(client_id c, const client_settings& s) {
        if (clients_.size() <= c.index) clients_.resize(c.index + std::size_t{1});
        waiting_.reserve(clients_.size());
        clients_[c.index] = {.id = c};
        return change(c, s);
    }
    /// Other settings; what the client had beyond its weight, it makes up for at the new one.
    failure change(client_id c, const client_settings& s) {
        auto& client = clients_[c.index];
        client.level = s.level;
        client.due.pace.change(s.weight.permille() * std::int64_t{1000}, now_);
        if (client.waits) place(client);
        return {};
    }
    /// Whether it holds a client to the cap in these settings: it has none.
    [[nodiscard]] static bool honours(const client_settings& s) noexcept { return s.cap >= share::whole(); }
    [[nodiscard]] static bool has_classes() noexcept { return false; }  ///< See compute_policy.
    /// A client ends.
    void remove(client_id c) noexcept { sleep(c); }

    /// It waits, with the arrival and the deadline in `head`.
    void wake(client_id c, const queue_head& head, instant now) noexcept {
        now_ = std::max(now_, now);
        auto& client = clients_[c.index];
        if (!std::exchange(client.waits, true)) client.due.pace.begin(now_);
        client.lifted = head.level;
        client.due.at = head.deadline != never ? head.deadline : saturating_add(head.arrival, patience_);
        place(client);
    }
    /// It waits no more.
    void sleep(client_id c) noexcept {
        clients_[c.index].waits = false;
        waiting_.drop(c.index);
    }

    /// The client of the highest level whose work is due first.
    [[nodiscard]] choice pick(instant) const noexcept {
        if (waiting_.empty()) return {};
        return clients_[waiting_.first()].id;
    }
    /// Delays the client's pace by the prediction.
    void serve(client_id c, ns cost, instant now) noexcept {
        now_ = std::max(now_, now);
        clients_[c.index].due.pace.spend(cost, now_);
    }
    /// Delays the client's pace by the difference to the true cost.
    void correct(client_id c, ns delta) noexcept {
        auto& client = clients_[c.index];
        client.due.pace.adjust(delta);
        if (client.waits) place(client);
    }

    /// Tells how far it is ahead of its weight, for another policy; see client_standing.
    void tell_standing(client_id c, client_standing& s, instant now) const noexcept {
        s.ahead(static_cast<double>(clients_[c.index].due.pace.beyond(now).count()));
    }
    /// Continues from the standing with an earlier policy. Call before it waits.
    void resume(client_id c, client_standing& s, instant now) noexcept {
        now_ = std::max(now_, now);
        auto& pace = clients_[c.index].due.pace;
        pace.from = now_ + pace.lasts(std::max(s.here().ahead, ns{0}));
    }

private:
    struct client_state {
        client_id id{};
        priority level{};
        detail::due_time due{};
        priority lifted = no_priority;  // what waits first
        bool waits = false;
    };

    void place(const client_state& c) noexcept {
        waiting_.put(c.id.index, std::max(c.level, c.lifted), c.due.counts().time_since_epoch().count());
    }

    ns patience_ = std::chrono::seconds(1);
    std::vector<client_state> clients_;
    detail::client_heap waiting_;  // by when their work counts as due
    instant now_{};
};
static_assert(compute_policy<earliest_deadline>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
