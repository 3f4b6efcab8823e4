// SPDX-License-Identifier: Apache-2.0
// Queues and pools that don't allocate in use: elements carry their own `next` pointer, and a pool
// keeps every element that it has made.
//
//   struct node { node* next = nullptr; };
//   detail::pool<node> nodes;    detail::fifo<node> queue;    queue.push(nodes.acquire());
#pragma once

#include <concepts>
#include <cstddef>
#include <utility>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <class T>
concept linked = requires(T& element) {
    { element.next } -> std::same_as<T*&>;
};

/// A first-in, first-out queue of elements that it doesn't own. An element is in one queue at a
/// time. The element type is checked at the first use, so that it may contain a queue of its own
/// kind.
template <class T>
class fifo {
public:
    fifo() noexcept = default;
    fifo(fifo&& other) noexcept
        : head_(std::exchange(other.head_, nullptr)), tail_(std::exchange(other.tail_, nullptr)) {}
    fifo& operator=(fifo&&) = delete;

    [[nodiscard]] bool empty() const noexcept { return head_ == nullptr; }
    [[nodiscard]] T* front() const noexcept { return head_; }
    [[nodiscard]] T* back() const noexcept { return tail_; }

    void push(T& element) noexcept {
        static_assert(linked<T>);
        element.next = nullptr;
        (tail_ != nullptr ? tail_->next : head_) = &element;
        tail_ = &element;
    }

    /// Before all others.
    void push_front(T& element) noexcept {
        element.next = head_;
        head_ = &element;
        if (tail_ == nullptr) tail_ = &element;
    }

    /// Inserts `element` before the first element for which `goes_behind` is true, or at the end if
    /// there is none. Takes linear time, unless the element goes to the end.
    template <class F>
    void insert(T& element, F goes_behind) noexcept {
        if (tail_ == nullptr || !goes_behind(*tail_)) return push(element);
        T** at = &head_;
        while (!goes_behind(**at)) at = &(*at)->next;
        element.next = *at;
        *at = &element;
    }

    /// Null when empty.
    T* pop() noexcept {
        T* const first = head_;
        if (first == nullptr) return nullptr;
        head_ = first->next;
        if (head_ == nullptr) tail_ = nullptr;
        return first;
    }

    /// Takes `element` out, wherever it stands; does nothing if it isn't here. Linear.
    void remove(T& element) noexcept {
        T* before = nullptr;
        for (T* at = head_; at != nullptr; before = at, at = at->next) {
            if (at != &element) continue;
            (before != nullptr ? before->next : head_) = at->next;
            if (tail_ == at) tail_ = before;
            return;
        }
    }

private:
    T* head_ = nullptr;
    T* tail_ = nullptr;
};

/// A pool of elements that are made once, reused and never moved. The pool is as large as the most
/// elements that were ever in use at once.
template <class T>
class pool {
public:
    pool() noexcept = default;
    pool(const pool&) = delete;
    pool& operator=(const pool&) = delete;
    ~pool() {
        while (newest_ != nullptr) {
            made* const before = newest_->before;
            delete newest_;
            newest_ = before;
        }
    }

    /// Throws std::bad_alloc if the pool has to grow and can't.
    [[nodiscard]] T& acquire() {
        if (T* const kept = try_acquire()) return *kept;
        newest_ = new made{.before = newest_};
        ++size_;
        return newest_->element;
    }
    /// Null if the pool would have to grow.
    [[nodiscard]] T* try_acquire() noexcept { return free_.pop(); }
    void release(T& element) noexcept { free_.push(element); }
    /// Whether `is(element)` holds for one of those made so far, in use or not. Linear.
    template <std::predicate<const T&> F>
    [[nodiscard]] bool any_of(F is) const {
        for (const made* m = newest_; m != nullptr; m = m->before)
            if (is(m->element)) return true;
        return false;
    }
    /// Elements made so far, in use or not.
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

private:
    struct made {
        T element{};
        made* before = nullptr;
    };

    // not a std::list: its header would cost each includer a hundred classes of traits
    made* newest_ = nullptr;
    std::size_t size_ = 0;
    fifo<T> free_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
