// SPDX-License-Identifier: Apache-2.0
// limiter_options::take_turns: whose ends a stream is to wait for on the device, so that its client's work doesn't run
// beside that of others of its level. A part of limiter_engine.hpp, under the mutex of its limiter.
//
//   while (auto p = detail::turn_before<stream>(flights.batches(), grant, s)) s.wait(*p);
//
// One wait for each change of clients is enough where each client has one stream: what the client before waits for needn't
// be waited for again.
#pragma once

#include <optional>
#include <span>

#include <gpushare/compute/batch.hpp>
#include <gpushare/compute/grant.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare::inline GPUSHARE_ABI::detail {

/// The next such point before `g` is enqueued on `s`; it counts as waited for from then on. What another thread is about
/// to enqueue isn't among them, nor what was written off.
template <timeline Stream>
[[nodiscard]] std::optional<typename Stream::point> turn_before(std::span<batch<Stream>> in_flight, const grant& g,
                                                                const Stream& s) noexcept {
    for (auto& b : in_flight) {
        if (b.at != batch<Stream>::state::ended || b.client == g.client || b.level != g.level || b.written_off)
            continue;
        // This stream waits for it already; or that of another client does, which is waited for here.
        if (b.followed_on != nullptr && (b.followed_on == &s || b.follower != g.client)) continue;
        b.followed_on = &s;
        b.follower = g.client;
        return b.end;
    }
    return std::nullopt;
}

/// It couldn't wait for them after all.
template <timeline Stream>
void no_turn(std::span<batch<Stream>> in_flight, const Stream& s) noexcept {
    for (auto& b : in_flight)
        if (b.followed_on == &s) b.followed_on = nullptr;
}

}  // namespace gpushare::inline GPUSHARE_ABI::detail
