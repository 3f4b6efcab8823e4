// SPDX-License-Identifier: Apache-2.0
// Floats in the memory of the stand-in's device, which the host may read.
//
//   support::visible_floats x(10);
//   CHECK(x.seen() == std::vector<float>(10, 3));
#pragma once

#include <cstddef>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>

#include <cuda_runtime_api.h>

namespace support {

class visible_floats {
public:
    explicit visible_floats(std::size_t n, float value = 0) : n_(n) {
        void* at = nullptr;
        if (cudaMalloc(&at, n * sizeof(float) + 1) != cudaSuccess) throw std::bad_alloc();
        data_ = static_cast<float*>(at);
        for (float& x : all()) x = value;
    }
    visible_floats(visible_floats&& o) noexcept : data_(std::exchange(o.data_, nullptr)), n_(o.n_) {}
    visible_floats& operator=(visible_floats&&) = delete;
    ~visible_floats() { (void)cudaFree(data_); }

    [[nodiscard]] std::span<float> all() const { return {data_, n_}; }
    [[nodiscard]] std::vector<float> seen() const { return {data_, data_ + n_}; }

private:
    float* data_;
    std::size_t n_;
};

/// Counts up by 1 from `first` for `period` elements, and then starts again.
struct count_up {
    float* to;
    std::size_t n;
    float first;
    std::size_t period = 100;
    template <class C>
    GPUSHARE_HD void operator()(C& ctx) const {
        for (std::size_t i = ctx.thread_rank(); i < n; i += ctx.num_threads())
            to[i] = first + static_cast<float>(i % period);
    }
};

}  // namespace support
