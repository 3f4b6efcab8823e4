// SPDX-License-Identifier: Apache-2.0
// What a compute policy is: a plain value that decides which waiting client goes next and is told what everything
// cost. It has no clock, thread or device: time comes in as an argument, so that every policy can be driven through
// millions of steps of virtual time, and the same object runs in production.
//
//   static_assert(gpushare::compute_policy<my_policy>);
#pragma once

#include <concepts>
#include <cstdint>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A client of a limiter: dense indices that are used again, told apart by their generation.
struct client_id {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;

    friend constexpr bool operator==(client_id, client_id) = default;
};

/// What a client is entitled to. Each policy says which of these it looks at.
struct client_settings {
    share weight = share::whole();  // of the device time of its level, relative to the others that have work there
    priority level{};               // a higher level goes first, always
    ns longest{};                   // its longest kernel, if known; 0: learnt
    share cap = share::whole();     // the most of the device's time that it gets
    bool soft_cap = false;          // the cap holds only while others, within theirs, have work
    ns slo{};                       // its work is due so long after its arrival; 0: it has no objective
    std::uint32_t group = 0;        // its class, from 0, where the policy is a tree
    std::uint32_t tag = 0;          // what records of its submissions call it; no policy looks at it

    friend constexpr bool operator==(const client_settings&, const client_settings&) = default;
};

/// What is known of the submission at the head of a client's line.
struct queue_head {
    ns cost{};                 // predicted device time; 0: unknown
    ns remaining{};            // the same of all that is left of its request, itself included
    instant arrival{};         // when it began to wait
    instant deadline = never;  // when it is due
    std::uint64_t key = 0;     // its kind, for the cost model; 0: none
    ns bound{};                // on its wait, as published when it came; 0: as it is when it is let in
    bool of_request = false;   // more of its client may follow soon: what is below is held back meanwhile
};

/// Whom to serve next: a client, nobody, or nobody before a time.
class choice {
public:
    constexpr choice() noexcept = default;                                 // nobody, until a call changes that
    constexpr choice(client_id c) noexcept : client_(c), is_one_(true) {}  // NOLINT: a client is an answer
    constexpr explicit choice(instant ask_again) noexcept : ask_again_(ask_again) {}  // nobody before then

    [[nodiscard]] constexpr explicit operator bool() const noexcept { return is_one_; }
    [[nodiscard]] constexpr client_id operator*() const noexcept { return client_; }
    [[nodiscard]] constexpr const client_id* operator->() const noexcept { return &client_; }
    /// Where nobody is chosen: the time at which to ask again though nothing happened. `never`: no need to.
    [[nodiscard]] constexpr instant ask_again() const noexcept { return ask_again_; }

    friend constexpr bool operator==(const choice&, const choice&) = default;

private:
    client_id client_{};
    bool is_one_ = false;
    instant ask_again_ = never;
};

/// Whether a policy looks at the times that it is given. One that doesn't says so with a member
/// `static constexpr bool timeless = true`, and spares its users the reading of a clock.
template <class P>
inline constexpr bool is_timeless = requires {
    requires P::timeless;
};

/// Decides among the clients with waiting work. Calls come from one thread at a time, with times that never go back.
///   add, change           a client begins, gets other settings (in force at once). May refuse (errc::share_exceeded
///                         where what is promised would sum over the whole) or run out of memory: nothing has changed
///   remove(c)             a client ends
///   wake(c, head, now)    c has waiting work, and this is the first of it: called when there was none, and again
///                         whenever the first is another; sleep(c): none is left
///   pick(now)             the waiting client to serve next, or when to ask again. Asked twice, answers the same
///   serve(c, cost, now)   c was picked and let in; cost is a prediction of its device time. c still waits: wake
///                         or sleep follows
///   correct(c, delta)     the truth about something served: the true cost less the predicted one
/// One that has take_turns() is told where clients run one after the other on the
/// device (limiter_options::take_turns), and may then let one go several times in a row.
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

/// With limiter_options::take_turns: a policy that can, lets a client go several times before it lets go another.
template <compute_policy P>
[[nodiscard]] P& in_turn(P& p, bool asked) noexcept {
    if constexpr (requires { p.take_turns(); })
        if (asked) p.take_turns();
    return p;
}

}  // namespace detail

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
