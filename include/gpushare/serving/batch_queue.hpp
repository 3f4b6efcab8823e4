// SPDX-License-Identifier: Apache-2.0
// Dynamic batching: requests wait for each other, up to a limit, and go to the engine together. The
// queue is a value: the caller passes the time, and owns the lock, the clock and the engine.
//
//   gpushare::batch_queue<request> waiting{{.max_size = 8, .max_delay = 2ms, .takes = 5ms}};
//   // r is as it was
//   if (waiting.try_push(std::move(r), now, deadline) == gpushare::errc::queue_full) refuse(r);
//   for (auto& late : waiting.take_expired(now)) refuse(late);
//   if (waiting.due() <= now) run(waiting.take(now));  // else: again at due()
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The rule by which a batch goes to the engine.
struct batch_rule {
    /// The most items in a batch, at least 1; a full batch goes immediately.
    std::size_t max_size = 8;
    ns max_delay{};  ///< how long an item waits for further items
    /// The most items that haven't expired; further items are refused.
    std::size_t max_waiting = 1U << 16;
    /// How long a batch runs, as far as known. A batch goes in time for the earliest deadline in
    /// the queue, and an item that can no longer meet its deadline has expired.
    ns takes{};
    /// How much earlier than its deadlines require a batch goes, since timers and threads are late.
    ns slack = std::chrono::microseconds(200);
};

/// Items that wait to be run together: a higher level first, and within a level in the order of
/// arrival. Items need only be movable. If the host runs out of memory (std::bad_alloc), no item is
/// lost. Expired items are kept for take_expired(), and all other members ignore them. Not
/// thread-safe. A push is O(1), except while the queue has expired items, or for an item that
/// passes waiting items of lower levels. All other calls are O(waiting).
template <class T>
class batch_queue {
public:
    /// A queue without items.
    explicit batch_queue(const batch_rule& rule = {}) noexcept { set_rule(rule); }

    /// Adds an item. If this returns queue_full, or deadline_exceeded for an item that is already
    /// late, the item stays with the caller. Throws what moving the item throws, and
    /// std::bad_alloc. Items of a higher level go first even if they keep coming, so they can
    /// starve lower levels.
    [[nodiscard]] errc try_push(T&& item, instant now, instant deadline = never, priority level = no_priority) {
        if (live(now) >= rule_.max_waiting) return errc::queue_full;
        if (latest_begin(deadline) < now) return errc::deadline_exceeded;
        // moved only now, when there is room for the item
        waiting_.emplace_back(std::move(item), now, deadline, level);
        for (auto at = waiting_.end() - 1; at != waiting_.begin() && at[-1].level < level; --at) std::swap(at[-1], *at);
        earliest_ = std::min(earliest_, deadline);
        return errc::none;
    }

    /// The time at which to look again: immediately if a batch is full, after its delay, or in time
    /// for the earliest deadline, less the slack. A time in the past means immediately; `never`
    /// means that no item waits. Without the current time the queue can't know which items have
    /// expired, so call take_expired() first.
    [[nodiscard]] instant due() const noexcept {
        if (waiting_.empty()) return never;
        if (waiting_.size() >= rule_.max_size) return instant::min();
        return std::min(saturating_add(came_first(), rule_.max_delay),
                        earliest_ == never ? never : saturating_add(latest_begin(earliest_), -rule_.slack));
    }

    /// The time at which the first item will have expired. Call take_expired() then, so that the
    /// item is reported immediately and not with the next batch. `never` if no item has a deadline.
    [[nodiscard]] instant expires_at() const noexcept { return saturating_add(latest_begin(earliest_), ns{1}); }

    /// The items that can no longer meet their deadlines, in their order. Refuse them; don't run
    /// them.
    [[nodiscard]] std::vector<T> take_expired(instant now) {
        std::vector<T> late;
        if (latest_begin(earliest_) >= now) return late;
        late.reserve(waiting_.size() - live(now));
        auto stays = waiting_.begin();
        for (auto& e : waiting_) {
            if (expired(e, now))
                late.push_back(std::move(e.item));
            else if (entry& to = *stays++; &to != &e)
                to = std::move(e);
        }
        waiting_.erase(stays, waiting_.end());
        find_earliest();
        return late;
    }

    /// The level of the first item; no_priority if no item waits.
    [[nodiscard]] priority level() const noexcept { return waiting_.empty() ? no_priority : waiting_.front().level; }
    /// A batch, the highest level first; empty before the batch is due. Expired items aren't in the
    /// batch: take_expired() returns them.
    [[nodiscard]] std::vector<T> take(instant now) {
        if (due_of_live(now) > now) return {};
        return take_now(now);
    }
    /// A batch that isn't due yet, for an idle engine.
    [[nodiscard]] std::vector<T> take_now(instant now) {
        std::vector<T> batch;
        batch.reserve(std::min(rule_.max_size, waiting_.size()));
        auto seen = waiting_.begin();
        for (; seen != waiting_.end() && batch.size() < rule_.max_size; ++seen)
            if (!expired(*seen, now)) batch.push_back(std::move(seen->item));
        // Skipped items move up to the place just before the remaining items, in their order.
        for (auto stays = seen; seen != waiting_.begin();)
            if (expired(*--seen, now) && --stays != seen) *stays = std::move(*seen);
        waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(batch.size()));
        find_earliest();
        return batch;
    }

    /// Sets the rule. Waiting items stay.
    void set_rule(const batch_rule& rule) noexcept {
        rule_ = rule;
        rule_.max_size = std::max<std::size_t>(rule_.max_size, 1);
        // so that their negative values are durations, too
        rule_.takes = std::max(rule_.takes, -ns::max());
        rule_.slack = std::max(rule_.slack, -ns::max());
    }
    /// The current rule.
    [[nodiscard]] const batch_rule& rule() const noexcept { return rule_; }
    /// The number of items present, including expired items that weren't taken out.
    [[nodiscard]] std::size_t size() const noexcept { return waiting_.size(); }
    /// The number of items that wait and haven't expired.
    [[nodiscard]] std::size_t live(instant now) const noexcept {
        if (latest_begin(earliest_) >= now) return waiting_.size();
        return static_cast<std::size_t>(
            std::count_if(waiting_.begin(), waiting_.end(), [&](const entry& e) { return !expired(e, now); }));
    }
    /// Whether no item is present.
    [[nodiscard]] bool empty() const noexcept { return waiting_.empty(); }
    /// All items, in their order, for a server that shuts down and answers them. The queue is empty
    /// afterwards.
    [[nodiscard]] std::vector<T> take_all() {
        std::vector<T> all;
        all.reserve(waiting_.size());
        for (auto& e : waiting_) all.push_back(std::move(e.item));
        waiting_.clear();
        earliest_ = never;
        return all;
    }

private:
    struct entry {
        entry(T&& i, instant a, instant d, priority l) : item(std::move(i)), arrived(a), deadline(d), level(l) {}
        T item;
        instant arrived, deadline;
        priority level;
    };

    // The arrival of the item that came first. Within a level, this is the level's first item.
    [[nodiscard]] instant came_first() const noexcept {
        instant first = never;
        if (waiting_.front().level == waiting_.back().level) return waiting_.front().arrived;
        for (const auto& e : waiting_) first = std::min(first, e.arrived);
        return first;
    }

    [[nodiscard]] bool expired(const entry& e, instant now) const noexcept { return latest_begin(e.deadline) < now; }
    // due() of the items that haven't expired.
    [[nodiscard]] instant due_of_live(instant now) const noexcept {
        if (latest_begin(earliest_) >= now) return due();
        std::size_t n = 0;
        instant first = never, earliest = never;
        for (const auto& e : waiting_) {
            if (expired(e, now)) continue;
            ++n;
            first = std::min(first, saturating_add(e.arrived, rule_.max_delay));
            earliest = std::min(earliest, e.deadline);
        }
        if (n >= rule_.max_size) return instant::min();
        return earliest == never ? first : std::min(first, saturating_add(latest_begin(earliest), -rule_.slack));
    }
    // The latest time at which a batch that must end by `deadline` can begin.
    [[nodiscard]] instant latest_begin(instant deadline) const noexcept {
        return deadline == never ? never : saturating_add(deadline, -rule_.takes);
    }
    void find_earliest() noexcept {
        earliest_ = never;
        for (const auto& e : waiting_) earliest_ = std::min(earliest_, e.deadline);
    }

    batch_rule rule_;
    std::deque<entry> waiting_;
    instant earliest_ = never;  // the earliest deadline of waiting items
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
