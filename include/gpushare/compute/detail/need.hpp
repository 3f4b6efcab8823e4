// SPDX-License-Identifier: Apache-2.0
// A thread in a compute limiter: why it is there (need), what it does for other threads (duty), and
// what it waits for (waiter). Values, used under the limiter's mutex.
//
//   need<submission> stay{.done = question(admitted), .own = &s, .deadline = deadline};
//   if (stay.is_met(clock) && !stay.is_short(clock)) leave();   // others' work is left to others
#pragma once

#include <algorithm>
#include <concepts>
#include <stop_token>
#include <thread>

#include <gpushare/compute/detail/sleepers.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The longest time for which a thread runs callables and callbacks of others beyond its own need.
/// A callable that is running at the end of that time is finished. If a callback is due and no
/// thread sleeps in the limiter, the thread calls at least one.
inline constexpr ns beyond_need{100'000};

/// A question that the caller answers: a callable, which outlives the question, or a constant
/// answer. It is no template argument, so that one engine is compiled for all callers.
class question {
public:
    /// A question that always has this answer.
    explicit constexpr question(bool answer) noexcept : ask_(answer ? &yes : &no) {}
    template <std::predicate F>
    explicit constexpr question(const F& asked) noexcept : of_(&asked), ask_(&ask<F>) {}

    bool operator()() const { return ask_(of_); }

private:
    template <class F>
    static bool ask(const void* of) {
        return (*static_cast<const F*>(of))();
    }
    static bool yes(const void*) { return true; }
    static bool no(const void*) { return false; }

    const void* of_ = nullptr;
    bool (*ask_)(const void*);
};

/// A waiting thread's duty to the others: it looks at the device. Before it runs possibly long user
/// code, it gives this duty up, so that another thread takes it.
template <class Submission>
struct duty {
    Submission* looks_at = nullptr;  // its own submission, if it looks at the end of that one
    bool watches = false;            // it looks at all ends at which no other thread looks
    bool came = false;               // new work came while it looked
};

/// The reason why a thread is here. It drives for others until the need is met, and after that for
/// at most `beyond`. It leaves the rest to a thread that sleeps in the limiter or, if there is
/// none, to the next thread that comes. So an endless supply of work keeps no thread. The need is
/// met when `done` is true, at the deadline, or by a stop request.
template <class Submission>
struct need {
    question done{true};
    // The thread's own submission, whose callable it always runs when its turn comes.
    const Submission* own = nullptr;
    instant deadline = never;
    const std::stop_token* stop = nullptr;
    duty<Submission>* duties = nullptr;
    ns beyond = beyond_need;
    // When the time beyond the need began: when the need was first found to be met or, if it was
    // met during a callable of another submission, when that callable began.
    instant since = never;
    bool called = false;  // it has called a callback

    template <clock Clock>
    [[nodiscard]] bool is_met(const Clock& time) const noexcept {
        return done() || (stop != nullptr && stop->stop_requested()) || (deadline != never && time.now() >= deadline);
    }
    /// Whether the time beyond the need is still short. If that time hasn't begun, it begins now.
    template <clock Clock>
    [[nodiscard]] bool is_short(const Clock& time) noexcept {
        if (beyond <= ns{0}) return false;
        const auto now = time.now();
        since = std::min(since, now);
        return now - since < beyond;
    }
};

/// A thread that waits in a limiter, for work of its own or for something else.
template <class Submission>
struct waiter {
    Submission* own;  // its submission; null: it waits for something else
    instant deadline;
    duty<Submission> duties{};  // kept until it has driven
    // From then on it also watches the ends that other threads were expected to watch.
    instant patient_until = never;
    std::thread::id thread = std::this_thread::get_id();

    /// The thread goes to sleep. If there are ends that other threads are expected to watch, its
    /// patience with them begins.
    void grow_patient(instant now, bool any_ends_left) noexcept {
        if (!any_ends_left)
            patient_until = never;
        else if (now >= patient_until || patient_until == never)
            patient_until = now + watch_slice::patience;
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
