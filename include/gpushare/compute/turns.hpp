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

/// What to wait for on the device: an end that was recorded; or, where somebody is just enqueuing more, one that is to be.
template <timeline Stream>
struct turn_end {
    std::optional<typename Stream::point> end;
    typename batch<Stream>::handle_type open;
};

/// The next of these before `g` is enqueued on `s`; it counts as waited for from then on. What another thread is about
/// to enqueue isn't among them, nor what was written off.
template <timeline Stream>
[[nodiscard]] std::optional<turn_end<Stream>> turn_before(std::span<batch<Stream>> in_flight, const grant& g,
                                                          const Stream& s) noexcept {
    for (auto& b : in_flight) {
        const bool ended = b.at == batch<Stream>::state::ended;
        if (!ended && (b.num_members == 0 || !static_cast<bool>(b.handle))) continue;
        if (b.client == g.client || b.level != g.level || b.written_off) continue;
        // This stream waits for it already; or that of another client does, which is waited for here.
        if (b.followed_on != nullptr && (b.followed_on == &s || b.follower != g.client)) continue;
        b.followed_on = &s;
        b.follower = g.client;
        if (ended) return turn_end<Stream>{b.end, {}};
        return turn_end<Stream>{std::nullopt, b.handle};
    }
    return std::nullopt;
}

/// Makes `s` wait for all of them, letting go of `lock` meanwhile. What the stream throws passes through.
template <class Flights, joining_timeline Stream>
void take_turn(std::unique_lock<std::mutex>& lock, Flights& flights, const grant& g, Stream& s) {
    while (auto before = turn_before<Stream>(flights.batches(), g, s)) {
        lock.unlock();
        try {
            if constexpr (batch<Stream>::shares)
                if (!before->end) try {
                        before->end = before->open.record();
                    } catch (...) {  // its stream is captured, say: nothing of it runs now
                    }
            if (before->end) s.wait(*before->end);
        } catch (...) {
            lock.lock();
            for (auto& b : flights.batches())
                if (b.followed_on == &s) b.followed_on = nullptr;  // it doesn't wait after all
            throw;
        }
        before.reset();  // perhaps the last of its stream
        lock.lock();
    }
}

}  // namespace gpushare::inline GPUSHARE_ABI::detail
