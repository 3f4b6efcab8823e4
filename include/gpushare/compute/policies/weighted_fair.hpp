// SPDX-License-Identifier: Apache-2.0
// Weighted fair sharing of device time, under strict priority between levels: of the waiting
// clients of the highest level, the one that is furthest behind its share goes next. The default
// policy.
//
//   gpushare::weighted_fair policy;
//   policy.add(chat, {.weight = 70_pct});  policy.add(batch, {.weight = 30_pct});
//
// `fair`, below, gives each client the same share. A client's `cap` holds with both policies.
//
// The method is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a client's tag grows by
// cost / weight, the smallest tag goes next, and a level's virtual time is the smallest waiting
// tag. A client that wakes up starts no earlier than virtual time, so it isn't owed the time in
// which it wanted nothing.
//
// If work of different clients can't run side by side, a change from one client to another costs
// device time, and the limiter calls take_turns(). So a client keeps its turn for a while: several
// short submissions go together, and one that is as long as a turn goes alone. A client gets ahead
// of its share by a turn and one submission at most.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <gpushare/compute/detail/client_heap.hpp>
#include <gpushare/compute/detail/pacer.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Shares a level's device time in proportion to `weight`. Looks at `level`, `weight`, `cap` and
/// `soft_cap`, and at the level of a submission; a weight of 0 counts as 0.1 %. Refuses no client.
/// Device time that a client's submissions get at a higher level is charged to its share at its own
/// level too. Over a time t, a client with a hard cap gets at most its cap times (t + w), plus the
/// submission begun last, or those in flight at once by client_settings::longest. Here w is how
/// long the client waited for others' work before t without having made up for it, at least 5 ms
/// and at most 100 ms: so the client reaches its cap alongside long calls of others. A client with
/// a soft cap isn't charged for time that it borrows. A value; not thread-safe. Memory grows with
/// the largest index in use. `pick` is O(1) while no client is at its cap, the rest O(log waiting).
/// The members are those of compute_policy.
class weighted_fair {
public:
    static constexpr bool timeless = true;    ///< See is_timeless.
    static constexpr ns usual_turn{100'000};  ///< The default length of a turn.

    /// Turns of usual_turn if take_turns() is called, none otherwise.
    weighted_fair() noexcept : weighted_fair(ns{-1}) {}
    /// Turns of this much device time in any case; 0: none.
    explicit weighted_fair(ns turn) noexcept : turn_(turn) {}

    /// A client begins, neither ahead of its share nor behind it.
    failure add(client_id c, const client_settings& s) {
        if (clients_.size() <= c.index) clients_.resize(c.index + std::size_t{1});
        for (auto* h : {&waiting_, &capped_out_, &borrowing_}) h->reserve(clients_.size());
        open_levels(s);
        clients_[c.index] = client_state(c, s, weight_of(s), virtual_time(s.level));
        num_capped_ += clients_[c.index].is_capped ? 1 : 0;
        return {};
    }

    /// Changes a client's settings. The device time by which it is ahead or behind stays the same.
    failure change(client_id c, const client_settings& s) {
        open_levels(s);
        auto& client = clients_[c.index];
        const auto before = client;
        // The debt is kept as device time, not as a tag: otherwise a client raised from 0.1 % would
        // first wait a thousand times its last kernel.
        client = client_state(before.id, s, weight_of(s), 0);
        client.tag = tag_of(client, before.lead(virtual_time(before.level)));
        client.pace.begin(now_, all_had_);
        client.pace.from = now_ + client.pace.lasts(before.is_capped ? before.pace.beyond(now_) : ns{0});
        client.waits = before.waits;
        client.held = before.held;
        num_capped_ += (client.is_capped ? 1 : 0) - (before.is_capped ? 1 : 0);
        if (before.at > before.level && before.at > client.level) {
            client.at = before.at;
            client.guest_tag = before.guest_tag;
        }
        if (client.waits && !client.held) place(client);
        return {};
    }

    /// A client ends.
    void remove(client_id c) noexcept {
        sleep(c);
        if (std::exchange(clients_[c.index].is_capped, false)) --num_capped_;
    }

    /// From now on a client may go several times in a row.
    void take_turns() noexcept {
        if (turn_ < ns{0}) turn_ = usual_turn;
    }
    /// See compute_policy.
    [[nodiscard]] static bool has_classes() noexcept { return false; }
    /// Any cap is enforced.
    [[nodiscard]] static bool honours(const client_settings&) noexcept { return true; }
    /// The client's own hard cap, if it has one; see compute_policy.
    [[nodiscard]] std::uint64_t hard_cap_of(client_id c) const noexcept {
        const auto& client = clients_[c.index];
        return client.is_capped && !client.soft ? detail::own_hard_cap(c) : 0;
    }
    /// Whether the policy needs the time, although it is timeless otherwise: a client has a cap.
    [[nodiscard]] bool needs_time() const noexcept { return num_capped_ > 0; }

    /// The client has waiting work. It is owed nothing for the time in which it had none. Only
    /// after hold() is it owed that time, up to most_owed.
    void wake(client_id c, const queue_head& head, instant now) noexcept {
        now_ = std::max(now_, now);
        auto& client = clients_[c.index];
        const priority at = std::max(client.level, head.level);
        // Whether the client waited or not.
        if (at != client.at && at > client.level) client.guest_tag = time_of(at);
        client.at = at;
        const bool held = std::exchange(client.held, false), waited = std::exchange(client.waits, true);
        if (!waited && client.is_capped) client.pace.begin(now_, all_had_);
        if (!waited || held) catch_up(client, held ? most_owed * client.rate : 0);
        place(client);
    }

    /// The client has no waiting work any more.
    void sleep(client_id c) noexcept {
        clients_[c.index].held = clients_[c.index].waits = false;
        take_out(clients_[c.index]);
    }

    /// The client's work waits, but must not be picked until wake().
    void hold(client_id c) noexcept {
        clients_[c.index].held = true;
        take_out(clients_[c.index]);
    }

    /// Of two clients of one level, the one further behind its share.
    [[nodiscard]] bool before(client_id a, client_id b) const noexcept {
        const auto &its = clients_[a.index], &other = clients_[b.index];
        if (its.level != other.at || (its.is_capped && !its.pace.entitled(now_))) return false;
        std::int64_t time = 0;  // the virtual time of the level, which add() opened
        for (const auto& l : levels_)
            if (l.level == its.level) time = l.time;
        return std::max(its.tag, time) < other.key();
    }

    /// The client of the highest level whose turn it still is; otherwise the one furthest behind
    /// its share, of those within their caps; otherwise a borrower; otherwise the time when a
    /// client will be within its cap.
    [[nodiscard]] choice pick(instant now) noexcept {
        if (num_capped_ > 0) {
            now_ = std::max(now_, now);
            while (!capped_out_.empty() && capped_out_.first_key() <= count(now_)) {
                auto& client = clients_[capped_out_.first()];
                catch_up(client, 0);
                place(client);
            }
        }
        if (waiting_.empty()) {
            if (!borrowing_.empty()) return clients_[borrowing_.first()].id;
            return capped_out_.empty() ? choice{} : choice(instant{ns{capped_out_.first_key()}});
        }
        const auto& first = clients_[waiting_.first()];
        const bool goes_on = left_ > ns{0} && waiting_.contains(latest_) && clients_[latest_].at == first.at;
        return goes_on ? clients_[latest_].id : first.id;
    }

    /// Charges the prediction, unless the time is lent beyond a soft cap. Returns whether it was
    /// lent, or served at a higher level, for correct().
    std::uint64_t serve(client_id c, ns cost, instant now) noexcept {
        auto& client = clients_[c.index];
        if (client.is_capped) {
            now_ = std::max(now_, now);
            if (borrowing_.contains(c.index)) return is_lent;
            client.pace.spend(cost, now_, all_had_);
        }
        const bool guest = client.at > client.level;
        if (auto* const l = find_level(client.at))
            l->time = std::max(l->time, std::min(client.key(), key_of_first(client)));
        take_turn(c, cost);
        charge(client, cost, guest);  // wake() or sleep() follows and gives the client its place
        return guest ? is_guest : 0;
    }
    /// How many bits of serve()'s result are used.
    [[nodiscard]] static constexpr unsigned lent_bits() noexcept { return 2; }

    /// Charges the difference to the true cost, unless the time was lent.
    void correct(client_id c, ns delta, std::uint64_t lent = 0) noexcept {
        if ((lent & is_lent) != 0) return;
        auto& client = clients_[c.index];
        if (client.is_capped) client.pace.adjust(delta);
        charge(client, delta, (lent & is_guest) != 0 && client.at > client.level);
        if (c.index == latest_ && left_ > ns{0} && delta > ns{0})
            left_ -= std::min(left_, delta);  // the turn was longer
        if (client.waits && !client.held) place(client);
    }

    /// Some client's completed work took this much device time; see compute_policy.
    void ended(ns took) noexcept { all_had_ = saturating_add(all_had_, std::max(took, ns{0})); }

    /// Tells another policy how far the client is ahead of its share and beyond its cap; see
    /// client_standing.
    void tell_standing(client_id c, client_standing& s, instant now) const noexcept {
        const auto& client = clients_[c.index];
        for (const auto& l : levels_)
            if (l.level == client.level) s.ahead(client.lead(l.time));
        if (client.is_capped) s.beyond(client.pace, now);
    }
    /// Continues from the client's standing with an earlier policy. Call before its first wake().
    void resume(client_id c, client_standing& s, instant now) noexcept {
        now_ = std::max(now_, now);
        auto& client = clients_[c.index];
        client.tag = tag_of(client, static_cast<double>(s.here().ahead.count()));
        if (client.is_capped) client.pace.from = now_ + client.pace.lasts(s.here().beyond);
    }

private:
    friend class fair;
    weighted_fair(ns turn, bool equal) noexcept : turn_(turn), equal_(equal) {}

    static constexpr std::uint64_t is_guest = 1, is_lent = 2;
    // The most device time, in ns, owed to a client that is held repeatedly because its streams
    // take no more: several long calls.
    static constexpr double most_owed = 250e6;
    static constexpr std::int64_t rebase_at = std::int64_t{1} << 61;
    // No kernel takes two weeks. Without this limit a wrong measurement could overflow a tag.
    static constexpr ns most_at_once{std::int64_t{1} << 50};

    struct client_state {
        client_state() = default;
        client_state(client_id c, const client_settings& s, std::int32_t w, std::int64_t t) noexcept
            : tag(t),
              id(c),
              level(s.level),
              at(s.level),
              weight(w),
              is_capped(s.cap < share::whole()),
              soft(s.soft_cap),
              rate(1000.0 / weight),
              pace{.per_million = s.cap.permille() * std::int64_t{1000}} {}

        /// The key by which clients at the same level are ordered.
        [[nodiscard]] std::int64_t key() const noexcept { return at > level ? guest_tag : tag; }
        /// The device time, in ns, that the client is ahead of its share. `time`: the level's
        /// virtual time.
        [[nodiscard]] double lead(std::int64_t time) const noexcept { return static_cast<double>(tag - time) / rate; }

        std::int64_t tag = 0;        // ns of device time over weight
        std::int64_t guest_tag = 0;  // the same at a higher level, while its submission waits there
        client_id id;
        priority level, at;  // the client's level; the level of its first waiting submission
        std::int32_t weight = 1000;
        bool held = false, waits = false;
        bool is_capped = false, soft = false;
        // The tag's growth for one ns of device time, stored because a division would cost more
        // than the rest.
        double rate = 1;
        detail::pacer pace{};
    };
    struct level_state {
        priority level;
        std::int64_t time = 0;
    };

    [[nodiscard]] static std::int64_t count(instant t) noexcept { return t.time_since_epoch().count(); }
    [[nodiscard]] std::int32_t weight_of(const client_settings& s) const noexcept {
        return equal_ ? 1000 : std::max(static_cast<std::int32_t>(s.weight.permille()), 1);
    }

    // Null for a level that no client ever had. A linear search, since levels are few.
    [[nodiscard]] level_state* find_level(priority p) noexcept {
        for (auto& l : levels_)
            if (l.level == p) return &l;
        return nullptr;
    }

    // Opens the client's level and the levels that its submissions may have, as far as known.
    void open_levels(const client_settings& s) {
        for (const priority p : {s.level, std::max(s.level, s.ceiling)})
            if (find_level(p) == nullptr) levels_.push_back({p, 0});
    }

    // A level's virtual time; 0 for a level that no client ever had.
    [[nodiscard]] std::int64_t time_of(priority p) noexcept {
        const auto* const l = find_level(p);
        return l != nullptr ? l->time : 0;
    }
    // add() opened the level.
    [[nodiscard]] std::int64_t& virtual_time(priority p) noexcept { return find_level(p)->time; }

    // `ahead`: device time in ns.
    [[nodiscard]] std::int64_t tag_of(const client_state& client, double ahead) noexcept {
        constexpr auto most = static_cast<double>(rebase_at / 2);
        return virtual_time(client.level) + static_cast<std::int64_t>(std::clamp(ahead * client.rate, -most, most));
    }

    // Limits how much a client is owed for time in which it had no work or was capped. `owed` is in
    // a tag's unit.
    void catch_up(client_state& client, double owed) noexcept {
        const auto behind = static_cast<std::int64_t>(owed);
        client.tag = std::max(client.tag, virtual_time(client.level) - behind);
        if (client.at != client.level) client.guest_tag = std::max(client.guest_tag, time_of(client.at) - behind);
    }

    void take_turn(client_id c, ns cost) noexcept {
        // Counts at least this much for each kernel, which bounds the kernels of a turn.
        constexpr ns least{1000};
        if (c.index != latest_ || left_ <= ns{0}) left_ = turn_;
        latest_ = c.index;
        left_ -= std::max(cost, least);
    }

    // The smallest waiting tag at the client's level; the client's own if that isn't the level
    // served next.
    [[nodiscard]] std::int64_t key_of_first(const client_state& client) const noexcept {
        if (waiting_.empty()) return client.key();
        const auto& first = clients_[waiting_.first()];
        return first.at == client.at ? first.key() : client.key();
    }

    // Charges the client at its own level and, if `guest`, at the higher level at which its
    // submission went.
    void charge(client_state& client, ns delta, bool guest) noexcept {
        const auto cost = std::clamp(delta, -most_at_once, most_at_once).count();
        const auto grows = static_cast<std::int64_t>(static_cast<double>(cost) * client.rate);
        client.tag = std::max(client.tag + grows, -rebase_at);
        if (guest) client.guest_tag = std::clamp(client.guest_tag + grows, -rebase_at, rebase_at);
        if (client.tag > rebase_at) rebase(client.level);
    }

    // Moves a level's tags back to 0. A tag gets so large after decades, or after months of one
    // client alone at 0.1 %, and only differences matter.
    GPUSHARE_RARE void rebase(priority p) noexcept {
        const auto base = std::exchange(virtual_time(p), 0);
        const auto moved = [&](std::int64_t tag) { return std::clamp(tag - base, -rebase_at / 2, rebase_at / 2); };
        for (auto& c : clients_) {
            if (c.level == p) c.tag = moved(c.tag);
            if (c.at == p && c.at != c.level) c.guest_tag = moved(c.guest_tag);
            // An index that was never used doesn't wait.
            if (c.waits && waiting_.contains(c.id.index)) place(c);
        }
    }

    void take_out(const client_state& c) noexcept {
        waiting_.drop(c.id.index);
        if (!c.is_capped) return;
        capped_out_.drop(c.id.index);
        borrowing_.drop(c.id.index);
    }
    // A client within its cap waits for its turn; otherwise it waits for time to pass.
    void place(const client_state& c) noexcept {
        const auto index = c.id.index;
        if (num_capped_ > 0 || !capped_out_.empty()) {
            capped_out_.drop(index);
            borrowing_.drop(index);
            if (c.is_capped && !c.pace.entitled(now_)) {
                waiting_.drop(index);
                capped_out_.put(index, {}, count(c.pace.from));
                if (c.soft) borrowing_.put(index, c.at, count(c.pace.from));
                return;
            }
        }
        waiting_.put(index, c.at, c.key());
    }

    detail::plain_list<client_state> clients_;
    detail::plain_list<level_state> levels_;
    detail::client_heap waiting_;  // ordered by tag
    // Ordered by when the clients are within their caps again; clients with soft caps are in both.
    detail::client_heap capped_out_, borrowing_;
    std::uint32_t num_capped_ = 0;  // clients with a cap
    ns turn_;                       // the length of a turn; 0 or less: no turns
    ns left_{};                     // the rest of the present turn
    std::uint32_t latest_ = 0;      // the client served last, whose turn it is
    bool equal_ = false;            // whether all weights count as alike
    instant now_{};                 // up to date while a client has a cap
    ns all_had_{};                  // the device time of all completed work
};
static_assert(compute_policy<weighted_fair>);

/// Gives each of the N clients of a level that have work 1/N, whatever their weights. Looks at
/// `level` and caps, and is otherwise the same as weighted_fair. A copy as a weighted_fair ignores
/// weights, too. A value; not thread-safe.
class fair : public weighted_fair {
public:
    /// Turns of usual_turn if take_turns() is called, none otherwise.
    fair() noexcept : weighted_fair(ns{-1}, true) {}
};
static_assert(compute_policy<fair>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
