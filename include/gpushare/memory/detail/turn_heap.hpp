// SPDX-License-Identifier: Apache-2.0
// Quotas with a waiter, in the order in which their first waiters came: a pairing heap (Fredman et
// al., 1986). The elements carry their own links, so that the heap allocates nothing and removes an
// element without a search.
//
//   turn_heap line;    line.push(q.turn_);    line.first()->of;    line.remove(q.turn_);
//
// A push takes one comparison. A removal takes as many as the logarithm of the number of elements,
// on average over many calls.
#pragma once

#include <cstdint>
#include <utility>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

struct quota_node;

/// A quota's place in a heap. A quota is in one heap at a time.
struct quota_turn {
    quota_node* of = nullptr;
    std::uint64_t ticket = 0;      // of its first waiter
    quota_turn* below = nullptr;   // the first element right below this one
    quota_turn* next = nullptr;    // its next sibling
    quota_turn* before = nullptr;  // its previous sibling or, for the first child, its parent
};

class turn_heap {
public:
    /// The earliest turn; null if the heap is empty.
    [[nodiscard]] quota_turn* first() const noexcept { return top_; }

    void push(quota_turn& t) noexcept { top_ = merged(top_, &t); }

    void remove(quota_turn& t) noexcept {
        auto* const rest = joined(std::exchange(t.below, nullptr));
        if (&t == top_) {
            top_ = rest;
            return;
        }
        (t.before->below == &t ? t.before->below : t.before->next) = t.next;
        if (t.next != nullptr) t.next->before = t.before;
        t.next = t.before = nullptr;
        top_ = merged(top_, rest);
    }

private:
    // Merges two separate heaps, or one and none.
    static quota_turn* merged(quota_turn* a, quota_turn* b) noexcept {
        if (a == nullptr || b == nullptr) return a != nullptr ? a : b;
        if (b->ticket < a->ticket) std::swap(a, b);
        b->before = a;
        b->next = a->below;
        if (b->next != nullptr) b->next->before = b;
        a->below = b;
        return a;
    }

    // Joins all siblings: in pairs from the front, and then the pairs from the back. That order
    // makes the cost logarithmic.
    static quota_turn* joined(quota_turn* side) noexcept {
        quota_turn* pairs = nullptr;
        while (side != nullptr) {
            auto* const a = alone(side);
            auto* const b = side != nullptr ? alone(side) : nullptr;
            auto* const pair = merged(a, b);
            pair->next = std::exchange(pairs, pair);
        }
        quota_turn* all = nullptr;
        while (pairs != nullptr) all = merged(all, alone(pairs));
        return all;
    }
    // Takes the first element of those side by side; `side` keeps the rest.
    static quota_turn* alone(quota_turn*& side) noexcept {
        auto* const t = std::exchange(side, side->next);
        t->next = t->before = nullptr;
        return t;
    }

    quota_turn* top_ = nullptr;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
