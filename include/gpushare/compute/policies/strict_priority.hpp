// SPDX-License-Identifier: Apache-2.0
// Strict priority with a cap on the high levels. Clients of high levels go first until together
// they have used up the cap. Then the other levels go for a while, so that low work doesn't starve.
// While the others have no work, the high levels aren't capped.
//
//   gpushare::strict_priority<> policy{80_pct};  // levels above 0 have at most 80 %
//   gpushare::strict_priority<> reserved{80_pct, gpushare::priority{3}};  // levels 3 and above
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/pacer.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// High levels first, up to a cap. Looks at `level` and at the settings that `Inner` uses. One
/// `Inner` decides among the high levels, another among the low ones; either may refuse. With a cap
/// of the whole, low work may starve. If a client of a low level has a submission of a high level,
/// the submission goes as high work does, within the same cap. While low levels have work, the high
/// ones get in a time t at most the cap times (t + w), plus the submission begun last. Here w is
/// how long the high levels waited for low work before t without having made up for it, at least
/// 5 ms and at most 100 ms. A value; not thread-safe. A call costs as much as a call of `Inner`.
/// The members are those of compute_policy.
template <compute_policy Inner = weighted_fair>
class strict_priority {
public:
    /// Levels above 0 have at most 90 %.
    strict_priority() : strict_priority(share::of_permille(900)) {}
    /// Levels of `high` and above have at most `cap`.
    explicit strict_priority(share cap, priority high = {1}, Inner inner = {})
        : high_from_(high), high_(inner), low_(std::move(inner)) {
        pace_.per_million = cap.permille() * std::int64_t{1000};
    }

    /// Whether `Inner` enforces the cap in these settings.
    [[nodiscard]] bool honours(const client_settings& s) const noexcept { return detail::honours(low_, s); }
    /// Whether `Inner` looks at classes.
    [[nodiscard]] bool has_classes() const noexcept { return detail::has_classes(low_); }
    /// The hard cap of `Inner`; see compute_policy.
    [[nodiscard]] std::uint64_t hard_cap_of(client_id c) const noexcept {
        return detail::hard_cap_of(is_high(clients_[c.index].level) ? high_ : low_, c);
    }
    /// Tells the client's standing with `Inner`, then how far the high levels are beyond their cap;
    /// see client_standing.
    void tell_standing(client_id c, client_standing& s, instant now) const noexcept {
        const bool high = is_high(clients_[c.index].level);
        detail::tell_standing(high ? high_ : low_, c, s, now);
        s.outwards();
        s.beyond(pace_, now);
    }
    /// Continues from the client's standing with an earlier policy. Call before its first wake().
    void resume(client_id c, client_standing& s, instant now) noexcept {
        now_ = std::max(now_, now);
        detail::resume(of(clients_[c.index].level), c, s, now);
        s.outwards();
        pace_.from = std::max(pace_.from, now_ + pace_.lasts(s.here().beyond));
    }

    /// Calls take_turns() of both inner policies, if they have this member.
    void take_turns() noexcept {
        (void)detail::in_turn(high_, true);
        (void)detail::in_turn(low_, true);
    }

    /// A client begins.
    failure add(client_id c, const client_settings& s) {
        if (clients_.size() <= c.index) clients_.resize(c.index + std::size_t{1});
        if (const auto why = of(s.level).add(c, s); why.code != errc::none) return why;
        clients_[c.index] = {.id = c, .level = s.level};
        return {};
    }

    /// Changes a client's settings. `Inner` may refuse.
    failure change(client_id c, const client_settings& s) {
        auto& client = clients_[c.index];
        if (is_high(s.level) == is_high(client.level)) {
            if (const auto why = of(s.level).change(c, s); why.code != errc::none) return why;
        } else {
            if (const auto why = of(s.level).add(c, s); why.code != errc::none) return why;
            const bool waits = client.waits, held = client.held;
            client_standing standing;
            detail::tell_standing(of(client.level), c, standing, now_);
            remove(c);
            detail::resume(of(s.level), c, standing, now_);
            client.waits = waits;
            client.held = held;
            if (waits && !held) of(s.level).wake(c, client.head, now_);
            if (waits && is_high(s.level)) ++high_waiting_;
        }
        client.level = s.level;
        return {};
    }

    /// A client ends.
    void remove(client_id c) noexcept {
        sleep(c);
        of(clients_[c.index].level).remove(c);
    }

    /// The client has waiting work.
    void wake(client_id c, const queue_head& head, instant now) noexcept {
        now_ = std::max(now_, now);
        auto& client = clients_[c.index];
        client.head = head;
        client.held = false;
        if (!std::exchange(client.waits, true) && is_high(client.level) && high_waiting_++ == 0)
            pace_.begin(now_, all_had_);
        of(client.level).wake(c, head, now_);
    }

    /// The client has no waiting work any more.
    void sleep(client_id c) noexcept {
        auto& client = clients_[c.index];
        client.held = false;
        if (std::exchange(client.waits, false) && is_high(client.level)) --high_waiting_;
        of(client.level).sleep(c);
    }

    /// The client's work waits, but must not be picked until wake().
    void hold(client_id c) noexcept {
        clients_[c.index].held = true;
        detail::hold(of(clients_[c.index].level), c);
    }

    /// Within one level the level's inner policy decides.
    [[nodiscard]] bool before(client_id a, client_id b) const noexcept {
        const auto level = clients_[a.index].level;
        return level == clients_[b.index].level && detail::goes_before(is_high(level) ? high_ : low_, a, b);
    }

    /// A high client while the cap isn't used up, or while no other client waits.
    [[nodiscard]] choice pick(instant now) noexcept {
        now_ = std::max(now_, now);
        const choice high = high_.pick(now_);
        choice low = low_.pick(now_);
        const bool lifted = low && is_high(clients_[low->index].head.level);
        if (pace_.entitled(now_)) {
            if (high && !(lifted && clients_[low->index].head.level > level_of(high))) return high;
        } else if (lifted) {  // the cap is used up: the submission falls back to its client's level
            for (; low && is_high(clients_[low->index].head.level); low = low_.pick(now_)) {
                clients_[low->index].head.level = no_priority;
                low_.wake(*low, clients_[low->index].head, now_);
            }
        }
        if (low || high) return low ? low : high;
        return choice(std::min(low.ask_again(), high.ask_again()));
    }

    /// Charges the prediction to the level's inner policy and, for high work within the cap, to the
    /// cap. Returns which it was, for correct().
    std::uint64_t serve(client_id c, ns cost, instant now) noexcept {
        now_ = std::max(now_, now);
        const auto level = clients_[c.index].level;
        // High work beyond the cap goes only while no other client wants the device, so the cap
        // isn't charged.
        const bool high = is_high(level), lifted = !high && is_high(clients_[c.index].head.level);
        const bool counts = (high || lifted) && pace_.entitled(now_);
        if (counts) pace_.spend(cost, now_, all_had_);
        const std::uint64_t of_it = high && !counts ? is_lent : lifted && counts ? is_lifted : 0;
        return detail::serve(of(level), c, cost, now_) << 2 | of_it;
    }

    /// How many bits serve() uses: two, and those of `Inner`.
    [[nodiscard]] unsigned lent_bits() const noexcept { return std::min(2 + detail::lent_bits(high_), 64U); }

    /// Charges the difference to the true cost in the same way.
    void correct(client_id c, ns delta, std::uint64_t lent = 0) noexcept {
        const bool high = is_high(clients_[c.index].level);
        if (high ? (lent & is_lent) == 0 : (lent & is_lifted) != 0) pace_.adjust(delta);
        detail::correct(of(clients_[c.index].level), c, delta, lent >> 2);
    }

    /// Some client's completed work took this much device time; see compute_policy.
    void ended(ns took) noexcept {
        all_had_ = saturating_add(all_had_, std::max(took, ns{0}));
        detail::ended(high_, took);
        detail::ended(low_, took);
    }

private:
    static constexpr std::uint64_t is_lent = 1, is_lifted = 2;

    struct client_state {
        client_id id{};
        priority level{};
        queue_head head{};
        bool waits = false, held = false;
    };

    [[nodiscard]] bool is_high(priority p) const noexcept { return p >= high_from_; }
    [[nodiscard]] priority level_of(const choice& c) const noexcept {
        return std::max(clients_[c->index].level, clients_[c->index].head.level);
    }
    [[nodiscard]] Inner& of(priority p) noexcept { return is_high(p) ? high_ : low_; }

    priority high_from_;
    Inner high_, low_;
    detail::pacer pace_{};  // the cap of the high levels
    ns all_had_{};          // the device time of all completed work
    std::size_t high_waiting_ = 0;
    std::vector<client_state> clients_;
    instant now_{};
};
static_assert(compute_policy<strict_priority<>>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
