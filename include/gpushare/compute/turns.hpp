// SPDX-License-Identifier: Apache-2.0
// limiter_options::take_turns: whose ends a stream is to wait for on the device, so that its client's work doesn't run
// beside that of others of its level. A part of limiter_engine.hpp, under the mutex of its limiter.
//
//   detail::take_turn(lock, flights, grant, s);
//
// One wait for each change of clients is enough where each client has one stream: what the client before waits for needn't
// be waited for again.
#pragma once

#include <cstddef>
#include <mutex>
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

/// Makes `s` wait for all of them, letting go of `lock` meanwhile. What the stream throws passes through.
template <class Flights, joining_timeline Stream>
void take_turn(std::unique_lock<std::mutex>& lock, Flights& flights, const grant& g, Stream& s) {
    while (const auto p = turn_before<Stream>(flights.batches(), g, s)) {
        lock.unlock();
        try {
            s.wait(*p);
        } catch (...) {
            lock.lock();
            for (auto& b : flights.batches())
                if (b.followed_on == &s) b.followed_on = nullptr;  // it doesn't wait after all
            throw;
        }
        lock.lock();
    }
}

}  // namespace gpushare::inline GPUSHARE_ABI::detail
