// SPDX-License-Identifier: Apache-2.0
// The part of libtorch that the experiment needs besides models: all else here knows only CUDA, and
// is rehearsed without libtorch (tests/gpu/engines_rehearsal.cpp).
//
//   use_stream(s);                                   // by the thread that enqueues
//   const auto replay = captured([&] { bert.step(); });
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <gpushare/units.hpp>

namespace gpu_engines {

/// cpu: without a device. There a pass is over when it returns.
enum class place : std::uint8_t { cpu, cuda };

/// Before anything else.
void start_libtorch(place p);
[[nodiscard]] std::string libtorch_version();

/// Weights come by the default stream, for which others don't wait: until they are all there.
void wait_for_weights();
/// The calling thread enqueues there from now on.
void use_stream(cudaStream_t s);
/// A graph of what `pass` enqueues, made on the calling thread's stream and to be replayed on the
/// stream of the thread that calls it.
[[nodiscard]] std::function<void()> captured(const std::function<void()>& pass);

/// A tenant of the first device, in whose memory and on whose stream libtorch computes.
class tenant_memory {
public:
    explicit tenant_memory(gpushare::bytes quota);
    tenant_memory(const tenant_memory&) = delete;
    tenant_memory& operator=(const tenant_memory&) = delete;
    ~tenant_memory();

    /// By the calling thread, which has its own stream again behind that.
    void inside(const std::function<void()>& task);
    /// What is kept for the next allocation.
    void give_back();
    [[nodiscard]] cudaStream_t native() const;

private:
    struct parts;
    std::unique_ptr<parts> parts_;
};

}  // namespace gpu_engines
