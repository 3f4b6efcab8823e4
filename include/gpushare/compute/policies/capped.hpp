// SPDX-License-Identifier: Apache-2.0
// Caps on device time, over any policy. A client that has used up its cap isn't offered to the
// inner policy until time has passed. A hard cap holds even if the device idles; a soft one holds
// only while other clients, within their caps, have work.
//
//   gpushare::capped<gpushare::weighted_fair> policy;      // include weighted_fair.hpp too
//   policy.add(batch, {.weight = 50_pct, .cap = 30_pct});            // never more than 30 %
//   policy.add(guest, {.cap = 10_pct, .soft_cap = true});  // more only if no other client wants it
//
// At the end of this header are three policies that only cap: hard_share, soft_share, equal_share.
// They refuse a client with errc::share_exceeded if its share and those promised to the other
// clients of its level would sum to more than the whole device.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/client_heap.hpp>
#include <gpushare/compute/detail/pacer.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A client's cap.
struct cap_terms {
    /// The cap, in millionths of the device's time; 0 counts as 1.
    std::int64_t per_million = 1'000'000;
    bool soft = false;      ///< holds only while others, within their caps, have work
    bool promised = false;  ///< the caps of a level are promises: together at most the whole
};

/// The default rule of `capped`: the cap in the client's settings, without a promise.
struct cap_of_settings {
    /// Takes `cap` and `soft_cap` from the settings.
    [[nodiscard]] cap_terms operator()(const client_settings& s) const noexcept {
        return {.per_million = s.cap.permille() * std::int64_t{1000}, .soft = s.soft_cap};
    }
};

/// `Inner` decides among the clients within their caps; `Rule` determines a client's cap. Over a
/// time t, a client with a hard cap gets at most its cap times (t + w), plus the submission begun
/// last, or those in flight at once by client_settings::longest. Here w is how long the client
/// waited for others' work before t without having made up for it, at least 5 ms and at most 100
/// ms: so the client reaches its cap alongside others' long calls. A client with a soft cap isn't
/// charged for time that it borrows; borrowers go in the order in which they will be within their
/// caps again. A value; not thread-safe. A call costs O(log waiting) plus the call of `Inner`. The
/// members are those of compute_policy.
template <compute_policy Inner, std::invocable<const client_settings&> Rule = cap_of_settings>
class capped {
public:
    capped() = default;  ///< The default policy and the default rule.
    /// Takes another inner policy.
    template <std::same_as<Inner> I>  // no conversions: an any_policy would accept this object
    explicit capped(I inner, Rule rule = {}) : inner_(std::move(inner)), rule_(std::move(rule)) {}
    /// Takes another rule.
    explicit capped(Rule rule) : rule_(std::move(rule)) {}

    /// A client begins. Refused with errc::share_exceeded (figures in permille) or the code of
    /// `Inner`.
    failure add(client_id c, const client_settings& s) {
        const cap_terms terms = rule_(s);
        auto& level = open_level(s.level);
        if (const auto why = admits(level, terms, 0); why.code != errc::none) return why;
        if (clients_.size() <= c.index) clients_.resize(c.index + std::size_t{1});
        capped_out_.reserve(clients_.size());
        borrowing_.reserve(clients_.size());
        if (const auto why = inner_.add(c, s); why.code != errc::none) return why;
        clients_[c.index] = {.id = c, .level = s.level, .terms = terms};
        clients_[c.index].pace.per_million = terms.per_million;
        if (terms.promised) level.promised += terms.per_million;
        return {};
    }

    /// Changes a client's settings; refused as in `add`. The client repays time beyond its old cap
    /// at the new rate.
    failure change(client_id c, const client_settings& s) {
        auto& client = clients_[c.index];
        const cap_terms terms = rule_(s);
        (void)open_level(s.level);
        auto &from = open_level(client.level), &to = open_level(s.level);
        const auto old = client.terms.promised ? client.terms.per_million : 0;
        if (const auto why = admits(to, terms, &from == &to ? old : 0); why.code != errc::none) return why;
        if (const auto why = inner_.change(c, s); why.code != errc::none) return why;
        from.promised -= old;
        if (terms.promised) to.promised += terms.per_million;
        // Repaid at the new rate: otherwise a client raised from 0.1 % would first wait a thousand
        // times its last kernel.
        if (client.pace.from > now_) {
            const auto ahead = static_cast<double>((client.pace.from - now_).count());
            const auto ratio = static_cast<double>(std::max<std::int64_t>(client.terms.per_million, 1)) /
                               static_cast<double>(std::max<std::int64_t>(terms.per_million, 1));
            client.pace.from = saturating_add(now_, ns{static_cast<std::int64_t>(std::min(ahead * ratio, 4e18))});
        }
        client.level = s.level;
        client.terms = terms;
        client.pace.per_million = terms.per_million;
        if (client.waits) place(client);
        return {};
    }

    /// Whether the policy enforces the cap in these settings: its rule or `Inner` looks at the cap.
    [[nodiscard]] bool honours(const client_settings& s) const noexcept {
        return rule_(s).per_million <= s.cap.permille() * std::int64_t{1000} || detail::honours(inner_, s);
    }
    /// Whether `Inner` looks at classes.
    [[nodiscard]] bool has_classes() const noexcept { return detail::has_classes(inner_); }
    /// The client's own hard cap or, without one, the hard cap of `Inner`; see compute_policy.
    [[nodiscard]] std::uint64_t hard_cap_of(client_id c) const noexcept {
        const auto& terms = clients_[c.index].terms;
        const bool hard = !terms.soft && terms.per_million < 1'000'000;
        return hard ? detail::own_hard_cap(c) : detail::hard_cap_of(inner_, c);
    }
    /// Tells the client's time beyond its cap, and the standing of `Inner`, to another policy; see
    /// client_standing.
    void tell_standing(client_id c, client_standing& s, instant now) const noexcept {
        const auto here = s.mark();
        detail::tell_standing(inner_, c, s, now);
        const auto inside = s.mark();
        s.back_to(here);
        if (clients_[c.index].terms.per_million < 1'000'000) s.beyond(clients_[c.index].pace, now);
        s.back_to(inside);
    }
    /// Continues from the client's standing with an earlier policy. Call before its first wake().
    void resume(client_id c, client_standing& s, instant now) noexcept {
        now_ = std::max(now_, now);
        auto& pace = clients_[c.index].pace;
        pace.from = now_ + pace.lasts(s.here().beyond);
        detail::resume(inner_, c, s, now);
    }

    /// Calls take_turns() of `Inner`, if it has that member.
    void take_turns() noexcept { (void)detail::in_turn(inner_, true); }

    /// A client ends. Its promised share is free again.
    void remove(client_id c) noexcept {
        sleep(c);
        auto& client = clients_[c.index];
        if (std::exchange(client.terms.promised, false)) find_level(client.level)->promised -= client.terms.per_million;
        inner_.remove(c);
    }

    /// The client has waiting work.
    void wake(client_id c, const queue_head& head, instant now) noexcept {
        now_ = std::max(now_, now);
        auto& client = clients_[c.index];
        client.head = head;
        client.held = false;
        if (!std::exchange(client.waits, true)) client.pace.begin(now_, all_had_);
        place(client);
    }

    /// The client has no waiting work any more.
    void sleep(client_id c) noexcept {
        clients_[c.index].waits = false;
        capped_out_.drop(c.index);
        borrowing_.drop(c.index);
        inner_.sleep(c);
    }

    /// The client's work waits, but must not be picked until wake().
    void hold(client_id c) noexcept {
        capped_out_.drop(c.index);
        borrowing_.drop(c.index);
        clients_[c.index].held = true;
        detail::hold(inner_, c);
    }

    /// The order of `Inner`, for two clients within their caps.
    [[nodiscard]] bool before(client_id a, client_id b) const noexcept {
        const auto within = [&](client_id c) {
            const auto& client = clients_[c.index];
            return client.terms.per_million >= 1'000'000 || client.pace.entitled(now_);
        };
        return within(a) && within(b) && detail::goes_before(inner_, a, b);
    }

    /// The client that `Inner` picks among those within their caps; otherwise a borrower; otherwise
    /// the time when a client will be within its cap.
    [[nodiscard]] choice pick(instant now) noexcept {
        now_ = std::max(now_, now);
        while (!capped_out_.empty() && capped_out_.first_key() <= count(now_)) {
            auto& client = clients_[capped_out_.first()];
            capped_out_.drop(client.id.index);
            borrowing_.drop(client.id.index);
            inner_.wake(client.id, client.head, now_);
        }
        const choice inside = inner_.pick(now_);
        if (inside) return inside;
        if (!borrowing_.empty()) return clients_[borrowing_.first()].id;
        if (capped_out_.empty()) return inside;
        return choice(std::min(inside.ask_again(), instant{ns{capped_out_.first_key()}}));
    }

    /// Charges the prediction, unless the time is lent. Returns whether it is lent, for correct().
    std::uint64_t serve(client_id c, ns cost, instant now) noexcept {
        now_ = std::max(now_, now);
        if (borrowing_.contains(c.index)) return is_lent;
        clients_[c.index].pace.spend(cost, now_, all_had_);
        return detail::serve(inner_, c, cost, now_) << 1;
    }

    /// How many bits serve() uses: one, and those of `Inner`.
    [[nodiscard]] unsigned lent_bits() const noexcept { return std::min(1 + detail::lent_bits(inner_), 64U); }

    /// Charges the difference to the true cost, unless the time was lent.
    void correct(client_id c, ns delta, std::uint64_t lent = 0) noexcept {
        if ((lent & is_lent) != 0) return;
        auto& client = clients_[c.index];
        client.pace.adjust(delta);
        detail::correct(inner_, c, delta, lent >> 1);
        if (client.waits) place(client);
    }

    /// Some client's completed work took this much device time; see compute_policy.
    void ended(ns took) noexcept {
        all_had_ = saturating_add(all_had_, std::max(took, ns{0}));
        detail::ended(inner_, took);
    }

private:
    static constexpr std::uint64_t is_lent = 1;

    struct client_state {
        client_id id{};
        priority level{};
        cap_terms terms{};
        detail::pacer pace{};
        queue_head head{};
        bool waits = false, held = false;
    };
    struct level_state {
        priority level{};
        std::int64_t promised = 0;
    };

    [[nodiscard]] static std::int64_t count(instant t) noexcept { return t.time_since_epoch().count(); }

    [[nodiscard]] level_state* find_level(priority p) noexcept {
        for (auto& l : levels_)
            if (l.level == p) return &l;
        return nullptr;
    }
    [[nodiscard]] level_state& open_level(priority p) {
        if (auto* const l = find_level(p)) return *l;
        levels_.push_back({p, 0});
        return levels_.back();
    }

    // The figures are in permille, the unit of shares; the remainder is rounded down.
    [[nodiscard]] static failure admits(const level_state& level, const cap_terms& terms,
                                        std::int64_t given_up) noexcept {
        const auto left = 1'000'000 - (level.promised - given_up);
        if (!terms.promised || terms.per_million <= left) return {};
        return {.code = errc::share_exceeded,
                .asked = static_cast<std::uint64_t>(terms.per_million / 1000),
                .left = static_cast<std::uint64_t>(left / 1000),
                .limit = 1000};
    }

    // A client within its cap waits in the inner policy; otherwise it waits for time to pass.
    void place(client_state& client) noexcept {
        const auto index = client.id.index;
        if (client.held) return;
        if (client.terms.per_million >= 1'000'000 || client.pace.entitled(now_)) {
            capped_out_.drop(index);
            borrowing_.drop(index);
            inner_.wake(client.id, client.head, now_);
        } else {
            inner_.sleep(client.id);
            capped_out_.put(index, {}, count(client.pace.from));
            if (client.terms.soft) {
                borrowing_.put(index, std::max(client.level, client.head.level), count(client.pace.from));
            } else {
                borrowing_.drop(index);
            }
        }
    }

    Inner inner_{};
    [[no_unique_address]] Rule rule_{};
    std::vector<client_state> clients_;
    std::vector<level_state> levels_;
    // Ordered by when the clients are within their caps again; clients with soft caps are in both.
    detail::client_heap capped_out_, borrowing_;
    instant now_{};
    ns all_had_{};  // the device time of all completed work
};

/// The rule of hard_share and soft_share: the weight is the cap, and is promised.
template <bool Soft>
struct cap_by_weight {
    /// Takes the cap from `weight`.
    [[nodiscard]] cap_terms operator()(const client_settings& s) const noexcept {
        return {.per_million = s.weight.permille() * std::int64_t{1000}, .soft = Soft, .promised = true};
    }
};

/// The rule of equal_share: the same cap for all clients of a level, promised.
class equal_cap {
public:
    /// For at most `most` clients of a level; 0 counts as 1.
    constexpr equal_cap(std::uint32_t most = 8) noexcept : most_(std::max(most, 1U)) {}  // NOLINT: equal_share{8}

    /// 1 / `most`, whatever the settings.
    [[nodiscard]] cap_terms operator()(const client_settings&) const noexcept {
        return {.per_million = 1'000'000 / most_, .promised = true};
    }

private:
    std::uint32_t most_;
};

/// Each client gets `weight` of the device's time and never more, even if it is alone.
using hard_share = capped<weighted_fair, cap_by_weight<false>>;
static_assert(compute_policy<hard_share>);

/// Each client is held to `weight` of the device's time while others that are within their share
/// have work. Otherwise it isn't limited.
using soft_share = capped<weighted_fair, cap_by_weight<true>>;
static_assert(compute_policy<soft_share>);

/// Each client of a level gets 1/N of the device's time and never more, even if it is alone; client
/// N + 1 is refused. `equal_share{N}`; 8 by default.
using equal_share = capped<fair, equal_cap>;
static_assert(compute_policy<equal_share>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
