// SPDX-License-Identifier: Apache-2.0
// The types of a submission at a limiter's interface: the work, the facts known beforehand, the
// callback at its end, and its record.
//
//   gpushare::submit_options about{.key = kernel_id, .deadline = now + 5ms};
//   limiter.submit(chat, stream, work, about, [](const gpushare::completion& c) { if (c.status != gpushare::errc::none) ...; });
//
// A submission can't be preempted. submit_chunked splits long work into pieces, so that a client of
// a higher level (priority) gets in between them. This suits kernels, copies and scrubbing. For
// collectives use enqueue_in_pieces (handles.hpp), which never holds back one rank alone.
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
#include <cstdint>
#include <exception>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/inplace_function.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The callable that enqueues the work of one submission. Stored in place: a callable of up to 128
/// bytes.
template <timeline Stream>
using submission_work = detail::inplace_function<void(Stream&), 128>;

/// How a sleeping client's submissions are treated; see compute_limiter::sleep.
enum class while_asleep : std::uint8_t {
    keep,    ///< submissions that wait or arrive stay queued until it wakes
    refuse,  ///< both end with errc::asleep
};

/// The facts that the caller knows of one submission beforehand. Every field may be left out.
struct submit_options {
    /// Its kind, such as a kernel's id and a class of sizes: predicts its cost.
    std::uint64_t key = 0;
    /// The part of the SMs that it can fill; unknown: learnt if the device reports it, otherwise
    /// all SMs.
    sm_width width{};
    /// Its device time (duration times width), if the caller knows it; 0: predicted.
    ns cost{};
    ns remaining{};            ///< the same for the rest of its request, this submission included
    instant deadline = never;  ///< when it is due, for policies that use deadlines
    /// Work that can't begin by its deadline never runs. It ends with errc::deadline_exceeded at
    /// the deadline, or immediately if it is late on arrival. It isn't admitted behind work that
    /// may last beyond the deadline, by the declared or seen times of that work's kind.
    bool drop_if_late = false;
    /// The submission's own priority. Among its client's waiting submissions it goes before those
    /// of a lower priority, whatever their streams; those without one have the client's level. It
    /// is admitted at this level if that is above its client's, but at most at
    /// client_settings::ceiling. Its time is charged to its client's share. A stream keeps its
    /// priority.
    gpushare::priority priority = no_priority;
    /// If the queue is full: how long to wait for room instead of refusing.
    instant room_by = instant::min();
    /// The index of the tenant's stream; a limiter gets the stream itself.
    std::uint32_t stream = 0;
    bool of_request = false;  ///< set by a request: more submissions follow soon
};

/// The default, which is recognised by its address.
inline constexpr submit_options no_options{};

namespace detail {
/// Throws the exception of a failed submission; see completion::rethrow.
inline void rethrow(errc status, const tenant_name& name, const std::exception_ptr& error) {
    if (status == errc::none) return;
    if (!error) raise(failure{status}, name.view(), "submission");
    if (name.empty()) std::rethrow_exception(error);
    std::string text;
    const auto add = [&](std::string_view why) {
        text.append("tenant '").append(name.view()).append("': ").append(to_string(status)).append(": ").append(why);
    };
    try {
        std::rethrow_exception(error);
    } catch (const std::exception& e) {
        add(e.what());
        std::throw_with_nested(operation_error(status, name.view(), text.c_str()));
    } catch (...) {
        add("no std::exception");
        std::throw_with_nested(operation_error(status, name.view(), text.c_str()));
    }
}
}  // namespace detail

/// The outcome of a submission.
struct completion {
    errc status = errc::none;  ///< as ticket::status()
    ns device_time{};          ///< the device time charged to its client
    instant finished_at{};     ///< when the limiter noticed the end, by its clock
    /// The exception of the callable, or of the kernel if the device keeps exceptions.
    std::exception_ptr error;
    tenant_name tenant{};  ///< its client's name, if the submission failed

    /// Throws if the submission failed; otherwise does nothing. A client without a name gets the
    /// original exception, if there was one. A client with a name gets an operation_error with the
    /// status, the name and a text, and with the original exception nested inside
    /// (std::rethrow_if_nested).
    void rethrow() const { detail::rethrow(status, tenant, error); }
};

/// Called once when the limiter notices the end, on the thread that drives it, under no lock. May
/// use the limiter, but must wait neither for it nor for a thread that waits for admission at a
/// lower level: while a callback runs, lower levels may have to wait for it, and try_acquire finds
/// no room for them. Must not throw. Stored in place: a callable of up to 64 bytes.
using submission_callback = detail::inplace_function<void(const completion&), 64>;

/// A submission that ran. Times are on the limiter's clock. `ended` is when its last point was
/// reached, as exactly as known: never before the admission, and late by at most the shortest delay
/// with which the limiter has noticed an end so far. `began` is earlier by the charged time, or by
/// the span if that is shorter. Each member of a batch has its part of the batch.
struct submission_record {
    client_id client{};     ///< the client that submitted it
    std::uint32_t tag = 0;  ///< client_settings::tag
    tenant_name name{};     ///< client_settings::name
    std::uint64_t key = 0;  ///< its kind
    instant arrived{};      ///< when it arrived
    instant let_in{};       ///< when it was admitted
    instant began{};        ///< when the device began to run it
    instant ended{};        ///< when the device had finished it
    instant noticed{};      ///< when the limiter noticed the end
    ns device_time{};       ///< the charged device time
    /// The bound on its wait once it is admitted; see limiter_core::bound_of.
    ns bound{};
    ns beyond{};               ///< by how much the wait exceeded the bound
    errc status = errc::none;  ///< as ticket::status()
};

namespace detail {

struct chunk_control {
    // No further pieces; relaxed: one piece more or less doesn't matter.
    std::atomic<bool> ended{false};
    std::atomic<std::size_t> passed{0};  // the number of pieces enqueued; relaxed: only a count
};
template <class F>
struct chunk_state : chunk_control {
    explicit chunk_state(F f) : enqueue(std::move(f)) {}
    F enqueue;
};

}  // namespace detail

/// A ticket for all pieces of submit_chunked. Movable; one owner. Destroying it doesn't affect the
/// work. Const members and cancel() may be called from several threads at once.
template <class Limiter>
class [[nodiscard]] chunked_ticket {
public:
    /// Called by submit_chunked.
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

    /// Once done: errc::none, or the status of the first piece that failed. No piece is enqueued
    /// after a failure has been seen.
    [[nodiscard]] errc status() const noexcept {
        const auto failed = std::ranges::find_if(pieces_, [](const auto& t) { return t.status() != errc::none; });
        return failed == pieces_.end() ? errc::none : failed->status();
    }
    /// How many pieces were enqueued so far: after a cancel or a failure, fewer than size().
    [[nodiscard]] std::size_t enqueued() const noexcept { return control_->passed.load(std::memory_order_relaxed); }
    /// The number of pieces.
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

namespace detail {

// submit_chunked, with `submit(work, on_done)` for the submission of one piece.
template <class Limiter, class F, class Submit>
[[nodiscard]] result<chunked_ticket<Limiter>> submit_pieces(std::size_t pieces, F enqueue, Submit submit) {
    const auto state = std::make_shared<chunk_state<F>>(std::move(enqueue));
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
            auto ticket = submit(work(i), on_done);
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

}  // namespace detail

/// Queues `pieces` submissions of client `c`, each of which calls `enqueue(s, i)` when it is
/// admitted, for i from 0 in order. All are of one kind, `o.key`. Later submissions of the client
/// wait behind all of them, so use a separate client for them. Fails with the codes of
/// Limiter::submit or std::bad_alloc, and then no further piece is enqueued. A tenant has a member
/// function of the same name (tenant.hpp).
template <class Limiter, std::invocable<typename Limiter::stream&, std::size_t> F>
[[nodiscard]] result<chunked_ticket<Limiter>> submit_chunked(Limiter& limiter, client_id c, typename Limiter::stream& s,
                                                             std::size_t pieces, F enqueue,
                                                             const submit_options& o = no_options) {
    return detail::submit_pieces<Limiter>(pieces, std::move(enqueue), [&](auto work, auto on_done) {
        return limiter.submit(c, s, std::move(work), o, std::move(on_done));
    });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
