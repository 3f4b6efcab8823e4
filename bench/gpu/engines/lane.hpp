// SPDX-License-Identifier: Apache-2.0
// The place where a tenant's passes run: a stream of the device, on which libtorch enqueues, or the
// calling thread if there is no device. On the calling thread, all work is done when the call
// returns.
//
//   lane l(place::cuda, urgency::high);
//   l.use();                                  // by the thread that enqueues
//   model.step();
//   const auto p = l.mark();
//   while (!p.reached()) {}
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

#include "libtorch.hpp"

namespace gpu_engines {

enum class urgency : std::uint8_t { normal, high };  ///< `high` is CUDA's highest priority

/// A point in a lane's work. Movable.
class point {
public:
    /// A point that has already been reached.
    point() = default;
    /// `timed` points can be passed to us_between.
    point(cudaStream_t behind, bool timed);

    [[nodiscard]] bool reached() const;
    void wait() const;
    /// Both points must be timed and reached.
    friend double us_between(const point& begin, const point& end);

private:
    struct destroy {
        void operator()(cudaEvent_t e) const noexcept { (void)cudaEventDestroy(e); }
    };
    std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, destroy> event_;
};

/// Not movable, because a thread may use the lane for as long as the lane exists.
class lane {
public:
    lane(place p, urgency u);
    lane(const lane&) = delete;
    lane& operator=(const lane&) = delete;
    ~lane();

    /// Makes the calling thread enqueue on this lane from now on.
    void use() const;
    [[nodiscard]] point mark(bool timed = false) const;
    /// Waits until all work is done.
    void drain() const;
    /// Null without a device.
    [[nodiscard]] cudaStream_t native() const noexcept { return stream_; }
    /// Captures `pass` as a graph. The calling thread, and later the thread that replays the graph,
    /// must use the lane. Without a device, returns `pass` itself.
    [[nodiscard]] std::function<void()> captured(std::function<void()> pass) const;

private:
    cudaStream_t stream_ = nullptr;
};

}  // namespace gpu_engines
