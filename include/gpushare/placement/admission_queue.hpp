// SPDX-License-Identifier: Apache-2.0
// Admission with a queue: a request is placed immediately, waits for its turn, or is refused with
// the resource that it lacks. The queue is a state machine without a clock, thread or cluster of
// its own: time and cluster are arguments.
//
//   gpushare::admission_queue queue({.most_waiting = 100});
//   auto a = queue.submit(now, policy, cluster, {.members = {request}, .level = {1}, .deadline = now + 30s});
//   if (a.outcome == gpushare::admission_result::queued) ...      // a.id comes back from a later advance()
//   cluster.release(p);
//   for (auto& done : queue.advance(now, policy, cluster)) ...
//
// The higher level goes first, and within a level the earlier arrival. A request that fits may go
// before an earlier request that doesn't fit, so that there is no head-of-line blocking behind a
// large request. A smaller request that takes capacity which the waiting request then lacks
// (detail/competition.hpp) overtakes the waiting request. A request may be overtaken at most
// `most_overtakes` times. From then on, no request of its level or below takes such capacity first.
// Capacity that the waiting request can't use is placed as before. So small requests don't starve
// large requests, and no capacity idles for a request that couldn't use it.
//
// The caller that carries placements out may refuse a placement. The queue then chooses again, and
// no request counts as overtaken.
//
//   queue.submit(now, policy, view, {.members = {request}}, [&](std::span<const gpushare::placement> where, gpushare::cluster& view) {
//       if (try_to_start(where)) return gpushare::carried::out;
//       view.drain(where[0].node);                        // its room is less than the view says
//       return gpushare::carried::elsewhere;
//   });
//
// A capacity_calendar promises capacity ahead of time by bookings. A booking is a placement from
// one instant to another; an existing placement is a booking that has begun. The calendar is a
// plain value as well.
//
//   gpushare::capacity_calendar days(cluster_of_empty_nodes);
//   // a result<booking>
//   auto night = days.try_book(policy, request, gpushare::instant{} + 22h, gpushare::instant{} + 30h);
//   days.cancel(night->id);
//   days.change_nodes([](gpushare::cluster& nodes) { nodes.drain({3}); });
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/detail/competition.hpp>
#include <gpushare/placement/detail/gang_search.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A request for admission: one placement request, or several requests that are placed together or
/// not at all.
struct admission_request {
    std::vector<placement_request> members{};  ///< placed together, or not at all
    priority level{};                          ///< a higher level goes first
    /// The request must be placed by then; `instant::min()` means no wait.
    instant deadline = never;
    /// The only devices of a node that the request may use; empty for any device.
    device_set on{};
};

/// The outcome of a request for admission.
struct admission_result {
    /// The result for the request.
    enum result : std::uint8_t {
        placed,     ///< `placements` are applied
        queued,     ///< the request waits because of the shortage `why`
        refused,    ///< not queued: the request can never fit, or the queue is full; see `code`
        expired,    ///< the deadline came before the placement
        withdrawn,  ///< the owner withdrew the request
    };
    std::uint64_t id = 0;      ///< the request's number in the queue
    result outcome = refused;  ///< the result
    /// the reason for a refusal: no_room, too_few_devices and the like, queue_full,
    /// deadline_exceeded
    errc code = errc::none;
    std::vector<placement> placements{};  ///< one for each member, applied
    std::size_t member = 0;               ///< the member that lacks a resource
    refusal why{};                        ///< what that member lacks
};

/// The outcome of carrying out a plan.
enum class carried : std::uint8_t {
    out,  ///< the plan was carried out
    /// the plan wasn't carried out: the function has noted why in its cluster, and the queue
    /// chooses again
    elsewhere,
    dropped,  ///< the request is refused, without a code of the queue's
};

/// The free capacity as each level sees it, if shares of different levels don't compete
/// (placement_request::level).
///  - `of(level)` is the cluster as requests of that level see it; the reference is valid until
///    took()
///  - `seen(p, level)` is the part of a placement that takes capacity which that level sees
///  - `took(level, after)` says that a plan was carried out: of(level) is `after` from now on
template <class V>
concept level_views = requires(V& v, const placement& p, priority level, cluster&& after) {
    { v.of(level) } -> std::same_as<cluster&>;
    { v.seen(p, level) } -> std::same_as<placement>;
    { v.took(level, std::move(after)) }
    noexcept;
};

namespace detail {

/// A view in which the cluster looks the same to all levels.
class one_view {
public:
    explicit one_view(cluster& all) noexcept : all_(&all) {}
    [[nodiscard]] cluster& of(priority) const noexcept { return *all_; }
    [[nodiscard]] static placement seen(const placement& p, priority) noexcept { return p; }
    void took(priority, cluster&& after) const noexcept { *all_ = std::move(after); }

private:
    cluster* all_;
};
static_assert(level_views<one_view>);

}  // namespace detail

/// Bounds of a queue.
struct admission_queue_options {
    std::size_t most_waiting = 1024;    ///< further requests are refused
    std::uint32_t most_overtakes = 16;  ///< how often later requests may overtake a request
};

/// Requests that wait to be placed. A value. Each queued request leaves the queue exactly once:
/// advance() returns its result, or withdraw() removes it.
class admission_queue {
public:
    /// An empty queue.
    explicit admission_queue(admission_queue_options options = {}) noexcept : options_(options) {}

    /// Places, queues or refuses the request. A request that wouldn't fit even on the empty cluster
    /// is refused immediately. Throws std::bad_alloc, which leaves the queue unchanged.
    template <class P>
    requires placement_policy<P> admission_result submit(instant now, P&& policy, cluster& c, admission_request r) {
        detail::one_view all(c);
        return submit(now, policy, all, std::move(r), at_once{});
    }
    /// submit() with a function that carries the plan out: `carry(placements, c)` returns the
    /// result, see `carried`. `c` doesn't have the placements yet. If `carry` throws, the exception
    /// propagates, and the queue is unchanged. A plan that was carried out is placed even if the
    /// host has no memory left. If `carry` has added labels to `c`, or has assigned another cluster
    /// to `c`, the changes that `carry` has made to `c` may then be lost.
    template <class P, class Carry>
    requires placement_policy<P> admission_result submit(instant now, P&& policy, cluster& c, admission_request r,
                                                         Carry&& carry) {
        detail::one_view all(c);
        return submit(now, policy, all, std::move(r),
                      [&](std::span<const placement> where, auto&) { return carry(where, c); });
    }
    /// submit() for views in which each level sees another cluster. The call is `carry(placements,
    /// views)`.
    template <class P, level_views Views, class Carry>
    requires placement_policy<P> admission_result submit(instant now, P&& policy, Views& views, admission_request r,
                                                         Carry&& carry) {
        admission_result a{.id = ++last_id_};
        const std::size_t ahead = before(r);
        if (place(policy, views, r, ahead, a, carry)) return a;
        const auto never_fits = impossible(policy, views.of(r.level), r);
        if (never_fits.why && never_fits.proven) {
            a.member = never_fits.member;
            a.why = never_fits.why;
            return refuse(std::move(a), to_errc(a.why.missing));
        }
        if (r.deadline <= now) return refuse(std::move(a), errc::deadline_exceeded);
        if (waiting_.size() >= options_.most_waiting) return refuse(std::move(a), errc::queue_full);
        const bool changed = !seen_.same(views.of(r.level));
        waiting_.insert(waiting_.begin() + static_cast<std::ptrdiff_t>(ahead),
                        entry{a.id, std::move(r), 0, !never_fits.why});
        // The request may fit the current nodes, but not the nodes of `seen_`.
        if (changed) seen_ = {};
        a.outcome = admission_result::queued;
        return a;
    }

    /// Places the waiting requests that fit now, in order. Returns these requests, and the requests
    /// whose deadline has passed. Returns as refused the requests that no longer fit on any node
    /// because nodes have gone or shrunk. Call advance() after a release, when nodes or devices
    /// have come or gone, and when a deadline may have passed.
    template <class P>
    requires placement_policy<P> std::vector<admission_result> advance(instant now, P&& policy, cluster& c) {
        detail::one_view all(c);
        return advance(now, policy, all, [](const admission_result&) { return at_once{}; });
    }
    /// advance() with a function: `carry_for(result)` returns the `carry` of a request. Only the id
    /// of `result` is set. See submit().
    template <class P, class CarryFor>
    requires placement_policy<P> std::vector<admission_result> advance(instant now, P&& policy, cluster& c,
                                                                       CarryFor&& carry_for) {
        detail::one_view all(c);
        return advance(now, policy, all, [&](const admission_result& a) {
            return
                [&c, carry = carry_for(a)](std::span<const placement> where, auto&) mutable { return carry(where, c); };
        });
    }
    /// advance() for views in which each level sees another cluster.
    template <class P, level_views Views, class CarryFor>
    requires placement_policy<P> std::vector<admission_result> advance(instant now, P&& policy, Views& views,
                                                                       CarryFor&& carry_for) {
        std::vector<admission_result> done;
        done.reserve(waiting_.size());  // no placed request is lost from here on
        std::erase_if(waiting_, [&](const entry& e) {
            if (e.request.deadline > now) return false;
            done.push_back({.id = e.id, .outcome = admission_result::expired, .code = errc::deadline_exceeded});
            return true;
        });
        try {
            refuse_impossible(policy, views, done);
            while (place_next(policy, views, done, carry_for)) {
            }
        } catch (...) {
            if (done.empty()) throw;
        }
        return done;
    }

    /// Removes a request from the queue. Returns false if the request doesn't wait there.
    bool withdraw(std::uint64_t id) noexcept {
        return std::erase_if(waiting_, [&](const entry& e) { return e.id == id; }) != 0;
    }

    /// For code that takes capacity past the queue, for example for a reservation. Returns where
    /// the policy would put the request, without taking capacity from requests that have been
    /// overtaken too often. Call note_overtaken() once the capacity has been taken.
    template <class P>
    requires placement_policy<P>
    [[nodiscard]] gang_plan plan(P&& policy, const cluster& c, const admission_request& r) const {
        cluster as_is = c;
        detail::one_view all(as_is);
        return plan(policy, all, r, before(r));
    }
    /// The same for views in which each level sees another cluster.
    template <class P, level_views Views>
    requires placement_policy<P>
    [[nodiscard]] gang_plan plan(P&& policy, Views& views, const admission_request& r) const {
        return plan(policy, views, r, before(r));
    }
    /// Counts placements on `before`, of a request of that level, as overtaking the requests whose
    /// capacity they take.
    void note_overtaken(const cluster& before, priority level, std::span<const placement> taken) {
        cluster as_is = before;
        detail::one_view all(as_is);
        note_overtaken(all, level, taken);
    }
    /// The same for views in which each level sees another cluster.
    template <level_views Views>
    void note_overtaken(Views& before, priority level, std::span<const placement> taken) {
        for (const auto i : harmed(before, taken, waiting_.size(), false))
            if (level <= waiting_[i].request.level) ++waiting_[i].overtaken;
    }

    /// The number of waiting requests.
    [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.size(); }
    /// The time at which advance() has something to do even if nothing is released before.
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
        // whether there is a plan on the empty cluster; without one, waiting is pointless
        bool has_plan = true;
    };
    struct at_once {};
    // The capacity that exists, node by node and device by device. After a change, a waiting
    // request may wait in vain even if the sum is as before.
    class extent {
    public:
        extent() = default;
        explicit extent(const cluster& c) {
            nodes_.reserve(c.size());
            devices_.reserve(c.devices());
            for (std::uint32_t i = 0; i < c.size(); ++i) {
                nodes_.push_back(c.there({i}));
                for (std::uint32_t d = 0; d < c[{i}].devices.size(); ++d) devices_.push_back(c.there({i}, {d}));
            }
        }
        [[nodiscard]] bool same(const cluster& c) const noexcept {
            if (nodes_.size() != c.size()) return false;
            std::size_t at = 0;
            for (std::uint32_t i = 0; i < c.size(); ++i) {
                const auto count = static_cast<std::uint32_t>(c[{i}].devices.size());
                if (nodes_[i] != c.there({i}) || devices_.size() - at < count) return false;
                for (std::uint32_t d = 0; d < count; ++d)
                    if (devices_[at++] != c.there({i}, {d})) return false;
            }
            return at == devices_.size();
        }

    private:
        std::vector<node_description> nodes_;
        std::vector<bytes> devices_;  // the memory of each device
    };

    static bool goes_before(const admission_request& r, const entry& e) noexcept { return r.level > e.request.level; }
    // The number of waiting requests that go before the request.
    [[nodiscard]] std::size_t before(const admission_request& r) const noexcept {
        return static_cast<std::size_t>(
            std::ranges::find_if(waiting_, [&](const entry& e) { return goes_before(r, e); }) - waiting_.begin());
    }

    // True if no other request may take capacity from this request any more. False while the
    // request waits to be near a request that isn't there yet, because that request may be behind
    // it in the queue.
    [[nodiscard]] bool holds_up(const cluster& c, const entry& e) const noexcept {
        const std::span members(e.request.members);
        return e.has_plan && e.overtaken >= options_.most_overtakes &&
               std::ranges::none_of(members, [&](const placement_request& r) {
                   return r.near && !c.carries(r.near) && !carried_in(members, r.near);
               });
    }

    static admission_result refuse(admission_result a, errc code) {
        a.outcome = admission_result::refused;
        a.code = code;
        return a;
    }

    // The entries among the first `ahead` whose capacity the placements take. With `held_only`,
    // only the entries that hold up other requests.
    template <level_views Views>
    [[nodiscard]] std::vector<std::size_t> harmed(Views& views, std::span<const placement> taken, std::size_t ahead,
                                                  bool held_only) const {
        std::vector<std::size_t> all;
        for (std::size_t i = 0; i < ahead; ++i) {
            const entry& e = waiting_[i];
            if (held_only && !holds_up(views.of(e.request.level), e)) continue;
            if (takes_from(views, e, taken)) all.push_back(i);
        }
        return all;
    }
    template <level_views Views>
    static bool takes_from(Views& views, const entry& e, std::span<const placement> taken) {
        const priority level = e.request.level;
        const cluster& c = views.of(level);
        if (taken.size() == 1)
            return detail::competition(c, e.request.members, e.request.on).harmed_by(views.seen(taken.front(), level));
        cluster after = c;  // each placement is judged alongside the placements before it
        for (const auto& p : taken) {
            const placement its = views.seen(p, level);
            if (detail::competition(after, e.request.members, e.request.on).harmed_by(its)) return true;
            after.hold(its);
        }
        return false;
    }

    // Where the policy would put the request on these devices.
    template <class P>
    static gang_plan plan_on(P& policy, const cluster& c, const admission_request& r,
                             std::size_t most_steps = gang_steps) {
        if (r.on.empty()) return plan_gang(policy, c, r.members, most_steps);
        return plan_gang(policy, only(c, r.on), r.members, most_steps);
    }
    static cluster only(const cluster& c, device_set on) {
        cluster named = c;
        for (std::uint32_t i = 0; i < c.size(); ++i)
            for (std::uint32_t d = 0; d < c[{i}].devices.size(); ++d)
                if (!on.contains({d}) && c[{i}].devices[d].open) named.drain({i}, {d});
        return named;
    }

    // A place that doesn't harm any of the first `ahead` entries that hold up other requests. Tries
    // the policy's own choice, then its choice among the capacity alongside those entries' needs,
    // then any such place.
    template <class P, level_views Views>
    gang_plan plan(P& policy, Views& views, const admission_request& r, std::size_t ahead) const {
        cluster& c = views.of(r.level);
        auto first = plan_on(policy, c, r);
        if (!first) return first;
        const auto in_front = harmed(views, *first.placements, ahead, true);
        if (in_front.empty()) return first;
        const cluster left = beside_held(views, r, ahead);
        if (auto other = plan_on(policy, left, r); other && harmed(views, *other.placements, ahead, true).empty())
            return other;
        const cluster named = r.on.empty() ? c : only(c, r.on);
        detail::gang_search search(named, r.members, detail::order_of_placing(r.members), gang_steps);
        const auto harmless = [&](const cluster& beside, const placement& p) {
            if (r.members.size() == 1) return harmed(views, std::span(&p, 1), ahead, true).empty();
            cluster as_is = beside;
            detail::one_view all(as_is);
            return harmed(all, std::span(&p, 1), ahead, true).empty();
        };
        if (search.run(harmless, true)) return {.placements = std::move(search).placements()};
        return {.why = {shortage::turn, {}, waiting_[in_front.front()].id, 0}};
    }
    // The capacity that remains for this request after the entries in front that hold up the queue.
    template <level_views Views>
    [[nodiscard]] cluster beside_held(Views& views, const admission_request& r, std::size_t ahead) const {
        cluster left = views.of(r.level);
        for (std::size_t i = 0; i < ahead; ++i) {
            const entry& e = waiting_[i];
            const cluster& its = views.of(e.request.level);
            if (!holds_up(its, e)) continue;
            const placement whole{{.devices = 1, .each = share::whole(), .level = e.request.level}};
            const bool shares = views.seen(whole, r.level).request.each != share{};
            detail::competition(its, e.request.members, e.request.on).keep(left, r.members, shares);
        }
        return left;
    }

    // Calls `carry`, and notes in the view a plan that was carried out. Also returns whether
    // `carry` has changed the view. Once a plan is carried out, no statement throws std::bad_alloc,
    // because the caller would take the request for one that wasn't placed.
    template <level_views Views, class Carry>
    static std::pair<carried, bool> carry_out(Views& views, priority level, std::span<const placement> all,
                                              Carry& carry) {
        views.of(level).reserve(all);  // for hold()
        cluster after = views.of(level);
        apply_gang(after, all);
        const cluster before = views.of(level);
        const carried how = carry(all, views);
        if (how == carried::dropped) return {how, false};
        if (how == carried::elsewhere) return {how, views.of(level) != before};
        bool changed = false;
        try {
            if (cluster& now = views.of(level); now != before) {
                changed = true;
                for (const auto& p : all) now.hold(p);
                after = std::move(now);
            }
        } catch (const std::exception&) {
            // `carry` took the memory for the labels, or held more than can be counted. `after` is
            // as if `carry` had changed nothing.
        }
        views.took(level, std::move(after));
        return {how, changed};
    }

    // Repeats until the plan is carried out, or there is no plan.
    template <class P, level_views Views, class Carry>
    bool place(P& policy, Views& views, const admission_request& r, std::size_t ahead, admission_result& a,
               Carry& carry) {
        for (;;) {
            auto found = plan(policy, views, r, ahead);
            a.member = found.member;
            a.why = found.why;
            if (!found) return false;
            const auto overtakes = harmed(views, *found.placements, ahead, false);
            if constexpr (std::is_same_v<std::remove_const_t<Carry>, at_once>) {
                apply_gang(views.of(r.level), *found.placements);
            } else {
                const auto [how, changed] = carry_out(views, r.level, *found.placements, carry);
                if (how == carried::dropped) {
                    a.outcome = admission_result::refused;
                    return true;
                }
                if (how == carried::elsewhere) {
                    if (changed) continue;
                    a.why = {shortage::consent};
                    return false;
                }
            }
            for (const auto i : overtakes) ++waiting_[i].overtaken;
            a.placements = *std::move(found.placements);
            a.outcome = admission_result::placed;
            return true;
        }
    }

    // The first request that fits without harming earlier requests that have been overtaken too
    // often.
    template <class P, level_views Views, class CarryFor>
    bool place_next(P& policy, Views& views, std::vector<admission_result>& done, CarryFor& carry_for) {
        for (std::size_t i = 0; i < waiting_.size(); ++i) {
            admission_result a{.id = waiting_[i].id};
            auto&& carry = carry_for(std::as_const(a));
            if (!place(policy, views, waiting_[i].request, i, a, carry)) continue;
            waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
            done.push_back(std::move(a));
            return true;
        }
        return false;
    }

    // The member that finds no place even if all nodes are empty. A request outside the gang that a
    // member wants to be near may still come. Without `proven`, the search only failed to find
    // places for all members together.
    template <class P>
    static gang_plan impossible(P& policy, const cluster& c, const admission_request& r) {
        cluster empty = c.emptied().resumed();
        if (!r.on.empty()) empty = only(empty, r.on);
        if (auto alone = detail::lonely_member(empty, r.members)) return *std::move(alone);
        if (r.members.size() == 1) return {};
        auto members = r.members;
        for (auto& m : members)
            if (!carried_in(r.members, m.near)) m.near = {};
        return plan_gang(policy, empty, members, 10 * gang_steps);
    }
    // Runs only once after each change of the existing capacity.
    template <class P, level_views Views>
    void refuse_impossible(P& policy, Views& views, std::vector<admission_result>& done) {
        if (waiting_.empty()) return;
        // Nodes and devices are the same for all levels.
        const cluster& c = views.of(waiting_.front().request.level);
        if (seen_.same(c)) return;
        extent now(c);
        std::vector<admission_result> gone;
        for (entry& e : waiting_) {
            const auto never_fits = impossible(policy, c, e.request);
            e.has_plan = !never_fits.why;
            if (!never_fits.why || !never_fits.proven) continue;
            gone.push_back(refuse({.id = e.id, .member = never_fits.member, .why = never_fits.why},
                                  to_errc(never_fits.why.missing)));
        }
        for (auto& a : gone) {  // no statement from here on throws
            withdraw(a.id);
            done.push_back(std::move(a));
        }
        seen_ = std::move(now);
    }

    admission_queue_options options_;
    std::vector<entry> waiting_;  // in the order in which they are served
    extent seen_;                 // as of the last search for requests that can no longer be placed
    std::uint64_t last_id_ = 0;
};

/// A placement during [begin, end).
struct booking {
    std::uint64_t id = 0;  ///< for cancel() and try_extend()
    instant begin{};       ///< the first instant
    instant end = never;   ///< one instant after the last
    placement where{};     ///< the place during the whole time

    friend bool operator==(const booking&, const booking&) = default;
};

/// Which shares of a device's time sum to at most the whole device.
enum class shares_sum : std::uint8_t {
    of_all,  ///< the shares of all requests
    /// The shares of one level (placement_request::level), each of the time that the levels above
    /// leave.
    of_each_level,
};

/// Bookings on the nodes of a cluster. Not thread-safe. std::bad_alloc leaves the calendar
/// unchanged.
class capacity_calendar {
public:
    /// `nodes` counts as empty; placements on it are ignored.
    explicit capacity_calendar(const cluster& nodes, shares_sum sum = shares_sum::of_all)
        : empty_(nodes.emptied()), sum_(sum) {}

    /// The nodes without any booking.
    [[nodiscard]] const cluster& nodes() const noexcept { return empty_; }
    /// Adds, resizes, drains, resumes and removes nodes and devices: `change(nodes)` makes the
    /// change on the cluster. Bookings stay. A booking on a drained, removed or smaller node or
    /// device counts as before, so that nothing else is booked there. See unkept(). If `change`
    /// throws, nothing is changed.
    template <std::invocable<cluster&> Change>
    void change_nodes(Change change) {
        cluster changed = empty_;
        change(changed);
        empty_ = changed.emptied();
    }
    /// Bookings from `from` on that can't be kept, because their nodes or devices are drained, gone
    /// or too small for all bookings there. Bookings count in the order in which they were made: a
    /// booking is listed if earlier bookings leave no room for it. Move such bookings, or tell
    /// their owners.
    [[nodiscard]] std::vector<booking> unkept(instant from) const {
        std::vector<booking> none;
        capacity_calendar kept(empty_, sum_);
        for (const auto& b : bookings_) {
            if (b.end <= from) continue;
            if (kept.free_during(std::max(b.begin, from), b.end, b.where.request.level).try_apply(b.where))
                none.push_back(b);
            else
                kept.bookings_.push_back(b);
        }
        return none;
    }

    /// The capacity that is free during all of [begin, end): for each device, and for each node's
    /// cores and memory, the minimum over that time. So a request fits there exactly if it fits
    /// into the result. The labels of an overlapping booking count for the whole time, so a request
    /// that wants to be near that booking may stay longer than the booking. `level` is the level
    /// whose shares are counted, if shares add up level by level.
    [[nodiscard]] cluster free_during(instant begin, instant end, priority level = {}) const {
        return free_without(nullptr, begin, end, level);
    }

    /// Books a placement that the policy chooses. The failure's code says which resource is
    /// missing, and its figures say how much; see why_not(). Returns invalid_specification if `end`
    /// isn't after `begin`.
    template <class P>
    requires placement_policy<P>
    [[nodiscard]] result<booking> try_book(P&& policy, const placement_request& r, instant begin, instant end) {
        if (begin >= end) return errc::invalid_specification;
        const cluster free = free_during(begin, end, r.level);
        const auto p = choose(policy, free, r);
        if (!p) return to_failure(free.why_not(r));
        bookings_.push_back({++last_id_, begin, end, *p});
        return bookings_.back();
    }

    /// Books the given placement. Fails as try_book does, and with invalid_specification for
    /// devices that the node doesn't have or the request doesn't allow.
    [[nodiscard]] result<booking> try_book_at(const placement& p, instant begin, instant end) {
        if (begin >= end) return errc::invalid_specification;
        cluster free = free_during(begin, end, p.request.level);
        if (const auto why = free.try_apply(p)) return to_failure(why);
        bookings_.push_back({++last_id_, begin, end, p});
        return bookings_.back();
    }

    /// Why no placement can be booked for that time; no refusal if one can.
    [[nodiscard]] refusal why_not(const placement_request& r, instant begin, instant end) const {
        return free_during(begin, end, r.level).why_not(r);
    }

    /// The first instant from `from` on at which the request could be booked for `length`; `never`
    /// if there is none. Free capacity grows only where bookings end, so the function tries those
    /// instants. For a request that wants to be near another request, it also tries the instants at
    /// which bookings begin.
    [[nodiscard]] instant earliest(const placement_request& r, instant from, ns length) const {
        return earliest(r, from, length, [](cluster&) {});
    }
    /// earliest() if capacity is taken by something other than bookings: `take(room)` takes it from
    /// the free capacity at one of these times.
    template <std::invocable<cluster&> Take>
    [[nodiscard]] instant earliest(const placement_request& r, instant from, ns length, Take take) const {
        std::vector<instant> starts{from};
        for (const auto& b : bookings_) {
            if (b.end > from && b.end != never) starts.push_back(b.end);
            if (b.begin > from && r.near) starts.push_back(b.begin);
        }
        std::ranges::sort(starts);
        for (const auto s : starts) {
            cluster room = free_during(s, saturating_add(s, length), r.level);
            take(room);
            if (!room.why_not(r)) return s;
        }
        return never;
    }

    /// Cancels a booking. Returns false if there is no such booking.
    bool cancel(std::uint64_t id) noexcept {
        return std::erase_if(bookings_, [&](const booking& b) { return b.id == id; }) != 0;
    }
    /// Moves the end of a booking. An earlier end is always possible; a later end is possible if no
    /// other booking is in the way. Otherwise returns false and changes nothing.
    [[nodiscard]] bool try_extend(std::uint64_t id, instant end) {
        const auto b = std::ranges::find(bookings_, id, &booking::id);
        if (b == bookings_.end() || end <= b->begin) return false;
        if (end > b->end && free_without(&*b, b->begin, end, b->where.request.level).try_apply(b->where)) return false;
        b->end = end;
        return true;
    }
    /// The capacity that is free during all of [begin, end) without that booking, if it exists.
    /// `level` as in free_during().
    [[nodiscard]] cluster free_without(std::uint64_t id, instant begin, instant end, priority level = {}) const {
        const auto b = std::ranges::find(bookings_, id, &booking::id);
        return free_without(b == bookings_.end() ? nullptr : &*b, begin, end, level);
    }
    /// Moves a booking to another place, which must fit into the result of free_without(). Does
    /// nothing if the booking doesn't exist.
    void move(std::uint64_t id, const placement& to) noexcept {
        const auto b = std::ranges::find(bookings_, id, &booking::id);
        if (b != bookings_.end()) b->where = to;
    }
    /// Removes the bookings that ended by `now`, and returns their number.
    std::size_t expire(instant now) noexcept {
        return std::erase_if(bookings_, [&](const booking& b) { return b.end <= now; });
    }

    /// All bookings, in the order in which they were made.
    [[nodiscard]] const std::vector<booking>& bookings() const noexcept { return bookings_; }

private:
    // Computes free_without() for a booking, or free_during() if `one` is null.
    [[nodiscard]] cluster free_without(const booking* one, instant begin, instant end, priority level) const {
        cluster free = empty_;
        for (std::uint32_t i = 0; i < empty_.size(); ++i) use_most(free, {i}, one, begin, end, level);
        return free;
    }
    [[nodiscard]] std::uint32_t counted(const placement_request& r, priority level) const noexcept {
        return sum_ == shares_sum::of_all || r.level == level ? r.each.permille() : 0;
    }

    // Takes the most that is booked at any moment, for each resource, from node `id` of `free`.
    void use_most(cluster& free, node_id id, const booking* but, instant begin, instant end, priority level) const {
        struct use {
            std::uint64_t cpu_milli = 0;
            bytes memory{};
        };
        std::vector<const booking*> here;
        for (const auto& b : bookings_)
            if (b.where.node == id && &b != but && b.begin < end && b.end > begin) here.push_back(&b);
        if (here.empty()) return;
        const node_description& whole = empty_[id].whole;
        use most;
        std::vector<free_device> most_of(whole.devices);
        // Use is largest at the beginning of the window or of a booking.
        for (const booking* at : here) {
            const instant t = std::max(at->begin, begin);
            use now;
            std::vector<free_device> now_of(whole.devices);
            for (const booking* b : here) {
                if (b->begin > t || b->end <= t) continue;
                const placement_request& r = b->where.request;
                now.cpu_milli += r.cpu_milli;
                now.memory += r.memory;
                for (const auto d : b->where.devices) {
                    now_of[d.index].permille += counted(r, level);
                    now_of[d.index].memory += r.device_memory;
                }
            }
            most.cpu_milli = std::max(most.cpu_milli, now.cpu_milli);
            most.memory = std::max(most.memory, now.memory);
            for (std::size_t d = 0; d < most_of.size(); ++d) {
                most_of[d].permille = std::max(most_of[d].permille, now_of[d].permille);
                most_of[d].memory = std::max(most_of[d].memory, now_of[d].memory);
            }
        }
        free.hold({{.cpu_milli = most.cpu_milli, .memory = most.memory}, id, {}});
        for (std::uint32_t d = 0; d < whole.devices; ++d)
            free.hold(
                {{.devices = 1, .each = share::of_permille(most_of[d].permille), .device_memory = most_of[d].memory},
                 id,
                 {device_id{d}}});
        // requests that must be apart may be here at different times
        for (const booking* b : here) {
            const placement_request& r = b->where.request;
            if (r.group || r.apart) free.hold({{.group = r.group, .apart = r.apart}, id, {}});
        }
    }

    cluster empty_;
    shares_sum sum_ = shares_sum::of_all;
    std::vector<booking> bookings_;
    std::uint64_t last_id_ = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
