// SPDX-License-Identifier: Apache-2.0
// The driver's functions, which programs look up by name. None of them is a symbol, so a program
// that links the driver by mistake fails to link with the stand-in, too.
#pragma once

#include <cuda.h>

#include <span>
#include <string_view>
#include <type_traits>

#include "machine.hpp"

namespace standin::detail {

struct entry_point {
    std::string_view name;
    int since = 0;  // the driver's version
    void* function = nullptr;
};

/// `Declared` is the function's type in CUDA's header.
template <class Declared, class Function>
entry_point point(std::string_view name, int since, Function* f) {
    static_assert(std::is_same_v<Declared, Function>);
    return {name, since, reinterpret_cast<void*>(f)};
}

std::span<const entry_point> context_functions();           // driver.cpp
std::span<const entry_point> virtual_memory_functions();    // virtual_memory.cpp
std::span<const entry_point> green_context_functions();     // green_context.cpp
std::span<const entry_point> memory_operation_functions();  // memory_operation.cpp
std::span<const entry_point> memory_functions();            // memory.cpp

/// The runtime and the driver use the same numbers for their errors.
inline CUresult driver(cudaError_t e) { return static_cast<CUresult>(e); }
inline constexpr auto invalid_value = cudaErrorInvalidValue;
inline constexpr auto invalid_context = static_cast<cudaError_t>(CUDA_ERROR_INVALID_CONTEXT);

/// Calls body(machine&) for a driver function that names its object and so needs no context. Makes
/// no context. (Driver API, Virtual Memory Management: these functions don't return
/// CUDA_ERROR_INVALID_CONTEXT.) If the thread has a context, the function may return errors of
/// earlier work there. (Driver API, every function: "may also return error codes from previous,
/// asynchronous launches".)
template <class Body>
cudaError_t beside_context(const call_info& info, Body body) {
    return enter(info, nullptr, [&](machine& m) {
        const auto& contexts = m.thread().contexts;
        return contexts.empty() ? body(m) : concerning(m, contexts.back()->device, info, [&] { return body(m); });
    });
}

/// A context's handle is its address. A green context has the same handle in both forms.
inline CUcontext handle_of(const std::shared_ptr<context>& c) { return reinterpret_cast<CUcontext>(c.get()); }

}  // namespace standin::detail
