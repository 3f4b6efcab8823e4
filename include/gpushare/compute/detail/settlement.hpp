// SPDX-License-Identifier: Apache-2.0
// Settles a batch whose end is reached: charges each member (charging.hpp), tells the core and the
// log, and ends the member (endings.hpp). Used under the limiter's mutex.
//
//   detail::settlement<stream, clock, policy> accounts(time, core, clients, batches, log, ends);
//   auto* const done = observer.next_done(batches, now, true, &ask);
//   if (done != nullptr) accounts.settle(*done, observer.seen());
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <utility>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/admissions.hpp>
#include <gpushare/compute/detail/batches.hpp>
#include <gpushare/compute/detail/charging.hpp>
#include <gpushare/compute/detail/endings.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/detail/submission_log.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <timeline Stream, clock Clock, compute_policy Policy>
class settlement {
public:
    using point = typename Stream::point;
    using submission = detail::submission<Stream>;

    /// The arguments must outlive this object.
    settlement(const Clock& time, limiter_core<Policy>& core, admissions<Stream, Policy>& clients, batches<Stream>& all,
               submission_log<Stream>& log, endings<Stream, Clock, Policy>& ends) noexcept
        : clock_(time), core_(core), clients_(clients), batches_(all), log_(log), endings_(ends) {}

    /// Charges the members of `b`, whose end is reached, and wakes the threads that wait for them.
    void settle(batch<Stream>& b, const observation& seen) noexcept {
        auto& client = clients_.queue(b.client);
        note_end(b);
        static constexpr client_settings gone{};
        const auto give_back = [this](client_id c, ns shared) { core_.give_back(c, shared); };
        auto& ended = *b.ended();
        const bool logged = log_.on();
        // Built in place: a copy of the charges costs a tenth of a permit.
        common of{.seen = seen,
                  .charged = charge_for(seen, meter_, client.enqueue_time, give_back),
                  .end = std::move(ended.end),
                  .pending_at = ended.pending_at,
                  .may_shrink = !seen.used && batches_.any_beside(b),
                  .written_off = ended.written_off,
                  .logged = logged,
                  .owner = logged && core_.contains(seen.client) ? core_.settings(seen.client) : gone};
        for (auto* next = batches_.take_members(b); next != nullptr;) {
            submission& s = *std::exchange(next, next->next_member);
            const auto part = of.charged.next(s.admitted.predicted, next == nullptr);
            const auto code = complete(s, part, of);
            const auto attendant = s.looked_at > 0 ? s.looker : std::thread::id{};
            if (!s.queued && !of.written_off) endings_.finish_permit(s, code, part.took);
            batches_.release(s);
            if (of.written_off) {
                if (s.queued) endings_.pool()->drop(s);
                continue;
            }
            client.attendant = attendant;
            if (s.queued) endings_.finish(s, code, part.took);
            endings_.tell_of_end(client);
        }
        settle_charges();
    }
    /// Charges made while other work was in flight may turn out to be shared with it, until all of
    /// that work has ended.
    void settle_charges() noexcept {
        if (!core_.any_unsettled()) {
            settles_after_ = batches_.latest_order();
            return;
        }
        const auto oldest = batches_.oldest_order();
        if (oldest <= settles_after_) return;
        settles_after_ = batches_.latest_order();
        core_.settle(oldest > settles_after_);
    }
    /// When the latest end was noticed, or one shortly before it.
    [[nodiscard]] instant last_end() const noexcept { return last_end_; }

private:
    // The facts that all members of a batch have in common when its end is reached.
    struct common {
        const observation& seen;
        charges charged;
        point end;
        instant pending_at;  // when the end was last seen pending
        bool may_shrink;     // work in flight may have shared the time
        bool written_off;    // its members were reported as stuck already
        bool logged;
        const client_settings& owner;  // used only for the log
    };

    // Reading the clock costs a good part of a permit. While no submission waits, nothing else is
    // in flight and one level is in use, the time of an earlier end serves. When others come, work
    // in flight looks longer by up to `some` ends and the pauses between them. So the first bounds
    // that the newcomers get may be too long, never too short.
    void note_end(const batch<Stream>& b) noexcept {
        constexpr std::uint64_t some = 16;
        if (b.order % some == 1 || batches_.in_use().size() > 1 || core_.num_waiting() > 0 || core_.several_levels())
            last_end_ = clock_.now();
    }
    // Charges one member its part. Returns the status of its work.
    errc complete(submission& s, const charges::part& part, const common& of) noexcept {
        const auto code = s.status != errc::none ? s.status : status_of(s.own, of.end);
        const bool asked_for = s.queued || (s.has_holder() && !s.told);
        if (asked_for && s.status == errc::none && code != errc::none) s.error = thrown_by(s.own, of.end);
        const auto now = of.logged || (!of.written_off && core_.needs_end_of(s.admitted)) ? clock_.now() : instant{};
        const auto from = of.charged.from();
        const bool timed = from == charge::source::own || from == charge::source::alone;
        ns beyond{};
        if (of.written_off) {
            core_.complete_late(s.admitted, part.took);
        } else {
            const bool failed = code != errc::none;
            const auto& a = s.admitted;
            beyond = core_.complete(a,
                                    {.took = part.took,
                                     .in_flight = timed ? part.span : ns{0},
                                     .noticed = noticed(s, of, now),
                                     .enqueuing = s.needs_end ? s.enqueue_ended - s.enqueue_began : ns{0},
                                     .failed = failed,
                                     .from = from,
                                     .times = s.times,
                                     .width = of.seen.used ? of.seen.used->width : s.fills.width,
                                     .opaque = s.fills.opaque,
                                     .may_shrink = of.may_shrink,
                                     .request_over = a.of_request && !clients_.has_request(a.client, a.level)},
                                    now);
            if (failed) endings_.note_failure(of.seen.client, code);
        }
        if (of.logged) log_.completed(s, code, of.owner, part, beyond, of.end, now);
        return code;
    }
    // How late the end was noticed. If points don't say when they were reached, this is the longest
    // possible delay: since the end was last seen pending, or its work was enqueued. If the clock
    // isn't the device's, the delay is meaningless. It is cut to the length and so has no effect.
    [[nodiscard]] static ns noticed([[maybe_unused]] const submission& s, [[maybe_unused]] const common& of,
                                    instant now) noexcept {
        if (now <= instant{}) return ns{0};
        if constexpr (dated_point<point>)
            return std::clamp(now - reached_at(of.end), ns{0}, of.seen.length);
        else if constexpr (looking_point<point>)
            return std::clamp(now - std::max(of.pending_at, s.enqueue_began), ns{0}, of.seen.length);
        else
            return ns{0};
    }

    const Clock& clock_;
    limiter_core<Policy>& core_;
    admissions<Stream, Policy>& clients_;
    batches<Stream>& batches_;
    submission_log<Stream>& log_;
    endings<Stream, Clock, Policy>& endings_;
    span_meter meter_;
    instant last_end_{};
    // The order of a batch: once all batches up to it have ended, earlier charges are settled.
    std::uint64_t settles_after_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
