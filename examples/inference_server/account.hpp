// SPDX-License-Identifier: Apache-2.0
// The counters that the server keeps for a tenant. They stay when the tenant goes and comes back.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include <gpushare/units.hpp>

namespace inference_server {

/// Any thread may use the counters. All accesses are relaxed: each counter stands alone, and no
/// code draws a conclusion from two of them.
class account {
public:
    /// The most requests of the tenant that may wait for one model; 0 stands for 64.
    std::atomic<std::uint32_t> queue_limit{0};
    /// The bytes of the tenant's bodies that are being received or served.
    std::atomic<std::size_t> uploads{0};
    std::atomic<std::size_t> calls{0};    ///< open gRPC calls
    std::atomic<std::size_t> streams{0};  ///< the open calls that are streams
    std::atomic<std::uint64_t> requests{0}, refusals{0}, failures{0}, tokens{0}, batches{0}, rows{0}, pieces{0};

    /// Counts an answered request.
    void answered(gpushare::ns took) noexcept {
        requests.fetch_add(1, std::memory_order_relaxed);
        const auto us = static_cast<std::uint64_t>(took.count() < 0 ? 0 : took.count()) / 1000;
        const auto bucket = static_cast<std::size_t>(std::bit_width(us));
        latency_[bucket < buckets ? bucket : buckets - 1].fetch_add(1, std::memory_order_relaxed);
        sum_us_.fetch_add(us, std::memory_order_relaxed);
    }

    static constexpr std::size_t buckets = 26;
    /// Bucket i counts the requests answered in less than 2^i us; the last bucket counts all slower
    /// requests.
    [[nodiscard]] std::uint64_t in_bucket(std::size_t i) const noexcept {
        return latency_[i].load(std::memory_order_relaxed);
    }
    [[nodiscard]] std::uint64_t sum_us() const noexcept { return sum_us_.load(std::memory_order_relaxed); }

private:
    std::array<std::atomic<std::uint64_t>, buckets> latency_{};
    std::atomic<std::uint64_t> sum_us_{0};
};

}  // namespace inference_server
