// SPDX-License-Identifier: Apache-2.0
// Where a tenant's passes go: a stream of the device with libtorch behind it or, without a device,
// the calling thread, where all is over when the call returns.
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

enum class urgency : std::uint8_t { normal, high };  ///< high: CUDA's highest priority

/// Something that happens on a lane. Movable.
class point {
public:
    /// One that is over already.
    point() = default;
    /// `timed`: for us_between.
    point(cudaStream_t behind, bool timed);

    [[nodiscard]] bool reached() const;
    void wait() const;
    /// Both timed, and reached.
    friend double us_between(const point& begin, const point& end);

private:
    struct destroy {
        void operator()(cudaEvent_t e) const noexcept { (void)cudaEventDestroy(e); }
    };
    std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, destroy> event_;
};

/// Not movable: a thread may use it for as long as it is there.
class lane {
public:
    lane(place p, urgency u);
    lane(const lane&) = delete;
    lane& operator=(const lane&) = delete;
    ~lane();

    /// The calling thread enqueues here from now on.
    void use() const;
    [[nodiscard]] point mark(bool timed = false) const;
    /// Until all is over.
    void drain() const;
    /// Null without a device.
    [[nodiscard]] cudaStream_t native() const noexcept { return stream_; }
    /// `pass` as a graph, by a thread that uses the lane and for one that does; without a device
    /// `pass` itself.
    [[nodiscard]] std::function<void()> captured(std::function<void()> pass) const;

private:
    cudaStream_t stream_ = nullptr;
};

}  // namespace gpu_engines
