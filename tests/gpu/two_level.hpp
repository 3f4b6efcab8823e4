// SPDX-License-Identifier: Apache-2.0
// Two levels of ranks on CUDA devices, for tests: nodes that are threads, each with its own
// devices, or with one device that its ranks share. For a file that can launch kernels on
// cuda::stream and includes the headers for that first.
//
//   const two_level::cluster all({2, 4}, apart, {.chunk = gs::bytes{4096}});
//   all.each([&](unsigned p, two_level::machine& m) { ... m.levels->all_reduce<float>(...) ... });
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>
#include <gpushare/units.hpp>

#include "gpu/two_level_sums.hpp"
#include "support/threads.hpp"

namespace two_level {

namespace cuda = gpushare::cuda;

using levels_type = gs::two_level_devices<std::remove_cvref_t<decltype(std::declval<cuda::node&>().gangs())>,
                                          cuda::stream, gs::thread_transport, cuda::pinned_memory>;

/// A node: ranks on devices from the first one on, or all on that one, and its end of the transport
/// between nodes.
struct machine {
    machine(std::uint32_t first, std::uint32_t count, layout how, const gs::member& outside)
        : of_ranks(count, gs::device_id{first}), outer(outside) {
        for (std::uint32_t r = 0; r < count && how == layout::apart; ++r) of_ranks[r] = {first + r};
        devices.assign(of_ranks.begin(), how == layout::apart ? of_ranks.end() : of_ranks.begin() + 1);
        if (!cuda::connect(node, devices)) throw std::runtime_error("not connected");
        group = std::make_unique<group_type>(node, pinned, of_ranks, gs::communicator_options{.blocks = 2});
        for (std::uint32_t r = 0; r < count; ++r) members.push_back(group->rank(r));
        for (const gs::device_id d : devices) streams.push_back(node.make_stream(d));
    }
    machine(const machine&) = delete;
    machine& operator=(const machine&) = delete;
    ~machine() {
        levels.reset();
        wait();
        for (const block& b : memory) (void)node.memory(b.on).deallocate(b.data, b.size, 256);
    }
    /// Collective.
    void split(const gs::two_level_options& options) {
        levels =
            std::make_unique<levels_type>(node.gangs(), devices, std::span(streams), members, outer, pinned, options);
    }
    [[nodiscard]] cuda::stream& stream_of(std::size_t r) { return streams[streams.size() == 1 ? 0 : r]; }
    /// Arrays of each rank, n elements in its device's memory, that hold of(the rank's number in
    /// all nodes, i).
    template <class T, class Of>
    [[nodiscard]] std::vector<T*> arrays(std::size_t n, const Of& of) {
        std::vector<T*> all;
        for (std::uint32_t r = 0; r < members.size(); ++r) {
            memory.push_back({of_ranks[r], node.memory(of_ranks[r]).allocate(n * sizeof(T), 256), n * sizeof(T)});
            all.push_back(static_cast<T*>(memory.back().data));
            std::vector<T> x(n);
            for (std::size_t i = 0; i < n; ++i) x[i] = of(levels->first() + r, i);
            stream_of(r).copy(all.back(), x.data(), n * sizeof(T));
            wait();
        }
        return all;
    }
    /// How many elements of all ranks aren't of(i).
    template <class T, class Of>
    [[nodiscard]] std::size_t wrong(const std::vector<T*>& all, std::size_t n, const Of& of) {
        std::size_t count = 0;
        for (std::size_t r = 0; r < all.size(); ++r) {
            std::vector<T> x(n);
            stream_of(r).copy(x.data(), all[r], n * sizeof(T));
            wait();
            for (std::size_t i = 0; i < n; ++i) count += x[i] == of(i) ? 0U : 1U;
        }
        return count;
    }
    void wait() {
        for (cuda::stream& s : streams) (void)s.record().wait(gs::never);
    }

    using group_type = gs::device_communicator<cuda::node, cuda::pinned_memory>;
    struct block {
        gs::device_id on;
        void* data;
        std::size_t size;
    };
    cuda::node node;
    cuda::pinned_memory pinned{node};
    std::vector<gs::device_id> of_ranks, devices;
    gs::thread_transport outer;
    std::unique_ptr<group_type> group;
    std::vector<gs::member> members;
    std::vector<cuda::stream> streams;
    std::vector<block> memory;
    std::unique_ptr<levels_type> levels;
};

/// Nodes of so many ranks each, joined by threads.
struct cluster {
    cluster(const std::vector<std::uint32_t>& ranks, layout how, const gs::two_level_options& options = {})
        : size(std::accumulate(ranks.begin(), ranks.end(), 0U)), between(static_cast<std::uint32_t>(ranks.size())) {
        for (std::uint32_t p = 0, first = 0; p < ranks.size(); first += how == layout::apart ? ranks[p] : 1, ++p)
            nodes.push_back(std::make_unique<machine>(first, ranks[p], how, between.rank(p)));
        each([&](unsigned, machine& m) { m.split(options); });
    }
    void each(const std::function<void(unsigned, machine&)>& f) const {
        support::together(static_cast<unsigned>(nodes.size()), [&](unsigned p) { f(p, *nodes[p]); });
    }
    std::uint32_t size;  // of all nodes
    gs::communicator between;
    std::vector<std::unique_ptr<machine>> nodes;
};

/// Small integers, whose sums are exact in any order: of rank `rank` of all.
template <class T>
[[nodiscard]] T number(std::uint32_t rank, std::size_t i) {
    return static_cast<T>(static_cast<float>((3 * rank + 5 * i) % 17) - 8);
}
template <class T>
[[nodiscard]] T sum_of(std::uint32_t ranks, std::size_t i) {
    float sum = 0;
    for (std::uint32_t r = 0; r < ranks; ++r) sum += static_cast<float>(number<T>(r, i));
    return static_cast<T>(sum);
}

}  // namespace two_level
