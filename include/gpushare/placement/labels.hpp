// SPDX-License-Identifier: Apache-2.0
// Counts labels, for affinity and anti-affinity: a request carries a label (`group`), wants a node
// that has one (`near`) or one that hasn't (`apart`). One label_counts is of a node, another of the
// whole cluster.
//
//   gpushare::label_counts on_node;
//   on_node.add(request);
//   if (on_node[other.apart].carried == 0) ...      // nothing here that `other` avoids
//   on_node.remove(request);
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/placement.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Counts the labels of placed requests. A value; equal contents compare equal.
class label_counts {
public:
    /// Placed requests that carry the label, and placed requests that want to be apart from it.
    struct count {
        label of{};                 ///< the label
        std::uint32_t carried = 0;  ///< placed requests that carry it
        std::uint32_t avoided = 0;  ///< placed requests that want to be apart from it

        friend bool operator==(const count&, const count&) = default;
    };

    /// The counts of one label.
    [[nodiscard]] count operator[](label of) const noexcept {
        const std::size_t at = place_of(of);
        return at < counts_.size() && counts_[at].of == of ? counts_[at] : count{of};
    }

    /// Takes note of a placed request; with room made by `reserve`, doesn't throw.
    void add(const placement_request& r) {
        reserve();
        if (r.group) ++counter(r.group).carried;
        if (r.apart) ++counter(r.apart).avoided;
    }
    /// The request's labels must have been added.
    void remove(const placement_request& r) noexcept {
        if (r.group) --counter(r.group).carried;
        if (r.apart) --counter(r.apart).avoided;
        std::erase_if(counts_, [](const count& c) { return c.carried == 0 && c.avoided == 0; });
    }
    /// Whether remove() would find its labels.
    [[nodiscard]] bool has(const placement_request& r) const noexcept {
        return (!r.group || (*this)[r.group].carried != 0) && (!r.apart || (*this)[r.apart].avoided != 0);
    }

    /// So that the next add() doesn't throw.
    void reserve() {
        constexpr std::size_t labels_of_a_request = 2;
        if (counts_.capacity() - counts_.size() < labels_of_a_request)
            counts_.reserve(2 * counts_.size() + labels_of_a_request);
    }

    friend bool operator==(const label_counts&, const label_counts&) = default;

private:
    // The place of the first label that isn't smaller. Not std::ranges::lower_bound: including that
    // alone costs as much as a header of ours.
    [[nodiscard]] std::size_t place_of(label of) const noexcept {
        std::size_t first = 0, end = counts_.size();
        while (first < end) {
            const std::size_t middle = first + (end - first) / 2;
            if (counts_[middle].of < of)
                first = middle + 1;
            else
                end = middle;
        }
        return first;
    }
    count& counter(label of) {
        const std::size_t at = place_of(of);
        if (at < counts_.size() && counts_[at].of == of) return counts_[at];
        return *counts_.insert(counts_.begin() + static_cast<std::ptrdiff_t>(at), count{of});
    }

    std::vector<count> counts_;  // ascending
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
