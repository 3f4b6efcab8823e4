// SPDX-License-Identifier: Apache-2.0
// The experiment's interface to libtorch, apart from models. All other code knows only CUDA, and a
// rehearsal runs that code without libtorch (tests/gpu/engines_rehearsal.cpp).
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

/// `cpu` runs without a device: a pass is done when the call returns.
enum class place : std::uint8_t { cpu, cuda };

/// Must be called before any other function of libtorch.
void start_libtorch(place p);
[[nodiscard]] std::string libtorch_version();

/// Waits until all weights are copied. The default stream copies the weights, and other streams
/// don't wait for it.
void wait_for_weights();
/// Makes the calling thread enqueue on `s` from now on.
void use_stream(cudaStream_t s);
/// Captures the work that `pass` enqueues on the calling thread's stream. The result replays the
/// graph on the stream of the thread that calls it.
[[nodiscard]] std::function<void()> captured(const std::function<void()>& pass);

/// A tenant of the first device. Inside, libtorch uses the tenant's memory and stream.
class tenant_memory {
public:
    explicit tenant_memory(gpushare::bytes quota);
    tenant_memory(const tenant_memory&) = delete;
    tenant_memory& operator=(const tenant_memory&) = delete;
    ~tenant_memory();

    /// Runs `task` on the calling thread, which gets its own stream back afterwards.
    void inside(const std::function<void()>& task);
    /// Returns the memory that is kept for later allocations.
    void give_back();
    [[nodiscard]] cudaStream_t native() const;

private:
    struct parts;
    std::unique_ptr<parts> parts_;
};

}  // namespace gpu_engines
