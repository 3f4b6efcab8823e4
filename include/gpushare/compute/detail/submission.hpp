// SPDX-License-Identifier: Apache-2.0
// The one record of a submission inside a limiter, from its arrival to its completion. Each stage
// fills in its own part and reads the parts before it.
//
//   auto& s = pool.acquire();   s.work = ...;       // arrive
//   core.admit(s.admitted, now, ...);               // admit
//   batches.place(s, stream, now);  // batch: which points are to be recorded around it
//   s.enqueue();                                    // enqueue, under no lock
//   s.status, s.device_time                         // completion
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The exception of failed work, if the device keeps exceptions: of the work with this outcome, or
/// of work before the point `end`, which is reached.
template <class Outcome, timeline_point Point>
[[nodiscard]] std::exception_ptr thrown_by(const Outcome& own, const Point& end) noexcept {
    if constexpr (requires { std::exception_ptr(own.exception()); })
        return own.exception();
    else if constexpr (requires { std::exception_ptr(end.exception()); })
        return end.exception();
    else
        return nullptr;
}

/// The name of the stream's timeline: its own name or, if the stream has none, the address of the
/// stream object.
template <timeline Stream>
[[nodiscard]] std::uint64_t timeline_of(const Stream& s) noexcept {
    if constexpr (shared_timeline<Stream>)
        return s.timeline();
    else
        return reinterpret_cast<std::uintptr_t>(&s);
}

/// Runs a submission's `work`. Returns the part that its launches fill, if the stream notes it.
/// Throws the work's exceptions, and operation_error if a launch past the stream (<<<>>>) failed,
/// on a backend whose streams can tell. The error can still be read from the backend.
template <timeline Stream, std::invocable<Stream&> F>
sm_fill run_work(Stream& s, F& work) {
    const auto run = [&] {
        if constexpr (requires { typename Stream::launch_errors; }) {
            const typename Stream::launch_errors launches(s);
            work(s);
            if (const errc why = launches.found(); why != errc::none)
                raise(failure{why}, {}, "a launch within a submission");
        } else {
            work(s);
        }
    };
    if constexpr (requires { typename Stream::launch_notes; }) {
        typename Stream::launch_notes notes(s);
        run();
        return notes.found();
    } else {
        run();
        return {};
    }
}

enum class submission_stage : std::uint8_t { waiting, admitted, done };

/// How much was enqueued: nothing; the work without the point at its end; or all.
enum class enqueued_part : std::uint8_t { nothing, work, all };

template <timeline Stream>
struct client_queue;

/// Used under its limiter's mutex, with two exceptions. The thread that enqueues the work has the
/// fields of that stage to itself meanwhile. Once `at` says that the work is done, `status`,
/// `error`, `finished_at` and `device_time` are final, and the ticket's holder reads them.
template <timeline Stream>
struct submission {
    using point = typename Stream::point;
    static constexpr std::size_t no_batch = static_cast<std::size_t>(-1);

    // In a list: of free, waiting, just enqueued or completed submissions.
    submission* next = nullptr;
    submission* next_member = nullptr;  // the next member of its batch

    // Arrival. A queued submission has a callable and a ticket. At the gate a thread enqueues by
    // itself.
    bool queued = false;
    client_id client{};
    client_queue<Stream>* queue = nullptr;  // its client's queue
    submission_facts facts{};
    // Its own level, or no_priority: its client's level at any time; in the callback queue, its
    // effective level.
    priority level{no_priority};
    instant drop_at = never;  // dropped then, unless it was admitted earlier
    // Its place among the submissions that are dropped when they are late, from 1 on.
    std::size_t in_deadlines = 0;
    instant waits_since = never;  // since when it waits; `never`: it didn't wait
    submission_work<Stream> work;
    submission_callback on_done;
    Stream* stream = nullptr;

    // Admission. One record may stand for several equal submissions of a batch: `times` is their
    // number, and `admitted` has the sum of their predictions.
    admission admitted{};
    std::uint32_t times = 1;
    std::uint32_t log_number = 0;  // the number of the log that was on at the admission; 0: none
    instant admitted_at{};         // when it was admitted, if the log was on

    // Its batch: the index of the batch, the index of the batch that ends at `begin`, and the
    // points to record around the work. `may_stay_open`: if the end can't be recorded now, it may
    // be recorded later.
    std::size_t batch = no_batch, ends = no_batch;
    bool needs_begin = false, needs_end = false, may_stay_open = false;
    ns in_front{};  // the predicted time of the work in front of it on the device

    // Enqueuing. The two times are set only for work between points of its own, if the clock was
    // read.
    std::optional<point> begin{}, end{};
    instant enqueue_began{}, enqueue_ended{};
    // The thread in its callable; relaxed: read by that thread or under the mutex.
    std::atomic<std::thread::id> enqueuer{};
    sm_fill fills{};
    // Its own failure, whichever thread records points.
    [[no_unique_address]] typename own_work_of<Stream>::outcome own{};

    // Completion. Before that, `status` is a failure that is known already.
    std::atomic<submission_stage> at{submission_stage::waiting};
    bool told = false;  // given up as stuck and reported: its end is only charged
    bool deaf = false;  // the receiver of the callback is gone
    errc status = errc::none;
    std::exception_ptr error;
    tenant_name failed_of;  // the client's name, if the submission failed
    instant finished_at{};
    ns device_time{};

    // Threads: how many wait for it and look at the device, the latest of these, and the number of
    // owners of the record.
    std::uint32_t looked_at = 0;
    std::thread::id looker{};
    // The limiter, and a ticket or permit; acq_rel in a decrement: the last owner sees all writes.
    std::atomic<int> owners{0};

    /// Whether the calling thread is in the user's code that enqueues this submission.
    [[nodiscard]] bool is_enqueued_here() const noexcept {
        return enqueuer.load(std::memory_order_relaxed) == std::this_thread::get_id();
    }
    void set_enqueuer(std::thread::id who) noexcept { enqueuer.store(who, std::memory_order_relaxed); }
    /// At the gate: whether the permit still exists, so that its holder may ask how the work went.
    [[nodiscard]] bool has_holder() const noexcept { return owners.load(std::memory_order_acquire) > 1; }
    /// At the gate: gives up one ownership. Returns true for the last owner, which then owns the
    /// record alone.
    [[nodiscard]] bool lose_owner() noexcept {
        return !has_holder() || owners.fetch_sub(1, std::memory_order_acq_rel) == 1;
    }

    /// The part of the SMs that the work can fill: as launched, or as expected. The declared width
    /// counts if it is more, and if the launched width is unknown.
    [[nodiscard]] double filled() const noexcept {
        if (admitted.declared)
            return std::max(admitted.width.part(), fills.width.known() && !fills.opaque ? fills.width.part() : 0.0);
        return fills.opaque || fills.width.known() ? fills.width.part() : admitted.width.part();
    }

    /// Resets the record, except for fields that arrival and admission write anyway.
    void reset(bool is_queued) noexcept {
        queued = is_queued;
        times = 1;
        log_number = 0;
        batch = ends = no_batch;
        enqueue_began = enqueue_ended = {};
        waits_since = never;
        fills = {};
        // Relaxed: no other thread has the record yet.
        at.store(submission_stage::waiting, std::memory_order_relaxed);
        told = deaf = false;
        status = errc::none;
    }

    /// Runs the callable, with the points around it that its batch needs. Sets `status` and `error`
    /// after an exception. Runs the user's code: call under no lock.
    enqueued_part enqueue() noexcept {
        const auto failed = [this] {
            status = errc::submission_failed;
            error = std::current_exception();
        };
        // Must not fail once the work runs, or the submission would be reported as over.
        const auto record_end = [this] {
            if constexpr (preparing_timeline<Stream>)
                stream->record(*end);
            else
                end = stream->record();
        };
        auto so_far = enqueued_part::nothing;
        try {
            const typename own_work_of<Stream>::type mine(*stream);
            own = mine.how_it_went();
            if constexpr (preparing_timeline<Stream>)
                if (needs_end) end = stream->prepare();
            if (needs_begin) begin = stream->record();
            so_far = enqueued_part::work;
            try {
                fills = run_work(*stream, work);
            } catch (...) {  // work enqueued before the exception is charged like any other work
                failed();
            }
            if (needs_end) record_end();
            so_far = enqueued_part::all;
        } catch (...) {
            end.reset();
            failed();
        }
        work.reset();
        return so_far;
    }
};

/// The records of queued submissions. A record outlives its limiter while a ticket on it exists.
/// Thread-safe.
template <timeline Stream>
class submission_pool {
public:
    /// Returns a free record. Throws std::bad_alloc.
    [[nodiscard]] submission<Stream>& acquire();

    /// Whether the calling thread is in a callable of `c`.
    [[nodiscard]] bool is_in_callable(client_id c) noexcept;

    /// Gives up one ownership of `s`.
    void drop(submission<Stream>& s) noexcept;

private:
    std::mutex mutex_;
    pool<submission<Stream>> pool_;
};

// Defined out of the class and without `inline`, so that an `extern template` keeps other
// translation units from instantiating them.

template <timeline Stream>
auto submission_pool<Stream>::acquire() -> submission<Stream>& {
    const std::lock_guard lock(mutex_);
    auto& s = pool_.acquire();
    s.reset(true);
    s.owners.store(2, std::memory_order_relaxed);
    return s;
}

template <timeline Stream>
bool submission_pool<Stream>::is_in_callable(client_id c) noexcept {
    const std::lock_guard lock(mutex_);
    return pool_.any_of([=](const auto& s) { return s.is_enqueued_here() && s.admitted.client == c; });
}

template <timeline Stream>
void submission_pool<Stream>::drop(submission<Stream>& s) noexcept {
    if (s.owners.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    s.work.reset();
    s.on_done.reset();
    s.error = nullptr;
    s.failed_of = {};
    const std::lock_guard lock(mutex_);
    pool_.release(s);
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
