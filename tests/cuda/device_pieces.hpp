// SPDX-License-Identifier: Apache-2.0
// A tenant of a CUDA node, and its floats, for tests of engines that compute pieces on a device.
#pragma once

#include <cstddef>
#include <cstring>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "graph/piece_programs.hpp"

namespace support {

using namespace gpushare::literals;
using cuda_tenancy = gpushare::tenancy<gpushare::cuda::node>;

struct piece_tenant {
    gpushare::cuda::node node;
    cuda_tenancy shared{node};
    cuda_tenancy::tenant chat = shared.admit({.name = "chat", .memory = 16_MiB, .compute = 50_pct});

    [[nodiscard]] bool all_back() {
        chat.memory().collect();
        return chat.memory().free() == chat.memory().capacity();
    }
    template <class Work>
    void submit(Work work) {
        auto ticket = chat.submit(work);
        (void)ticket.wait();
        if (ticket.status() != gpushare::errc::none) ticket.rethrow();
    }
};

/// Floats in the tenant's memory, `offset` bytes behind the begin of a block.
class device_floats {
public:
    device_floats(cuda_tenancy::tenant& of, const extents& shape, std::size_t offset = 0)
        : whose_(&of), size_(count(shape) * sizeof(float) + offset + 1) {
        block_ = static_cast<std::byte*>(of.memory().allocate(size_, 256));
        at = {gpushare::graph::element::f32, shape, block_ + offset, size_ - offset};
        std::memset(block_, 0xff, size_);  // NaN
    }
    /// `n` has a shape, and its numbers.
    template <class Numbers>
    device_floats(cuda_tenancy::tenant& of, const Numbers& n, std::size_t offset = 0)
        : device_floats(of, n.shape, offset) {
        for (std::size_t i = 0; i < n.at.size(); ++i) static_cast<float*>(at.data)[i] = static_cast<float>(n.at[i]);
    }
    device_floats(const device_floats&) = delete;
    device_floats& operator=(const device_floats&) = delete;
    ~device_floats() { whose_->memory().deallocate(block_, size_, 256); }

    gpushare::graph::tensor at;

private:
    cuda_tenancy::tenant* whose_;
    std::size_t size_;
    std::byte* block_ = nullptr;
};

}  // namespace support
