// SPDX-License-Identifier: Apache-2.0
#include "lane.hpp"

#include <gpushare/backend/cuda/error.hpp>

namespace gpu_engines {
namespace {

using gpushare::cuda::check;

}  // namespace

point::point(cudaStream_t behind, bool timed) {
    cudaEvent_t made = nullptr;
    check(cudaEventCreateWithFlags(&made, timed ? cudaEventDefault : cudaEventDisableTiming), "making an event");
    event_.reset(made);
    check(cudaEventRecord(made, behind), "recording an event");
}
bool point::reached() const {
    if (event_ == nullptr) return true;
    const cudaError_t code = cudaEventQuery(event_.get());
    if (code == cudaErrorNotReady) return false;
    check(code, "asking an event");
    return true;
}
void point::wait() const {
    if (event_ != nullptr) check(cudaEventSynchronize(event_.get()), "waiting for an event");
}
double us_between(const point& begin, const point& end) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.event_.get(), end.event_.get()), "measuring between two events");
    return 1e3 * static_cast<double>(ms);
}

lane::lane(place p, urgency u) {
    if (p == place::cpu) return;
    wait_for_weights();
    int lowest = 0, highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for priorities");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, u == urgency::high ? highest : lowest),
          "making a stream");
}
lane::~lane() {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}
void lane::use() const {
    if (stream_ != nullptr) use_stream(stream_);
}
point lane::mark(bool timed) const { return stream_ != nullptr ? point(stream_, timed) : point(); }
void lane::drain() const {
    if (stream_ != nullptr) check(cudaStreamSynchronize(stream_), "waiting for a stream");
}
std::function<void()> lane::captured(std::function<void()> pass) const {
    if (stream_ == nullptr) return pass;
    // The first passes load kernels and allocate memory, which a capture doesn't allow.
    for (int i = 0; i < 3; ++i) pass();
    drain();
    return gpu_engines::captured(pass);
}

}  // namespace gpu_engines
