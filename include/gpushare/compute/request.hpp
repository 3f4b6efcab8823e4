// SPDX-License-Identifier: Apache-2.0
// A request: submissions of one client that belong together, one after the other, such as the layers of an inference,
// with a deadline and a priority. While it is under way, and for a bounded time between two of its submissions, work of
// lower levels is held back. So a chain of kernels waits for a neighbour's work once, not once per kernel.
//
//   gpushare::request r(limiter, chat, {.deadline = clock.now() + 50ms, .level = gpushare::priority{1}});
//   for (auto& layer : layers) r.submit(stream, [&](auto& s) { s.launch(shape, layer); })->wait();
#pragma once

#include <algorithm>
#include <stop_token>
#include <utility>

#include <gpushare/compute/submission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// What the caller knows of a request beforehand.
struct request_options {
    instant deadline = never;      ///< when it is to be done, for policies that look at it
    ns cost{};                     ///< device time of all of it, if known, for policies that look at what remains
    priority level = no_priority;  ///< its own, where it is above its client's; at most client_settings::ceiling
};

/// Submissions of a client that belong together. While one of them is in flight, and for
/// limiter_options::anticipation after the end of the latest was seen, no work of lower levels is
/// admitted. This ends with the request. A request's own level is the level of its submissions and
/// of nothing else: they go before waiting submissions of its client of a lower level, whatever
/// their streams. Their time, and time held back for them, is charged to the client's share. A
/// request above its client's ceiling goes at the ceiling. It doesn't change the priority of a
/// stream: use a stream of that level. Neither copied nor moved; for one thread at a time, though
/// others may wait for its tickets. Must not outlive its limiter.
template <class Limiter>
class [[nodiscard]] request {
public:
    using stream = typename Limiter::stream;  ///< The stream that its submissions are enqueued on.

    /// Begins. Throws std::bad_alloc.
    request(Limiter& limiter, client_id client, request_options options = {})
        : limiter_(limiter), client_(client), options_(options) {
        const auto why = limiter_.begin_request(client_, options_.level);
        if (why != errc::none && why != errc::closed) raise(failure{why}, {}, "request");
    }
    request(const request&) = delete;             ///< Not copied.
    request& operator=(const request&) = delete;  ///< Not copied.
    /// Ends the request. Its submissions go on.
    ~request() { limiter_.end_request(client_, options_.level); }

    /// As limiter.submit. The remaining time is the request's; so is the deadline, if it is earlier
    /// than the deadline of `o`.
    [[nodiscard]] result<typename Limiter::ticket> submit(stream& s, submission_work<stream> work,
                                                          const submit_options& o = {},
                                                          submission_callback on_done = {}) {
        return limiter_.submit(client_, s, std::move(work), describe(o), std::move(on_done));
    }
    /// As limiter.acquire; waits until the deadline of the request.
    [[nodiscard]] result<typename Limiter::permit> acquire(const submit_options& o = {},
                                                           const std::stop_token& stop = {}) {
        return limiter_.acquire(client_, options_.deadline, stop, describe(o));
    }

    /// When it is to be done.
    [[nodiscard]] instant deadline() const noexcept { return options_.deadline; }

private:
    [[nodiscard]] submit_options describe(submit_options o) noexcept {
        o.remaining = options_.cost;
        o.deadline = std::min(o.deadline, options_.deadline);
        o.of_request = true;
        o.priority = std::max(o.priority, options_.level);
        const ns cost = std::max(o.cost, ns{0});  // a negative one says nothing
        options_.cost = options_.cost > cost ? options_.cost - cost : ns{0};
        return o;
    }

    Limiter& limiter_;
    client_id client_;
    request_options options_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
