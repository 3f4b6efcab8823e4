// SPDX-License-Identifier: Apache-2.0
// Sharded training: each rank combines its shard of every gradient, steps its shard of every
// parameter, and gets the others' shards before the next forward pass. An optimiser's state
// (momentum, master copies) exists once and not on every rank: ZeRO's first two stages (Rajbhandari
// et al., SC 2020).
//
//   while (!mine.reduce_scatter(net, gpushare::average{}, patience)) {}   // mine: gradient_buckets, in the thread that communicates
//   mine.ready(g);   mine.wait(deadline);                                 // in the thread that computes, as with reduce()
//   for (std::span<float> p : parameters) {
//       const gpushare::element_range own = gpushare::shard_of(p.size(), net.rank(), net.size());
//       ...                                                               // step the elements `own` of p by those of its gradient
//   }
//   if (auto fault = gpushare::all_gather_shards<float>(net, parameters, deadline)) ...        // spans, the same sizes on all ranks
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>
#include <gpushare/gradient/detail/packed_list.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// Some arrays of a list, on the way.
template <class T>
struct gathered_group {
    std::span<const std::span<T>> arrays;
    packed_list<T> packed;
    std::uint64_t ticket = 0;

    template <class Net>
    void begin(Net& net, std::span<const std::span<T>> some) {
        arrays = some;
        packed.pack(some, net.size(), {net.rank(), net.rank() + 1});
        if constexpr (pipelined_transport<Net>) ticket = net.start_all_gather(packed.data());
    }
    template <class Net>
    [[nodiscard]] collective_fault end(Net& net, instant deadline) {
        collective_fault fault;
        if constexpr (pipelined_transport<Net>) {
            fault = net.finish(ticket, deadline);
        } else {
            const std::span<T> all = packed.data();
            const std::size_t each = all.size() / net.size();
            fault = net.all_gather(std::span<const T>(all.subspan(net.rank() * each, each)), all, deadline);
        }
        if (!fault) packed.unpack(arrays, {0, net.size()});
        return fault;
    }
};

}  // namespace detail

/// Every rank gets each rank's shard (shard_of) of every array of the list from that rank, in
/// place. By all ranks alike, with the same sizes. Between threads nothing is packed; else arrays
/// go in groups of at most `group`, an array that is larger by itself. After a fault with
/// buffers_in_use, or an exception, the arrays may still be read and written. Between a step's
/// gradient_buckets::wait() and the next step's first ready() the transport of the thread that
/// communicates may be used: it waits. May throw std::bad_alloc, and what the transport throws.
template <class T, host_transport Net>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault all_gather_shards(Net& net, std::span<const std::type_identity_t<std::span<T>>> list,
                                                 instant deadline = never, bytes group = bytes{1 << 20}) {
    if constexpr (list_transport<Net>) {
        return net.template all_gather_list<T>(list, deadline);
    } else {
        // One goes over the link while the other is packed.
        std::array<detail::gathered_group<T>, pipelined_transport<Net> ? 2 : 1> under_way;
        std::size_t begun = 0, ended = 0;
        collective_fault fault;
        const auto leave_behind = [&] {
            for (auto& one : under_way) one.packed.leave_behind();
        };
        try {
            while (!fault && (!list.empty() || ended < begun)) {
                if (!list.empty() && begun - ended < under_way.size()) {
                    std::size_t arrays = 1, filled = list.front().size_bytes();
                    while (arrays < list.size() && filled + list[arrays].size_bytes() <= group.count())
                        filled += list[arrays++].size_bytes();
                    under_way[begun++ % under_way.size()].begin(net, list.first(arrays));
                    list = list.subspan(arrays);
                } else {
                    fault = under_way[ended++ % under_way.size()].end(net, deadline);
                }
            }
        } catch (...) {  // of the host's memory, say: the group before is still under way
            leave_behind();
            throw;
        }
        if (fault.buffers_in_use) leave_behind();
        return fault;
    }
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
