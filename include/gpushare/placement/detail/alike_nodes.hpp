// SPDX-License-Identifier: Apache-2.0
// Finds nodes that are alike: nodes with the same description and the same free resources. While
// many of a thousand nodes are empty, usually only some tens of them differ.
//
//   alike_nodes seen;
//   seen.clear(nodes.size());
//   for (...) if (const auto other = seen.first_like(nodes, id); other != id) ...   // rated already
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>
#include <gpushare/placement/cluster.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A hash table of nodes by their free capacity, with linear probing.
class alike_nodes {
public:
    /// Forgets all nodes, and makes room for `nodes`.
    void clear(std::size_t nodes) { first_.assign(std::bit_ceil(2 * nodes + 1), none); }

    /// The first node that was asked about and is like this node, or this node if there is none.
    /// The nodes must not change between the calls.
    [[nodiscard]] node_id first_like(const cluster& nodes, node_id id) noexcept {
        const node_view n = nodes[id];
        for (std::size_t at = hash(n);; ++at) {
            std::uint32_t& first = first_[at & (first_.size() - 1)];
            if (first == none) first = id.index;
            if (first == id.index || are_alike(n, nodes[{first}])) return {first};
        }
    }

private:
    static constexpr std::uint32_t none = ~std::uint32_t{0};

    static std::size_t hash(const node_view& n) noexcept {
        std::uint64_t h = 0;
        const auto mix = [&h](std::uint64_t x) { h = (std::rotl(h, 23) ^ x) * golden_ratio; };
        mix(n.cpu_milli);
        mix(n.memory.count());
        mix(n.whole.model.index);
        for (const free_device& d : n.devices) mix(d.permille + (d.memory.count() << 10));
        return static_cast<std::size_t>(h >> 20);
    }
    static bool are_alike(const node_view& a, const node_view& b) noexcept {
        return a.cpu_milli == b.cpu_milli && a.memory == b.memory && a.whole == b.whole &&
               std::ranges::equal(a.devices, b.devices);
    }

    std::vector<std::uint32_t> first_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
