// SPDX-License-Identifier: Apache-2.0
// Driver functions for contexts, and the call that looks up functions by name.
#include "driver.hpp"

#include <algorithm>
#include <array>

namespace standin {

using namespace detail;

namespace {

std::shared_ptr<context> context_of(machine& m, const void* handle) {
    for (const auto& d : m.devices)
        if (d.primary.get() == handle && d.active) return d.primary;
    if (auto users = m.user_contexts.find(handle)) return users;
    return m.green_contexts.find(handle);
}

CUresult device_attribute(int* out, CUdevice_attribute what, CUdevice device) {
    return driver(enter({"cuDeviceGetAttribute"}, nullptr, [&](machine& m) {
        if (!m.has_device(device)) return cudaErrorInvalidDevice;
        switch (what) {
            case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: *out = m.chosen.rdma ? 1 : 0; break;
            case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
                *out = m.chosen.stream_memory_operations ? 1 : 0;
                break;
            default: return invalid_value;
        }
        return cudaSuccess;
    }));
}

CUresult context_id(CUcontext handle, unsigned long long* out) {
    return driver(enter({"cuCtxGetId"}, nullptr, [&](machine& m) {
        const auto c = context_of(m, handle);
        if (c == nullptr) return static_cast<cudaError_t>(CUDA_ERROR_CONTEXT_IS_DESTROYED);
        *out = c->id;
        return cudaSuccess;
    }));
}

// Contexts beside the primary one. "The context is current to the calling thread." (Driver API,
// cuCtxCreate.)
CUresult create_context(CUcontext* out, CUctxCreateParams*, unsigned, CUdevice device) {
    return driver(enter({"cuCtxCreate"}, nullptr, [&](machine& m) {
        if (!m.has_device(device)) return cudaErrorInvalidDevice;
        auto made = m.new_context(device);
        made->users = true;
        *out = handle_of(made);
        m.user_contexts.add(*out, made);
        m.thread().contexts.push_back(std::move(made));
        ++m.pushed;
        return cudaSuccess;
    }));
}

// Driver API, cuCtxDestroy: "the resources associated with the context are destroyed"; a thread in
// which the context is current loses it.
CUresult destroy_context(CUcontext handle) {
    return driver(enter({.name = "cuCtxDestroy", .returns = true}, nullptr, [&](machine& m) {
        const auto c = m.user_contexts.find(handle);
        if (c == nullptr) return invalid_context;
        std::vector<std::uintptr_t> theirs;
        for (const auto& [at, b] : m.blocks)
            if (b.in == c.get()) theirs.push_back(at);
        for (const std::uintptr_t at : theirs) m.give_back(at);
        auto& contexts = m.thread().contexts;
        if (!contexts.empty() && contexts.back() == c) {
            contexts.pop_back();
            m.pushed -= m.pushed > 0 ? 1 : 0;
        }
        c->destroyed = true;
        m.user_contexts.remove(handle);
        return cudaSuccess;
    }));
}

CUresult get_device(CUdevice* out, int ordinal) {
    return driver(enter({"cuDeviceGet"}, nullptr, [&](machine& m) {
        *out = ordinal;
        return m.has_device(ordinal) ? cudaSuccess : cudaErrorInvalidDevice;
    }));
}

CUresult get_current(CUcontext* out) {
    return driver(enter({"cuCtxGetCurrent"}, nullptr, [&](machine& m) {
        const auto& contexts = m.thread().contexts;
        *out = contexts.empty() ? nullptr : handle_of(contexts.back());
        return cudaSuccess;
    }));
}

CUresult current_device(CUdevice* out) {
    return driver(enter({"cuCtxGetDevice"}, nullptr, [&](machine& m) {
        const auto& contexts = m.thread().contexts;
        if (contexts.empty()) return invalid_context;
        *out = contexts.back()->device;
        return cudaSuccess;
    }));
}

CUresult set_current(CUcontext handle) {
    return driver(enter({"cuCtxSetCurrent"}, nullptr, [&](machine& m) {
        auto& contexts = m.thread().contexts;
        if (!contexts.empty()) contexts.pop_back();
        if (handle == nullptr) return cudaSuccess;
        auto c = context_of(m, handle);
        if (c == nullptr) return invalid_context;
        contexts.push_back(std::move(c));
        return cudaSuccess;
    }));
}

CUresult push_current(CUcontext handle) {
    return driver(enter({"cuCtxPushCurrent"}, nullptr, [&](machine& m) {
        auto c = context_of(m, handle);
        if (c == nullptr) return invalid_context;
        m.thread().contexts.push_back(std::move(c));
        ++m.pushed;
        return cudaSuccess;
    }));
}

CUresult retain_primary(CUcontext* out, CUdevice device) {
    return driver(enter({"cuDevicePrimaryCtxRetain"}, nullptr, [&](machine& m) {
        if (!m.has_device(device)) return cudaErrorInvalidDevice;
        *out = handle_of(m.primary(device));
        ++m.device(device).retained;
        return m.device(device).told ? m.device(device).sticky : cudaSuccess;
    }));
}

CUresult release_primary(CUdevice device) {
    return driver(enter({.name = "cuDevicePrimaryCtxRelease", .returns = true}, nullptr, [&](machine& m) {
        if (!m.has_device(device) || m.device(device).retained == 0) return invalid_context;
        --m.device(device).retained;  // the runtime keeps the context
        return cudaSuccess;
    }));
}

// For these functions the driver's manual names no error for a thread without a context, so they
// need none.
CUresult event_query(CUevent e) { return driver(query("cuEventQuery", e)); }
CUresult stream_query(CUstream s) { return driver(query("cuStreamQuery", s)); }
// For this function, the manual names such an error.
CUresult event_elapsed_time(float* ms, CUevent from, CUevent to) {
    return driver(elapsed_time("cuEventElapsedTime", ms, from, to));
}
CUresult event_record(CUevent e, CUstream s) { return driver(record("cuEventRecord", e, s)); }
CUresult stream_is_capturing(CUstream s, CUstreamCaptureStatus* status) {
    auto told = cudaStreamCaptureStatusNone;
    const CUresult result = driver(is_capturing("cuStreamIsCapturing", s, &told));
    *status = static_cast<CUstreamCaptureStatus>(told);
    return result;
}
CUresult exchange_capture_mode(CUstreamCaptureMode* mode) {
    auto theirs = static_cast<cudaStreamCaptureMode>(*mode);
    const CUresult result = driver(exchange_mode("cuThreadExchangeStreamCaptureMode", &theirs));
    *mode = static_cast<CUstreamCaptureMode>(theirs);
    return result;
}

CUresult pop_current(CUcontext* out) {
    return driver(enter({.name = "cuCtxPopCurrent", .returns = true}, nullptr, [&](machine& m) {
        auto& t = m.thread();
        if (t.contexts.empty()) return invalid_context;
        if (out != nullptr) *out = handle_of(t.contexts.back());
        t.contexts.pop_back();
        m.pushed -= m.pushed > 0 ? 1 : 0;
        return cudaSuccess;
    }));
}

}  // namespace

std::span<const entry_point> detail::context_functions() {
    static const std::array all{
        point<decltype(cuDeviceGet)>("cuDeviceGet", 2000, get_device),
        point<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent", 4000, get_current),
        point<decltype(cuDeviceGetAttribute)>("cuDeviceGetAttribute", 2000, device_attribute),
        point<decltype(cuCtxGetId)>("cuCtxGetId", 12000, context_id),
        point<decltype(cuCtxCreate)>("cuCtxCreate", 13000, create_context),
        point<decltype(cuCtxDestroy)>("cuCtxDestroy", 4000, destroy_context),
        point<decltype(cuCtxGetDevice)>("cuCtxGetDevice", 2000, current_device),
        point<decltype(cuCtxSetCurrent)>("cuCtxSetCurrent", 4000, set_current),
        point<decltype(cuCtxPushCurrent)>("cuCtxPushCurrent", 4000, push_current),
        point<decltype(cuCtxPopCurrent)>("cuCtxPopCurrent", 4000, pop_current),
        point<decltype(cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain", 7000, retain_primary),
        point<decltype(cuDevicePrimaryCtxRelease)>("cuDevicePrimaryCtxRelease", 11000, release_primary),
        point<decltype(cuEventElapsedTime)>("cuEventElapsedTime", 2000, event_elapsed_time),
        point<decltype(cuEventQuery)>("cuEventQuery", 2000, event_query),
        point<decltype(cuEventRecord)>("cuEventRecord", 2000, event_record),
        point<decltype(cuStreamQuery)>("cuStreamQuery", 2000, stream_query),
        point<decltype(cuStreamIsCapturing)>("cuStreamIsCapturing", 10000, stream_is_capturing),
        point<decltype(cuThreadExchangeStreamCaptureMode)>("cuThreadExchangeStreamCaptureMode", 10010,
                                                           exchange_capture_mode),
    };
    return all;
}

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned version,
                                                        unsigned long long, cudaDriverEntryPointQueryResult* status) {
    *out = nullptr;
    return enter({.name = "cudaGetDriverEntryPointByVersion", .bare = true}, nullptr, [&](machine& m) {
        auto result = cudaDriverEntryPointSymbolNotFound;
        for (const auto part : {context_functions(), virtual_memory_functions(), green_context_functions(),
                                memory_operation_functions(), memory_functions()}) {
            const auto found = std::ranges::find(part, std::string_view(symbol), &entry_point::name);
            if (found == part.end() || m.hidden.contains(std::string_view(symbol))) continue;
            const int usable = std::min(m.chosen.driver_version, static_cast<int>(version));
            result = found->since > usable ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSuccess;
            if (result == cudaDriverEntryPointSuccess) *out = found->function;
        }
        if (status != nullptr) *status = result;
        return cudaSuccess;
    });
}

}  // namespace standin
