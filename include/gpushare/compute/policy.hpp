// SPDX-License-Identifier: Apache-2.0
// The concept of a compute policy: a plain value that decides which waiting client's submission is
// admitted next. The limiter tells the policy how long each submission took. A policy has no clock,
// thread or device: time is an argument. So a test drives a policy through millions of steps of
// virtual time, and the same object runs in production. compute/policies/ has the library's
// policies.
//
//   gpushare::fifo policy;  // or another one of policies/
//   policy.add(chat, {});
//   policy.wake(chat, {.cost = 20us, .arrival = now}, now);  // its first submission waits
//   if (auto next = policy.pick(now)) policy.serve(*next, 20us, now);  // chat's: it is admitted
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include <gpushare/compute/detail/pacer.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Below all levels: marks a request or submission without a level of its own.
inline constexpr priority no_priority{std::numeric_limits<std::int32_t>::min()};

/// The lowest possible level, below all clients with a share: for work that gets the device only
/// while no other client wants it.
inline constexpr priority best_effort{no_priority.level + 1};

namespace detail {

/// The level of a client: best_effort for a client with neither a share nor a level of its own.
[[nodiscard]] constexpr priority level_of(share compute, priority level) noexcept {
    return compute == share{} && level == priority{} ? best_effort : level;
}

}  // namespace detail

/// A client of a limiter. Indices are dense, so that a policy keeps its clients in a vector. An
/// index is used again after its client has ended; the generation distinguishes its former owners
/// from the present one.
struct client_id {
    std::uint32_t index = 0;       ///< place in a vector of clients
    std::uint32_t generation = 0;  ///< counts the owners of the index so far

    friend constexpr bool operator==(client_id, client_id) = default;
};

/// The settings of a client. Each policy uses some of the settings; the policy's comment says
/// which.
struct client_settings {
    /// The weight for its level's device time, relative to other clients with work there.
    share weight = share::whole();
    priority level{};  ///< a higher level always goes first
    /// The highest level that its requests and submissions may have: a request for a higher level
    /// is served at this level. At least `level`.
    priority ceiling = no_priority;
    /// A submission with a declared width counts as filling at least this part of the SMs. If the
    /// device doesn't tell which part work fills, the submission is charged by that width. 0: the
    /// declared width counts as it is.
    sm_width narrowest{};
    /// The client's longest kernel, if known; 0: learnt from its submissions. Under a hard cap,
    /// work in flight can't be taken back. So several submissions are admitted one behind the other
    /// only if this is set and no submission has taken longer, and only as many as end together
    /// within half of limiter_options::horizon.
    ns longest{};
    /// The client's work calls yield_point() at least this often: higher levels wait for that time,
    /// and not for the whole work. 0: it doesn't yield. The limiter relies on this value: a longer
    /// stretch breaks a bound and raises an event. Ignored if kernels can't yield
    /// (yielding_timeline).
    ns yields_within{};
    /// The most of the device's time that the client gets. If a device doesn't tell how many of its
    /// SMs work fills, the charge follows the declared width (submit_options::width): set
    /// `narrowest` for a client that may declare too little.
    share cap = share::whole();
    /// The cap holds only while other clients, within their caps, have work.
    bool soft_cap = false;
    /// The part of the SMs that the client's level keeps free of lower levels' long work; see
    /// limiter_core.
    sm_width keeps{};
    ns slo{};                 ///< latency goal: how long after arrival a request is due; 0: none
    std::uint32_t group = 0;  ///< its class, from 0 to 65535, if the policy is a policy_tree
    /// How many of its submissions may wait; 0: limiter_options::queue_limit.
    std::uint32_t queue_limit = 0;
    std::uint32_t tag = 0;  ///< its number in records of its submissions; no policy looks at it
    tenant_name name{};     ///< in errors, events and records; no policy looks at it

    friend constexpr bool operator==(const client_settings&, const client_settings&) = default;
};

/// The known facts about the first submission in a client's queue.
struct queue_head {
    ns cost{};  ///< predicted device time; 0: unknown
    /// Predicted device time of the rest of its request, this submission included.
    ns remaining{};
    instant arrival{};         ///< when the submission began to wait
    instant deadline = never;  ///< when it is due
    std::uint64_t key = 0;     ///< its kind, for the cost model; 0: none
    /// The level at which the submission goes, if above its client's. A policy that enforces shares
    /// charges the client's share also for such a submission.
    priority level = no_priority;
};

/// A client's past as one policy hands it to the next: device time used beyond its cap and ahead of
/// its share. A policy over other policies (a policy_tree) reports for each of them in turn: the
/// client's own, then its class's, and so on outwards.
class client_standing {
public:
    /// The standing with one policy.
    struct scope {
        ns ahead{};   ///< device time ahead of its share; negative: behind
        ns beyond{};  ///< device time beyond its cap that the client still has to make up for
    };
    /// How many nested policies can report a standing; further ones are ignored.
    static constexpr std::size_t most = 4;

    /// The scope of the present policy.
    [[nodiscard]] const scope& here() const noexcept { return of_[at_]; }
    /// Reports that the client is ahead of its share by this much device time, in ns.
    void ahead(double time) noexcept {
        of_[at_].ahead = ns{static_cast<ns::rep>(time < -9e18 ? -9e18 : time > 9e18 ? 9e18 : time)};
    }
    /// Reports the client's debt beyond a cap, as in this pacer. If a client has two caps, the
    /// larger debt counts.
    void beyond(const detail::pacer& pace, instant now) noexcept {
        const ns owes = pace.beyond(now);
        if (owes > of_[at_].beyond) of_[at_].beyond = owes;
    }
    /// Moves on to the policy around the present one.
    void outwards() noexcept { at_ += at_ + 1 < most ? 1 : 0; }
    /// The present scope, for back_to().
    [[nodiscard]] std::size_t mark() const noexcept { return at_; }
    void back_to(std::size_t mark) noexcept { at_ = mark; }  ///< Returns to an earlier scope.

private:
    std::array<scope, most> of_{};
    std::size_t at_ = 0;
};

/// A policy's answer: a client to serve next, no client, or no client before a time.
class choice {
public:
    constexpr choice() noexcept = default;  ///< No client, until another call changes that.
    /// The client to serve.
    constexpr choice(client_id c) noexcept : client_(c), is_one_(true) {}  // NOLINT: a client is an answer
    /// No client before `ask_again`.
    constexpr explicit choice(instant ask_again) noexcept : ask_again_(ask_again) {}

    /// Whether the answer is a client.
    [[nodiscard]] constexpr explicit operator bool() const noexcept { return is_one_; }
    /// Which one, if any.
    [[nodiscard]] constexpr client_id operator*() const noexcept { return client_; }
    /// Which one, if any.
    [[nodiscard]] constexpr const client_id* operator->() const noexcept { return &client_; }
    /// If no client is chosen: when to ask again even if nothing happens until then. `never`: there
    /// is no need.
    [[nodiscard]] constexpr instant ask_again() const noexcept { return ask_again_; }

    friend constexpr bool operator==(const choice&, const choice&) = default;

private:
    client_id client_{};
    bool is_one_ = false;
    instant ask_again_ = never;
};

/// Whether a policy never looks at the times that it gets. Such a policy declares `static constexpr
/// bool timeless = true`, and its limiter needn't read a clock.
template <class P>
inline constexpr bool is_timeless = requires {
    requires P::timeless;
};

/// Decides among the clients with waiting work. Calls come from one thread at a time, with times
/// that never go back. Only `add` and `change` may allocate and throw std::bad_alloc. If they throw
/// or refuse, nothing has changed.
///   add(c, settings)      a client begins, without work
///   change(c, settings)   new settings, effective immediately. Both may refuse: share_exceeded
///                         if the promised shares would sum to more than the whole
///   remove(c)             a client ends, whether it has work or not
///   wake(c, head, now)    c has waiting work, of which `head` is the first. Called when it had
///                         none, and again whenever another submission is the first
///   sleep(c)              c has no waiting work any more
///   pick(now)             the client to serve next, or when to ask again. Asked twice, answers the
///                         same
///   serve(c, cost, now)   c, which was picked, had its first submission admitted; cost predicts
///                         its device time. wake or sleep follows
///   correct(c, delta)     something served is over: its true cost less the predicted one
/// Further members are optional:
///   take_turns()          called once if work of different clients that fills the device runs in
///                         turn. Each change of clients then costs a wait on the device, so the
///                         policy may let a client go several times in a row
///   hold(c)               called in place of sleep(c) while c's first submission is still behind
///                         others on its stream, until wake(c, ...). The policy may owe c the share
///                         that it misses meanwhile, within bounds
///   before(a, b)          whether `a`, which has no waiting work, would go before the waiting `b`
///                         if `a` had work. If so, the limiter may keep the device for `a` for a
///                         moment (detail/limiter_clients.hpp)
///   honours(settings)     whether the policy enforces the cap in these settings. If not, the
///                         limiter refuses the client. Without this member the answer is yes
///   has_classes()         whether the policy looks at client_settings::group. If not, the limiter
///                         refuses groups other than 0. Without this member the answer is yes
///   hard_cap_of(c)        a number that identifies c's hard cap, equal for clients under the same
///                         cap; 0: none. The limiter keeps work in flight within a hard cap
///   ended(took)           some client's work has ended and took this much device time. From these
///                         calls a policy with caps measures how long a client waited for others
///   tell_standing(c, s, now), resume(c, s, now)
///                         hand over a client's debts when another policy takes over
///   needs_time()          of a timeless policy: whether it needs the time at present nevertheless.
///                         A timeless policy with hard caps must have this member
///   lent_bits()           A policy that lends device time may return a std::uint64_t from serve,
///                         and gets the value back as the third argument of correct; 0 stands for
///                         no value. lent_bits() says how many low bits the policy uses, so that a
///                         policy around it has room for its own. Without this member: all 64
// clang-format off
template <class P>
concept compute_policy = std::movable<P> && requires(P& p, client_id c, const client_settings& s, const queue_head& head,
                                                     ns cost, instant now) {
    { p.add(c, s) } -> std::same_as<failure>;
    { p.change(c, s) } -> std::same_as<failure>;
    { p.remove(c) } noexcept;
    { p.wake(c, head, now) } noexcept;
    { p.sleep(c) } noexcept;
    { p.pick(now) } noexcept -> std::same_as<choice>;
    { p.serve(c, cost, now) } noexcept;
    { p.correct(c, cost) } noexcept;
};
// clang-format on

namespace detail {

/// How many bits of serve()'s result belong to `p`.
template <class P>
[[nodiscard]] constexpr unsigned lent_bits(const P& p) noexcept {
    if constexpr (requires { p.lent_bits(); })
        return p.lent_bits();
    else
        return std::is_void_v<decltype(std::declval<P&>().serve(client_id{}, ns{}, instant{}))> ? 0 : 64;
}

/// Calls serve. Returns the value of `p`, or 0 if it returns none.
template <compute_policy P>
[[nodiscard]] std::uint64_t serve(P& p, client_id c, ns cost, instant now) noexcept {
    if constexpr (std::is_void_v<decltype(p.serve(c, cost, now))>) {
        p.serve(c, cost, now);
        return 0;
    } else {
        return p.serve(c, cost, now);
    }
}
/// Calls correct. `lent`: the value that serve returned for this submission.
template <compute_policy P>
void correct(P& p, client_id c, ns delta, std::uint64_t lent) noexcept {
    if constexpr (requires { p.correct(c, delta, lent); })
        p.correct(c, delta, lent);
    else
        p.correct(c, delta);
}

/// Calls ended, if `p` has it.
template <class P>
void ended(P& p, ns took) noexcept {
    if constexpr (requires { p.ended(took); }) p.ended(took);
}

/// Calls tell_standing, if `p` has it.
template <class P>
void tell_standing(const P& p, client_id c, client_standing& s, instant now) noexcept {
    if constexpr (requires { p.tell_standing(c, s, now); }) p.tell_standing(c, s, now);
}
/// Calls resume, if `p` has it.
template <class P>
void resume(P& p, client_id c, client_standing& s, instant now) noexcept {
    if constexpr (requires { p.resume(c, s, now); }) p.resume(c, s, now);
}

/// Whether `p` enforces the cap in these settings.
template <class P>
[[nodiscard]] bool honours(const P& p, const client_settings& s) noexcept {
    if constexpr (requires { p.honours(s); })
        return p.honours(s);
    else
        return true;  // a policy of the embedder's own isn't checked
}
/// Whether `p` looks at the class in a client's settings.
template <class P>
[[nodiscard]] bool has_classes(const P& p) noexcept {
    if constexpr (requires { p.has_classes(); })
        return p.has_classes();
    else
        return true;
}
/// Names a setting that `p` would ignore; errc::none if there is none.
template <class P>
[[nodiscard]] failure ignores(const P& p, const client_settings& s) noexcept {
    if (!honours(p, s)) return {.code = errc::invalid_specification, .because = reason::no_caps};
    if (s.group != 0 && !has_classes(p)) return {.code = errc::invalid_specification, .because = reason::no_classes};
    return {};
}
/// The name of the hard cap to which `p` holds `c`, alone or together with clients whose cap has
/// the same name; 0: no hard cap.
template <class P>
[[nodiscard]] std::uint64_t hard_cap_of(const P& p, client_id c) noexcept {
    if constexpr (requires { p.hard_cap_of(c); })
        return p.hard_cap_of(c);
    else
        return 0;
}
/// The name of a hard cap that one client has for itself.
[[nodiscard]] constexpr std::uint64_t own_hard_cap(client_id c) noexcept { return std::uint64_t{c.index} + 1; }

/// Calls hold or, if `p` has none, sleep.
template <compute_policy P>
void hold(P& p, client_id c) noexcept {
    if constexpr (requires { p.hold(c); })
        p.hold(c);
    else
        p.sleep(c);
}

/// Whether `a`, which has no waiting work, would go before `b`; false if `p` has no `before`.
template <compute_policy P>
[[nodiscard]] bool goes_before(const P& p, client_id a, client_id b) noexcept {
    if constexpr (requires { p.before(a, b); })
        return p.before(a, b);
    else
        return false;
}

/// Calls take_turns if `asked` and if `p` has it. Returns `p`.
template <compute_policy P>
[[nodiscard]] P& in_turn(P& p, bool asked) noexcept {
    if constexpr (requires { p.take_turns(); })
        if (asked) p.take_turns();
    return p;
}

}  // namespace detail

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
