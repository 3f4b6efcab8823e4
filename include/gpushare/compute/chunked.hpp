// SPDX-License-Identifier: Apache-2.0
// Splits long work into pieces, so that a client of a higher level (priority) gets in between them,
// since a submission can't be preempted. For kernels, copies and scrubbing. For collectives use
// enqueue_in_pieces (gang_permit.hpp), which never holds back one rank alone.
//
//   auto done = gpushare::submit_chunked(limiter, batch, stream, 64, [=](auto& s, std::size_t i) {
//       s.copy(to + i * size, from + i * size, size);
//   });
//   done->wait();
//
// Others wait for at most one piece (limiter_core::wait_bound). All pieces are charged to the
// client, so together they get its share of device time.
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <memory>
#include <stop_token>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

struct chunk_control {
    std::atomic<bool> ended{false};      // no more pieces; relaxed: a piece more or less
    std::atomic<std::size_t> passed{0};  // pieces that were enqueued; relaxed: a count
};
template <class F>
struct chunk_state : chunk_control {
    explicit chunk_state(F f) : enqueue(std::move(f)) {}
    F enqueue;
};

}  // namespace detail

/// A ticket for all pieces of submit_chunked. Movable; one owner. Destroying it doesn't affect the work. Const members
/// and cancel() may be called from several threads at once.
template <class Limiter>
class [[nodiscard]] chunked_ticket {
public:
    /// For submit_chunked.
    chunked_ticket(std::shared_ptr<detail::chunk_control> control,
                   std::vector<typename Limiter::ticket> pieces) noexcept
        : control_(std::move(control)), pieces_(std::move(pieces)) {}

    /// True once all pieces are done, have failed or were cancelled.
    [[nodiscard]] bool done() const noexcept {
        return std::ranges::all_of(pieces_, [](const auto& t) { return t.done(); });
    }
    /// As ticket::wait, for all pieces.
    bool wait(instant deadline = never, const std::stop_token& stop = {}) const {
        return std::ranges::all_of(pieces_, [&](const auto& t) { return t.wait(deadline, stop); });
    }
    /// Enqueues no further pieces; pieces already enqueued run. Callable from any thread.
    void cancel() noexcept { control_->ended.store(true, std::memory_order_relaxed); }

    /// Once done: errc::none, or the status of the first piece that failed. No piece is enqueued after a failure has
    /// been seen.
    [[nodiscard]] errc status() const noexcept {
        const auto failed = std::ranges::find_if(pieces_, [](const auto& t) { return t.status() != errc::none; });
        return failed == pieces_.end() ? errc::none : failed->status();
    }
    /// How many pieces were enqueued so far: after a cancel or a failure, fewer than size().
    [[nodiscard]] std::size_t enqueued() const noexcept { return control_->passed.load(std::memory_order_relaxed); }
    /// How many pieces there are.
    [[nodiscard]] std::size_t size() const noexcept { return pieces_.size(); }
    /// Once done: the device time that the client was charged for all pieces.
    [[nodiscard]] ns device_time() const noexcept {
        ns sum{};
        for (const auto& t : pieces_) sum += t.device_time();
        return sum;
    }

private:
    std::shared_ptr<detail::chunk_control> control_;
    std::vector<typename Limiter::ticket> pieces_;
};

/// Queues `pieces` submissions of client `c`, each of which calls `enqueue(s, i)` when it is admitted, i from 0 in
/// order. All are of one kind, `o.key`. Later submissions of the client wait behind all of them, so use a client of its
/// own. Fails with the codes of Limiter::submit or std::bad_alloc, and then no further piece is enqueued.
template <class Limiter, std::invocable<typename Limiter::stream&, std::size_t> F>
[[nodiscard]] result<chunked_ticket<Limiter>> submit_chunked(Limiter& limiter, client_id c, typename Limiter::stream& s,
                                                             std::size_t pieces, F enqueue,
                                                             const submit_options& o = no_options) {
    const auto state = std::make_shared<detail::chunk_state<F>>(std::move(enqueue));
    std::vector<typename Limiter::ticket> tickets;
    tickets.reserve(pieces);
    const auto work = [state](std::size_t i) {
        return [state, i](typename Limiter::stream& to) {
            if (state->ended.load(std::memory_order_relaxed)) return;
            state->passed.fetch_add(1, std::memory_order_relaxed);
            try {
                state->enqueue(to, i);
            } catch (...) {
                state->ended.store(true, std::memory_order_relaxed);
                throw;
            }
        };
    };
    const auto on_done = [state](const completion& how) {
        if (how.status != errc::none) state->ended.store(true, std::memory_order_relaxed);
    };
    try {
        for (std::size_t i = 0; i < pieces; ++i) {
            auto ticket = limiter.submit(c, s, work(i), o, on_done);
            if (!ticket) {
                state->ended.store(true, std::memory_order_relaxed);
                return ticket.why();
            }
            tickets.push_back(*std::move(ticket));
        }
    } catch (...) {
        state->ended.store(true, std::memory_order_relaxed);
        throw;
    }
    return chunked_ticket<Limiter>(state, std::move(tickets));
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
