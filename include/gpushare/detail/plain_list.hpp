// SPDX-License-Identifier: Apache-2.0
// A vector of plain values: numbers, pointers, and structs whose bytes can be copied. One function
// grows the lists of all types, so a list takes a small fraction of std::vector's time to compile.
//
//   gpushare::detail::plain_list<int> all;
//   all.push_back(7);      // all is {7}
#pragma once

#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The memory of a plain_list, whatever its elements are. An element has `each` bytes.
struct plain_memory {
    plain_memory() noexcept = default;
    plain_memory(plain_memory&& other) noexcept { swap(other); }
    plain_memory& operator=(plain_memory&& other) noexcept {
        plain_memory old(std::move(other));
        swap(old);
        return *this;
    }
    ~plain_memory() { ::operator delete(data); }

    /// Moves all to memory for `n` elements. Throws std::bad_alloc, and then nothing has changed.
    void move_to_room(std::size_t n, std::size_t each);
    /// Has room for `n` elements, more than now, and for at least twice as many as now: so growing
    /// by one costs O(1) on average.
    void grow(std::size_t n, std::size_t each);
    /// Makes a gap of one element at place `i`; `size` counts the gap.
    void open(std::size_t i, std::size_t each);
    /// Removes `n` elements from index `i` on, and closes the gap.
    void close(std::size_t i, std::size_t n, std::size_t each) noexcept;
    void swap(plain_memory& other) noexcept {
        std::swap(data, other.data);
        std::swap(size, other.size);
        std::swap(capacity, other.capacity);
    }

    void* data = nullptr;
    std::size_t size = 0, capacity = 0;
};

/// Like std::vector, as far as the library uses it. Not thread-safe. Growing throws std::bad_alloc,
/// and then nothing has changed.
template <class T>
class plain_list {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);

public:
    using value_type = T;
    using iterator = T*;
    using const_iterator = const T*;

    plain_list() noexcept = default;
    explicit plain_list(std::size_t n, T x = T()) { resize(n, x); }
    plain_list(std::initializer_list<T> all) { append(all.begin(), all.size()); }
    plain_list(const plain_list& other) { append(other.data(), other.size()); }
    plain_list(plain_list&&) noexcept = default;
    plain_list& operator=(const plain_list& other) {
        plain_list copy(other);
        return *this = std::move(copy);
    }
    plain_list& operator=(plain_list&&) noexcept = default;
    ~plain_list() = default;

    void push_back(T x) {
        if (m_.size == m_.capacity) m_.grow(m_.size + 1, sizeof(T));
        ::new (static_cast<void*>(data() + m_.size)) T(x);
        ++m_.size;
    }
    template <class... Args>
    T& emplace_back(Args&&... args) {
        static_assert(std::is_constructible_v<T, Args...>, "T(arg) would also cast");
        if (m_.size == m_.capacity) {  // made first: the argument may be an element
            push_back(T(std::forward<Args>(args)...));
        } else {
            ::new (static_cast<void*>(data() + m_.size)) T(std::forward<Args>(args)...);
            ++m_.size;
        }
        return back();
    }
    void pop_back() noexcept { --m_.size; }
    void clear() noexcept { m_.size = 0; }
    /// Makes room for exactly `n` elements, unless there is more.
    void reserve(std::size_t n) {
        if (n > m_.capacity) m_.move_to_room(n, sizeof(T));
    }
    /// New elements are copies of `x`.
    void resize(std::size_t n, T x = T()) {
        if (n > m_.capacity) m_.grow(n, sizeof(T));
        for (std::size_t i = m_.size; i < n; ++i) ::new (static_cast<void*>(data() + i)) T(x);
        m_.size = n;
    }
    void assign(std::size_t n, T x) {
        clear();
        resize(n, x);
    }
    void swap(plain_list& other) noexcept { m_.swap(other.m_); }
    iterator insert(const_iterator before, T x) {
        const auto i = static_cast<std::size_t>(before - data());
        m_.open(i, sizeof(T));
        return ::new (static_cast<void*>(data() + i)) T(x);
    }
    iterator erase(const_iterator at) noexcept { return erase(at, at + 1); }
    iterator erase(const_iterator from, const_iterator to) noexcept {
        const auto i = static_cast<std::size_t>(from - data());
        m_.close(i, static_cast<std::size_t>(to - from), sizeof(T));
        return data() + i;
    }

    [[nodiscard]] std::size_t size() const noexcept { return m_.size; }
    [[nodiscard]] std::size_t capacity() const noexcept { return m_.capacity; }
    [[nodiscard]] bool empty() const noexcept { return m_.size == 0; }
    [[nodiscard]] T* data() noexcept { return static_cast<T*>(m_.data); }
    [[nodiscard]] const T* data() const noexcept { return static_cast<const T*>(m_.data); }
    [[nodiscard]] T& operator[](std::size_t i) noexcept { return data()[i]; }
    [[nodiscard]] const T& operator[](std::size_t i) const noexcept { return data()[i]; }
    [[nodiscard]] T& front() noexcept { return *data(); }
    [[nodiscard]] const T& front() const noexcept { return *data(); }
    [[nodiscard]] T& back() noexcept { return data()[m_.size - 1]; }
    [[nodiscard]] const T& back() const noexcept { return data()[m_.size - 1]; }
    [[nodiscard]] iterator begin() noexcept { return data(); }
    [[nodiscard]] iterator end() noexcept { return data() + m_.size; }
    [[nodiscard]] const_iterator begin() const noexcept { return data(); }
    [[nodiscard]] const_iterator end() const noexcept { return data() + m_.size; }

private:
    void append(const T* from, std::size_t n) {
        reserve(m_.size + n);
        if (n > 0) std::memcpy(static_cast<void*>(data() + m_.size), static_cast<const void*>(from), n * sizeof(T));
        m_.size += n;
    }

    plain_memory m_;
};

#if GPUSHARE_BODIES
GPUSHARE_INLINE void plain_memory::move_to_room(std::size_t n, std::size_t each) {
    // no object is that large
    if (n > std::numeric_limits<std::size_t>::max() / 2 / each) throw std::bad_alloc();
    void* const larger = ::operator new(n* each);
    if (size > 0) std::memcpy(larger, data, size * each);
    ::operator delete(data);
    data = larger;
    capacity = n;
}

GPUSHARE_INLINE void plain_memory::grow(std::size_t n, std::size_t each) {
    const std::size_t twice = capacity < 2 ? 4 : 2 * capacity;
    move_to_room(n < twice ? twice : n, each);
}

GPUSHARE_INLINE void plain_memory::open(std::size_t i, std::size_t each) {
    if (size == capacity) grow(size + 1, each);
    auto* gap = static_cast<std::byte*>(data) + i * each;
    std::memmove(gap + each, gap, (size - i) * each);
    ++size;
}

GPUSHARE_INLINE void plain_memory::close(std::size_t i, std::size_t n, std::size_t each) noexcept {
    if (n == 0) return;
    auto* hole = static_cast<std::byte*>(data) + i * each;
    std::memmove(hole, hole + n * each, (size - i - n) * each);
    size -= n;
}
#endif

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
