// SPDX-License-Identifier: Apache-2.0
// The concept of a compute policy: a plain value that decides which waiting client's submission is admitted next, and
// is told what each took. It has no clock, thread or device: time is an argument. So a test drives a policy through
// millions of steps of virtual time, and the same object runs in production. compute/policies/ has the library's
// policies.
//
//   gpushare::fifo policy;                                                 // or another one of policies/
//   policy.add(chat, {});
//   policy.wake(chat, {.cost = 20us, .arrival = now}, now);                // its first submission waits
//   if (auto next = policy.pick(now)) policy.serve(*next, 20us, now);      // chat's: it is admitted
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

/// Below all levels: a request has none of its own.
inline constexpr priority no_priority{std::numeric_limits<std::int32_t>::min()};

/// The lowest possible level, below all clients with a share: for work that has the device while no
/// other client wants it.
inline constexpr priority best_effort{no_priority.level + 1};

namespace detail {

/// Where work goes: without a share and a level of its own, below all who have one.
[[nodiscard]] constexpr priority level_of(share compute, priority level) noexcept {
    return compute == share{} && level == priority{} ? best_effort : level;
}

}  // namespace detail

/// A client of a limiter. Indices are dense, so that a policy keeps its clients in a vector. An
/// index is used again after its client has ended; the generation distinguishes its former owners
/// from the present one.
struct client_id {
    std::uint32_t index = 0;       ///< place in a vector of clients
    std::uint32_t generation = 0;  ///< how often the index had an owner

    friend constexpr bool operator==(client_id, client_id) = default;
};

/// The settings of a client. Each policy uses some of them; its comment says which.
struct client_settings {
    share weight = share::whole();  ///< of the device time of its level, relative to the others with work there
    priority level{};               ///< a higher level always goes first
    /// The highest level that its requests and submissions may have: a request for more is served
    /// at this one. At least `level`.
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
    bool soft_cap = false;  ///< the cap holds only while others, within theirs, have work
    sm_width keeps{};       ///< SMs that its level keeps free of lower levels' long work; see limiter_core
    /// Its level lends the SMs that it keeps to lower work that ends or yields (yields_within)
    /// within this time. If several clients of a level keep SMs, the shortest time counts. The
    /// level's bound includes the work that may borrow SMs. 0, or less than an eighth of
    /// limiter_options::horizon: that eighth. A kind of submission that doesn't yield may borrow if
    /// its latest 16 submissions ended within this time, and all but one in a hundred of the latest
    /// 512 to 1023 (with fewer than a hundred, all; recent_longest::usual). So at most about one in
    /// a hundred of its calls occupies a kept SM for longer and breaks the bound; the next 16 to 31
    /// submissions then may not borrow. A kind that turns slow is detected by its first slow calls,
    /// those in flight together.
    ns back_within{};
    ns slo{};                       ///< how long after its arrival its work is due; 0: no objective
    std::uint32_t group = 0;        ///< its class, from 0, where the policy is a policy_tree
    std::uint32_t queue_limit = 0;  ///< how many of its submissions may wait; 0: as the limiter's options say
    std::uint32_t tag = 0;          ///< its number in records of its submissions; no policy looks at it
    tenant_name name{};             ///< in errors, events and records; no policy looks at it

    friend constexpr bool operator==(const client_settings&, const client_settings&) = default;
};

/// The first submission in a client's queue, as far as it is known.
struct queue_head {
    ns cost{};                 ///< predicted device time; 0: unknown
    ns remaining{};            ///< predicted device time of what is left of its request, itself included
    instant arrival{};         ///< when it began to wait
    instant deadline = never;  ///< when it is due
    std::uint64_t key = 0;     ///< its kind, for the cost model; 0: none
    /// The level at which it goes, if that is above its client's. Its client is charged all the
    /// same: a policy that enforces shares charges the client's share.
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
        ns beyond{};  ///< device time beyond its cap, which is yet to be made up for
    };
    static constexpr std::size_t most = 4;  ///< Policies, one over the other, that are told of; others are forgotten.

    [[nodiscard]] const scope& here() const noexcept { return of_[at_]; }  ///< The scope of the present policy.
    /// It has had so much ahead of its share, in ns.
    void ahead(double time) noexcept {
        of_[at_].ahead = ns{static_cast<ns::rep>(time < -9e18 ? -9e18 : time > 9e18 ? 9e18 : time)};
    }
    /// The client's debt beyond a cap, as this pacer says; of two caps on the same client, the
    /// larger debt counts.
    void beyond(const detail::pacer& pace, instant now) noexcept {
        const ns owes = pace.beyond(now);
        if (owes > of_[at_].beyond) of_[at_].beyond = owes;
    }
    /// The policy around the present one is next.
    void outwards() noexcept { at_ += at_ + 1 < most ? 1 : 0; }
    /// Where it is, and back to there.
    [[nodiscard]] std::size_t mark() const noexcept { return at_; }
    void back_to(std::size_t mark) noexcept { at_ = mark; }  ///< See mark().

private:
    std::array<scope, most> of_{};
    std::size_t at_ = 0;
};

/// A policy's answer: a client to serve next, nobody, or nobody before a time.
class choice {
public:
    constexpr choice() noexcept = default;  ///< Nobody, until another call changes that.
    /// This client.
    constexpr choice(client_id c) noexcept : client_(c), is_one_(true) {}  // NOLINT: a client is an answer
    /// Nobody before `ask_again`.
    constexpr explicit choice(instant ask_again) noexcept : ask_again_(ask_again) {}

    /// Whether it is a client.
    [[nodiscard]] constexpr explicit operator bool() const noexcept { return is_one_; }
    [[nodiscard]] constexpr client_id operator*() const noexcept { return client_; }           ///< Which one, if any.
    [[nodiscard]] constexpr const client_id* operator->() const noexcept { return &client_; }  ///< Which one, if any.
    /// Where nobody is chosen: when to ask again even if nothing happens until then. `never`: no need to.
    [[nodiscard]] constexpr instant ask_again() const noexcept { return ask_again_; }

    friend constexpr bool operator==(const choice&, const choice&) = default;

private:
    client_id client_{};
    bool is_one_ = false;
    instant ask_again_ = never;
};

/// Whether a policy never looks at the times that it gets. It declares this with a member
/// `static constexpr bool timeless = true`, and its limiter needs not read a clock for it.
template <class P>
inline constexpr bool is_timeless = requires {
    requires P::timeless;
};

/// Decides among the clients with waiting work. Calls come from one thread at a time, with times that never go back.
/// Only `add` and `change` may allocate, and throw std::bad_alloc; then, and where they refuse, nothing has changed.
///   add(c, settings)      a client begins, without work
///   change(c, settings)   other settings, in force at once. Both may refuse: errc::share_exceeded where what is promised
///                         would sum to more than the whole
///   remove(c)             a client ends, whether it has work or not
///   wake(c, head, now)    c has waiting work, of which `head` is the first. Called when it had none, and again whenever
///                         another submission is the first
///   sleep(c)              c has no waiting work any more
///   pick(now)             the client to serve next, or when to ask again. Asked twice, answers the same
///   serve(c, cost, now)   c, which was picked, had its first submission admitted; cost predicts its device time. wake or
///                         sleep follows
///   correct(c, delta)     something served is over: its true cost less the predicted one
/// A policy that lends device time may return an std::uint64_t from serve, and then takes it as the
/// third argument of correct; 0 where there is none. Its member `lent_bits()` says how many of the
/// low bits it uses, so that a policy around it has room for its own: without that member, all 64.
/// Two more members are optional. `take_turns()` is called once where different clients' work that
/// fills the device runs in turn, which costs a wait on the device at each change of clients; the
/// policy may then let a client go several times in a row. `hold(c)` is called in place of sleep(c)
/// while c's first submission is still behind others on its stream, until wake(c, ...); the policy
/// may owe c the share that it misses meanwhile, within bounds. `before(a, b)` says whether `a`,
/// which has nothing waiting, would go before `b`, which waits, if it had: then the limiter may
/// keep the device for it for a moment (detail/limiter_clients.hpp). `honours(settings)` says
/// whether it holds a client to the cap in these, or else the limiter refuses such a client:
/// without that member it does. `has_classes()` says whether it looks at client_settings::group, or
/// else the limiter refuses another than 0: without that member it does. `hard_cap_of(c)` names a client's hard cap, or 0: the limiter then
/// keeps what is in flight within it. `ended(took)` tells that somebody's work has ended, which took
/// so much device time: a policy with caps measures by it how long a client waited for others' work.
/// `tell_standing(c, s, now)` and `resume(c, s, now)` hand over what a client owes when another
/// policy takes over. `needs_time()`, of a timeless policy, says whether it has to know the time at
/// present all the same.
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

/// How many bits of what serve() returns belong to `p`.
template <class P>
[[nodiscard]] constexpr unsigned lent_bits(const P& p) noexcept {
    if constexpr (requires { p.lent_bits(); })
        return p.lent_bits();
    else
        return std::is_void_v<decltype(std::declval<P&>().serve(client_id{}, ns{}, instant{}))> ? 0 : 64;
}

/// The value that `p` returns for it, or 0.
template <compute_policy P>
[[nodiscard]] std::uint64_t serve(P& p, client_id c, ns cost, instant now) noexcept {
    if constexpr (std::is_void_v<decltype(p.serve(c, cost, now))>) {
        p.serve(c, cost, now);
        return 0;
    } else {
        return p.serve(c, cost, now);
    }
}
/// `lent`: what serve said of it.
template <compute_policy P>
void correct(P& p, client_id c, ns delta, std::uint64_t lent) noexcept {
    if constexpr (requires { p.correct(c, delta, lent); })
        p.correct(c, delta, lent);
    else
        p.correct(c, delta);
}

/// Tells a policy that can.
template <class P>
void ended(P& p, ns took) noexcept {
    if constexpr (requires { p.ended(took); }) p.ended(took);
}

/// Tells what `p` knows of the past of `c`.
template <class P>
void tell_standing(const P& p, client_id c, client_standing& s, instant now) noexcept {
    if constexpr (requires { p.tell_standing(c, s, now); }) p.tell_standing(c, s, now);
}
/// Tells a policy that goes on with it.
template <class P>
void resume(P& p, client_id c, client_standing& s, instant now) noexcept {
    if constexpr (requires { p.resume(c, s, now); }) p.resume(c, s, now);
}

/// Whether `p` does what these settings say of caps.
template <class P>
[[nodiscard]] bool honours(const P& p, const client_settings& s) noexcept {
    if constexpr (requires { p.honours(s); })
        return p.honours(s);
    else
        return true;  // one of the embedder's own, which looks at what it likes
}
/// Whether `p` looks at the class in settings.
template <class P>
[[nodiscard]] bool has_classes(const P& p) noexcept {
    if constexpr (requires { p.has_classes(); })
        return p.has_classes();
    else
        return true;
}
/// Which of these settings `p` would ignore; errc::none if none.
template <class P>
[[nodiscard]] failure ignores(const P& p, const client_settings& s) noexcept {
    if (!honours(p, s)) return {.code = errc::invalid_specification, .because = reason::no_caps};
    if (s.group != 0 && !has_classes(p)) return {.code = errc::invalid_specification, .because = reason::no_classes};
    return {};
}
/// Names the hard cap to which `p` holds `c`, alone or together with others of the same name; 0:
/// none.
template <class P>
[[nodiscard]] std::uint64_t hard_cap_of(const P& p, client_id c) noexcept {
    if constexpr (requires { p.hard_cap_of(c); })
        return p.hard_cap_of(c);
    else
        return 0;
}
/// The name of a hard cap of one client alone.
[[nodiscard]] constexpr std::uint64_t own_hard_cap(client_id c) noexcept { return std::uint64_t{c.index} + 1; }
/// Whether it has to be told the time at present, though it is timeless.
template <class P>
[[nodiscard]] bool needs_time(const P& p) noexcept {
    if constexpr (requires { p.needs_time(); })
        return p.needs_time();
    else
        return false;
}

/// Tells a policy that can.
template <compute_policy P>
void hold(P& p, client_id c) noexcept {
    if constexpr (requires { p.hold(c); })
        p.hold(c);
    else
        p.sleep(c);
}

/// Whether `p` says that `a`, which doesn't wait, would go before `b`; false where it can't tell.
template <compute_policy P>
[[nodiscard]] bool goes_before(const P& p, client_id a, client_id b) noexcept {
    if constexpr (requires { p.before(a, b); })
        return p.before(a, b);
    else
        return false;
}

/// Tells a policy that can, if `asked`, that clients take turns. Returns the policy.
template <compute_policy P>
[[nodiscard]] P& in_turn(P& p, bool asked) noexcept {
    if constexpr (requires { p.take_turns(); })
        if (asked) p.take_turns();
    return p;
}

}  // namespace detail

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
