// SPDX-License-Identifier: Apache-2.0
// Weighted fair sharing of device time, under strict priority between levels: of the waiting clients of the highest
// level, the one that is furthest behind its share goes next. The default policy.
//
//   gpushare::weighted_fair policy;
//   policy.add(chat, {.weight = 70_pct});  policy.add(batch, {.weight = 30_pct});
//
// `fair`, below it, gives each client the same share.
//
// The method is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a client's tag grows by cost / weight, the
// smallest tag goes next, and a level's virtual time is the smallest waiting tag. A client that wakes up starts no
// earlier than virtual time, so it isn't owed the time in which it wanted nothing.
//
// Where work of different clients can't run side by side, the limiter calls take_turns(): a change from one client to
// another costs device time there. So a client keeps its turn for a while: several short submissions go together, and one
// that is as long as a turn goes alone. A client gets ahead of its share by a turn and one submission at most.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/client_heap.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Shares a level's device time in proportion to `weight`. Looks at `level` and `weight`; a weight of 0 counts as 0.1
/// %. Refuses nothing. A value; not thread-safe. Memory grows with the largest index in use. `pick` is O(1), the rest
/// O(log waiting). The members are those of compute_policy.
class weighted_fair {
public:
    static constexpr bool timeless = true;    ///< See is_timeless.
    static constexpr ns usual_turn{100'000};  ///< What a turn is where take_turns() finds none set.

    /// Turns of usual_turn if take_turns() is called, none otherwise.
    weighted_fair() noexcept : weighted_fair(ns{-1}) {}
    /// Turns of this much device time in any case; 0: none.
    explicit weighted_fair(ns turn) noexcept : turn_(turn) {}

    /// A client begins, neither ahead of its share nor behind it.
    failure add(client_id c, const client_settings& s) {
        if (clients_.size() <= c.index) clients_.resize(c.index + std::size_t{1});
        waiting_.reserve(clients_.size());
        open_level(s.level);
        clients_[c.index] = client_state(c, s, virtual_time(s.level));
        return {};
    }

    /// Other settings; what it is ahead or behind stays the same device time.
    failure change(client_id c, const client_settings& s) {
        open_level(s.level);
        auto& client = clients_[c.index];
        // As device time, and not as a tag: or else a client raised from 0.1 % would first sit out a thousand times its
        // last kernel.
        const auto lead = static_cast<double>(client.tag - virtual_time(client.level)) *
                          static_cast<double>(client.weight) / static_cast<double>(weight_of(s));
        constexpr auto most = static_cast<double>(rebase_at / 2);
        const auto tag = virtual_time(s.level) + static_cast<std::int64_t>(std::clamp(lead, -most, most));
        client = client_state(client.id, s, tag);
        if (waiting_.contains(c.index)) place(client);
        return {};
    }

    /// A client ends.
    void remove(client_id c) noexcept { sleep(c); }

    /// From now on a client may go several times in a row.
    void take_turns() noexcept {
        if (turn_ < ns{0}) turn_ = usual_turn;
    }

    /// It waits. It isn't owed the time in which it didn't, except up to most_owed if it was held.
    void wake(client_id c, const queue_head&, instant) noexcept {
        auto& client = clients_[c.index];
        if (!waiting_.contains(c.index)) {
            const double owed = std::exchange(client.held, false) ? most_owed * client.rate : 0;
            client.tag = std::max(client.tag, virtual_time(client.level) - static_cast<std::int64_t>(owed));
        }
        place(client);
    }

    /// It waits no more.
    void sleep(client_id c) noexcept {
        clients_[c.index].held = false;
        waiting_.drop(c.index);
    }

    /// It waits, and isn't to be picked until wake().
    void hold(client_id c) noexcept {
        clients_[c.index].held = true;
        waiting_.drop(c.index);
    }

    /// Of one level: who would be further behind its share.
    [[nodiscard]] bool before(client_id a, client_id b) const noexcept {
        const auto &its = clients_[a.index], &other = clients_[b.index];
        if (its.level != other.level) return false;
        std::int64_t time = 0;  // of the level; add() opened it
        for (const auto& l : levels_)
            if (l.level == its.level) time = l.time;
        return std::max(its.tag, time) < other.tag;
    }

    /// The client of the highest level whose turn it still is, else the one furthest behind its share.
    [[nodiscard]] choice pick(instant) const noexcept {
        if (waiting_.empty()) return {};
        const auto& first = clients_[waiting_.first()];
        const bool goes_on = left_ > ns{0} && waiting_.contains(latest_) && clients_[latest_].level == first.level;
        return goes_on ? clients_[latest_].id : first.id;
    }

    /// Charges the prediction.
    void serve(client_id c, ns cost, instant) noexcept {
        auto& client = clients_[c.index];
        auto& time = virtual_time(client.level);
        time = std::max(time, std::min(client.tag, tag_of_first(client)));
        take_turn(c, cost);
        charge(client, cost);  // wake() or sleep() follows: only then it has a place
    }

    /// Charges the difference to the true cost.
    void correct(client_id c, ns delta) noexcept {
        auto& client = clients_[c.index];
        charge(client, delta);
        if (c.index == latest_ && left_ > ns{0} && delta > ns{0})
            left_ -= std::min(left_, delta);  // the turn was longer
        if (waiting_.contains(c.index)) place(client);
    }

private:
    // Of device time, in ns: to a client that is held time and again because its streams take no more. Several long calls.
    static constexpr double most_owed = 250e6;
    static constexpr std::int64_t rebase_at = std::int64_t{1} << 61;
    // Two weeks are beyond any kernel; without a limit a wild measurement could overflow a tag.
    static constexpr ns most_at_once{std::int64_t{1} << 50};

    struct client_state {
        client_state() = default;
        client_state(client_id c, const client_settings& s, std::int64_t t) noexcept
            : tag(t), id(c), level(s.level), weight(weight_of(s)), rate(1000.0 / weight) {}

        std::int64_t tag = 0;  // ns of device time over weight
        client_id id;
        priority level;
        std::int32_t weight = 1000;
        bool held = false;
        double rate = 1;  // what the tag grows by for a ns of device time: a division would cost more than the rest
    };
    struct level_state {
        priority level;
        std::int64_t time = 0;
    };

    [[nodiscard]] static std::int32_t weight_of(const client_settings& s) noexcept {
        return std::max(static_cast<std::int32_t>(s.weight.permille()), 1);
    }

    // Null for a level that no client ever had. They are few.
    [[nodiscard]] level_state* find_level(priority p) noexcept {
        for (auto& l : levels_)
            if (l.level == p) return &l;
        return nullptr;
    }

    void open_level(priority p) {
        if (find_level(p) == nullptr) levels_.push_back({p, 0});
    }

    [[nodiscard]] std::int64_t& virtual_time(priority p) noexcept { return find_level(p)->time; }  // add() opened it

    void take_turn(client_id c, ns cost) noexcept {
        constexpr ns least{1000};  // a turn is so many kernels at the most, whatever they are said to take
        if (c.index != latest_ || left_ <= ns{0}) left_ = turn_;
        latest_ = c.index;
        left_ -= std::max(cost, least);
    }

    // The smallest tag that waits on the client's level, or else its own.
    [[nodiscard]] std::int64_t tag_of_first(const client_state& client) const noexcept {
        if (waiting_.empty()) return client.tag;
        const auto& first = clients_[waiting_.first()];
        return first.level == client.level ? first.tag : client.tag;
    }

    void charge(client_state& client, ns delta) noexcept {
        const auto cost = std::clamp(delta, -most_at_once, most_at_once).count();
        const auto grows = static_cast<std::int64_t>(static_cast<double>(cost) * client.rate);
        client.tag = std::max(client.tag + grows, -rebase_at);
        if (client.tag > rebase_at) rebase(client.level);
    }

    // A tag reaches this after decades, or after months of one client alone at 0.1 %: then only differences matter.
    void rebase(priority p) noexcept {
        const auto base = std::exchange(virtual_time(p), 0);
        for (auto& c : clients_) {
            if (c.level != p) continue;
            c.tag = std::clamp(c.tag - base, -rebase_at / 2, rebase_at / 2);
            if (waiting_.contains(c.id.index)) place(c);
        }
    }

    void place(const client_state& c) noexcept { waiting_.put(c.id.index, c.level, c.tag); }

    std::vector<client_state> clients_;
    std::vector<level_state> levels_;
    detail::client_heap waiting_;  // by tag
    ns turn_;                      // how long a turn is: 0 or less, none
    ns left_{};                    // of the present turn
    std::uint32_t latest_ = 0;     // whose turn it is: who was served last
};
static_assert(compute_policy<weighted_fair>);

/// Gives each of the N clients of a level that have work 1/N, whatever their weights. Looks at `level`. Otherwise as
/// weighted_fair, which it is made of. A value; not thread-safe.
class fair {
public:
    static constexpr bool timeless = true;  ///< See is_timeless.

    /// A client begins.
    failure add(client_id c, const client_settings& s) { return inner_.add(c, equal(s)); }
    /// Another level.
    failure change(client_id c, const client_settings& s) { return inner_.change(c, equal(s)); }
    void remove(client_id c) noexcept { inner_.remove(c); }                                              ///< It ends.
    void wake(client_id c, const queue_head& head, instant now) noexcept { inner_.wake(c, head, now); }  ///< It waits.
    void sleep(client_id c) noexcept { inner_.sleep(c); }  ///< It waits no more.
    void hold(client_id c) noexcept { inner_.hold(c); }    ///< It isn't to be picked.
    [[nodiscard]] bool before(client_id a, client_id b) const noexcept {
        return inner_.before(a, b);
    }                                                                                       ///< Who has had less.
    [[nodiscard]] choice pick(instant now) const noexcept { return inner_.pick(now); }      ///< The one that had least.
    void serve(client_id c, ns cost, instant now) noexcept { inner_.serve(c, cost, now); }  ///< Charges a prediction.
    void correct(client_id c, ns delta) noexcept {
        inner_.correct(c, delta);
    }                                                    ///< Charges the difference to the truth.
    void take_turns() noexcept { inner_.take_turns(); }  ///< From now on a client may go several times in a row.

private:
    [[nodiscard]] static client_settings equal(client_settings s) noexcept {
        s.weight = share::whole();
        return s;
    }

    weighted_fair inner_;
};
static_assert(compute_policy<fair>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
