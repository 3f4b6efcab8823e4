// SPDX-License-Identifier: Apache-2.0
// The driver's functions, which programs ask for by name. None of them is a symbol, so that a
// program that links the driver by mistake doesn't link here either.
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

/// `Declared` is the type that the header gives the name.
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

/// The two sides share the numbers of their errors.
inline CUresult driver(cudaError_t e) { return static_cast<CUresult>(e); }
inline constexpr auto invalid_value = cudaErrorInvalidValue;
inline constexpr auto invalid_context = static_cast<cudaError_t>(CUDA_ERROR_INVALID_CONTEXT);

/// body(machine&) for a function of the driver's that names its object, and needs no context: it
/// makes none (Driver API, Virtual Memory Management: CUDA_ERROR_INVALID_CONTEXT isn't among their
/// answers). Where the thread has one, errors of earlier work there may be answered (Driver API,
/// every function: "may also return error codes from previous, asynchronous launches").
template <class Body>
cudaError_t beside_context(const call_info& info, Body body) {
    return enter(info, nullptr, [&](machine& m) {
        const auto& contexts = m.thread().contexts;
        return contexts.empty() ? body(m) : concerning(m, contexts.back()->device, info, [&] { return body(m); });
    });
}

/// A context's handle is its address; green contexts have the same in both forms.
inline CUcontext handle_of(const std::shared_ptr<context>& c) { return reinterpret_cast<CUcontext>(c.get()); }

}  // namespace standin::detail
