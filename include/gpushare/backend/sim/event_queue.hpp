// SPDX-License-Identifier: Apache-2.0
// Events in the order of their times, and in order of arrival at equal times, which makes a simulation the same on
// every run.
//
//   gpushare::sim::event_queue<int> events;    events.push(t, 7);
//   while (!events.empty()) { const auto now = events.first_time();  handle(now, events.pop()); }
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace sim {

/// Events, first the earliest, and of equal times the one pushed first. Allocates while more events wait than ever did. A heap
/// with four children a node, which is half as deep as a binary one. A value; not thread-safe.
template <class Event>
class event_queue {
public:
    /// Whether no event waits.
    [[nodiscard]] bool empty() const noexcept { return heap_.empty(); }
    /// Events that wait.
    [[nodiscard]] std::size_t size() const noexcept { return heap_.size(); }
    /// When the first event happens. There must be one.
    [[nodiscard]] instant first_time() const noexcept { return heap_.front().time; }

    /// Adds an event. Throws std::bad_alloc.
    void push(instant time, Event event) {
        entry e{time, pushed_++, std::move(event)};
        auto at = heap_.size();
        heap_.push_back(e);
        for (; at > 0 && before(e, heap_[(at - 1) / 4]); at = (at - 1) / 4) heap_[at] = std::move(heap_[(at - 1) / 4]);
        heap_[at] = std::move(e);
    }

    /// Takes the first event out. There must be one.
    Event pop() {
        Event first = std::move(heap_.front().event);
        entry last = std::move(heap_.back());
        heap_.pop_back();
        if (heap_.empty()) return first;
        std::size_t at = 0;
        for (;;) {
            const auto child = 4 * at + 1;
            if (child >= heap_.size()) break;
            auto next = child;
            const auto end = child + 4 < heap_.size() ? child + 4 : heap_.size();
            for (auto other = child + 1; other < end; ++other)
                if (before(heap_[other], heap_[next])) next = other;
            if (!before(heap_[next], last)) break;
            heap_[at] = std::move(heap_[next]);
            at = next;
        }
        heap_[at] = std::move(last);
        return first;
    }

private:
    struct entry {
        instant time{};
        std::uint64_t number = 0;
        Event event{};
    };

    [[nodiscard]] static bool before(const entry& a, const entry& b) noexcept {
        return a.time != b.time ? a.time < b.time : a.number < b.number;
    }

    std::vector<entry> heap_;
    std::uint64_t pushed_ = 0;
};

}  // namespace sim
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
