// SPDX-License-Identifier: Apache-2.0
// The types of a submission at a limiter's interface: the work, what is known of it beforehand, the callback at its
// end, and the record that is kept of it.
//
//   gpushare::submit_options about{.key = kernel_id, .deadline = now + 5ms};
//   limiter.submit(chat, stream, work, about, [](const gpushare::completion& c) { if (c.status != gpushare::errc::none) ...; });
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

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
    std::uint64_t key = 0;  ///< its kind, such as a kernel's id and a class of sizes: predicts its cost
    sm_width
        width{};  ///< the part of the SMs that it can fill; not known: learnt where the device tells, else all of them
    ns cost{};    ///< device time that it takes (duration times width), if the caller knows; 0: predicted
    ns remaining{};            ///< the same for all that is left of its request, itself included
    instant deadline = never;  ///< when it is due, for policies that look at it
    /// Work that can't begin by its deadline never runs. errc::deadline_exceeded, at the deadline,
    /// or before where it is late when it comes. It isn't admitted behind work that may take beyond
    /// the deadline, as declared or seen of its kind.
    bool drop_if_late = false;
    /// Its own priority. Among its client's waiting submissions it goes before those of a lower
    /// priority, whatever their streams; those without one have the client's level. It is admitted
    /// at this level if it is above its client's, but at most at client_settings::ceiling. Its time
    /// is charged to its client's share. A stream keeps its priority.
    gpushare::priority priority = no_priority;
    instant room_by = instant::min();  ///< if the queue is full: how long to wait for room instead of refusing
    std::uint32_t stream = 0;  ///< of a tenant's streams the one that it is for; a limiter is told the stream itself
    bool of_request = false;   ///< set by a request: more follows soon
};

/// The default, which is recognised by its address.
inline constexpr submit_options no_options{};

namespace detail {
/// Throws what a submission that failed is known to have thrown; see completion::rethrow.
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

/// How a submission went.
struct completion {
    errc status = errc::none;  ///< as ticket::status()
    ns device_time{};          ///< as its client was charged
    instant finished_at{};     ///< when the limiter noticed, on its clock
    std::exception_ptr error;  ///< what the callable threw, or the kernel on a device that keeps it
    tenant_name tenant{};      ///< of one that failed: its client's name

    /// If it failed: throws what was thrown, as it is, for a client without a name; for one with a
    /// name an operation_error with status, name and text, in which that is nested
    /// (std::rethrow_if_nested). Else it does nothing.
    void rethrow() const { detail::rethrow(status, tenant, error); }
};

/// Called once when the limiter notices the end, on the thread that drives it, under no lock. May use the limiter, but
/// not wait for it, nor for a thread that waits to get in below: while a callback is under way
/// lower levels may have to wait for it, and try_acquire finds no room for them. Must not throw.
/// Stored in place: a callable of up to 64 bytes.
using submission_callback = detail::inplace_function<void(const completion&), 64>;

/// A submission that ran. Times are on the limiter's clock. `ended` is when its last point was reached, as near as can
/// be told: never before the admission, and late by at most the shortest delay with which the limiter has noticed an
/// end so far. `began` lies before that by what it was charged, at most by its span. Each member of a batch has its
/// part of the batch.
struct submission_record {
    client_id client{};        ///< whose
    std::uint32_t tag = 0;     ///< client_settings::tag
    tenant_name name{};        ///< client_settings::name
    std::uint64_t key = 0;     ///< its kind
    instant arrived{};         ///< when it came
    instant let_in{};          ///< when it was admitted
    instant began{};           ///< when the device began with it
    instant ended{};           ///< when the device was done with it
    instant noticed{};         ///< when the limiter saw that
    ns device_time{};          ///< as charged
    ns bound{};                ///< on its wait once it is admitted; see limiter_core::bound_of
    ns beyond{};               ///< by how much that was longer
    errc status = errc::none;  ///< as ticket::status()
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
