// SPDX-License-Identifier: Apache-2.0
// Waits for a submission in a coroutine, without keeping a thread. The coroutine resumes on the thread that drives the
// limiter: the dispatcher, or a thread that waits or polls.
//
//   auto done = co_await gpushare::async_submit(limiter, chat, stream, [&](auto& s) { s.launch(shape, kernel); });
//   if (done.status != gpushare::errc::none) ...
//
// A coroutine may be destroyed while it waits: what waits of it never runs then, and what is on the
// device goes on without it.
#pragma once

#include <atomic>
#include <coroutine>
#include <optional>
#include <utility>

#include <gpushare/compute/handles.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The awaitable that async_submit returns. Await it once, in the expression that made it. The
/// limiter and the stream must outlive the wait.
///
/// Destroying the coroutine while it waits, from any thread but one that may resume it at that
/// moment, ends the wait. A callable that hasn't begun never runs. If it has begun on another
/// thread, the destructor waits for it, so the callable may use the coroutine's variables. Work
/// that it has enqueued goes on, and must not outlive the data it uses.
template <class Limiter>
class [[nodiscard]] async_submission {
public:
    using stream = typename Limiter::stream;  ///< The stream that work is enqueued on.

    /// For async_submit.
    async_submission(Limiter& limiter, client_id c, stream& s, submission_work<stream> work,
                     const submit_options& options) noexcept
        : limiter_(limiter), client_(c), stream_(s), work_(std::move(work)), options_(options) {}
    async_submission(const async_submission&) = delete;             ///< Not copied.
    async_submission& operator=(const async_submission&) = delete;  ///< Not copied.
    /// Ends the wait, if it is under way.
    ~async_submission() {
        if (ticket_) ticket_->abandon();
    }

    /// Never: the work isn't queued yet.
    [[nodiscard]] static bool await_ready() noexcept { return false; }

    /// Queues the work. False, and the coroutine goes on at once, if the work was done or refused
    /// within the call. Throws std::bad_alloc.
    bool await_suspend(std::coroutine_handle<> waiting) {
        auto ticket = limiter_.submit(client_, stream_, std::move(work_), options_, [this, waiting](const auto& c) {
            completion_ = c;
            if (arrived()) waiting.resume();
        });
        if (!ticket) {
            completion_.status = ticket.code();
            return false;
        }
        ticket_.emplace(*std::move(ticket));
        return !arrived();
    }

    /// How it went, with what the callable threw in `error`. If it was refused, the status is the code of submit.
    [[nodiscard]] completion await_resume() noexcept {
        ticket_.reset();
        return std::move(completion_);
    }

private:
    // The call that hands the work over and the one that says it is done both come here: the second of them goes on.
    // acq_rel: it sees what the first has written.
    [[nodiscard]] bool arrived() noexcept { return first_has_come_.exchange(true, std::memory_order_acq_rel); }

    Limiter& limiter_;
    client_id client_;
    stream& stream_;
    submission_work<stream> work_;
    submit_options options_;
    completion completion_;
    std::optional<typename Limiter::ticket> ticket_;
    std::atomic<bool> first_has_come_{false};
};

/// Returns an awaitable that queues `work` for client `c` as limiter.submit does. Awaiting it gives the completion.
template <class Limiter>
async_submission<Limiter> async_submit(Limiter& limiter, client_id c, typename Limiter::stream& s,
                                       submission_work<typename Limiter::stream> work,
                                       const submit_options& options = {}) {
    return {limiter, c, s, std::move(work), options};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
