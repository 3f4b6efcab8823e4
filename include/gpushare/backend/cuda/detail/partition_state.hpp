// SPDX-License-Identifier: Apache-2.0
// The state shared by an SM partition and its streams: a green context and its SMs. The state is
// retired when the partition and its last stream are destroyed. The SMs are free for others once
// the partition's work is done.
//
//   stream_state s;     s.partition = partition;     s.end = partition->new_end();
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

struct partition_state {
    explicit partition_state(std::shared_ptr<device_state> on)
        : device(std::move(on)), own(std::make_unique<retired_partition>()) {}
    partition_state(const partition_state&) = delete;
    partition_state& operator=(const partition_state&) = delete;
    ~partition_state() { device->retire(std::move(own)); }

    /// Makes room and an event for the end of one more stream, so that the stream's destructor
    /// needs nothing more. Call under `mutex`.
    [[nodiscard]] point_state& new_end() {
        device->drop_ended(own->ends);
        own->ends.reserve(own->ends.size() + streams + 1);
        point_state& end = device->acquire();
        ++streams;
        return end;
    }
    /// A stream is gone. Its work has ended once `end` is reached.
    void stream_gone(point_state& end) noexcept {
        const std::lock_guard lock(mutex);
        own->ends.push_back(&end);
        --streams;
    }

    /// From now on a stream of the partition belongs to an owner that doesn't say when the stream
    /// goes. So the native partition stays, and its SMs belong to no other partition. (Driver API,
    /// cuGreenCtxDestroy: streams of a destroyed context can't be used.)
    void keep() noexcept {
        const std::lock_guard lock(mutex);
        own->owned = false;
        own->units.clear();
    }

    const std::shared_ptr<device_state> device;
    std::unique_ptr<retired_partition> own;
    std::uint32_t sms = 0;
    std::size_t streams = 0;  // the number of streams
    std::mutex mutex;         // the driver allows one thread at a time for a green context
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
