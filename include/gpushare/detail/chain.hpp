// SPDX-License-Identifier: Apache-2.0
// Doubly-linked lists through the elements of a vector, by index. Removing an element takes
// constant time, wherever it is. An element can be in as many lists as it has links. Vector and
// lists are values and can be copied.
//
//   struct cell { detail::chain_link age; };    std::vector<cell> cells(9);
//   detail::chain<cell, &cell::age> oldest_first;    oldest_first.push_back(cells, 4);
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// No element.
inline constexpr std::uint32_t no_index = std::numeric_limits<std::uint32_t>::max();

struct chain_link {
    std::uint32_t previous = no_index, next = no_index;
};

/// An element is in a chain at most once; `cells` is always the same vector.
template <class Cell, chain_link Cell::*Link>
class chain {
public:
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
    [[nodiscard]] std::uint32_t front() const noexcept { return first_; }
    [[nodiscard]] std::uint32_t back() const noexcept { return last_; }

    void push_back(std::vector<Cell>& cells, std::uint32_t i) noexcept {
        cells[i].*Link = {.previous = last_, .next = no_index};
        (last_ != no_index ? (cells[last_].*Link).next : first_) = i;
        last_ = i;
        ++size_;
    }

    void erase(std::vector<Cell>& cells, std::uint32_t i) noexcept {
        const chain_link link = cells[i].*Link;
        (link.previous != no_index ? (cells[link.previous].*Link).next : first_) = link.next;
        (link.next != no_index ? (cells[link.next].*Link).previous : last_) = link.previous;
        --size_;
    }

private:
    std::uint32_t first_ = no_index, last_ = no_index;
    std::size_t size_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
