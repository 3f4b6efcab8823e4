// SPDX-License-Identifier: Apache-2.0
// What is handed to a limiter's queue: the work, what is known of it, and whom to tell when it is done.
//
//   limiter.submit(chat, stream, work, {.key = kernel_id, .deadline = now + 5ms},
//                  [](const gpushare::completion& c) { if (c.status != gpushare::errc::none) ... });
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/flight_slots.hpp>
#include <gpushare/compute/detail/held_up.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/inplace_function.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// What enqueues the work of one submission. Stored in place: a callable of up to 128 bytes.
template <timeline Stream>
using submission_work = detail::inplace_function<void(Stream&), 128>;

/// Below all levels: a request has none of its own.
inline constexpr priority no_priority{std::numeric_limits<std::int32_t>::min()};

/// What is known of one submission beforehand. Everything may be left out.
struct submit_options {
    std::uint64_t key = 0;             // its kind, such as a kernel's id and a class of sizes: predicted from its like
    ns cost{};                         // what it takes, if the caller knows; 0: predicted
    ns remaining{};                    // the same for all that is left of its request, itself included
    instant deadline = never;          // when it is due, for policies that look at it
    bool of_request = false;           // set by a request: more follows soon
    instant room_by = instant::min();  // if the queue is full: how long to wait for room instead of refusing
};

/// The default. By its address it is known without a look at each member.
inline constexpr submit_options no_options{};

/// The same as a policy sees it, of what came at `arrival` and was told this `bound`.
[[nodiscard]] constexpr queue_head head_of_line(const submit_options& o, instant arrival, ns bound) noexcept {
    return {.cost = o.cost,
            .remaining = o.remaining,
            .arrival = arrival,
            .deadline = o.deadline,
            .key = o.key,
            .bound = bound,
            .of_request = o.of_request};
}

/// How a submission went.
struct completion {
    errc status = errc::none;  // as ticket::status()
    ns device_time{};
    instant finished_at{};
    std::exception_ptr error;  // what the callable threw
};

/// Called once on whichever thread drives the limiter when it notices, under no lock; the limiter may be used from in
/// there, but not waited for. Must not throw. Stored in place: a callable of up to 64 bytes.
using submission_callback = detail::inplace_function<void(const completion&), 64>;

namespace detail {

enum class phase : std::uint8_t { waiting, let_in, done };

/// One submission. Under its limiter's mutex, but for what `at` publishes.
template <timeline Stream>
struct submission {
    submission* next = nullptr;
    submission_work<Stream> work;  // empty: a thread waits at the gate and enqueues for itself
    submission_callback on_done;
    Stream* stream = nullptr;
    client_id client;
    queue_head facts{};
    flight<Stream>* slot = nullptr;  // once it is let in
    // done is stored with release after the fields below are final, and loaded with acquire before they are read.
    std::atomic<phase> at{phase::waiting};
    errc code = errc::none;
    std::exception_ptr error;
    instant finished_at{};
    ns device_time{};
    std::uint32_t looked_at = 0;  // by so many threads that wait for it
    std::thread::id looker{};     // the latest
    std::atomic<int> owners{0};   // limiter and ticket; acq_rel when it falls, so that the last one sees all

    enum class came : std::uint8_t { to_nothing, without_end, to_its_end };

    /// Enqueues the work, after and before a point if its slot asks for one. Sets `code` and `error` if something threw.
    /// Runs code of the user's: under no lock.
    came run() noexcept {
        const auto failed = [this] {
            code = errc::submission_failed;
            error = std::current_exception();
        };
        auto so_far = came::to_nothing;
        try {
            if (slot->needs_begin) slot->begin = stream->record();
            so_far = came::without_end;
            try {
                work(*stream);
            } catch (...) {  // what it had enqueued before it threw is charged like the rest
                failed();
            }
            if (slot->needs_end) slot->end = stream->record();
            so_far = came::to_its_end;
        } catch (...) {
            failed();
        }
        work.reset();
        return so_far;
    }
};

/// What waits of one client, in the order in which it came.
template <timeline Stream>
struct client_queue {
    fifo<submission<Stream>> waiting;
    bool told_of_loss = false;
    std::thread::id attendant{};       // the thread that waited for the latest to end and looked at it, if one did
    std::uint32_t requests = 0;        // under way
    priority own_level{};              // without its requests
    std::vector<priority> raised{};    // to these, by requests under way
    std::uint32_t waits_for_room = 0;  // threads
    detail::enqueuing enqueuing;       // how long it usually takes

    /// Another client has this index from now on.
    void begin(priority level) noexcept {
        told_of_loss = false;
        attendant = {};
        requests = 0;
        own_level = level;
        raised.clear();
        enqueuing = {};
    }

    /// Its level if its own were this one.
    [[nodiscard]] priority level_with(priority own) const noexcept {
        for (const auto p : raised) own = std::max(own, p);
        return own;
    }

    /// What is known of the first, or of the one behind it; it must be there.
    [[nodiscard]] queue_head head(bool second) const noexcept {
        return (second ? waiting.front()->next : waiting.front())->facts;
    }
};

/// Submissions outlive their limiter where somebody still holds a ticket.
template <timeline Stream>
class submission_pool {
public:
    [[nodiscard]] submission<Stream>& acquire() {
        const std::lock_guard lock(mutex_);
        auto& s = pool_.acquire();
        s.at.store(phase::waiting, std::memory_order_relaxed);
        s.owners.store(2, std::memory_order_relaxed);
        s.code = errc::none;
        return s;
    }

    void drop(submission<Stream>& s) noexcept {
        if (s.owners.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        s.work.reset();
        s.on_done.reset();
        s.error = nullptr;
        const std::lock_guard lock(mutex_);
        pool_.release(s);
    }

private:
    std::mutex mutex_;
    pool<submission<Stream>> pool_;
};

}  // namespace detail

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
