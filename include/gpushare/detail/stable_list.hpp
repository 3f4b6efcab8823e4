// SPDX-License-Identifier: Apache-2.0
// A list of elements that never move, found by index: for a few elements that live long, such as a
// node's devices. It takes a small fraction of std::deque's time to compile, and finds an element
// faster.
//
//   detail::stable_list<std::mutex> all;      all.emplace_back();      all[0].lock();
#pragma once

#include <cstddef>
#include <iterator>
#include <memory>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/plain_list.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Not thread-safe. Each element has its own allocation. Neither copied nor moved.
template <class T>
class stable_list {
    template <class Element>
    class iterator_to {
    public:
        using value_type = T;
        using difference_type = std::ptrdiff_t;
        using reference = Element&;
        using pointer = Element*;
        using iterator_category = std::forward_iterator_tag;

        iterator_to() noexcept = default;
        explicit iterator_to(void* const* at) noexcept : at_(at) {}

        reference operator*() const noexcept { return *static_cast<Element*>(*at_); }
        pointer operator->() const noexcept { return static_cast<Element*>(*at_); }
        iterator_to& operator++() noexcept {
            ++at_;
            return *this;
        }
        iterator_to operator++(int) noexcept { return iterator_to(at_++); }
        friend bool operator==(iterator_to, iterator_to) noexcept = default;

    private:
        void* const* at_ = nullptr;
    };

public:
    using value_type = T;
    using iterator = iterator_to<T>;
    using const_iterator = iterator_to<const T>;

    stable_list() noexcept = default;
    stable_list(const stable_list&) = delete;
    stable_list& operator=(const stable_list&) = delete;
    ~stable_list() {
        for (T& t : *this) delete &t;
    }

    /// Appends an element, which is in the list only once it is constructed. Throws std::bad_alloc
    /// and what T's constructor throws, and then nothing has changed.
    template <class... Args>
    T& emplace_back(Args&&... args) {
        if (elements_.size() == elements_.capacity()) elements_.reserve(2 * elements_.size() + 4);
        auto made = std::make_unique<T>(std::forward<Args>(args)...);
        elements_.push_back(made.get());  // there is room: nothing throws once it is made
        return *made.release();
    }
    void pop_back() noexcept {
        delete static_cast<T*>(elements_.back());
        elements_.pop_back();
    }

    [[nodiscard]] std::size_t size() const noexcept { return elements_.size(); }
    [[nodiscard]] bool empty() const noexcept { return elements_.empty(); }
    [[nodiscard]] T& operator[](std::size_t i) noexcept { return *static_cast<T*>(elements_[i]); }
    [[nodiscard]] const T& operator[](std::size_t i) const noexcept { return *static_cast<const T*>(elements_[i]); }
    [[nodiscard]] T& front() noexcept { return (*this)[0]; }
    [[nodiscard]] const T& front() const noexcept { return (*this)[0]; }

    [[nodiscard]] iterator begin() noexcept { return iterator(elements_.data()); }
    [[nodiscard]] iterator end() noexcept { return iterator(elements_.data() + elements_.size()); }
    [[nodiscard]] const_iterator begin() const noexcept { return const_iterator(elements_.data()); }
    [[nodiscard]] const_iterator end() const noexcept { return const_iterator(elements_.data() + elements_.size()); }

private:
    plain_list<void*> elements_;  // T*: of one type, whatever the elements are
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
