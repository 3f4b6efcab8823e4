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
#include <cstdint>
#include <optional>
#include <span>

#include <gpushare/compute/detail/batch.hpp>
#include <gpushare/compute/grant.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// None where it can't be now: the stream is captured, say. The end is waited for by who comes once it is recorded.
template <timeline Stream>
[[nodiscard]] std::optional<typename Stream::point> recorded(const typename batch<Stream>::handle_type& open) noexcept {
    try {
        return open.record();
    } catch (...) {
        return std::nullopt;
    }
}

/// The first of these behind the batch `after`, before `g` is enqueued on `s`; it counts as waited for from then on, an open
/// one until it ends. What another thread is about to enqueue isn't among them, nor what was written off.
template <timeline Stream>
[[nodiscard]] batch<Stream>* turn_before(std::span<batch<Stream>> in_flight, std::uint64_t after, const grant& g,
                                         const Stream& s) noexcept {
    batch<Stream>* first = nullptr;
    for (auto& b : in_flight) {
        const bool ended = b.at == batch<Stream>::state::ended;
        if (!ended && (b.num_members == 0 || !static_cast<bool>(b.handle) || b.is_on(s))) continue;
        if (b.order <= after || b.client == g.client || b.level != g.level || b.written_off) continue;
        // This stream waits for it already; or that of another client does, which is waited for here.
        if (b.followed_on != nullptr && (b.followed_on == &s || b.follower != g.client)) continue;
        if (first == nullptr || b.order < first->order) first = &b;
    }
    if (first == nullptr) return nullptr;
    first->followed_on = &s;
    first->follower = g.client;
    return first;
}

/// Makes `s` wait for all of them, letting go of `lock` meanwhile. What the stream throws passes through.
template <class Lock, class Flights, joining_timeline Stream>
void take_turn(Lock& lock, Flights& flights, const grant& g, Stream& s) {
    std::uint64_t after = 0;  // once round, though others do the same
    while (auto* const b = turn_before<Stream>(flights.batches(), after, g, s)) {
        after = b->order;
        // An end that was recorded; or, where somebody is just enqueuing more, one that is to be.
        std::optional<typename Stream::point> end;
        if (b->at == batch<Stream>::state::ended) end = b->end;
        auto open = b->handle;  // none where it has ended
        lock.unlock();
        try {
            if constexpr (batch<Stream>::shares)
                if (!end) end = recorded<Stream>(open);
            if (end) s.wait(*end);
        } catch (...) {
            open = {};
            lock.lock();
            for (auto& f : flights.batches())
                if (f.followed_on == &s) f.followed_on = nullptr;  // it doesn't wait after all
            throw;
        }
        open = {};  // perhaps the last of its stream: not under the lock
        lock.lock();
    }
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
