// SPDX-License-Identifier: Apache-2.0
// The calls about devices, peers and errors.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "machine.hpp"

namespace standin {

using namespace detail;

namespace {

constexpr int max_threads = 1024, warp = 32, first_bus = 0x10;

/// Calls body(machine&) for a call that names its device, and so doesn't use the current device.
template <class Body>
cudaError_t about(const char* name, int device, Body body) {
    return enter({.name = name, .bare = true}, nullptr,
                 [&](machine& m) { return m.has_device(device) ? body(m) : cudaErrorInvalidDevice; });
}

}  // namespace

extern "C" {

// ---- versions and errors

cudaError_t cudaDriverGetVersion(int* version) {
    return enter({.name = "cudaDriverGetVersion", .always = true, .bare = true}, nullptr, [&](machine& m) {
        *version = m.chosen.driver_version;
        return cudaSuccess;
    });
}

cudaError_t cudaPeekAtLastError() {
    return enter({.name = "cudaPeekAtLastError", .always = true, .silent = true, .bare = true}, nullptr,
                 [](machine& m) { return m.thread().last_error; });
}

cudaError_t cudaGetLastError() {
    return enter({.name = "cudaGetLastError", .always = true, .silent = true, .bare = true}, nullptr, [](machine& m) {
        auto& t = m.thread();
        const auto last = std::exchange(t.last_error, cudaSuccess);
        // A sticky error stays, whether this thread has seen it or not.
        const int d = t.contexts.empty() ? 0 : t.contexts.back()->device;
        return m.has_device(d) && m.device(d).told ? m.device(d).sticky : last;
    });
}

const char* cudaGetErrorName(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
        case cudaErrorDevicesUnavailable: return "cudaErrorDevicesUnavailable";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorECCUncorrectable: return "cudaErrorECCUncorrectable";
        case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
        case cudaErrorIllegalState: return "cudaErrorIllegalState";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
        case cudaErrorLaunchTimeout: return "cudaErrorLaunchTimeout";
        case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
        case cudaErrorInitializationError: return "cudaErrorInitializationError";
        case cudaErrorCudartUnloading: return "cudaErrorCudartUnloading";
        case cudaErrorDeviceUninitialized: return "cudaErrorDeviceUninitialized";
        case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
        case cudaErrorContextIsDestroyed: return "cudaErrorContextIsDestroyed";
        case cudaErrorCooperativeLaunchTooLarge: return "cudaErrorCooperativeLaunchTooLarge";
        case cudaErrorNotSupported: return "cudaErrorNotSupported";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
        case cudaErrorUnknown: return "cudaErrorUnknown";
        default: return "cudaError that the stand-in has no name for";
    }
}

const char* cudaGetErrorString(cudaError_t e) { return cudaGetErrorName(e); }

// ---- devices

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 0;
    return enter({.name = "cudaGetDeviceCount", .bare = true}, nullptr, [&](machine& m) {
        *count = static_cast<int>(m.devices.size());
        return cudaSuccess;
    });
}

cudaError_t cudaGetDevice(int* device) {
    return enter({.name = "cudaGetDevice", .bare = true}, nullptr, [&](machine& m) {
        const auto& contexts = m.thread().contexts;
        *device = contexts.empty() ? 0 : contexts.back()->device;
        return cudaSuccess;
    });
}

cudaError_t cudaSetDevice(int device) {
    return about("cudaSetDevice", device, [&](machine& m) {
        auto& contexts = m.thread().contexts;
        if (contexts.empty()) contexts.emplace_back();
        contexts.back() = m.primary(device);
        return cudaSuccess;
    });
}

cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
    return about("cudaInitDevice", device, [&](machine& m) {
        (void)m.primary(device);
        return m.device(device).sticky;
    });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
    return about("cudaGetDeviceProperties", device, [&](machine& m) {
        *out = {};
        std::strncpy(out->name, "stand-in", sizeof out->name - 1);
        out->uuid.bytes[15] = static_cast<char>(device);
        out->totalGlobalMem = static_cast<std::size_t>(m.chosen.memory.count());
        out->sharedMemPerBlock = std::size_t{48} << 10;
        out->sharedMemPerBlockOptin = out->sharedMemPerMultiprocessor = std::size_t{228} << 10;
        out->regsPerBlock = out->regsPerMultiprocessor = 65536;
        out->warpSize = warp;
        out->maxThreadsPerBlock = max_threads;
        out->maxThreadsPerMultiProcessor = 2 * max_threads;
        out->maxBlocksPerMultiProcessor = static_cast<int>(m.chosen.blocks_per_sm);
        out->multiProcessorCount = static_cast<int>(m.chosen.sms);
        out->major = m.chosen.capability / 10;
        out->minor = m.chosen.capability % 10;
        out->pciBusID = first_bus + device;
        out->asyncEngineCount = 2;
        out->l2CacheSize = 50 << 20;
        out->unifiedAddressing = out->concurrentKernels = out->cooperativeLaunch = 1;
        out->memoryPoolsSupported = out->streamPrioritiesSupported = out->canMapHostMemory = 1;
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
    return about("cudaDeviceGetPCIBusId", device, [&](machine&) {
        const int n = std::snprintf(out, static_cast<std::size_t>(std::max(size, 0)), "0000:%02X:00.0",
                                    static_cast<unsigned>(first_bus + device));
        return n < size ? cudaSuccess : cudaErrorInvalidValue;
    });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return on_device({"cudaDeviceGetStreamPriorityRange"}, [&](machine& m, int) {
        *least = m.chosen.least_priority;
        *greatest = m.chosen.greatest_priority;
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceReset() {
    // Runtime API, cudaDeviceReset: destroys all resources of the current device in the process,
    // whichever thread owns them.
    return enter({.name = "cudaDeviceReset", .returns = true, .bare = true}, nullptr, [](machine& m) {
        const auto& contexts = m.thread().contexts;
        m.reset_device(contexts.empty() ? 0 : contexts.back()->device);
        return cudaSuccess;
    });
}

// ---- peers

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    return about("cudaDeviceCanAccessPeer", device, [&](machine& m) {
        if (!m.has_device(peer)) return cudaErrorInvalidDevice;
        *can = m.chosen.peers && device != peer ? 1 : 0;
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    return on_device({"cudaDeviceEnablePeerAccess"}, [&](machine& m, int device) {
        if (!m.has_device(peer) || peer == device) return cudaErrorInvalidDevice;
        if (!m.chosen.peers) return cudaErrorPeerAccessUnsupported;
        return m.current()->peers.insert(peer).second ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
    });
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr what, int from, int to) {
    return about("cudaDeviceGetP2PAttribute", from, [&](machine& m) {
        if (!m.has_device(to) || from == to) return cudaErrorInvalidDevice;
        switch (what) {
            case cudaDevP2PAttrAccessSupported: *value = m.chosen.peers ? 1 : 0; break;
            case cudaDevP2PAttrNativeAtomicSupported: *value = m.chosen.peers && m.chosen.peer_atomics ? 1 : 0; break;
            default: *value = 0; break;
        }
        return cudaSuccess;
    });
}

}  // extern "C"

}  // namespace standin
