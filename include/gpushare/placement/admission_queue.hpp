// SPDX-License-Identifier: Apache-2.0
// Admission with a queue: a request is placed at once, waits for its turn, or is refused with what it lacks. A state
// machine without a clock, thread or cluster of its own: time and cluster are arguments.
//
//   gpushare::admission_queue queue({.most_waiting = 100});
//   auto a = queue.submit(now, policy, cluster, {.members = {request}, .level = {1}, .deadline = now + 30s});
//   if (a.outcome == gpushare::admission_result::queued) ...      // a.id comes back from a later advance()
//   cluster.release(p);
//   for (auto& done : queue.advance(now, policy, cluster)) ...
//
// The higher level goes first, and within a level the earlier arrival. A request that fits may overtake one that
// doesn't, so that capacity isn't left idle beside a large request. But each entry is overtaken at most
// `most_overtakes` times. After that no later entry is placed before it, unless the overtaken one waits to be
// near a label (labels.hpp) that no node has. So small requests don't starve large ones, nor the other way round.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/gang_plan.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A request for admission: one placement request, or several that are placed together or not at all.
struct admission_request {
    std::vector<placement_request> members{};  ///< all of them or none
    priority level{};                          ///< a higher one goes first
    instant deadline = never;                  ///< to be placed by; `instant::min()` doesn't wait at all
};

/// The outcome of a request for admission.
struct admission_result {
    /// How it went.
    enum result : std::uint8_t {
        placed,     ///< `placements` are applied
        queued,     ///< `why` is what it lacks now
        refused,    ///< not queued: it can never fit, or the queue is full; see `code`
        expired,    ///< the deadline came first
        withdrawn,  ///< by its owner
    };
    std::uint64_t id = 0;      ///< of the request, in the queue
    result outcome = refused;  ///< how it went
    errc code = errc::none;    ///< of a refusal: no_room, too_few_devices and the like, queue_full, deadline_exceeded
    std::vector<placement> placements{};  ///< one for each member, applied
    std::size_t member = 0;               ///< which one lacks it
    refusal why{};                        ///< what that member lacks
};

/// Bounds of a queue.
struct admission_queue_options {
    std::size_t most_waiting = 1024;    ///< more are refused
    std::uint32_t most_overtakes = 16;  ///< of each request, by those behind it
};

/// Requests that wait to be placed. A value. Every id that was queued comes back exactly once: from advance() or
/// withdraw().
class admission_queue {
public:
    /// An empty queue.
    explicit admission_queue(admission_queue_options options = {}) noexcept : options_(options) {}

    /// Places, queues or refuses the request. One that wouldn't fit even on the empty cluster is refused at once.
    /// Throws std::bad_alloc, and then nothing has happened.
    template <class P>
    requires placement_policy<P> admission_result submit(instant now, P&& policy, cluster& c, admission_request r) {
        admission_result a{.id = ++last_id_};
        const bool blocked =
            std::ranges::any_of(waiting_, [&](const entry& e) { return !goes_before(r, e) && holds_up(c, e); });
        if (!blocked && place(policy, c, r.members, a)) {
            overtake(r);
            return a;
        }
        if (blocked) note_shortage(policy, c, r.members, a);
        if (const auto never_fits = impossible(policy, c, r.members); never_fits.why) {
            a.member = never_fits.member;
            a.why = never_fits.why;
            return refuse(std::move(a), to_errc(a.why.missing));
        }
        if (r.deadline <= now) return refuse(std::move(a), errc::deadline_exceeded);
        if (waiting_.size() >= options_.most_waiting) return refuse(std::move(a), errc::queue_full);
        const auto behind = std::ranges::find_if(waiting_, [&](const entry& e) { return goes_before(r, e); });
        waiting_.insert(behind, entry{a.id, std::move(r), 0});
        a.outcome = admission_result::queued;
        return a;
    }

    /// Places the waiting requests that fit now, in order, and returns these and those whose deadline has passed. Call
    /// it after a release, and when a deadline may have passed.
    template <class P>
    requires placement_policy<P> std::vector<admission_result> advance(instant now, P&& policy, cluster& c) {
        std::vector<admission_result> done;
        done.reserve(waiting_.size());  // from here on, what was placed is not lost
        std::erase_if(waiting_, [&](const entry& e) {
            if (e.request.deadline > now) return false;
            done.push_back({.id = e.id, .outcome = admission_result::expired, .code = errc::deadline_exceeded});
            return true;
        });
        try {
            while (place_next(policy, c, done)) {
            }
        } catch (...) {
            if (done.empty()) throw;
        }
        return done;
    }

    /// Removes a request from the queue. False if it isn't waiting there.
    bool withdraw(std::uint64_t id) noexcept {
        return std::erase_if(waiting_, [&](const entry& e) { return e.id == id; }) != 0;
    }

    /// How many requests wait.
    [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.size(); }
    /// When advance() has something to do even if nothing is released.
    [[nodiscard]] instant next_deadline() const noexcept {
        instant first = never;
        for (const auto& e : waiting_) first = std::min(first, e.request.deadline);
        return first;
    }

private:
    struct entry {
        std::uint64_t id = 0;
        admission_request request{};
        std::uint32_t overtaken = 0;
    };

    static bool goes_before(const admission_request& r, const entry& e) noexcept { return r.level > e.request.level; }

    // Whether nobody may go before it any more. Not while it waits for somebody who isn't there: they may be behind it.
    [[nodiscard]] bool holds_up(const cluster& c, const entry& e) const noexcept {
        const std::span members(e.request.members);
        return e.overtaken >= options_.most_overtakes && std::ranges::none_of(members, [&](const placement_request& r) {
                   return r.near && !c.carries(r.near) && !carried_in(members, r.near);
               });
    }

    static admission_result refuse(admission_result a, errc code) {
        a.outcome = admission_result::refused;
        a.code = code;
        return a;
    }

    template <class P>
    static bool place(P& policy, cluster& c, std::span<const placement_request> members, admission_result& a) {
        auto plan = plan_gang(policy, c, members);
        a.member = plan.member;
        a.why = plan.why;
        if (!plan) return false;
        apply_gang(c, *plan.placements);
        a.placements = *std::move(plan.placements);
        a.outcome = admission_result::placed;
        return true;
    }

    template <class P>
    static void note_shortage(P& policy, const cluster& c, std::span<const placement_request> members,
                              admission_result& a) {
        const auto plan = plan_gang(policy, c, members);
        a.member = plan.member;
        a.why = plan.why;
    }

    // The first who fits, unless somebody before it has been overtaken too often.
    template <class P>
    bool place_next(P& policy, cluster& c, std::vector<admission_result>& done) {
        for (std::size_t i = 0; i < waiting_.size(); ++i) {
            admission_result a{.id = waiting_[i].id};
            if (place(policy, c, waiting_[i].request.members, a)) {
                for (std::size_t ahead = 0; ahead < i; ++ahead) ++waiting_[ahead].overtaken;
                waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
                done.push_back(std::move(a));
                return true;
            }
            if (holds_up(c, waiting_[i])) return false;
        }
        return false;
    }

    // Which member finds no place even if all nodes are empty; whoever from outside it wants to be near may still come.
    // A gang without a plan there would only hold up everybody behind it.
    template <class P>
    static gang_plan impossible(P& policy, const cluster& c, std::vector<placement_request> members) {
        cluster empty;
        for (std::uint32_t i = 0; i < c.size(); ++i) empty.add(c[{i}].whole);
        for (std::size_t i = 0; i < members.size(); ++i) {
            placement_request alone = members[i];
            alone.group = alone.near = alone.apart = {};
            if (const auto why = empty.why_not(alone)) return {.member = i, .why = why};
        }
        if (members.size() == 1) return {};
        const auto among = members;
        for (auto& m : members)
            if (!carried_in(among, m.near)) m.near = {};
        return plan_gang(policy, empty, members);
    }

    void overtake(const admission_request& r) noexcept {
        for (auto& e : waiting_)
            if (!goes_before(r, e)) ++e.overtaken;
    }

    admission_queue_options options_;
    std::vector<entry> waiting_;  // in the order in which they go
    std::uint64_t last_id_ = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
