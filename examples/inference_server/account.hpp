// SPDX-License-Identifier: Apache-2.0
// What the server counts of a tenant. It stays when the tenant goes and comes back.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include <gpushare/units.hpp>

namespace inference_server {

/// Thread-safe. Relaxed everywhere: each is a count of its own, and nothing is concluded from two
/// of them.
class account {
public:
    /// how many of its requests may wait for one model; 0: 64
    std::atomic<std::uint32_t> queue_limit{0};
    /// bytes of its bodies that are being received or served
    std::atomic<std::size_t> uploads{0};
    std::atomic<std::size_t> calls{0};    ///< of gRPC that are open
    std::atomic<std::size_t> streams{0};  ///< of these
    std::atomic<std::uint64_t> requests{0}, refusals{0}, failures{0}, tokens{0}, batches{0}, rows{0}, pieces{0};

    /// A request was answered.
    void answered(gpushare::ns took) noexcept {
        requests.fetch_add(1, std::memory_order_relaxed);
        const auto us = static_cast<std::uint64_t>(took.count() < 0 ? 0 : took.count()) / 1000;
        const auto bucket = static_cast<std::size_t>(std::bit_width(us));
        latency_[bucket < buckets ? bucket : buckets - 1].fetch_add(1, std::memory_order_relaxed);
        sum_us_.fetch_add(us, std::memory_order_relaxed);
    }

    static constexpr std::size_t buckets = 26;
    /// Bucket i: answered in less than 2^i us. The last: all others.
    [[nodiscard]] std::uint64_t in_bucket(std::size_t i) const noexcept {
        return latency_[i].load(std::memory_order_relaxed);
    }
    [[nodiscard]] std::uint64_t sum_us() const noexcept { return sum_us_.load(std::memory_order_relaxed); }

private:
    std::array<std::atomic<std::uint64_t>, buckets> latency_{};
    std::atomic<std::uint64_t> sum_us_{0};
};

}  // namespace inference_server
