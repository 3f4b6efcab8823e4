// SPDX-License-Identifier: Apache-2.0
// The SMs of a CUDA device in the form that partitioned_limiter and tenancy::slice take (the concept sm_partitionable).
// A program that has CUDA anyway can use green_context.hpp, which is behind it.
//
//   gpushare::cuda::device_sms sms{node, gpushare::device_id{0}};
//   auto parts = sms.partition(gpushare::equal_sms(sms.split(), 2));
//   gpushare::cuda::stream s = parts[0].make_stream(gpushare::priority{1}, /*tag=*/7);  // tag: whose work it is, a number of yours
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// A handle: copies are the same SMs. Safe from any thread; the node must outlive it.
class device_sms {
public:
    using stream = cuda::stream;           ///< inside and outside of partitions
    using partition_type = green_context;  ///< what SMs are split into

    /// Throws operation_error (no_device).
    device_sms(node& on, device_id d) : node_(&on), device_(d) { (void)on.state(d); }

    /// See node::make_stream.
    [[nodiscard]] stream make_stream(priority level = {}, std::uint32_t tag = 0) {
        return node_->make_stream(device_, level, tag);
    }
    /// How they can be split. Throws operation_error (not_supported).
    [[nodiscard]] sm_split split() const { return query_sm_split(*node_, device_); }
    /// See make_green_contexts.
    [[nodiscard]] std::vector<green_context> partition(std::span<const std::uint32_t> sms) {
        return make_green_contexts(*node_, device_, sms);
    }
    /// Tags of streams whose kernels run on all SMs: existing streams that came from the node, or
    /// through it. Streams that the embedder made without it are unknown.
    [[nodiscard]] std::vector<std::uint32_t> outside_any_partition() const {
        return node_->state(device_)->sms().unpartitioned();
    }

private:
    node* node_;
    device_id device_;
};
static_assert(sm_partitionable<device_sms>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
