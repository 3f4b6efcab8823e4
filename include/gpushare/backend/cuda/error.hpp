// SPDX-License-Identifier: Apache-2.0
// Translates the CUDA runtime's errors into the library's.
//
//   // throws the exception for the error
//   gpushare::cuda::check(cudaStreamQuery(s), "asking a stream");
//
// A driver function returns a CUresult with the same numbers, which is translated in the same way.
//
// A device's health keeps errors that no call could report: the error that made the device
// unusable, and the last error that a destructor had to ignore, with the number of such errors.
//
//   if (auto why = node.health(d).fatal()) log(why->call, cudaGetErrorName(why->code));
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string_view>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/sticky_cuda_error.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// True for an error that stays: every later call on the device returns it, in any thread, until
/// the process is restarted or the device is reset. False for cudaErrorContextIsDestroyed: the
/// destroyed context may be a green one, which affects only its own streams.
[[nodiscard]] constexpr bool is_sticky(cudaError_t code) noexcept {
    return gpushare::detail::is_sticky_cuda_error(static_cast<int>(code));
}

/// Whether a launch by <<<>>> may leave this error for cudaGetLastError(): errors of
/// cudaLaunchKernel, and of a kernel's first use, which loads the kernel. False for codes of
/// queries and other calls that are no failure of work (cudaErrorNotReady,
/// cudaErrorPeerAccessAlreadyEnabled).
[[nodiscard]] constexpr bool is_left_by_launch(cudaError_t code) noexcept {
    if (is_sticky(code)) return true;
    switch (code) {
        case cudaErrorInvalidValue:
        case cudaErrorMemoryAllocation:
        case cudaErrorInitializationError:
        case cudaErrorInvalidConfiguration:
        case cudaErrorMissingConfiguration:
        case cudaErrorInvalidDeviceFunction:
        case cudaErrorLaunchMaxDepthExceeded:
        case cudaErrorSyncDepthExceeded:
        case cudaErrorLaunchPendingCountExceeded:
        case cudaErrorDeviceUninitialized:
        case cudaErrorContextIsDestroyed:
        case cudaErrorInvalidKernelImage:
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorInvalidPtx:
        case cudaErrorUnsupportedPtxVersion:
        case cudaErrorUnsupportedDevSideSync:
        case cudaErrorJitCompilerNotFound:
        case cudaErrorJitCompilationDisabled:
        case cudaErrorSharedObjectSymbolNotFound:
        case cudaErrorSharedObjectInitFailed:
        case cudaErrorOperatingSystem:
        case cudaErrorInvalidResourceHandle:
        case cudaErrorSymbolNotFound:
        case cudaErrorLaunchOutOfResources:
        case cudaErrorLaunchIncompatibleTexturing:
        case cudaErrorCooperativeLaunchTooLarge:
        case cudaErrorNotPermitted:
        case cudaErrorNotSupported:
        case cudaErrorStreamCaptureUnsupported:
        case cudaErrorStreamCaptureInvalidated:
        case cudaErrorStreamCaptureImplicit:
        case cudaErrorStreamCaptureWrongThread:
        case cudaErrorUnknown: return true;
        default: return false;
    }
}

/// Translates a CUDA error. errc::backend_failed for an error without a name of its own.
[[nodiscard]] constexpr errc to_errc(cudaError_t code) noexcept {
    if (is_sticky(code)) return errc::device_lost;
    switch (code) {
        case cudaSuccess: return errc::none;
        case cudaErrorMemoryAllocation: return errc::out_of_memory;
        case cudaErrorNoDevice:
        case cudaErrorInvalidDevice:
        case cudaErrorDevicesUnavailable: return errc::no_device;
        case cudaErrorInsufficientDriver:
        case cudaErrorInitializationError:
        case cudaErrorStubLibrary:
        case cudaErrorSystemNotReady:
        case cudaErrorSystemDriverMismatch:
        case cudaErrorCompatNotSupportedOnDevice:
        case cudaErrorCudartUnloading: return errc::no_driver;
        case cudaErrorNotSupported:
        case cudaErrorCallRequiresNewerDriver:
        case cudaErrorSymbolNotFound:
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorPeerAccessUnsupported: return errc::not_supported;
        case cudaErrorCooperativeLaunchTooLarge: return errc::too_many_blocks;
        case cudaErrorStreamCaptureUnsupported:
        case cudaErrorStreamCaptureInvalidated:
        case cudaErrorStreamCaptureMerge:
        case cudaErrorStreamCaptureUnmatched:
        case cudaErrorStreamCaptureUnjoined:
        case cudaErrorStreamCaptureIsolation:
        case cudaErrorStreamCaptureImplicit:
        case cudaErrorCapturedEvent:
        case cudaErrorStreamCaptureWrongThread: return errc::capturing;
        default: return errc::backend_failed;
    }
}

/// Both types have the same numbers.
[[nodiscard]] constexpr cudaError_t to_runtime(CUresult code) noexcept { return static_cast<cudaError_t>(code); }
static_assert(to_runtime(CUDA_ERROR_OUT_OF_MEMORY) == cudaErrorMemoryAllocation);
static_assert(to_runtime(CUDA_ERROR_ILLEGAL_ADDRESS) == cudaErrorIllegalAddress);
static_assert(to_runtime(CUDA_ERROR_NOT_SUPPORTED) == cudaErrorNotSupported);

/// Throws the exception for `code`: memory_error for out of memory, otherwise operation_error, with
/// a text such as "making a stream: cudaErrorInvalidValue (1), invalid argument".
[[noreturn]] inline void fail(cudaError_t code, std::string_view what) {
    const failure f{.code = to_errc(code)};
    gpushare::detail::message text;
    text.add(what, ": ", std::string_view{cudaGetErrorName(code)}, " (", static_cast<std::uint64_t>(code), "), ",
             std::string_view{cudaGetErrorString(code)});
    if (is_sticky(code)) text.add("; the device stays unusable until this process is restarted");
    if (f.code == errc::out_of_memory) throw memory_error(f, {}, text);
    throw operation_error(f, {}, text);
}

/// Throws if `code` is an error, and clears it from cudaGetLastError(), which the embedder may call
/// later.
inline void check(cudaError_t code, std::string_view what) {
    if (code == cudaSuccess) return;
    (void)cudaGetLastError();
    fail(code, what);
}
/// The driver's functions leave nothing for cudaGetLastError().
inline void check(CUresult code, std::string_view what) {
    if (code != CUDA_SUCCESS) fail(to_runtime(code), what);
}

namespace detail {

/// Returns `code` and makes the runtime forget it: an error that the library handles itself must
/// not turn up in the embedder's cudaGetLastError().
inline cudaError_t handled(cudaError_t code) noexcept {
    if (code != cudaSuccess) (void)cudaGetLastError();
    return code;
}

}  // namespace detail

/// A call of the runtime or driver that failed. `call` is a literal. True if there was one.
struct incident {
    cudaError_t code = cudaSuccess;  ///< the code that CUDA returned
    const char* call = "";           ///< the function's name
    /// Whether there was one.
    [[nodiscard]] explicit constexpr operator bool() const noexcept { return code != cudaSuccess; }
};

/// The errors of one device. Safe from any thread. Shared by all objects of the device; outlives
/// its node.
class health {
public:
    /// Whether the device is unusable. An illegal access or a similar error makes every later call
    /// on the device fail, and so does a reset. Once such an error is noticed, all points of the
    /// device are reached with errc::device_lost. CUDA doesn't tell which kernel caused the error:
    /// fatal() names only the call that noticed it.
    [[nodiscard]] bool lost() const noexcept {
        // acquire: a thread that sees the loss also sees the details that were written before.
        return lost_.load(std::memory_order_acquire);
    }
    /// The error that made the device unusable; null while the device is usable.
    [[nodiscard]] const incident* fatal() const noexcept { return lost() ? &fatal_ : nullptr; }
    /// Returns the last failure that a destructor, or another function that can't fail, couldn't
    /// report, and forgets it.
    incident take_last_error() noexcept {
        const std::lock_guard lock(mutex_);
        const incident last = last_;
        last_ = {};
        return last;
    }
    /// How many failures weren't reported so far.
    [[nodiscard]] std::uint64_t unreported() const noexcept { return unreported_.load(std::memory_order_relaxed); }

    // --- for the backend

    /// Sets how to find out whether the device still answers, for errors that leave this open. Call
    /// once, before any note().
    void ask_by(std::function<bool()> answers) { answers_ = std::move(answers); }
    /// Whether the device still answers, as far as the driver can tell. Takes one driver call or
    /// more.
    [[nodiscard]] bool answers() const noexcept { return !lost() && (!answers_ || answers_()); }

    /// Examines the result of a call whose failure the caller reports. Returns the errc for the
    /// result.
    errc note(cudaError_t code, const char* call) noexcept {
        return code == cudaSuccess ? errc::none : look_at(detail::handled(code), call);
    }
    /// The same for a driver function. Driver functions don't set cudaGetLastError(), so the
    /// embedder's own error stays there.
    errc note(CUresult code, const char* call) noexcept {
        return code == CUDA_SUCCESS ? errc::none : look_at(to_runtime(code), call);
    }
    /// The same for a failure that no caller reports: keeps the failure as an incident.
    errc keep(cudaError_t code, const char* call) noexcept { return put_away(detail::handled(code), call); }
    /// The same for a driver function.
    errc keep(CUresult code, const char* call) noexcept { return put_away(to_runtime(code), call); }

private:
    errc look_at(cudaError_t code, const char* call) noexcept {
        if (is_sticky(code) || (leaves_open(code) && !answers())) {
            declare_lost(code, call);
            return errc::device_lost;
        }
        return to_errc(code);
    }
    // Whether this error leaves open if the device is lost. (Runtime API, cudaError: an unknown
    // internal error; or an object destroyed with its context, for example by cudaDeviceReset, or
    // with a green context, which affects only its own streams.)
    [[nodiscard]] static constexpr bool leaves_open(cudaError_t code) noexcept {
        return code == cudaErrorUnknown || code == cudaErrorContextIsDestroyed ||
               code == cudaErrorDeviceUninitialized || code == cudaErrorInvalidResourceHandle;
    }
    errc put_away(cudaError_t code, const char* call) noexcept {
        if (code == cudaSuccess) return errc::none;
        const errc why = look_at(code, call);
        const std::lock_guard lock(mutex_);
        last_ = {code, call};
        unreported_.fetch_add(1, std::memory_order_relaxed);
        return why;
    }
    void declare_lost(cudaError_t code, const char* call) noexcept {
        const std::lock_guard lock(mutex_);
        if (fatal_) return;  // written once, so readers need no lock
        fatal_ = {code, call};
        lost_.store(true, std::memory_order_release);
    }

    std::function<bool()> answers_;
    std::mutex mutex_;
    incident fatal_, last_;
    std::atomic<bool> lost_{false};
    std::atomic<std::uint64_t> unreported_{0};
};

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
