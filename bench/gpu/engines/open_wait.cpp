// SPDX-License-Identifier: Apache-2.0
#include "open_wait.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>

#include "colocation.hpp"
#include "lane.hpp"

namespace gpu_engines {
namespace {

using gpushare::cuda::check;

/// Two words, one of which is always 0, and a block of device memory.
class words {
public:
    words() {
        void* p = nullptr;
        check(cudaHostAlloc(&p, 2 * sizeof(std::uint64_t), cudaHostAllocMapped), "making words");
        at_ = static_cast<std::uint64_t*>(p);
        at_[0] = at_[1] = 0;
        check(cudaMalloc(&memory_, bytes), "making memory");
    }
    words(const words&) = delete;
    words& operator=(const words&) = delete;
    ~words() {
        close(false);  // freeing memory waits for the device
        (void)cudaFree(memory_);
        (void)cudaFreeHost(at_);
    }
    void close(bool closed) const noexcept { std::atomic_ref(at_[1]).store(closed ? 1 : 0, std::memory_order_release); }
    [[nodiscard]] CUdeviceptr open_one() const noexcept { return reinterpret_cast<CUdeviceptr>(&at_[0]); }
    [[nodiscard]] CUdeviceptr other_one() const noexcept { return reinterpret_cast<CUdeviceptr>(&at_[1]); }
    void fill(cudaStream_t s) const { check(cudaMemsetAsync(memory_, 1, bytes, s), "filling memory"); }

private:
    static constexpr std::size_t bytes = 4096;
    std::uint64_t* at_ = nullptr;
    void* memory_ = nullptr;
};

/// Enqueues everything before the first operation starts, so that the host causes no gaps.
double us_of(const gpushare::cuda::driver& api, const lane& way, const words& w, int fills, bool waits) {
    const auto wait = [&](CUdeviceptr word) {
        check(static_cast<cudaError_t>(api.stream_wait_value(way.native(), word, 0, CU_STREAM_WAIT_VALUE_EQ)),
              "waiting in a stream");
    };
    w.close(true);
    wait(w.other_one());
    const point begin = way.mark(true);
    for (int i = 0; i < fills; ++i) {
        if (waits) wait(w.open_one());
        w.fill(way.native());
    }
    const point end = way.mark(true);
    w.close(false);
    end.wait();
    return us_between(begin, end);
}

}  // namespace

std::vector<double> open_wait_us(bool small) {
    if (!can_wait_in_streams()) return {};
    // A stream holds about 1000 launches.
    const int fills = small ? 10 : 200, repeats = small ? 3 : 21;
    const auto api = gpushare::cuda::driver::load();
    const lane way(place::cuda, urgency::normal);
    const words w;
    (void)us_of(api, way, w, fills, true);  // a first run loads everything
    std::vector<double> each;
    for (int i = 0; i < repeats; ++i) {
        const double without = us_of(api, way, w, fills, false);
        each.push_back((us_of(api, way, w, fills, true) - without) / fills);
    }
    return each;
}

}  // namespace gpu_engines
