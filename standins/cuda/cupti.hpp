// SPDX-License-Identifier: Apache-2.0
// The part of CUPTI that the library uses, for tests: linked instead of libcupti, it calls the one
// subscriber back at the launches that go through the stand-in for CUDA. The runtime's calls appear
// as the driver's that they end in.
//
//   standin::take_subscriber("CUPTI for a profiler");      // from now on nobody else can subscribe
//
// What it models: one subscriber, the name of the present one, single callbacks switched on and
// off, ENTER and EXIT with the function's parameters, a word that goes from one to the other, data
// that is invalid behind the callback.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cupti.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "machine.hpp"

namespace standin {

/// Somebody else subscribes, under that name. Ends what the stand-in's own subscriber had.
void take_subscriber(std::string name);
/// And goes.
void give_subscriber_back();
/// How many callbacks were made since the reset.
[[nodiscard]] std::uint64_t callbacks();
/// Whether somebody subscribes.
[[nodiscard]] bool has_subscriber();

/// The grid and the block of the calling thread's next kernels.
struct launch_dimensions {
    unsigned blocks = 1, threads = 1;
};
[[nodiscard]] launch_dimensions& next_dimensions();

namespace detail {

/// Whether anybody wants to hear of the function.
[[nodiscard]] bool traced(CUpti_CallbackId id);
/// Calls the subscriber, if any. `result` null: ENTER.
void call_back(CUpti_CallbackId id, const char* name, const void* parameters, const CUresult* result,
               std::uint64_t& between);

/// `body()`, between the two callbacks.
template <class Parameters, class Body>
cudaError_t traced_call(CUpti_CallbackId id, const char* name, const Parameters& p, Body body) {
    if (!traced(id)) return body();
    std::uint64_t between = 0;
    {
        const Parameters copy = p;  // gone behind the callback
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
