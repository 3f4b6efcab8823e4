// SPDX-License-Identifier: Apache-2.0
// A CUDA stream of another owner, and memory on its device, for adaptors without a node. Its calls
// work while other threads capture and with any current device, and leave no CUDA error behind.
//
//   detail::native_queue queue{stream};       void* word = queue.allocate(4, code);
//   if (queue.state() == cudaErrorNotReady) ...
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

#include <gpushare/config.hpp>
#include <gpushare/detail/sticky_cuda_error.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Translates a runtime error for code that only calls the runtime.
[[nodiscard]] constexpr errc errc_of_native(cudaError_t code) noexcept {
    if (is_sticky_cuda_error(static_cast<int>(code))) return errc::device_lost;
    switch (code) {
        case cudaSuccess: return errc::none;
        case cudaErrorInsufficientDriver:
        case cudaErrorInitializationError:
        case cudaErrorStubLibrary: return errc::no_driver;
        case cudaErrorNoDevice:
        case cudaErrorInvalidDevice: return errc::no_device;
        case cudaErrorMemoryAllocation: return errc::out_of_memory;
        default: return errc::backend_failed;
    }
}

/// While this object exists, calls of this thread don't end captures of other threads.
class relaxed_thread {
public:
    relaxed_thread() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
    relaxed_thread(const relaxed_thread&) = delete;
    relaxed_thread& operator=(const relaxed_thread&) = delete;
    ~relaxed_thread() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

private:
    // after the constructor: the previous mode
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Refers to the stream, which must outlive the object. Any thread may use it.
class native_queue {
public:
    /// A null handle is the default stream of the current device.
    explicit native_queue(cudaStream_t stream) noexcept : stream_(stream) {
        forget(stream == nullptr ? cudaGetDevice(&device_) : cudaStreamGetDevice(stream, &device_));
        find("cuStreamQuery", query_);
        find("cuDevicePrimaryCtxRetain", retain_);
        find("cuDevicePrimaryCtxRelease", release_);
        find("cuCtxPushCurrent", push_);
        find("cuCtxPopCurrent", pop_);
    }

    /// Allocates `size` bytes on the stream's device. Returns null if that fails, with the reason
    /// in `why`.
    [[nodiscard]] void* allocate(std::size_t size, cudaError_t& why) const noexcept {
        void* p = nullptr;
        why = on_device([&] { return cudaMalloc(&p, size); });
        return p;
    }
    /// Allocates pinned host memory in the same way.
    [[nodiscard]] void* allocate_host(std::size_t size, cudaError_t& why) const noexcept {
        void* p = nullptr;
        why = on_device([&] { return cudaHostAlloc(&p, size, cudaHostAllocDefault); });
        return p;
    }
    /// Enqueues a copy.
    [[nodiscard]] cudaError_t copy(void* to, const void* from, std::size_t size) const noexcept {
        return on_device([&] { return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream_); });
    }
    /// Frees pinned memory. Null is ignored, here and in the next function.
    void free_host(void* p) const noexcept {
        if (p != nullptr) (void)on_device([p] { return cudaFreeHost(p); });
    }
    void free(void* p) const noexcept {
        if (p != nullptr) (void)on_device([p] { return cudaFree(p); });
    }
    /// Returns cudaSuccess once all enqueued work is done; cudaErrorNotReady until then; or the
    /// error because of which the work never ends. Call this while a relaxed_thread exists.
    [[nodiscard]] cudaError_t state() const noexcept {
        // The current device decides which default stream is meant. Any other handle names its
        // stream.
        return is_default() ? on_device([this] { return query(); }) : query();
    }

private:
    [[nodiscard]] bool is_default() const noexcept {
        return stream_ == nullptr || stream_ == cudaStreamLegacy || stream_ == cudaStreamPerThread;
    }
    [[nodiscard]] cudaError_t query() const noexcept {
        if (query_ != nullptr) return static_cast<cudaError_t>(query_(stream_));
        return forget(cudaStreamQuery(stream_));
    }
    // Makes the device's primary context current, calls the function, and makes the previous
    // context current again, if there was one.
    template <class Call>
    cudaError_t on_device(Call call) const noexcept {
        CUcontext primary = nullptr, was = nullptr;
        if (retain_ == nullptr || release_ == nullptr || push_ == nullptr || pop_ == nullptr)
            return cudaErrorNotSupported;
        const relaxed_thread relaxed;
        auto code = static_cast<cudaError_t>(retain_(&primary, device_));
        if (code != cudaSuccess) return code;
        code = static_cast<cudaError_t>(push_(primary));
        if (code == cudaSuccess) {
            code = forget(call());
            (void)pop_(&was);
        }
        (void)release_(device_);
        return code;
    }
    // The queue handles the error, so the embedder mustn't find it.
    static cudaError_t forget(cudaError_t code) noexcept {
        if (code != cudaSuccess) (void)cudaGetLastError();
        return code;
    }
    template <class Function>
    static void find(const char* name, Function& f) noexcept {
        void* found = nullptr;
        auto status = cudaDriverEntryPointSymbolNotFound;
        constexpr unsigned since = 11000;
        if (forget(cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableLegacyStream, &status)) ==
                cudaSuccess &&
            status == cudaDriverEntryPointSuccess)
            f = reinterpret_cast<Function>(found);
    }

    cudaStream_t stream_;
    int device_ = 0;
    decltype(&cuStreamQuery) query_ = nullptr;
    decltype(&cuDevicePrimaryCtxRetain) retain_ = nullptr;
    decltype(&cuDevicePrimaryCtxRelease) release_ = nullptr;
    CUresult(CUDAAPI* push_)(CUcontext) = nullptr;
    CUresult(CUDAAPI* pop_)(CUcontext*) = nullptr;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
