// SPDX-License-Identifier: Apache-2.0
// The one record of a submission inside a limiter, from its arrival to its completion. Each stage
// fills in its own part and reads the parts before it.
//
//   auto& s = pool.acquire();   s.work = ...;       // arrive
//   core.admit(s.admitted, now, ...);               // admit
//   batches.place(s, stream, now);                  // batch: which points are to be recorded around it
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

/// The exception that work with this outcome threw on the device, or work before its end, which is
/// reached; only if the device keeps it.
template <class Outcome, timeline_point Point>
[[nodiscard]] std::exception_ptr thrown_by(const Outcome& own, const Point& end) noexcept {
    if constexpr (requires { std::exception_ptr(own.exception()); })
        return own.exception();
    else if constexpr (requires { std::exception_ptr(end.exception()); })
        return end.exception();
    else
        return nullptr;
}

/// Names the timeline of `s`: by itself where it has a name, or else by where the stream object is.
template <timeline Stream>
[[nodiscard]] std::uint64_t timeline_of(const Stream& s) noexcept {
    if constexpr (shared_timeline<Stream>)
        return s.timeline();
    else
        return reinterpret_cast<std::uintptr_t>(&s);
}

/// For streams that don't note what is launched.
struct no_launch_notes {
    explicit no_launch_notes(const auto&) noexcept {}
    [[nodiscard]] static sm_fill found() noexcept { return {}; }
};
template <timeline Stream>
struct launch_notes_of {
    using type = no_launch_notes;
};
template <timeline Stream>
requires requires { typename Stream::launch_notes; }
struct launch_notes_of<Stream> {
    using type = typename Stream::launch_notes;
};

/// Runs a submission's `work`. Returns the part that its launches fill, if the stream notes it.
/// Throws the work's exceptions, and operation_error if a launch past the stream (<<<>>>) failed,
/// on a backend whose streams can tell. The error can still be read from the backend.
template <timeline Stream, std::invocable<Stream&> F>
sm_fill run_work(Stream& s, F& work) {
    typename launch_notes_of<Stream>::type notes(s);
    if constexpr (requires { typename Stream::launch_errors; }) {
        const typename Stream::launch_errors launches(s);
        work(s);
        if (const errc why = launches.found(); why != errc::none)
            raise(failure{why}, {}, "a launch within a submission");
    } else {
        work(s);
    }
    return notes.found();
}

enum class submission_stage : std::uint8_t { waiting, admitted, done };

/// How far enqueuing came: nothing is on the stream; the work is, without the point at its end; all of it is.
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

    submission* next = nullptr;         // in a queue: free, waiting, just enqueued, or to be told
    submission* next_member = nullptr;  // in its batch

    // Arrival. A queued one has a callable and a ticket; at the gate a thread enqueues by itself.
    bool queued = false;
    client_id client{};
    client_queue<Stream>* queue = nullptr;  // its client's
    submission_facts facts{};
    priority level{no_priority};   // its own, or its client's whatever that is; to be told: its client's
    instant drop_at = never;       // unless it was admitted before
    std::size_t in_deadlines = 0;  // its place among the submissions that are dropped when they are late, from 1 on
    instant waits_since = never;   // if it does
    submission_work<Stream> work;
    submission_callback on_done;
    Stream* stream = nullptr;

    // Admission. One record stands for alike submissions of a batch: their number, with the sum of
    // their predictions.
    admission admitted{};
    std::uint32_t times = 1;
    std::uint32_t log_number = 0;  // of the log that was kept when it was admitted; 0: none
    instant admitted_at{};         // if it was

    // Its batch: the index, the batch that `begin` is the end of, and the points to record around
    // the work. `may_stay_open`: if the end can't be recorded now, it may be recorded later.
    std::size_t batch = no_batch, ends = no_batch;
    bool needs_begin = false, needs_end = false, may_stay_open = false;
    ns in_front{};  // what the device is predicted to have to do before it gets there

    // Enqueuing. The two times are those of work between points of its own, where somebody looks at the clock.
    std::optional<point> begin{}, end{};
    instant enqueue_began{}, enqueue_ended{};
    std::atomic<std::thread::id>
        enqueuer{};  // that is in its callable; relaxed: matters to that thread, or is under the mutex
    sm_fill fills{};
    [[no_unique_address]]
    typename own_work_of<Stream>::outcome own{};  // a failure of its own, whoever else records points

    // Completion. Until then `status` is what is known to have failed already.
    std::atomic<submission_stage> at{submission_stage::waiting};
    bool told = false;  // given up as stuck: what comes of it is only charged
    bool deaf = false;  // who would be called back is gone
    errc status = errc::none;
    std::exception_ptr error;
    tenant_name failed_of;  // of one that failed, its client's
    instant finished_at{};
    ns device_time{};

    // Interested threads: how many wait for it and look at the device, and the latest of them; and
    // the number of owners of the record.
    std::uint32_t looked_at = 0;
    std::thread::id looker{};
    std::atomic<int> owners{0};  // limiter and ticket or permit; acq_rel when it falls: the last one sees all

    /// Whether the calling thread is about to enqueue it, and in code of the user's.
    [[nodiscard]] bool is_enqueued_here() const noexcept {
        return enqueuer.load(std::memory_order_relaxed) == std::this_thread::get_id();
    }
    void set_enqueuer(std::thread::id who) noexcept { enqueuer.store(who, std::memory_order_relaxed); }
    /// At the gate: whether the permit is still there, whose holder may ask how the work went.
    [[nodiscard]] bool has_holder() const noexcept { return owners.load(std::memory_order_acquire) > 1; }
    /// At the gate: one of its owners is done with it. True for the last one, whose the record is now.
    [[nodiscard]] bool lose_owner() noexcept {
        return !has_holder() || owners.fetch_sub(1, std::memory_order_acq_rel) == 1;
    }

    /// The part of the SMs that it can fill: as launched, or as expected. The declared width counts
    /// if it is more, and if the launched width is unknown.
    [[nodiscard]] double filled() const noexcept {
        if (admitted.declared)
            return std::max(admitted.width.part(), fills.width.known() && !fills.opaque ? fills.width.part() : 0.0);
        return fills.opaque || fills.width.known() ? fills.width.part() : admitted.width.part();
    }

    /// As new, but for what arrival and admission write anyway.
    void reset(bool is_queued) noexcept {
        queued = is_queued;
        times = 1;
        log_number = 0;
        batch = ends = no_batch;
        enqueue_began = enqueue_ended = {};
        waits_since = never;
        fills = {};
        at.store(submission_stage::waiting, std::memory_order_relaxed);  // nobody else has it yet
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
            } catch (...) {  // what it had enqueued before it threw is charged like the rest
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

/// Queued submissions. They outlive their limiter where somebody still holds a ticket. Thread-safe.
template <timeline Stream>
class submission_pool {
public:
    /// Throws std::bad_alloc.
    [[nodiscard]] submission<Stream>& acquire();

    /// Whether the calling thread is in the callable of one of `c`.
    [[nodiscard]] bool is_in_callable(client_id c) noexcept;

    /// One of its owners is done with it.
    void drop(submission<Stream>& s) noexcept;

private:
    std::mutex mutex_;
    pool<submission<Stream>> pool_;
};

// Out of the class, and so without `inline`: an `extern template` stops compilers from instantiating them.

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
