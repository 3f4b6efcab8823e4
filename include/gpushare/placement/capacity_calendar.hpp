// SPDX-License-Identifier: Apache-2.0
// Capacity promised ahead of time: bookings, each a placement from one instant to another. A placement that exists now
// is a booking that has begun. A plain value; time is an argument.
//
//   gpushare::capacity_calendar days(cluster_of_empty_nodes);
//   auto night = days.try_book(policy, request, gpushare::instant{} + 22h, gpushare::instant{} + 30h);  // a result<booking>
//   days.cancel(night->id);
//   days.change_nodes([](gpushare::cluster& nodes) { nodes.drain({3}); });
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A placement during [begin, end).
struct booking {
    std::uint64_t id = 0;  ///< for cancel() and try_extend()
    instant begin{};       ///< from then on
    instant end = never;   ///< until just before then
    placement where{};     ///< all that time

    friend bool operator==(const booking&, const booking&) = default;
};

/// Which shares of a device's time add up to the whole at most.
enum class shares_sum : std::uint8_t {
    of_all,         ///< those of all requests
    of_each_level,  ///< those of one level (placement_request::level), each of what the levels above leave
};

/// Bookings on the nodes of a cluster. Not thread-safe; std::bad_alloc changes nothing.
class capacity_calendar {
public:
    /// `nodes`: as they are when nothing is placed on them; what is there is not looked at.
    explicit capacity_calendar(const cluster& nodes, shares_sum sum = shares_sum::of_all)
        : empty_(nodes.emptied()), sum_(sum) {}

    /// The nodes without any booking.
    [[nodiscard]] const cluster& nodes() const noexcept { return empty_; }
    /// Adds, resizes, drains, resumes and removes nodes and devices: `change(nodes)` does it on the
    /// cluster. Bookings stay; one on what is drained, gone or smaller counts as ever, so that
    /// nothing else is booked there. See unkept(). If `change` throws, nothing happens.
    template <std::invocable<cluster&> Change>
    void change_nodes(Change change) {
        cluster changed = empty_;
        change(changed);
        empty_ = changed.emptied();
    }
    /// Bookings from `from` on that can't be kept, since their nodes or devices are drained, gone
    /// or too small for all that is booked there. In the order of booking: a booking is listed if
    /// earlier ones leave it no room. Move them, or tell their owners.
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

    /// The capacity that is free during all of [begin, end): for each device, and each node's cores
    /// and memory, the minimum over that time. So a request fits there exactly if it fits into the
    /// result. Labels of a booking that overlaps count for the whole time, so a request to be near
    /// it may stay longer than it does. `level`: the level whose shares are counted, where they add
    /// up level by level.
    [[nodiscard]] cluster free_during(instant begin, instant end, priority level = {}) const {
        return free_without(nullptr, begin, end, level);
    }

    /// Books a placement that the policy chooses. The failure's code says what is missing, its figures how much: see
    /// why_not(). invalid_specification if `end` isn't after `begin`.
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

    /// Books the given placement. Codes as those of try_book, and invalid_specification for devices that the node
    /// doesn't have or the request doesn't want.
    [[nodiscard]] result<booking> try_book_at(const placement& p, instant begin, instant end) {
        if (begin >= end) return errc::invalid_specification;
        cluster free = free_during(begin, end, p.request.level);
        if (const auto why = free.try_apply(p)) return to_failure(why);
        bookings_.push_back({++last_id_, begin, end, p});
        return bookings_.back();
    }

    /// Why no placement could be booked for that time; nothing if one could.
    [[nodiscard]] refusal why_not(const placement_request& r, instant begin, instant end) const {
        return free_during(begin, end, r.level).why_not(r);
    }

    /// The first instant from `from` on at which the request could be booked for `length`; `never` if there is none.
    /// Free capacity grows only where bookings end, so those are the instants tried; for a request
    /// that wants to be near somebody also those at which bookings begin.
    [[nodiscard]] instant earliest(const placement_request& r, instant from, ns length) const {
        return earliest(r, from, length, [](cluster&) {});
    }
    /// The same where something is taken that isn't booked: `take(room)` takes it of what is free
    /// at one of these times.
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

    /// False if there is no such booking.
    bool cancel(std::uint64_t id) noexcept {
        return std::erase_if(bookings_, [&](const booking& b) { return b.id == id; }) != 0;
    }
    /// Moves the end of a booking: earlier always, later if nothing is in the way. Otherwise false, and nothing
    /// changes.
    [[nodiscard]] bool try_extend(std::uint64_t id, instant end) {
        const auto b = std::ranges::find(bookings_, id, &booking::id);
        if (b == bookings_.end() || end <= b->begin) return false;
        if (end > b->end && free_without(&*b, b->begin, end, b->where.request.level).try_apply(b->where)) return false;
        b->end = end;
        return true;
    }
    /// The capacity that is free during all of [begin, end) if one of the bookings, if it is there,
    /// is given up; `level` as in free_during().
    [[nodiscard]] cluster free_without(std::uint64_t id, instant begin, instant end, priority level = {}) const {
        const auto b = std::ranges::find(bookings_, id, &booking::id);
        return free_without(b == bookings_.end() ? nullptr : &*b, begin, end, level);
    }
    /// Another place for a booking, which must fit into what free_without() says of it. Nothing if
    /// there is no such booking.
    void move(std::uint64_t id, const placement& to) noexcept {
        const auto b = std::ranges::find(bookings_, id, &booking::id);
        if (b != bookings_.end()) b->where = to;
    }
    /// Removes bookings that ended by `now`. Returns how many.
    std::size_t expire(instant now) noexcept {
        return std::erase_if(bookings_, [&](const booking& b) { return b.end <= now; });
    }

    /// All bookings, in the order in which they were made.
    [[nodiscard]] const std::vector<booking>& bookings() const noexcept { return bookings_; }

private:
    // As if one of the bookings, if given, were not there.
    [[nodiscard]] cluster free_without(const booking* one, instant begin, instant end, priority level) const {
        cluster free = empty_;
        for (std::uint32_t i = 0; i < empty_.size(); ++i) use_most(free, {i}, one, begin, end, level);
        return free;
    }
    [[nodiscard]] std::uint32_t counted(const placement_request& r, priority level) const noexcept {
        return sum_ == shares_sum::of_all || r.level == level ? r.each.permille() : 0;
    }

    // Takes from node `id` of `free` the most that is booked there at any moment, resource by resource.
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
        for (const booking* b : here) {  // who stays apart from whom may be here at another time
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
