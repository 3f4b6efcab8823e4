// SPDX-License-Identifier: Apache-2.0
// Policies that serve submissions by arrival, by deadline, or by the remaining time of requests.
// Between levels all of them have strict priority.
//
// fifo serves submissions in order of arrival, as the device itself would, and holds no client to a
// share. The limiter still bounds the work in flight and meters all device time.
//
//   using limiter_type = gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock, gpushare::fifo>;
//
// earliest_deadline serves the work that is due first. The deadline is the submission's own or,
// without one, its arrival plus its client's latency goal (`slo`). A client that wants more device
// time than its weight misses its own deadlines first, not its neighbours'.
//
//   gpushare::earliest_deadline by_deadline;
//   by_deadline.add(chat, {.weight = 60_pct, .slo = 50ms});  by_deadline.add(batch, {.weight = 40_pct});
//
// Work counts as due no earlier than its client's pace of weight x device time allows, as under a
// constant bandwidth server (Abeni, Buttazzo, RTSS 1998). Otherwise the late work of a client that
// floods its queue would always be the most urgent. Work without a deadline is due one second after
// its arrival, so that it doesn't starve.
//
// shortest_remaining serves the shortest remaining request first: the next submission is that of
// the request that needs the least device time until its end, which minimises the mean time of a
// request. A guard keeps long requests from starving: a client that is too far behind its fair
// share goes before all others.
//
//   // the guard: a client that is 50 ms of its fair share behind goes first
//   gpushare::shortest_remaining policy{50ms};
//
// The fair share is that of an ideal processor that serves all waiting clients at once, by weight:
// its virtual time grows by the device time served over the sum of their weights (Demers, Keshav,
// Shenker, SIGCOMM 1989).
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

/// Serves in the order of arrival. Looks at `level` and at arrivals; refuses nothing. A value; not
/// thread-safe. `pick` is O(1), the rest O(log waiting). The members are those of compute_policy.
class fifo {
public:
    /// A client begins.
    failure add(client_id c, const client_settings& s) {
        if (clients_.size() <= c.index) clients_.resize(c.index + std::size_t{1});
        waiting_.reserve(clients_.size());
        clients_[c.index] = {.id = c, .level = s.level};
        return {};
    }
    /// Changes the client's level.
    failure change(client_id c, const client_settings& s) {
        auto& client = clients_[c.index];
        client.level = s.level;
        if (waiting_.contains(c.index)) place(client);
        return {};
    }
    /// Whether the policy enforces the cap in these settings. It enforces none, so true only
    /// without a cap.
    [[nodiscard]] static bool honours(const client_settings& s) noexcept { return s.cap >= share::whole(); }
    [[nodiscard]] static bool has_classes() noexcept { return false; }  ///< See compute_policy.
    /// A client ends.
    void remove(client_id c) noexcept { sleep(c); }

    /// The client has waiting work, which arrived as `head` says.
    void wake(client_id c, const queue_head& head, instant) noexcept {
        auto& client = clients_[c.index];
        client.arrival = head.arrival;
        client.lifted = head.level;
        place(client);
    }
    /// The client has no waiting work any more.
    void sleep(client_id c) noexcept { waiting_.drop(c.index); }

    /// The client of the highest level whose first submission came first.
    [[nodiscard]] choice pick(instant) const noexcept {
        if (waiting_.empty()) return {};
        return clients_[waiting_.first()].id;
    }
    void serve(client_id, ns, instant) noexcept {}  ///< Costs don't matter.
    void correct(client_id, ns) noexcept {}         ///< Costs don't matter.

private:
    struct client_state {
        client_id id{};
        priority level{};
        priority lifted = no_priority;  // the level of its first waiting submission, if raised
        instant arrival{};
    };

    void place(const client_state& c) noexcept {
        waiting_.put(c.id.index, std::max(c.level, c.lifted), c.arrival.time_since_epoch().count());
    }

    std::vector<client_state> clients_;
    detail::client_heap waiting_;  // ordered by arrival
};
static_assert(compute_policy<fifo>);

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
    /// Changes a client's settings. The client makes up at its new weight for time beyond the old
    /// one.
    failure change(client_id c, const client_settings& s) {
        auto& client = clients_[c.index];
        client.level = s.level;
        client.due.pace.change(s.weight.permille() * std::int64_t{1000}, now_);
        if (client.waits) place(client);
        return {};
    }
    /// Whether the policy enforces the cap in these settings. It enforces none, so true only
    /// without a cap.
    [[nodiscard]] static bool honours(const client_settings& s) noexcept { return s.cap >= share::whole(); }
    [[nodiscard]] static bool has_classes() noexcept { return false; }  ///< See compute_policy.
    /// A client ends.
    void remove(client_id c) noexcept { sleep(c); }

    /// The client has waiting work, with the arrival and the deadline in `head`.
    void wake(client_id c, const queue_head& head, instant now) noexcept {
        now_ = std::max(now_, now);
        auto& client = clients_[c.index];
        if (!std::exchange(client.waits, true)) client.due.pace.begin(now_);
        client.lifted = head.level;
        client.due.at = head.deadline != never ? head.deadline : saturating_add(head.arrival, patience_);
        place(client);
    }
    /// The client has no waiting work any more.
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

    /// Tells another policy how far the client is ahead of its weight; see client_standing.
    void tell_standing(client_id c, client_standing& s, instant now) const noexcept {
        s.ahead(static_cast<double>(clients_[c.index].due.pace.beyond(now).count()));
    }
    /// Continues from the client's standing with an earlier policy. Call before its first wake().
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
        priority lifted = no_priority;  // the level of its first waiting submission, if raised
        bool waits = false;
    };

    void place(const client_state& c) noexcept {
        waiting_.put(c.id.index, std::max(c.level, c.lifted), c.due.counts().time_since_epoch().count());
    }

    ns patience_ = std::chrono::seconds(1);
    std::vector<client_state> clients_;
    detail::client_heap waiting_;  // ordered by when the clients' work counts as due
    instant now_{};
};
static_assert(compute_policy<earliest_deadline>);

/// Serves the request that is nearest to its end. Looks at `level`, `weight` and the remaining time
/// of requests; refuses nothing. A value; not thread-safe. `pick` is O(1), the rest O(log waiting).
/// The members are those of compute_policy.
class shortest_remaining {
public:
    static constexpr bool timeless = true;  ///< See is_timeless.

    shortest_remaining() = default;  ///< A guard of 50 ms.
    /// `guard`: how far a client may be behind or ahead of its fair share, as the time in which its
    /// share would have given it that much device time. The time is longer if the weights of the
    /// waiting clients sum to more than the whole. 0: fair queueing.
    explicit shortest_remaining(ns guard) : guard_(guard) {}

    /// A client begins, neither ahead of its share nor behind it.
    failure add(client_id c, const client_settings& s) {
        if (clients_.size() <= c.index) clients_.resize(c.index + std::size_t{1});
        shortest_.reserve(clients_.size());
        furthest_behind_.reserve(clients_.size());
        auto& level = open_level(s.level);
        clients_[c.index] = {.id = c, .level = s.level, .weight = weight_of(s), .had = level.fair};
        return {};
    }

    /// Changes a client's settings. The device time by which it is ahead or behind stays the same.
    failure change(client_id c, const client_settings& s) {
        (void)open_level(s.level);
        auto& client = clients_[c.index];
        const bool waits = client.waits;
        sleep(c);
        const auto lag = static_cast<double>(client.had - level_of(client).fair) * static_cast<double>(client.weight);
        client.level = s.level;
        client.weight = weight_of(s);
        constexpr auto most = static_cast<double>(rebase_at / 2);
        client.had = level_of(client).fair +
                     static_cast<std::int64_t>(std::clamp(lag / static_cast<double>(client.weight), -most, most));
        if (waits) begin(client);
        return {};
    }

    /// Whether the policy enforces the cap in these settings. It enforces none, so true only
    /// without a cap.
    [[nodiscard]] static bool honours(const client_settings& s) noexcept { return s.cap >= share::whole(); }
    [[nodiscard]] static bool has_classes() noexcept { return false; }  ///< See compute_policy.
    /// A client ends.
    void remove(client_id c) noexcept { sleep(c); }

    /// The client has waiting work; `head` has the remaining time of its request. The client isn't
    /// owed the time in which it had no work.
    void wake(client_id c, const queue_head& head, instant) noexcept {
        auto& client = clients_[c.index];
        client.remaining = head.remaining;
        client.lifted = head.level;
        if (client.waits) {
            place(client);
        } else {
            // The client isn't owed the time in which it had no work.
            client.had = std::max(client.had, level_of(client).fair);
            begin(client);
        }
    }

    /// The client has no waiting work any more.
    void sleep(client_id c) noexcept {
        auto& client = clients_[c.index];
        if (!std::exchange(client.waits, false)) return;
        level_of(client).weights -= client.weight;
        shortest_.drop(c.index);
        furthest_behind_.drop(c.index);
    }

    /// The client of the highest level that is behind by more than the guard; otherwise the one
    /// whose request is nearest to its end.
    [[nodiscard]] choice pick(instant) const noexcept {
        if (shortest_.empty()) return {};
        const auto& behind = clients_[furthest_behind_.first()];
        if (furthest_behind_.first_key() < find_level(behind.level)->fair) return behind.id;
        return clients_[shortest_.first()].id;
    }

    /// Charges the prediction.
    std::uint64_t serve(client_id c, ns cost, instant) noexcept {
        const bool lifted = clients_[c.index].lifted > clients_[c.index].level;
        correct(c, cost, lifted ? is_lifted : 0);
        return lifted ? is_lifted : 0;
    }
    /// How many bits of serve()'s result are used.
    [[nodiscard]] static constexpr unsigned lent_bits() noexcept { return 1; }

    /// Charges the difference to the true cost.
    void correct(client_id c, ns delta, std::uint64_t lent = 0) noexcept {
        auto& client = clients_[c.index];
        auto& level = level_of(client);
        // No kernel takes two weeks. Without this bound a wrong measurement could cause an
        // overflow.
        const auto cost =
            std::clamp<std::int64_t>(delta.count(), -(std::int64_t{1} << 50), std::int64_t{1} << 50) * 1000;
        level.fair += cost / std::max(level.weights, client.weight);
        // Time beyond the guard took nothing from other clients, or the guard would have served
        // them, so it isn't held against the client. Time above the client's level is an exception,
        // since no guard acts there.
        const auto guarded = level.fair + std::clamp<std::int64_t>(guard_.count(), 0, rebase_at / 2);
        const auto most = lent == is_lifted ? 2 * rebase_at : std::max(guarded, client.had);
        client.had = std::clamp(client.had + cost / client.weight, -rebase_at, most);
        if (std::max(level.fair, client.had) > rebase_at) {
            rebase(level);
        } else if (client.waits) {
            place(client);
        }
    }

    /// Tells another policy how far the client is ahead of its fair share; see client_standing.
    void tell_standing(client_id c, client_standing& s, instant) const noexcept {
        const auto& client = clients_[c.index];
        s.ahead(static_cast<double>(client.had - find_level(client.level)->fair) * static_cast<double>(client.weight) /
                1000);
    }
    /// Continues from the client's standing with an earlier policy. Call before its first wake().
    void resume(client_id c, client_standing& s, instant) noexcept {
        auto& client = clients_[c.index];
        constexpr auto most = static_cast<double>(rebase_at / 2);
        const auto had = static_cast<double>(s.here().ahead.count()) * 1000 / static_cast<double>(client.weight);
        client.had = level_of(client).fair + static_cast<std::int64_t>(std::clamp(had, -most, most));
    }

private:
    static constexpr std::uint64_t is_lifted = 1;
    static constexpr std::int64_t rebase_at = std::int64_t{1} << 61;

    struct client_state {
        client_id id{};
        priority level{};
        std::int64_t weight = 1000;  // permille
        std::int64_t had = 0;        // ns of device time over weight
        ns remaining{};
        priority lifted = no_priority;  // the level of its first waiting submission, if raised
        bool waits = false;
    };
    struct level_state {
        priority level{};
        // The service of each client under the ideal, in ns over weight.
        std::int64_t fair = 0;
        std::int64_t weights = 0;  // the sum of the waiting clients' weights
    };

    [[nodiscard]] static std::int64_t weight_of(const client_settings& s) noexcept {
        return std::max<std::int64_t>(s.weight.permille(), 1);
    }

    [[nodiscard]] const level_state* find_level(priority p) const noexcept {
        for (const auto& l : levels_)
            if (l.level == p) return &l;
        return nullptr;
    }
    [[nodiscard]] level_state& level_of(const client_state& c) noexcept {
        for (auto& l : levels_)
            if (l.level == c.level) return l;
        return levels_.front();  // unreachable: add() opened it
    }
    [[nodiscard]] level_state& open_level(priority p) {
        if (find_level(p) == nullptr) levels_.push_back({.level = p});
        return level_of({.level = p});
    }

    void begin(client_state& c) noexcept {
        c.waits = true;
        level_of(c).weights += c.weight;
        place(c);
    }

    void place(const client_state& c) noexcept {
        const auto at = std::max(c.level, c.lifted);
        shortest_.put(c.id.index, at, c.remaining.count());
        furthest_behind_.put(c.id.index, at, c.had + std::clamp<std::int64_t>(guard_.count(), 0, rebase_at / 2));
    }

    void rebase(level_state& level) noexcept {
        const auto base = std::exchange(level.fair, 0);
        for (auto& c : clients_) {
            if (c.level != level.level) continue;
            c.had = std::clamp(c.had - base, -rebase_at / 2, rebase_at / 2);
            if (c.waits) place(c);
        }
    }

    ns guard_ = std::chrono::milliseconds(50);
    std::vector<client_state> clients_;
    std::vector<level_state> levels_;
    // Ordered by the remaining time, and by the time had plus the guard.
    detail::client_heap shortest_, furthest_behind_;
};
static_assert(compute_policy<shortest_remaining>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
