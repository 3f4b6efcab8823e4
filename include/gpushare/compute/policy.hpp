// SPDX-License-Identifier: Apache-2.0
// What a compute policy is: a plain value that decides which waiting client goes next and is told what everything
// cost. It has no clock, thread or device: time comes in as an argument, so that every policy can be driven through
// millions of steps of virtual time, and the same object runs in production.
//
//   static_assert(gpushare::compute_policy<my_policy>);
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// A client of a limiter: dense indices that are used again, told apart by their generation.
struct client_id {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;

    friend constexpr bool operator==(client_id, client_id) = default;
};

/// What a client is entitled to.
struct client_settings {
    share weight = share::whole();  // of the device time of its level, relative to the others that have work there
    priority level{};               // a higher level goes first, always
    ns longest{};                   // its longest kernel, if known; 0: learnt
};

/// Whether a policy looks at the time that it is given. One that doesn't says so with a member
/// `static constexpr bool timeless = true`, and spares its users the reading of a clock.
template <class P>
inline constexpr bool is_timeless = requires {
    requires P::timeless;
};

/// Decides among the clients with waiting work. Calls come from one thread at a time.
///   add, change, remove   a client begins, gets other settings (in force at once), ends; add and change may run out
///                         of memory, and then change nothing
///   wake(c, now)          c has waiting work again, after it had none; sleep(c): none is left
///   pick(now)             the waiting client to serve next; changes nothing
///   serve(c, cost)        c was picked and let in; cost is a prediction of its device time
///   correct(c, delta)     the truth about something served: the true cost less the predicted one
// clang-format off
template <class P>
concept compute_policy = std::movable<P> && requires(P& p, const P& cp, client_id c, const client_settings& s, ns cost,
                                                     instant now) {
    p.add(c, s);
    p.change(c, s);
    { p.remove(c) } noexcept;
    { p.wake(c, now) } noexcept;
    { p.sleep(c) } noexcept;
    { cp.pick(now) } noexcept -> std::same_as<std::optional<client_id>>;
    { p.serve(c, cost) } noexcept;
    { p.correct(c, cost) } noexcept;
};
// clang-format on

}  // namespace gpushare::inline GPUSHARE_ABI
