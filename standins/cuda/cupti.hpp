// SPDX-License-Identifier: Apache-2.0
// The part of CUPTI that the library uses, for tests. Linked instead of libcupti, it calls the
// single subscriber back at launches that go through the stand-in for CUDA. A call of the runtime
// appears as the driver call in which it ends.
//
//   standin::take_subscriber("CUPTI for a profiler");      // from now on nobody else can subscribe
//
// It models one subscriber with a name, callbacks that can be enabled one by one, ENTER and EXIT
// with the function's parameters, a word that is passed from ENTER to EXIT, and data that is
// invalid after the callback.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cupti.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "machine.hpp"

namespace standin {

/// Plays another part of the process that subscribes, under that name, and replaces the present
/// subscriber.
void take_subscriber(std::string name);
/// Ends the subscription of take_subscriber().
void give_subscriber_back();
/// The number of callbacks since the reset.
[[nodiscard]] std::uint64_t callbacks();
/// Whether there is a subscriber.
[[nodiscard]] bool has_subscriber();

/// The grid and the block of the calling thread's next kernels.
struct launch_dimensions {
    unsigned blocks = 1, threads = 1;
};
[[nodiscard]] launch_dimensions& next_dimensions();

namespace detail {

/// Whether the subscriber has enabled callbacks of the function.
[[nodiscard]] bool traced(CUpti_CallbackId id);
/// Calls the subscriber, if there is one. `result` is null at ENTER.
void call_back(CUpti_CallbackId id, const char* name, const void* parameters, const CUresult* result,
               std::uint64_t& between);

/// Calls `body()` between the two callbacks.
template <class Parameters, class Body>
cudaError_t traced_call(CUpti_CallbackId id, const char* name, const Parameters& p, Body body) {
    if (!traced(id)) return body();
    std::uint64_t between = 0;
    {
        const Parameters copy = p;  // destroyed after the callback, as CUPTI's data is
        call_back(id, name, &copy, nullptr, between);
    }
    const cudaError_t code = body();
    const auto result = static_cast<CUresult>(code);
    const Parameters copy = p;
    call_back(id, name, &copy, &result, between);
    return code;
}

}  // namespace detail

}  // namespace standin
