// SPDX-License-Identifier: Apache-2.0
// Ranks that use Horovod's names on devices of a node: a device for each rank, or one device for
// all ranks.
//
//   support::named_machine<gpushare::host::node, heap, float> m(node, heap, 2, together);
//   horovod::process_set of(*m.ranks, r);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/horovod_devices.hpp>
#include <gpushare/units.hpp>

namespace support {

/// The stream in the form in which arrays are passed.
template <class Stream>
[[nodiscard]] void* handle_of(Stream& s) {
    if constexpr (requires { s.native_handle(); })
        return s.native_handle();
    else
        return &s;
}

/// `Group` is a communicator of the ranks.
template <class Node, class Visible, class Group, class... T>
struct named_machine {
    using stream = typename Node::stream;
    using ranks_type = gpushare::horovod::device_ranks<Node, Visible, T...>;

    named_machine(Node& on, Visible& visible, const Group& group, bool together, std::size_t staging_size = 512,
                  const gpushare::horovod::device_options& options = {}) {
        const auto count = static_cast<std::uint32_t>(group.size());
        for (std::uint32_t r = 0; r < count; ++r) {
            members.push_back(group.rank(r));
            staging.emplace_back(staging_size / sizeof(double));
            callers.push_back(on.make_stream(gpushare::device_id{together ? 0 : r}));
            if (together && r != 0) continue;
            devices.push_back({r});
            streams.push_back(on.make_stream(devices[r]));
        }
        for (auto& s : staging) pointers.push_back(s.data());
        ranks = std::make_unique<ranks_type>(on, devices, std::span(streams), members, visible, pointers,
                                             gpushare::bytes{staging_size}, options);
    }
    /// An array of rank r, computed on the rank's stream.
    template <class E>
    [[nodiscard]] gpushare::horovod::device_array<E> array(std::uint32_t r, std::span<E> x, std::size_t row = 1) {
        return {x.data(), x.size(), handle_of(callers[r]), row};
    }
    void wait(std::uint32_t r) { callers[r].record().wait(gpushare::never); }

    std::vector<std::vector<double>> staging{};
    std::vector<void*> pointers{};
    std::vector<gpushare::device_id> devices{};
    std::vector<gpushare::member> members{};
    std::vector<stream> streams{}, callers{};
    std::unique_ptr<ranks_type> ranks{};  // destroyed first
};

/// Tells conformance::check_named how to pass arrays of rank r.
template <class Machine>
struct named_on_device {
    Machine& m;
    std::uint32_t r;
    template <class E>
    [[nodiscard]] gpushare::horovod::handle all_reduce(std::span<E> x, std::string_view name,
                                                       gpushare::horovod::reduce_op op,
                                                       gpushare::horovod::process_set& of) const {
        return gpushare::horovod::allreduce_async(m.array(r, x), name, op, of);
    }
    template <class E>
    [[nodiscard]] gpushare::horovod::handle broadcast(std::span<E> x, std::uint32_t root, std::string_view name,
                                                      gpushare::horovod::process_set& of) const {
        return gpushare::horovod::broadcast_async(m.array(r, x), root, name, of);
    }
    void synchronize(std::span<const gpushare::horovod::handle> all) const {
        gpushare::horovod::synchronize(all);
        m.wait(r);
    }
};

}  // namespace support
