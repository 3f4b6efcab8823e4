// SPDX-License-Identifier: Apache-2.0
// Waiting submissions that are dropped when they are late, the most urgent first. So the limiter
// reports each at its deadline, and not when its turn comes. Used under the limiter's mutex.
//
//   detail::waiting_deadlines<submission> late;      late.add(s);
//   while (auto* s = late.first_at(now)) { late.drop(*s); tell(*s); }
#pragma once

#include <cstddef>
#include <new>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A binary heap by `drop_at`. Each submission knows its place, from 1 on, in `in_deadlines`; 0: it
/// isn't here. Allocates while more wait than ever before.
template <class Submission>
class waiting_deadlines {
public:
    /// Does nothing if it is here. Where memory runs out it is told at its turn.
    void add(Submission& s) noexcept {
        if (s.in_deadlines != 0) return;
        try {
            heap_.push_back(&s);
        } catch (const std::bad_alloc&) {
            return;
        }
        settle(heap_.size() - 1, s);
    }
    /// Does nothing if it isn't here.
    void drop(Submission& s) noexcept {
        if (s.in_deadlines == 0) return;
        const auto at = std::exchange(s.in_deadlines, 0) - 1;
        Submission& last = *heap_.back();
        heap_.pop_back();
        if (&last != &s) settle(at, last);
    }
    [[nodiscard]] bool empty() const noexcept { return heap_.empty(); }
    /// When the first is late; `never` where there is none.
    [[nodiscard]] instant next() const noexcept { return heap_.empty() ? never : heap_.front()->drop_at; }
    /// One that is late by now; null where none is.
    [[nodiscard]] Submission* first_at(instant now) const noexcept { return next() <= now ? heap_.front() : nullptr; }

private:
    void set(std::size_t at, Submission& s) noexcept {
        heap_[at] = &s;
        s.in_deadlines = at + 1;
    }
    // Puts `s` where it belongs, from the hole at `at`.
    void settle(std::size_t at, Submission& s) noexcept {
        while (at > 0 && s.drop_at < heap_[(at - 1) / 2]->drop_at) {
            set(at, *heap_[(at - 1) / 2]);
            at = (at - 1) / 2;
        }
        for (auto child = 2 * at + 1; child < heap_.size(); child = 2 * at + 1) {
            if (child + 1 < heap_.size() && heap_[child + 1]->drop_at < heap_[child]->drop_at) ++child;
            if (s.drop_at <= heap_[child]->drop_at) break;
            set(at, *heap_[child]);
            at = child;
        }
        set(at, s);
    }

    plain_list<Submission*> heap_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
