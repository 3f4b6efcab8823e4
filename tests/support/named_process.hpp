// SPDX-License-Identifier: Apache-2.0
// One of several processes that use Horovod's names, with a device.
//
//   support::named_process<gpushare::cuda::node, pinned, net> mine(std::move(node), pinned, net);
//   horovod::allreduce(mine.array(std::span(x)), "x", horovod::Sum, mine.set());
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include <gpushare/gradient/horovod_processes.hpp>
#include <gpushare/units.hpp>

#include "support/named_ranks.hpp"

namespace support {

template <class Node, class Pinned, class Net>
class named_process {
public:
    using stream = typename Node::stream;

    named_process(std::shared_ptr<Node> on, Pinned& pinned, Net& net,
                  const gpushare::horovod::device_process_options& o = {},
                  const gpushare::horovod::process_set_options& s = {})
        : node_(std::move(on)),
          copies_(node_->make_stream(gpushare::device_id{0})),
          caller_(node_->make_stream(gpushare::device_id{0})),
          rank(std::make_unique<gpushare::horovod::device_process<Node, Net, Pinned>>(*node_, copies_, net, pinned, o)),
          set_(std::make_unique<gpushare::horovod::process_set>(*rank, s)) {}

    /// An array that is computed on the caller's stream.
    template <class E>
    [[nodiscard]] gpushare::horovod::device_array<E> array(std::span<E> x, std::size_t row = 1) {
        return {x.data(), x.size(), handle_of(caller_), row};
    }
    [[nodiscard]] gpushare::horovod::process_set& set() { return *set_; }
    [[nodiscard]] stream& caller() { return caller_; }
    [[nodiscard]] stream& copies() { return copies_; }
    void wait() { caller_.record().wait(gpushare::never); }
    void leave() { set_.reset(); }

private:
    std::shared_ptr<Node> node_;
    stream copies_, caller_;

public:
    std::unique_ptr<gpushare::horovod::device_process<Node, Net, Pinned>> rank;

private:
    std::unique_ptr<gpushare::horovod::process_set> set_;  // destroyed first
};

/// Tells conformance::check_named how to pass its arrays.
template <class Process>
struct named_in_process {
    Process& mine;
    template <class E>
    [[nodiscard]] gpushare::horovod::handle all_reduce(std::span<E> x, std::string_view name,
                                                       gpushare::horovod::reduce_op op,
                                                       gpushare::horovod::process_set& of) const {
        return gpushare::horovod::allreduce_async(mine.array(x), name, op, of);
    }
    template <class E>
    [[nodiscard]] gpushare::horovod::handle broadcast(std::span<E> x, std::uint32_t root, std::string_view name,
                                                      gpushare::horovod::process_set& of) const {
        return gpushare::horovod::broadcast_async(mine.array(x), root, name, of);
    }
    void synchronize(std::span<const gpushare::horovod::handle> all) const {
        gpushare::horovod::synchronize(all);
        mine.wait();
    }
};

}  // namespace support
