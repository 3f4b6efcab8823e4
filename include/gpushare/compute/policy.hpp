// SPDX-License-Identifier: Apache-2.0
// The concept of a compute policy: a plain value that decides which waiting client's submission is admitted next, and
// is told what each took. It has no clock, thread or device: time is an argument. So a test drives a policy through
// millions of steps of virtual time, and the same object runs in production. compute/policies/ has the library's
// policies.
//
//   struct my_policy { ... };                                   // the members that compute_policy asks for
//   static_assert(gpushare::compute_policy<my_policy>);
//   gpushare::compute_limiter<stream, clock, my_policy> limiter{{}, clock};
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A client of a limiter. Indices are dense, so that a policy keeps its clients in a vector. An index is used again
/// after its client has ended; the generation tells former owners of the index from the present one.
struct client_id {
    std::uint32_t index = 0;       ///< place in a vector of clients
    std::uint32_t generation = 0;  ///< how often the index had an owner

    friend constexpr bool operator==(client_id, client_id) = default;
};

/// What a client asks for. Each policy looks at some of these; its comment says at which.
struct client_settings {
    share weight = share::whole();  ///< of the device time of its level, relative to the others with work there
    priority level{};               ///< a higher level always goes first
    ns longest{};                   ///< its longest kernel, if known; 0: learnt from what it submits
    /// Its work calls yield_point() at least this often: higher levels wait for so long, and not for the whole of it. 0: it doesn't
    /// yield. Its word: what isn't kept breaks a bound, and is an event. Ignored where kernels can't
    /// (yielding_timeline).
    ns yields_within{};
    share cap = share::whole();  ///< the most of the device's time that it gets
    bool soft_cap = false;       ///< the cap holds only while others, within theirs, have work
    sm_width keeps{};            ///< its level keeps this part of the SMs free of long work below; see limiter_core
    /// What its level keeps is lent to work below that ends within this or yields within it (yields_within);
    /// of those that keep a part, the shortest counts. Its level's bound counts what may be lent. 0, or less than an
    /// eighth of limiter_options::horizon: that eighth. Of a kind that doesn't yield, the latest 16 have to have ended within
    /// this, and of the latest 512 to 1023 all but one in a hundred (of fewer than a hundred, all; recent_longest::usual). So at
    /// most about one in a hundred of its calls keeps such an SM for longer, which breaks the bound, and the next 16 to 31 aren't
    /// lent it; a kind that turns slow is found out by its first slow ones, those in flight together.
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

/// Whether a policy never looks at the times that it is given. It says so with a member
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
/// A policy that lends device time may return an std::uint32_t from serve, and then takes it as the third argument of
/// correct; 0 where there is none. Two more members are optional. `take_turns()` is called once where different
/// clients' work that fills the device runs in turn, which costs a wait on the device at each change of clients; the
/// policy may then let a client go several times in a row. `hold(c)` is called in place of sleep(c) while c's first
/// submission is still behind others on its stream, until wake(c, ...); the policy may owe c the share that it misses
/// meanwhile, within bounds. `before(a, b)` says whether `a`, which has nothing waiting, would go before `b`, which waits,
/// if it had: then the limiter may keep the device for it for a moment (detail/limiter_clients.hpp).
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

/// What `p` says of it, or 0.
template <compute_policy P>
[[nodiscard]] std::uint32_t serve(P& p, client_id c, ns cost, instant now) noexcept {
    if constexpr (std::is_void_v<decltype(p.serve(c, cost, now))>) {
        p.serve(c, cost, now);
        return 0;
    } else {
        return p.serve(c, cost, now);
    }
}
/// `lent`: what serve said of it.
template <compute_policy P>
void correct(P& p, client_id c, ns delta, std::uint32_t lent) noexcept {
    if constexpr (requires { p.correct(c, delta, lent); })
        p.correct(c, delta, lent);
    else
        p.correct(c, delta);
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
